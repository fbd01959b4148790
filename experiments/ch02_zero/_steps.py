"""Plain data parallelism grows into ZeRO-3: four training steps, each a few lines away from the one before.

Rajbhandari et al., arXiv:1910.02054, section 5. A step is the body of a shard_map over the replicas: it sees one
device's part of the state and of the batch. Start with `one_device`, and read on for what changes.

Model: LAYERS residual layers x + gelu(x W_in) W_out. Shapes: M microbatches, r rows on this device, D and F widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax5d.mesh import DATA_AXES
from jax5d.parallel.cuts import Cut, gather, scatter
from jax5d.parallel.data import sum_over_shards, varying

Tree = Any
Batch = tuple[jax.Array, jax.Array]
"""Inputs and targets, float32 [M, r, D]."""
Layer = Callable[[Tree, jax.Array], jax.Array]

LAYERS, D, F = 4, 48, 192
ROWS = 48
"""Of a microbatch, on all devices together."""

CUTS = [{"w_in": Cut(DATA_AXES, -1, F), "w_out": Cut(DATA_AXES, -1, D)}] * LAYERS
"""Every weight is cut along its last dim."""

OPTIMIZER = optax.adamw(3e-3, weight_decay=0.1)
"""Elementwise, so that it updates a piece as it would update the whole."""


class State(NamedTuple):
    """What lasts from step to step."""

    params: Tree
    """What the optimizer updates."""
    moments: Tree
    replica: Tree = ()
    """A whole copy to compute with, where `params` are pieces: ZeRO-1 and 2."""


class Result(NamedTuple):
    """What a step leaves."""

    state: State
    loss: jax.Array
    """Of the whole batch, before the update: float32 []."""
    sums: Tree
    """The gradients that this device held when its last backward pass ended."""


def layer(w: Tree, x: jax.Array) -> jax.Array:
    """[r, D] -> [r, D]."""
    return x + jax.nn.gelu(x @ w["w_in"]) @ w["w_out"]


def gradient(params: Tree, batch: Batch, layer: Layer = layer) -> tuple[jax.Array, Tree]:
    """This device's part of a microbatch's mean squared error, and the part's gradient."""

    def error(params: Tree) -> jax.Array:
        x, targets = batch
        for w in params:
            x = layer(w, x)
        return jnp.sum((x - targets) ** 2) / (ROWS * D)

    return jax.value_and_grad(error)(params)


def mean(one: Callable[[Batch], Tree], batch: Batch) -> Tree:
    """The mean of `one` over the microbatches, of which one is at work at a time."""
    count = batch[0].shape[0]
    total = one((batch[0][0], batch[1][0]))
    for m in range(1, count):
        total = jax.tree.map(jnp.add, total, one((batch[0][m], batch[1][m])))
    return jax.tree.map(lambda x: x / count, total)


def copy(params: Tree) -> Tree:
    """A copy of this device's own to differentiate, so that nothing is summed before we say so."""
    return jax.tree.map(lambda x: varying(x, DATA_AXES), params)


# The steps ------------------------------------------------------------------------------------------------------------


def one_device(state: State, batch: Batch) -> Result:
    """What all others must equal."""
    params, moments, _ = state
    loss, grads = mean(lambda part: gradient(params, part), batch)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    params = optax.apply_updates(params, updates)
    return Result(State(params, moments), loss, grads)


def stage_0(state: State, batch: Batch) -> Result:
    """Plain data parallelism: everything is held N times, and the gradients are summed."""
    params, moments, _ = state
    own = copy(params)
    loss, sums = mean(lambda part: gradient(own, part), batch)
    grads = jax.tree.map(sum_over_shards, sums)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    params = optax.apply_updates(params, updates)
    return Result(State(params, moments), sum_over_shards(loss), sums)


def stage_1(state: State, batch: Batch) -> Result:
    """ZeRO-1: a device updates its piece of the parameters, so it needs that piece's sums and moments alone."""
    params, moments, replica = state
    own = copy(replica)
    loss, sums = mean(lambda part: gradient(own, part), batch)
    grads = scatter(sums, CUTS)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    params = optax.apply_updates(params, updates)
    replica = gather(params, CUTS, jnp.float32, alike=True)
    return Result(State(params, moments, replica), sum_over_shards(loss), sums)


def stage_2(state: State, batch: Batch) -> Result:
    """ZeRO-2: each microbatch's gradients are scattered at once, so the sums over microbatches are a piece too."""
    params, moments, replica = state
    own = copy(replica)
    loss, grads = mean(lambda part: scattered(gradient(own, part)), batch)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    params = optax.apply_updates(params, updates)
    replica = gather(params, CUTS, jnp.float32, alike=True)
    return Result(State(params, moments, replica), sum_over_shards(loss), grads)


def scattered(part: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
    """A microbatch's loss, and this device's piece of its summed gradients."""
    loss, grads = part
    return loss, scatter(grads, CUTS)


def stage_3(state: State, batch: Batch) -> Result:
    """ZeRO-3: no replica. A layer is gathered when it is needed; the transpose of a gather scatters its gradients."""
    params, moments, _ = state
    loss, grads = mean(lambda part: gradient(params, part, gathered_layer), batch)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    params = optax.apply_updates(params, updates)
    return Result(State(params, moments), sum_over_shards(loss), grads)


@jax.checkpoint
def gathered_layer(pieces: Tree, x: jax.Array) -> jax.Array:
    """A layer from its pieces. Checkpointed, so that the backward pass gathers it anew instead of keeping it whole."""
    return layer(gather(pieces, CUTS[0], jnp.float32), x)


STEPS = (stage_0, stage_1, stage_2, stage_3)
"""By stage."""
