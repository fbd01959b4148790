"""Initial values: drawn at full shape, whatever the mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

STD = 0.02
"""Standard deviation of GPT-2's weights."""


def normal(rngs: nnx.Rngs, *shape: int, std: float = STD) -> jax.Array:
    """float32 normal values. GPT-2: std 0.02, and 0.02 / sqrt(2 layers) for residual projections (section 2.3)."""
    return std * jax.random.normal(rngs.params(), shape, jnp.float32)
