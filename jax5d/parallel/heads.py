"""Products of queries and keys whose heads may be fewer: each key and value head serves n / m query heads in a row.

Grouped-query attention (Ainslie et al., arXiv:2305.13245): one group a query head is multi-head attention, one group in
all is multi-query attention.

Shapes: b batch, s queries, t keys, n query heads, m key and value heads, h head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange, repeat


def products(q: jax.Array, k: jax.Array, dtype: Any) -> jax.Array:
    """Each query times each key of its head: [b, s, n, h], [b, t, m, h] -> `dtype` [b, n, s, t]."""
    return jnp.einsum("bsnh,btnh->bnst", q, _for_queries(k, q.shape[2]), preferred_element_type=dtype)


def weighted_values(weights: jax.Array, v: jax.Array, dtype: Any = None) -> jax.Array:
    """Sums over keys: weights [b, n, s, t], [b, t, m, h] -> `dtype` (default: v's) [b, s, n, h]."""
    return jnp.einsum("bnst,btnh->bsnh", weights, _for_queries(v, weights.shape[1]), preferred_element_type=dtype)


def weighted_queries(weights: jax.Array, q: jax.Array, heads: int, dtype: Any = None) -> jax.Array:
    """Sums over queries and a group's heads: weights [b, n, s, t], [b, s, n, h] -> `dtype` (default: q's) [b, t, m, h].

    m is `heads`.
    """
    summed = jnp.einsum("bnst,bsnh->btnh", weights, q, preferred_element_type=dtype)
    if heads == q.shape[2]:
        return summed
    return jnp.sum(rearrange(summed, "b t (m g) h -> b t m g h", m=heads), axis=3)


def _for_queries(x: jax.Array, heads: int) -> jax.Array:
    """Keys or values [b, t, m, h] once for each of `heads` query heads: [b, t, n, h]."""
    return x if x.shape[2] == heads else repeat(x, "b t m h -> b t (m g) h", g=heads // x.shape[2])
