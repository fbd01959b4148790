"""Megatron's transformer layer, which keeps for its backward pass what the textbook counts, and its compiled memory.

Korthikanti et al., arXiv:2205.05198, section 4: products of 16 bits, dropout whose masks are kept, the softmax and
what dropout makes of it, GELU's input and its result. Here that is a policy of names; `jax5d`'s own layers keep less.

Shapes: b batch, s sequence, d hidden, n heads, h head dim, f of the MLP, l layers; n and f are one tp device's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax5d.config import RunConfig
from jax5d.measure.aot import Memory, absent_gpus
from jax5d.models.build import Model
from jax5d.parallel.data import sum_over_varying
from jax5d.parallel.tensor import Boundary

Params = dict[str, jax.Array]

KEPT = (
    "product_in", "queries", "keys", "values", "attention_out", "stream_mask", "norm_in", "gelu_in", "gelu_out",
)  # fmt: skip
"""Names of what is kept beside the layer's input. A product's input is named before it is gathered: it waits split."""

SQUARES = ("softmax", "weights_mask", "dropped")
"""Names of what is kept of attention's weights [b, n, s, s], unless attention is recomputed."""

SPECS = {
    "norm_1": P(None, None),
    "w_qkv": P(None, None, None, "tp", None),
    "w_out": P(None, "tp", None, None),
    "norm_2": P(None, None),
    "w_in": P(None, None, "tp"),
    "w_down": P(None, "tp", None),
}
"""Of parameters with a leading layers dim. Biases keep nothing and are left out."""


@dataclass(frozen=True)
class MegatronLayer:
    """The layers of a configuration's model, with its dropout rate; computed in bfloat16, parameters too."""

    config: RunConfig

    @cached_property
    def boundary(self) -> Boundary:
        """Tensor parallelism's, or sequence parallelism's with inputs that are gathered again."""
        return Model(self.config.model, self.config.mesh, self.config.parallel).boundary

    def shapes(self, layers: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameters of so many layers, bfloat16."""
        m = self.config.model
        d, n, h, f = m.d_model, m.heads, m.head_dim, m.d_ff
        sizes = {"norm_1": (d,), "w_qkv": (3, d, n, h), "w_out": (n, h, d), "norm_2": (d,), "w_in": (d, f)}
        sizes["w_down"] = f, d
        return {name: jax.ShapeDtypeStruct((layers, *size), jnp.bfloat16) for name, size in sizes.items()}

    def layer(self, x: jax.Array, params: Params, key: jax.Array) -> jax.Array:
        """Residual stream [b, s_stream, d] -> the same. `key` typed [], the same on every device."""
        on_weights = jax.random.fold_in(key, lax.axis_index("tp"))
        after_attention, after_mlp = jax.random.split(self._of_stream(key))
        y = self.boundary.enter(checkpoint_name(_norm(x, params["norm_1"]), "product_in"))
        q, k, v = jnp.einsum("bsd,cdnh->cbsnh", y, params["w_qkv"])
        q, k, v = checkpoint_name(q, "queries"), checkpoint_name(k, "keys"), checkpoint_name(v, "values")
        weights = _softmax(jnp.einsum("bsnh,btnh->bnst", q, k) * q.shape[-1] ** -0.5)
        weights = checkpoint_name(self._dropout(weights, on_weights, "weights_mask"), "dropped")
        y = checkpoint_name(jnp.einsum("bnst,btnh->bsnh", weights, v), "attention_out")
        y = self.boundary.leave(jnp.einsum("bsnh,nhd->bsd", y, params["w_out"]))
        x = checkpoint_name(x + self._dropout(y, after_attention, "stream_mask"), "norm_in")
        y = self.boundary.enter(checkpoint_name(_norm(x, params["norm_2"]), "product_in"))
        hidden = checkpoint_name(jnp.einsum("bsd,df->bsf", y, params["w_in"]), "gelu_in")
        hidden = checkpoint_name(jax.nn.gelu(hidden, approximate=True), "gelu_out")
        y = self.boundary.leave(jnp.einsum("bsf,fd->bsd", hidden, params["w_down"]))
        return x + self._dropout(y, after_mlp, "stream_mask")

    def _of_stream(self, key: jax.Array) -> jax.Array:
        """A key for each part of the residual stream."""
        for axis in self.boundary.axes:
            key = jax.random.fold_in(key, lax.axis_index(axis))
        return key

    def _dropout(self, x: jax.Array, key: jax.Array, name: str) -> jax.Array:
        rate = self.config.model.dropout
        mask = checkpoint_name(jax.random.bernoulli(key, 1 - rate, x.shape), name)
        return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)

    def gradients(self, params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        """Inside shard_map: of the sum of squares of what the layers make of x [b, s_stream, d]."""
        squares = () if self.config.parallel.remat == "selective" else SQUARES
        policy = checkpoint_policies.save_only_these_names(*KEPT, *squares)
        layer = jax.checkpoint(self.layer, policy=policy, prevent_cse=False)

        def loss(params: Params, x: jax.Array) -> jax.Array:
            def body(carry: tuple, layer_params: Params) -> tuple:
                x, key = carry
                key, own = jax.random.split(key)
                return (layer(x, layer_params, own), key), None

            (x, _), _ = lax.scan(body, (x, jax.random.key(0)), params)
            return sum_over_varying(jnp.sum(jnp.square(x.astype(jnp.float32))))

        return jax.grad(loss, argnums=(0, 1))(params, x)

    def memory(self, gpu: str, layers: int) -> Memory:
        """The compiler's, of the gradients of so many layers."""
        mesh = Mesh(absent_gpus(gpu, self.config.mesh.tp), ("tp",))
        stream = P(None, "tp" if self.config.parallel.sequence else None)
        train, m = self.config.train, self.config.model
        x = jax.ShapeDtypeStruct((train.global_batch, train.seq_len, m.d_model), jnp.bfloat16)

        def laid(shape: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

        specs = SPECS, stream
        step = jax.jit(jax.shard_map(self.gradients, mesh=mesh, in_specs=specs, out_specs=specs))
        return Memory.of(step.lower(jax.tree.map(laid, self.shapes(layers), SPECS), laid(x, stream)).compile())


@partial(jax.checkpoint, prevent_cse=False)
def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return (normed * scale.astype(jnp.float32)[None, None]).astype(x.dtype)


@jax.custom_vjp
def _softmax(scores: jax.Array) -> jax.Array:
    """Causal, over the last dim of [b, n, s, s]. Keeps its result, where autodiff would keep it in float32."""
    seen = jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None]
    wide = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
    return jax.nn.softmax(wide, axis=-1).astype(scores.dtype)


def _softmax_fwd(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights = checkpoint_name(_softmax(scores), "softmax")
    return weights, weights


def _softmax_bwd(weights: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    wide, slope = weights.astype(jnp.float32), slope.astype(jnp.float32)
    return ((wide * (slope - jnp.sum(wide * slope, axis=-1, keepdims=True))).astype(weights.dtype),)


_softmax.defvjp(_softmax_fwd, _softmax_bwd)
