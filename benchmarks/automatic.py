"""GPT-2 for the automatic partitioner: one global program, and sharding annotations where they help.

The same mathematics as `jax5d.models` without a word about collectives: parameters and batch carry NamedShardings,
activations are constrained where a choice exists, and XLA (GSPMD, arXiv:2105.04663; Shardy where JAX uses it)
splits the program and adds the communication. Megatron's layout over tp, the batch over dp, the state donated.

Shapes: b batch, s sequence, d d_model, n heads, h head dim, f d_ff, v vocabulary; all of them global.
"""

from __future__ import annotations

from collections.abc import Callable
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

BATCH_SPEC = P("dp", None)
"""Spec of a batch's arrays [rows, sequence]."""


def make_step(
    mesh: Mesh, optimizer: optax.GradientTransformation, shardings: tuple, *, clip: float, remat: str
) -> Step:
    """Jitted (params, opt_state, batch) -> (params, opt_state, loss), the old state donated.

    Args:
        mesh: has axes dp and tp, of Auto type.
        optimizer: the same optax transformation as the library's.
        shardings: of params and opt_state.
        clip: largest global gradient norm.
        remat: "none", or "full" for the library's policy: recompute a layer, keep the attention's sum over tp.
    """
    batch = {name: NamedSharding(mesh, BATCH_SPEC) for name in ("inputs", "labels")}

    def step(params: Tree, opt_state: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(_loss)(params, batch, partial(_constrain, mesh), remat)
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


def _loss(params: Tree, batch: dict[str, jax.Array], at: Callable[..., jax.Array], remat: str) -> jax.Array:
    """Mean next-token cross-entropy, float32 []; `at(x, *spec)` constrains a value's layout."""
    outer = params["outer"]
    ids = batch["inputs"]
    x = outer["wte"][ids] + outer["wpe"][: ids.shape[1]][None]
    body = partial(_layer, at=at)
    if remat == "full":
        policy = checkpoint_policies.save_only_these_names(SAVED)
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    x, _ = lax.scan(body, at(x, "dp", None, None), params["blocks"])
    logits = jnp.einsum("bsd,vd->bsv", _norm(x, outer["norm_f"]), outer["wte"])
    logits = at(logits, "dp", None, "tp")
    hit = batch["labels"][..., None] == jnp.arange(logits.shape[-1])[None, None]  # a gather would cross the split
    target = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)


def _layer(x: jax.Array, p: Tree, *, at: Callable[..., jax.Array]) -> tuple[jax.Array, None]:
    """The residual stream [b, s, d] through one block."""
    x = x + _attention(_norm(x, p["norm_1"]), p["attention"], at)
    hidden = jnp.einsum("bsd,df->bsf", _norm(x, p["norm_2"]), p["mlp"]["w_in"]) + p["mlp"]["b_in"][None, None]
    y = _gelu_times(at(hidden, "dp", None, "tp"), p["mlp"]["w_out"]) + p["mlp"]["b_out"][None, None]
    return at(x + y, "dp", None, None), None


def _attention(x: jax.Array, p: Tree, at: Callable[..., jax.Array]) -> jax.Array:
    """Dense causal attention, [b, s, d] -> [b, s, d]."""
    qkv = jnp.einsum("bsd,dcnh->cbsnh", x, p["w_qkv"]) + p["b_qkv"][:, None, None]
    q, k, v = at(qkv, None, "dp", None, "tp", None)
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) * q.shape[-1] ** -0.5
    s = x.shape[1]
    seen = jnp.tril(jnp.ones((s, s), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bnst,btnh->bsnh", weights, v)
    y = at(jnp.einsum("bsnh,nhd->bsd", y, p["w_out"]), "dp", None, None)
    return checkpoint_name(y, SAVED) + p["b_out"][None, None]


@partial(jax.checkpoint, prevent_cse=False)
def _gelu_times(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Keeps `hidden` alone, as the library does."""
    return jnp.einsum("bsf,fd->bsd", jax.nn.gelu(hidden, approximate=True), weight)


@partial(jax.checkpoint, prevent_cse=False)
def _norm(x: jax.Array, p: Tree) -> jax.Array:
    """Keeps `x` alone, as the library does."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + EPS) * p["scale"][None, None] + p["bias"][None, None]
