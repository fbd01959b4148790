"""Multi-head causal attention: heads split over tp, sequence over cp.

Shapes: b batch, s sequence (this context shard), d d_model, n heads (local), m key and value heads (local), h head dim.
Query head i attends to key and value head i m / n.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jax5d.config import ModelConfig
from jax5d.layers.dropout import Place
from jax5d.layers.init import normal
from jax5d.layers.linear import add_bias, times
from jax5d.layers.names import QKV, SAVED
from jax5d.layers.rotary import rotate
from jax5d.parallel.context import Draw, ring_attention
from jax5d.parallel.heads import products, weighted_queries, weighted_values
from jax5d.parallel.random import keep
from jax5d.parallel.tensor import Boundary, own_heads

Attend = Callable[..., jax.Array]
"""(q [b, s, n, h], k and v [b, s, m, h], draw, rate=) -> [b, s, n, h]; causal."""
Meet = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(q [b, s, n, h], k and v [b, s, m, h]) -> ([b, s, n, h], a memory): attention to more than this call's tokens."""


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, draw: Draw, *, rate: float) -> jax.Array:
    """cuDNN's fused attention, for one context shard without dropout."""
    del draw, rate
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, draw: Draw, *, rate: float) -> jax.Array:
    """Attention of the textbook, for one context shard: [b, n, s, s] weights exist, and wait for the backward pass.

    Arguments, result and dropout mask are `ring_attention`'s. Softmax is float32. Kept for the backward pass are the
    weights before dropout and after it, in q's dtype, and the mask where it is not drawn again: the 5 a s / h of
    Korthikanti et al., arXiv:2205.05198, eq. 2.
    """
    weights = _weights(q, k)
    if rate:
        keys = jnp.arange(k.shape[1], dtype=jnp.uint32)
        mask = keep(draw.key, rate, draw.query_ids[..., None], keys[None, None, None])
        weights = jnp.where(mask, weights / (1 - rate), 0).astype(v.dtype)
    return weighted_values(weights, v)


@jax.custom_vjp
def _weights(q: jax.Array, k: jax.Array) -> jax.Array:
    """Causal softmax [b, n, s, t] in q's dtype; the backward pass keeps that, where autodiff would keep float32."""
    scores = products(q, k, jnp.float32)
    with jax.named_scope("softmax"):
        scores = scores * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None]
        return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(q.dtype)


def _weights_fwd(q: jax.Array, k: jax.Array) -> tuple[jax.Array, tuple]:
    weights = _weights(q, k)
    return weights, (q, k, weights)


