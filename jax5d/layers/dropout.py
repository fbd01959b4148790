"""Dropout whose mask is a function of the seed, the step, the layer and the element's global position."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax5d.parallel.random import keep
from jax5d.parallel.tensor import Boundary


class Place(NamedTuple):
    """Where this device's tokens of one microbatch are in the global batch."""

    rows: jax.Array
    """int32 [b]: row of the global batch."""
    positions: jax.Array
    """int32 [s]: position in the sequence, of the tokens on this context shard. Without dropout also [b, s], where each
    row has its own."""
    span: int
    """Longest sequence; a token's global id is row * span + position."""

    def tokens(self, positions: jax.Array) -> jax.Array:
        """Global token ids uint32 [b, n] of the given positions [n]."""
        return (self.rows[:, None] * self.span + positions[None]).astype(jnp.uint32)


def site(key: jax.Array, number: int) -> jax.Array:
    """The raw key uint32 [2] of one of a layer's dropout sites."""
    return jax.random.key_data(jax.random.fold_in(key, number))


def dropout(x: jax.Array, rate: float, key: jax.Array, place: Place, boundary: Boundary) -> jax.Array:
    """Drop elements of the residual stream [b, s_stream, d] at `rate`, and scale the rest by 1/(1 - rate).

    `key` is uint32 [2], as `site` gives it.
    """
    if not rate:
        return x
    tokens = place.tokens(boundary.split(place.positions))
    mask = keep(key, rate, tokens[..., None], jnp.arange(x.shape[-1], dtype=jnp.uint32)[None, None])
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)
