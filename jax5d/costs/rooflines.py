"""The roofline: an operation takes as long as its arithmetic or its bytes, whichever takes longer.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009. Intensity is FLOPs for
each byte that is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Roofline:
    """A device that computes and moves bytes at once."""

    peak: float
    """FLOP/s."""
    bandwidth: float
    """Bytes/s."""

    @property
    def ridge(self) -> float:
        """Intensity from which on arithmetic is the limit, FLOPs/byte."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s at an intensity, at most."""
        return min(self.peak, intensity * self.bandwidth)

    def time(self, flops: float, bytes: float) -> float:
        """Seconds, at least."""
        return max(flops / self.peak, bytes / self.bandwidth)

    def bound(self, flops: float, bytes: float) -> Literal["compute", "memory"]:
        """What limits the operation; at the ridge itself, compute."""
        return "compute" if flops / self.peak >= bytes / self.bandwidth else "memory"
