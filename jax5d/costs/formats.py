"""Floating-point formats: what follows from their bits, and rounding to them.

A number is sign, exponent (biased by 2^(e-1) - 1) and mantissa (m bits behind an implied 1; none implied at the lowest
exponent, the subnormals). IEEE 754 keeps the highest exponent for infinity and nan. float8_e4m3fn gives up infinity and
keeps one code of it for nan (Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433, table 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A format by its bits; every other number here is computed from them."""

    name: str
    exponent: int
    """Bits of the exponent."""
    mantissa: int
    """Bits of the mantissa that are stored."""
    infinite: bool = True
    """Whether the highest exponent is infinity and nan (IEEE 754); if not, only its last code is nan."""

    @property
    def bits(self) -> int:
        """Bits that carry information, the sign's included; TF32 has 19 of them in a float32's 32."""
        return 1 + self.exponent + self.mantissa

    @property
    def _bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> float:
        """Largest finite number."""
        if self.infinite:
            return math.ldexp(2 - self.epsilon, self._bias)
        return math.ldexp(2 - 2 * self.epsilon, self._bias + 1)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with all of the mantissa's digits."""
        return math.ldexp(1, 1 - self._bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number."""
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """From 1 to the next number: 2^-m."""
        return math.ldexp(1, -self.mantissa)

    @property
    def digits(self) -> int:
        """Decimal digits that survive a way through the format: floor(m log10 2), C's FLT_DIG."""
        return math.floor(self.mantissa * math.log10(2))

    @property
    def exact_integers(self) -> int:
        """Largest n such that each of 0..n is a number of the format: 2^(m+1)."""
        return 2 ** (self.mantissa + 1)


FORMATS = {
    f.name: f
    for f in (
        Format("float32", 8, 23),
        Format("tf32", 8, 10),
        Format("bfloat16", 8, 7),
        Format("float16", 5, 10),
        Format("float8_e4m3fn", 4, 3, infinite=False),
        Format("float8_e5m2", 5, 2),
    )
}
"""The formats of training, by name."""


def round_to(x: float, format: Format) -> float:
    """The format's number nearest to x, an even mantissa where two are as near.

    Beyond the largest number by half a step or more it is infinity, or nan in a format without infinity.
    """
    if math.isnan(x) or x == 0:
        return x
    beyond = math.copysign(math.inf, x) if format.infinite else math.nan
    if math.isinf(x):
        return beyond
    exponent = max(math.frexp(x)[1] - 1, 1 - format._bias)
    step = exponent - format.mantissa
    rounded = math.ldexp(round(math.ldexp(x, -step)), step)  # scaling by powers of 2 is exact; round() is half to even
    return math.copysign(rounded, x) if abs(rounded) <= format.largest else beyond