def _weights_bwd(saved: tuple, d_weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k, weights = saved
    with jax.named_scope("softmax"):
        wide, slope = weights.astype(jnp.float32), d_weights.astype(jnp.float32)
        d_scores = wide * (slope - jnp.sum(slope * wide, axis=-1, keepdims=True)) * q.shape[-1] ** -0.5
        d_scores = d_scores.astype(q.dtype)
    with jax.named_scope("scores"):
        return weighted_values(d_scores, k), weighted_queries(d_scores, q, k.shape[2])


_weights.defvjp(_weights_fwd, _weights_bwd)


def choose_attention(model: ModelConfig, platform: str, context_shards: int) -> Attend:
    """The model's attention. Flash is cuDNN's where that computes the same (a GPU, one context shard, 16-bit, no
    dropout), else our own ring."""
    if model.attention == "plain":
        return plain_attention
    fused = platform in ("gpu", "cuda") and context_shards == 1 and not model.dropout and model.dtype != "float32"
    return cudnn_attention if fused else ring_attention


def recomputed(attend: Attend) -> Attend:
    """`attend`, computed again in the backward pass from q, k, v. Korthikanti et al., arXiv:2205.05198, section 5."""

    def again(q: jax.Array, k: jax.Array, v: jax.Array, draw: Draw, *, rate: float) -> jax.Array:
        return jax.checkpoint(partial(attend, rate=rate), prevent_cse=False)(q, k, v, draw)

    return again


class Attention(nnx.Module):
    """Heads of attention without biases or positions, which `BiasedAttention` and `RotaryAttention` add.

    Queries are projected by [d, n, h], keys and values by [2, d, m, h], so that a cut over tp takes whole heads of
    each. With fewer key and value heads than tp devices every one holds them all (`own_heads`). They are three
    products: of one, results would be cut apart and transposed, and on GPUs XLA merges products of one input itself.
    """

    def __init__(self, config: ModelConfig, *, out_std: float, boundary: Boundary, attend: Attend, rngs: nnx.Rngs):
        d, n, h, self.kv_heads = config.d_model, config.heads, config.head_dim, config.groups
        self.w_q = nnx.Param(normal(rngs, d, n, h), spec=P(None, "tp", None))
        self.w_kv = nnx.Param(normal(rngs, 2, d, self.kv_heads, h), spec=P(None, None, "tp", None), shared=True)
        self.w_out = nnx.Param(normal(rngs, n, h, d, std=out_std), spec=P("tp", None, None))
        self.dropout, self.boundary, self.attend = config.dropout, boundary, attend

    def __call__(self, x: jax.Array, place: Place, key: jax.Array) -> jax.Array:
        """Residual stream [b, s_stream, d] -> [b, s_stream, d]; `key` uint32 [2] draws dropout on the weights."""
        q, k, v = self.queries_keys_values(x, place)
        y = self.attend(q, k, v, Draw(key, self._query_ids(q, place)), rate=self.dropout)
        return self.out(y)

    def remembering(self, x: jax.Array, place: Place, meet: Meet) -> tuple[jax.Array, Any]:
        """The same without dropout, where `meet` attends and says what is remembered of the keys and values."""
        y, memory = meet(*self.queries_keys_values(x, place))
        return self.out(y), memory

    def queries_keys_values(self, x: jax.Array, place: Place) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Residual stream [b, s_stream, d] -> q [b, s, n, h], k and v [b, s, m, h], as they meet."""
        q, k, v = self.boundary.columns(self._project, x, self._projections())
        q, k = self._positioned(q, place), self._positioned(k, place)
        return checkpoint_name(q, QKV), checkpoint_name(k, QKV), checkpoint_name(v, QKV)

    def out(self, y: jax.Array) -> jax.Array:
        """Attention's result [b, s, n, h] -> the residual stream [b, s_stream, d]."""
        y = self.boundary.rows(_output, y, self.w_out[...])
        return self._shifted(checkpoint_name(y, SAVED))

    def _projections(self) -> dict[str, jax.Array]:
        """What `_project` needs, for this device's heads."""
        return {"w_q": self.w_q[...], "w_kv": own_heads(self.w_kv[...], self.kv_heads)}

    @staticmethod
    def _project(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tokens [b, s, d] -> q [b, s, n, h], k and v [b, s, m, h]."""
        q = times(x, weights["w_q"], "bsd,dnh->bsnh")
        k, v = (times(x, weight, "bsd,dmh->bsmh") for weight in weights["w_kv"])
        return q, k, v

    def _positioned(self, x: jax.Array, place: Place) -> jax.Array:
        """What positions make of queries or keys [b, s, n, h]."""
        del place
        return x

    def _shifted(self, y: jax.Array) -> jax.Array:
        """What becomes of the sum over tp [b, s_stream, d]."""
        return y

    def _query_ids(self, q: jax.Array, place: Place) -> jax.Array:
        """Global (token, head) number of each query: uint32 [b, n, s]."""
        n = q.shape[2]
        head = (lax.axis_index("tp") * n + jnp.arange(n)).astype(jnp.uint32)
        every = jnp.uint32(n * lax.axis_size("tp"))
        return place.tokens(place.positions)[:, None, :] * every + head[None, :, None]


def _output(y: jax.Array, weight: jax.Array) -> jax.Array:
    """Attention's result [b, s, n, h] -> partial sums [b, s, d]."""
    return times(y, weight, "bsnh,nhd->bsd")


class BiasedAttention(Attention):
    """GPT-2's: biases on q, k, v and on the result, the last one after the sum over tp, so that it counts once."""

    def __init__(self, config: ModelConfig, *, out_std: float, boundary: Boundary, attend: Attend, rngs: nnx.Rngs):
        super().__init__(config, out_std=out_std, boundary=boundary, attend=attend, rngs=rngs)
        self.b_q = nnx.Param(jnp.zeros((config.heads, config.head_dim)), spec=P("tp", None))
        self.b_kv = nnx.Param(jnp.zeros((2, self.kv_heads, config.head_dim)), spec=P(None, "tp", None), shared=True)
        self.b_out = nnx.Param(jnp.zeros(config.d_model), spec=P(None))

    def _projections(self) -> dict[str, jax.Array]:
        return super()._projections() | {"b_q": self.b_q[...], "b_kv": own_heads(self.b_kv[...], self.kv_heads)}

    @staticmethod
    def _project(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        biases = weights["b_q"], *weights["b_kv"]
        q, k, v = (add_bias(y, b[None, None]) for y, b in zip(Attention._project(x, weights), biases, strict=True))
        return q, k, v

    def _shifted(self, y: jax.Array) -> jax.Array:
        return add_bias(y, self.b_out[...][None, None])


class RotaryAttention(Attention):
    """Llama's: queries and keys are turned by their positions in the whole sequence."""

    def __init__(self, config: ModelConfig, *, out_std: float, boundary: Boundary, attend: Attend, rngs: nnx.Rngs):
        super().__init__(config, out_std=out_std, boundary=boundary, attend=attend, rngs=rngs)
        self.theta = config.rope_theta

    def _positioned(self, x: jax.Array, place: Place) -> jax.Array:
        return rotate(x, place.positions, self.theta)
