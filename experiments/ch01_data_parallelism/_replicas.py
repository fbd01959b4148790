"""Data parallelism from a plain training loop, one change at a time, and two ways to get it wrong.

Every loop takes the same global batches [steps, rows, s] and returns the parameters after each step of SGD. Labels
below 0 are ignored. Read `one_device`, then what `replicas` does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax5d.mesh import DATA_AXES
from jax5d.parallel.data import sum_over_shards

Tree = Any
Batches = tuple[jax.Array, jax.Array]
"""Inputs and labels, int32 [steps, rows, s]."""
Gradient = Callable[[Tree, jax.Array, jax.Array], Tree]
"""(params, inputs, labels) -> gradient of the objective, from this device's rows."""

SPLIT = P(DATA_AXES)
"""Rows of a batch, or copies of the parameters, over dp; ep and cp have one device."""


def summed_loss(params: Tree, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy of GPT-2, summed over the valid tokens of [rows, s]: float32 []."""
    outer = params["outer"]
    x = outer["wte"][inputs] + outer["wpe"][: inputs.shape[1]][None]
    x, _ = jax.lax.scan(lambda x, block: (_block(block, x), None), x, params["blocks"])
    logits = jnp.einsum("bsd,vd->bsv", _norm(outer["norm_f"], x), outer["wte"])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(labels >= 0, picked, 0.0))


def _block(p: Tree, x: jax.Array) -> jax.Array:
    y, weights = _norm(p["norm_1"], x), p["attention"]
    q = jnp.einsum("bsd,dnh->bsnh", y, weights["w_q"]) + weights["b_q"][None, None]
    k, v = jnp.einsum("bsd,cdnh->cbsnh", y, weights["w_kv"]) + weights["b_kv"][:, None, None]
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bsnh,nhd->bsd", y, p["attention"]["w_out"]) + p["attention"]["b_out"][None, None]
    hidden = jax.nn.gelu(_norm(p["norm_2"], x) @ p["mlp"]["w_in"] + p["mlp"]["b_in"][None, None])
    return x + hidden @ p["mlp"]["w_out"] + p["mlp"]["b_out"][None, None]


def _norm(p: Tree, x: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
    return x * p["scale"][None, None] + p["bias"][None, None]


def valid(labels: jax.Array) -> jax.Array:
    """How many tokens count: float32 []."""
    return jnp.sum(labels >= 0).astype(jnp.float32)


def descend(params: Tree, grads: Tree, rate: float) -> Tree:
    """One step of SGD."""
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


# One device ----------------------------------------------------------------------------------------------------------


def one_device(params: Tree, batches: Batches, rate: float) -> list[Tree]:
    """The loop that all others must equal: the gradient of the mean loss over the batch's valid tokens."""

    @jax.jit
    def step(params: Tree, inputs: jax.Array, labels: jax.Array) -> Tree:
        grads = jax.grad(lambda p: summed_loss(p, inputs, labels) / valid(labels))(params)
        return descend(params, grads, rate)

    history = []
    for inputs, labels in zip(*batches, strict=True):
        params = step(params, inputs, labels)
        history.append(params)
    return history


# N replicas ----------------------------------------------------------------------------------------------------------


def summed(params: Tree, inputs: jax.Array, labels: jax.Array) -> Tree:
    """Right: each replica differentiates its rows' summed loss over all replicas' tokens; the gradients are summed.

    Collectives: one psum of 4 bytes, and one of each gradient leaf, 2 (N-1)/N of its bytes a device.
    """
    tokens = sum_over_shards(valid(labels))
    grads = jax.grad(lambda p: summed_loss(p, inputs, labels) / tokens)(params)
    return jax.tree.map(sum_over_shards, grads)


def mean_of_means(params: Tree, inputs: jax.Array, labels: jax.Array) -> Tree:
    """Wrong where replicas have different numbers of tokens: a token of the shortest rows weighs the most."""
    replicas = sum_over_shards(jnp.ones(()))
    grads = jax.grad(lambda p: summed_loss(p, inputs, labels) / valid(labels) / replicas)(params)
    return jax.tree.map(sum_over_shards, grads)


def not_summed(params: Tree, inputs: jax.Array, labels: jax.Array) -> Tree:
    """Wrong: every replica follows the gradient of its own rows, and goes its own way."""
    return jax.grad(lambda p: summed_loss(p, inputs, labels) / valid(labels))(params)


def replicas(params: Tree, batches: Batches, rate: float, mesh: Mesh, gradient: Gradient) -> list[Tree]:
    """The same loop with each batch's rows split over dp. Parameters [N, ...]: each replica has a copy of its own."""

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(SPLIT, SPLIT, SPLIT), out_specs=SPLIT)
    def step(params: Tree, inputs: jax.Array, labels: jax.Array) -> Tree:
        params = jax.tree.map(lambda p: p[0], params)  # [1, ...] on each device
        params = descend(params, gradient(params, inputs, labels), rate)
        return jax.tree.map(lambda p: p[None], params)

    n = mesh.shape["dp"]
    copies, history = jax.tree.map(lambda p: jnp.stack([p] * n), params), []
    for inputs, labels in zip(*batches, strict=True):
        copies = step(copies, inputs, labels)
        history.append(copies)
    return history
