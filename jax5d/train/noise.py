"""The gradient noise scale along a run: the batch size beyond which more sequences buy little.

McCandlish et al., arXiv:1812.06162, section 2.2: B_noise = tr(S) / |G|^2. Each step's two estimates
(`jax5d.parallel.noise`) are rough, so both are averaged over steps before they are divided (appendix A.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

DECAY = 0.95
"""Weight of what came before, a step."""


class NoiseScale:
    """Running averages of a run's estimates.

    Args:
        records: metrics of the steps before, for a run that goes on.
    """

    def __init__(self, records: Iterable[dict[str, Any]] = ()):
        self._signal = self._noise = 0.0
        for record in records:
            self.after(record)

    def after(self, record: dict[str, Any]) -> dict[str, float]:
        """Take in one step's metrics: {"noise_scale": sequences}, or {} where it is not known (yet)."""
        signal, noise = record.get("gradient_signal"), record.get("gradient_noise")
        if signal is None or noise is None:
            return {}
        self._signal = DECAY * self._signal + (1 - DECAY) * signal  # both begin at 0, alike, so the ratio needs no
        self._noise = DECAY * self._noise + (1 - DECAY) * noise  # correction
        return {"noise_scale": self._noise / self._signal} if self._signal > 0 and self._noise > 0 else {}
