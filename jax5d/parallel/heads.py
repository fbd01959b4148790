"""Products of queries and keys whose heads may be fewer: each key and value head serves n / m query heads in a row.

Grouped-query attention (Ainslie et al., arXiv:2305.13245): one group a query head is multi-head attention, one group in
all is multi-query attention.

Shapes: b batch, s queries, t keys, n query heads, m key and value heads, h head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange


def products(q: jax.Array, k: jax.Array, dtype: Any) -> jax.Array:
    """Each query times each key of its head: [b, s, n, h], [b, t, m, h] -> `dtype` [b, n, s, t]."""
    grouped = jnp.einsum("bsmgh,btmh->bmgst", _by_group(q, k.shape[2]), k, preferred_element_type=dtype)
    return rearrange(grouped, "b m g s t -> b (m g) s t")


def weighted_values(weights: jax.Array, v: jax.Array, dtype: Any = None) -> jax.Array:
    """Sums over keys: weights [b, n, s, t], [b, t, m, h] -> `dtype` (default: v's) [b, s, n, h]."""
    weights = rearrange(weights, "b (m g) s t -> b m g s t", m=v.shape[2])
    summed = jnp.einsum("bmgst,btmh->bsmgh", weights, v, preferred_element_type=dtype)
    return rearrange(summed, "b s m g h -> b s (m g) h")


def weighted_queries(weights: jax.Array, q: jax.Array, heads: int, dtype: Any = None) -> jax.Array:
    """Sums over queries and a group's heads: weights [b, n, s, t], [b, s, n, h] -> [b, t, m, h], m is `heads`."""
    weights = rearrange(weights, "b (m g) s t -> b m g s t", m=heads)
    return jnp.einsum("bmgst,bsmgh->btmh", weights, _by_group(q, heads), preferred_element_type=dtype)


def _by_group(q: jax.Array, heads: int) -> jax.Array:
    return rearrange(q, "b s (m g) h -> b s m g h", m=heads)
