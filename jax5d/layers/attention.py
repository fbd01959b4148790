"""Multi-head causal attention: heads split over tp, sequence over cp.

Shapes: b batch, s sequence (this context shard), d d_model, n heads (local), h head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jax5d.layers.dropout import Place
from jax5d.layers.init import normal
from jax5d.layers.linear import add_bias, times
from jax5d.layers.names import QKV, SAVED
from jax5d.parallel.context import Draw, ring_attention
from jax5d.parallel.tensor import Boundary

Attend = Callable[..., jax.Array]
"""(q, k, v, draw, rate=) -> output, all [b, s, n, h]; causal."""


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, draw: Draw, *, rate: float) -> jax.Array:
    """cuDNN's fused attention, for one context shard without dropout."""
    del draw, rate
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def choose_attention(platform: str, context_shards: int, dropout: float, dtype: str) -> Attend:
    """cuDNN where it computes the same thing (a GPU, one context shard, 16-bit, no dropout), else our own ring."""
    fused = platform in ("gpu", "cuda") and context_shards == 1 and not dropout and dtype == "bfloat16"
    return cudnn_attention if fused else ring_attention


class Attention(nnx.Module):
    """Fused q, k, v projection laid out [d, 3, heads, h], so that a cut over tp takes whole heads of each."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        out_std: float,
        dropout: float,
        boundary: Boundary,
        attend: Attend,
        rngs: nnx.Rngs,
    ):
        h = d_model // heads
        self.w_qkv = nnx.Param(normal(rngs, d_model, 3, heads, h), spec=P(None, None, "tp", None))
        self.b_qkv = nnx.Param(jnp.zeros((3, heads, h)), spec=P(None, "tp", None))
        self.w_out = nnx.Param(normal(rngs, heads, h, d_model, std=out_std), spec=P("tp", None, None))
        self.b_out = nnx.Param(jnp.zeros(d_model), spec=P(None))
        self.dropout, self.boundary, self.attend = dropout, boundary, attend

    def __call__(self, x: jax.Array, place: Place, key: jax.Array) -> jax.Array:
        """Residual stream [b, s_stream, d] -> [b, s_stream, d]; `key` uint32 [2] draws dropout on the weights."""
        x = self.boundary.enter(x)
        qkv = times(x, self.w_qkv[...], "bsd,dcnh->cbsnh")
        q, k, v = checkpoint_name(add_bias(qkv, jnp.expand_dims(self.b_qkv[...], (1, 2))), QKV)
        y = self.attend(q, k, v, Draw(key, self._query_ids(q, place)), rate=self.dropout)
        y = self.boundary.leave(times(y, self.w_out[...], "bsnh,nhd->bsd"))
        y = checkpoint_name(y, SAVED)
        return add_bias(y, self.b_out[...][None, None])

    def _query_ids(self, q: jax.Array, place: Place) -> jax.Array:
        """Global (token, head) number of each query: uint32 [b, n, s]."""
        n = q.shape[2]
        head = (lax.axis_index("tp") * n + jnp.arange(n)).astype(jnp.uint32)
        every = jnp.uint32(n * lax.axis_size("tp"))
        return place.tokens(place.positions)[:, None, :] * every + head[None, :, None]
