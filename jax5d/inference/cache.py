"""Keys and values of the tokens before: kept, so that a new token is the only one that is computed.

Heads are split over tp as attention's are. Where tp is larger than their number (grouped-query attention) each device
keeps the one head that its queries look at, which tp / heads devices then keep alike.

Shapes, all of them local: b batch, c capacity in tokens, s tokens of this call, n query heads, m heads of keys and
values, h head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.config import AXES, MeshConfig, ModelConfig
from jax5d.parallel.data import varying

SPEC = P("pp", ("dp", "ep"), "tp", "cp", None)
"""Of the cache's arrays."""


class Cache(NamedTuple):
    """Of all layers, in the computation's dtype: 2 x layers x b x m x c x h elements on a device.

    Heads come before tokens, as the two products want them: otherwise XLA would lay the whole cache out anew in a step.
    """

    keys: jax.Array
    """[layers, b, m, c, h], turned by their positions already."""
    values: jax.Array
    """[layers, b, m, c, h]."""


def cache_shape(model: ModelConfig, mesh: MeshConfig, rows: int, capacity: int) -> tuple[int, ...]:
    """Global shape of either of a cache's arrays. A head that devices keep alike is there once for each of them."""
    return model.layers, rows, max(model.groups, mesh.tp), capacity, model.head_dim


def empty(model: ModelConfig, mesh: MeshConfig, rows: int, capacity: int) -> Cache:
    """This device's part of a cache for `rows` rows of its own. Runs inside shard_map."""
    layers, _, heads, _, width = cache_shape(model, mesh, rows, capacity)
    zeros = jnp.zeros((layers // mesh.pp, rows, heads // mesh.tp, capacity, width), jnp.dtype(model.dtype))
    zeros = varying(zeros, AXES)
    return Cache(zeros, zeros)


def fill(cache: Cache, at: jax.Array, k: jax.Array, v: jax.Array) -> Cache:
    """Write a prompt's keys and values [b, s, m, h] of layer `at` from position 0 on."""

    def write(kept: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(kept, rearrange(new, "b s m h -> 1 b m s h"), (at, 0, 0, 0, 0))

    return Cache(write(cache.keys, k), write(cache.values, v))


def append(cache: Cache, at: jax.Array, position: jax.Array, k: jax.Array, v: jax.Array) -> Cache:
    """Write one token's keys and values [b, 1, m, h] of layer `at`, each row's at its own position int32 [b]."""
    row = jnp.arange(position.shape[0])
    write = lambda kept, new: kept.at[at, row, :, position].set(new[:, 0])  # noqa: E731
    return Cache(write(cache.keys, k), write(cache.values, v))


def attend(q: jax.Array, cache: Cache, at: jax.Array, position: jax.Array) -> jax.Array:
    """Attention of one new token a row to what layer `at` keeps of its row up to and with its own position.

    Args:
        q: [b, 1, n, h]; query head i looks at the kept head i m / n.
        position: int32 [b]. What is kept behind it belongs to padding or to nothing, and is not seen.

    Returns:
        [b, 1, n, h] in q's dtype; scores and softmax are float32.
    """
    k, v = (lax.dynamic_index_in_dim(kept, at, keepdims=False) for kept in cache)
    grouped = rearrange(q, "b 1 (m g) h -> b m g h", m=k.shape[1])
    scores = jnp.einsum("bmgh,bmch->bmgc", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.arange(k.shape[2])[None] <= position[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    return rearrange(jnp.einsum("bmgc,bmch->bmgh", weights.astype(v.dtype), v), "b m g h -> b 1 (m g) h")
