"""GPT-2 for the automatic partitioner: one global program, and sharding annotations where they help.

The same mathematics as `jax5d.models` without a word about collectives: parameters and batch carry NamedShardings,
activations are constrained where a choice exists, and XLA (GSPMD, arXiv:2105.04663; Shardy where JAX uses it)
splits the program and adds the communication. Megatron's layout over tp, the batch over dp, the state donated.

Shapes: b batch, s sequence, d d_model, n heads, h head dim, f d_ff, v vocabulary; all of them global.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax5d.layers.names import SAVED
from jax5d.layers.norm import EPS

Tree = Any
Step = Callable[[Tree, Tree, dict[str, jax.Array]], tuple[Tree, Tree, jax.Array]]
At = Callable[..., jax.Array]
"""`at(x, *spec)` constrains a value's layout."""

BATCH_SPEC = P("dp", None)
"""Spec of a batch's arrays [rows, sequence]."""


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of the textbook, all [b, s, n, h]; scores [b, n, s, s] exist."""
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) * q.shape[-1] ** -0.5
    s = q.shape[1]
    seen = jnp.tril(jnp.ones((s, s), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnst,btnh->bsnh", weights, v)


def cross_entropy(y: jax.Array, table: jax.Array, labels: jax.Array, at: At) -> jax.Array:
    """Mean over tokens of y [b, s, d] against labels [b, s]; float32 logits [b, s, v] exist. float32 []."""
    logits = jnp.einsum("bsd,vd->bsv", y, table, preferred_element_type=jnp.float32)
    logits = at(logits, "dp", None, "tp")
    hit = labels[..., None] == jnp.arange(logits.shape[-1])[None, None]  # a gather would cross the split
    target = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)


def _unchanged(tree: Tree) -> Tree:
    return tree


@dataclass(frozen=True)
class Program:
    """What can be chosen of the global program. The default computes in float32 and lays out what the state does."""

    remat: str = "none"
    """none, or full: recompute a layer from its input and the values of `save`."""
    save: tuple[str, ...] = (SAVED,)
    """Names of what full recomputation keeps; the library's default is attention's sum over tp."""
    dtype: str = "float32"
    """Of the computation, and of the gradients: they are taken by the parameters' cast to it."""
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = dense_attention
    head: Callable[[jax.Array, jax.Array, jax.Array, At], jax.Array] = cross_entropy
    layer_weights: Callable[[Tree], Tree] = _unchanged
    """From a layer's part of the parameters to what it computes with, inside the recomputed layer."""
    outer_weights: Callable[[Tree], Tree] = _unchanged
    """The same of embedding, final norm and head."""
    gradients: Callable[[Tree], Tree] = _unchanged
    """From the gradients to what the optimizer gets."""
    stream: tuple[str | None, ...] = ("dp", None, None)
    """Axes that split the residual stream [b, s, d]; "tp" in the middle is sequence parallelism."""


def make_step(
    mesh: Mesh, optimizer: optax.GradientTransformation, shardings: tuple, program: Program, *, clip: float
) -> Step:
    """Jitted (params, opt_state, batch) -> (params, opt_state, loss), the old state donated.

    Args:
        mesh: has axes dp and tp, of Auto type.
        optimizer: the same optax transformation as the library's.
        shardings: of params and opt_state.
        program: the choices that are open.
        clip: largest global gradient norm.
    """
    batch = {name: NamedSharding(mesh, BATCH_SPEC) for name in ("inputs", "labels")}
    loss_of = partial(_loss, at=partial(_constrain, mesh), program=program)

    def step(params: Tree, opt_state: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, Tree, jax.Array]:
        cast = jax.tree.map(lambda p: p.astype(program.dtype), params)
        loss, grads = jax.value_and_grad(loss_of)(cast, batch)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), program.gradients(grads), params)
        scale = jnp.minimum(1.0, clip / jnp.maximum(optax.global_norm(grads), 1e-30))
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g * scale, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(
        step,
        in_shardings=(*shardings, batch),
        out_shardings=(*shardings, NamedSharding(mesh, P())),
        donate_argnums=(0, 1),
    )


def _constrain(mesh: Mesh, x: jax.Array, *spec: str | None) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def _loss(params: Tree, batch: dict[str, jax.Array], *, at: At, program: Program) -> jax.Array:
    """Mean next-token cross-entropy, float32 []."""
    outer = program.outer_weights(params["outer"])
    ids = batch["inputs"]
    x = outer["wte"][ids] + outer["wpe"][: ids.shape[1]][None]
    body = partial(_layer, at=at, program=program)
    if program.remat == "full":
        policy = checkpoint_policies.save_only_these_names(*program.save)
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    x, _ = lax.scan(body, at(x, *program.stream), params["blocks"])
    return program.head(_norm(x, outer["norm_f"]), outer["wte"], batch["labels"], at)


def _layer(x: jax.Array, p: Tree, *, at: At, program: Program) -> tuple[jax.Array, None]:
    """The residual stream [b, s, d] through one block."""
    p = program.layer_weights(p)
    x = x + _attention(_norm(x, p["norm_1"]), p["attention"], at, program)
    hidden = jnp.einsum("bsd,df->bsf", _norm(x, p["norm_2"]), p["mlp"]["w_in"]) + p["mlp"]["b_in"][None, None]
    y = _gelu_times(at(hidden, "dp", None, "tp"), p["mlp"]["w_out"]) + p["mlp"]["b_out"][None, None]
    return at(x + y, *program.stream), None


def _attention(x: jax.Array, p: Tree, at: At, program: Program) -> jax.Array:
    """Causal attention, [b, s, d] -> [b, s, d]."""
    weights, biases = (p["w_q"], *p["w_kv"]), (p["b_q"], *p["b_kv"])
    products = (jnp.einsum("bsd,dnh->bsnh", x, w) + b[None, None] for w, b in zip(weights, biases, strict=True))
    q, k, v = (at(y, "dp", None, "tp", None) for y in products)
    y = at(jnp.einsum("bsnh,nhd->bsd", program.attend(q, k, v), p["w_out"]), *program.stream)
    return checkpoint_name(y, SAVED) + p["b_out"][None, None]


@partial(jax.checkpoint, prevent_cse=False)
def _gelu_times(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Keeps `hidden` alone, as the library does."""
    return jnp.einsum("bsf,fd->bsd", jax.nn.gelu(hidden, approximate=True), weight)


@partial(jax.checkpoint, prevent_cse=False)
def _norm(x: jax.Array, p: Tree) -> jax.Array:
    """In float32, result in x's dtype. Keeps `x` alone, as the library does."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(variance + EPS)
    return (normed * p["scale"][None, None] + p["bias"][None, None]).astype(x.dtype)
