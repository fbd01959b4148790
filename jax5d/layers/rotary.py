"""Rotary positions (Su et al., RoFormer, arXiv:2104.09864): a query meets a key by the distance between them.

Dim i of the first half of a head is paired with dim i of the second half, as GPT-NeoX and Llama's published weights
have it; the paper pairs neighbours. Position p turns pair i by p theta^(-2 i / h).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Turn each pair of dims by its position's angle; in float32, result in x's dtype.

    Args:
        x: [b, s, n, h] with h even.
        positions: int32 [s], or [b, s] where rows differ, in the whole sequence: whoever splits it over cp gives each
            shard's own.
        theta: base of the frequencies.
    """
    pairs = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angle = jnp.atleast_2d(positions).astype(jnp.float32)[..., None, None] * frequency[None, None, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
