"""Bytes of training state on one device: parameters and what AdamW keeps of them, all float32."""

from __future__ import annotations

from jax5d.config import RunConfig
from jax5d.costs.parameters import FLOAT32, INT32, leaves

COUNTERS = 3
"""The step, Adam's count and the schedule's, int32 each, on every device."""


def state_bytes(config: RunConfig) -> int:
    """Bytes per device of parameters and AdamW's two moments (4 + 4 + 4 per parameter), and the counters."""
    elements = sum(leaf.local_size(config.mesh) for leaf in leaves(config.model, config.mesh))
    return 3 * FLOAT32 * elements + COUNTERS * INT32
