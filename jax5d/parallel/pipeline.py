"""Pipeline parallelism: the layers are split over pp, and a table says who works on what when.

Every device runs the same program: a loop over the table's ticks. A stage takes its input from the stage before it
(ppermute), works, and hands on. What a forward pass saves waits in a ring of slots for its backward pass. The
embedding and the head belong to all stages (their vocabulary is split over pp and tp), so no stage waits for another's.

A pipeline of one stage is gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.agree import agreed
from jax5d.parallel.data import varying, varying_axes, zeros_of
from jax5d.parallel.schedules import Table, Tick, phases
from jax5d.parallel.stack import Back, Layer, Reduce, Ring, Stack, run

Tree = Any


@dataclass(frozen=True)
class Work:
    """What the executor runs; `m` is a microbatch index, int32 []."""

    embed: Callable[[Tree, jax.Array], jax.Array]
    """(outer, m) -> x, the first stage's input, the same on all stages; linear in outer."""
    layer: Layer
    """(params, x, (m, index)) -> ((y, losses), stats): one of the stage's layers."""
    head: Callable[[Tree, jax.Array, jax.Array], Tree]
    """(outer, y, m) -> a result that adds up over microbatches, from each stage's own copy of the last one's y."""


@dataclass(frozen=True)
class Result:
    """Sums over the microbatches that passed through this device."""

    head: Tree
    losses: Tree
    stats: Tree
    outer_grads: Tree = None
    block_grads: Tree = None
    block_squares: Tree = None
    """Each leaf's sum of squares before it was reduced, float32 []."""


@jax.named_scope("pp_send")
def _step_to(x: jax.Array, by: int) -> jax.Array:
    """Send to the stage `by` further; the end stage receives zeros. Transpose: by -by. Bytes: (p-1)/p K a device."""
    size = lax.axis_size("pp")
    return lax.ppermute(x, "pp", [(i, i + by) for i in range(size) if 0 <= i + by < size])


def _is_first() -> jax.Array:
    return lax.axis_index("pp") == 0


def _is_last() -> jax.Array:
    return lax.axis_index("pp") == lax.axis_size("pp") - 1


@jax.named_scope("pp_share")
def _from_last(y: jax.Array) -> jax.Array:
    """Each stage's own copy of the last one's value: psum of a masked value over pp, 2 (p-1)/p K bytes.

    Transpose: the same psum, of the copies' gradients, to the last stage.
    """
    return varying(lax.psum(jnp.where(_is_last(), y, 0), "pp"), ("pp",))


def _kinds(function: Callable[..., Tree], *args: Tree) -> Tree:
    """Types of a function's results, with their varying axes; nothing is computed."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)


def _add_where(valid: jax.Array, total: Tree, new: Tree) -> Tree:
    """Accumulate what belongs to a real microbatch. `where`, not a product: an idle tick may hold nan."""
    return jax.tree.map(lambda t, n: t + jnp.where(valid, n, 0).astype(t.dtype), total, new)


def _add(total: Tree, new: Tree) -> Tree:
    """Sum in the dtype of `total`."""
    return jax.tree.map(lambda t, n: t + n.astype(t.dtype), total, new)


def _rows(ticks: tuple[Tick, ...]) -> dict[str, jax.Array]:
    """A phase as arrays to scan over: forward and backward int32 [ticks, p], head int32 [ticks]."""
    names = ("forward", "backward", "head")
    columns = {name: [getattr(tick, name) for tick in ticks] for name in names}
    return {name: jnp.asarray(column, jnp.int32) for name, column in columns.items() if column[0] is not None}


def _zero_once_done(outer: Tree, blocks: Tree) -> jax.Array:
    """int32 0, known only when a backward pass is done: by comparisons that XLA does not see through.

    Args:
        outer: gradients added up by it, of the embedding.
        blocks: those of the layers; the smallest leaf tells.
    """
    leaves = [*jax.tree.leaves(outer), min(jax.tree.leaves(blocks), key=lambda leaf: leaf.size)]
    done = jnp.stack([leaf.ravel()[0].astype(jnp.float32) for leaf in leaves]).sum()
    never = (done != done) & (done == done)
    return agreed(never.astype(jnp.int32), varying_axes(never))


def _forward(
    carry: dict, row: jax.Array, embed: Callable[..., jax.Array], layers: Callable[..., tuple], outer: Tree, count: int
) -> dict:
    """Every stage's forward pass of one tick. `row` int32 [p]."""
    m = row[lax.axis_index("pp")]
    real = jnp.clip(m, 0, count - 1)
    with jax.named_scope("embed"):
        x = jnp.where(_is_first(), embed(outer, jnp.clip(row[0], 0, count - 1)), carry["x"])
    with jax.named_scope("layers"):
        (y, losses), stats, ring = layers(x, real, carry["saved"], m)
    valid = (m >= 0) & (m < count)
    return carry | {
        "x": _step_to(y, 1),
        "saved": ring,
        "y": lax.dynamic_update_index_in_dim(carry["y"], y, m % carry["y"].shape[0], 0),
        "losses": _add_where(valid, carry["losses"], losses),
        "stats": _add_where(valid, carry["stats"], stats),
    }


def _head(carry: dict, m: jax.Array, work: Work, outer: Tree, scale: jax.Array) -> dict:
    """The head's loss of microbatch `m` and its gradient, on all stages together."""
    y = lax.dynamic_index_in_dim(carry["y"], m % carry["y"].shape[0], 0, keepdims=False)
    with jax.named_scope("head"):
        loss, vjp = jax.vjp(lambda o, y: work.head(o, _from_last(y), m), outer, y)
        d_outer, d_y = vjp(varying(scale, varying_axes(loss)))
    return carry | {"head": carry["head"] + loss, "outer": _add(carry["outer"], d_outer), "d_y": d_y}


def _backward(
    carry: dict, row: jax.Array, work: Work, outer: Tree, count: int, weights: Tree, layers: Callable[..., Back]
) -> dict:
    """Every stage's backward pass of one tick, and the embedding's for the microbatch that leaves stage 0."""
    m = row[lax.axis_index("pp")]
    valid = (m >= 0) & (m < count)
    d_losses = jax.tree.map(
        lambda w, loss: varying(jnp.asarray(w, loss.dtype), varying_axes(loss)),
        weights,
        carry["losses"],
    )
    d = jnp.where(_is_last(), carry["d_y"], carry["d_x"]), d_losses
    with jax.named_scope("layers"):
        back = layers(jnp.clip(m, 0, count - 1), carry["saved"], m, d, partial(_add_where, valid), carry["blocks"])
    leaving = jnp.clip(row[0], 0, count - 1)
    with jax.named_scope("embed"):
        unembed = jax.linear_transpose(lambda o: jnp.where(_is_first(), work.embed(o, leaving), 0), outer)
        (d_outer,) = unembed(jnp.where(valid & _is_first(), back.d_x, 0))
    outer_grads = _add(carry["outer"], d_outer)
    return carry | {
        "d_x": _step_to(back.d_x, -1),
        "blocks": back.grads,
        "squares": back.squares,
        "outer": outer_grads,
        "zero": _zero_once_done(outer_grads, back.grads),
    }


def train(
    table: Table,
    work: Work,
    params: dict[str, Tree],
    x: jax.Array,
    scale: jax.Array,
    weights: Tree,
    *,
    accumulate: jnp.dtype,
    reduce: Reduce,
) -> Result:
    """Loss and gradients of one step.

    Args:
        table: the schedule, for as many stages as pp has devices.
        work: the model in three parts.
        params: already diverged; "outer" belongs to every stage, "blocks" is this stage's, stacked [layers, ...].
        x: zeros [b, s, d] of a stage's input, varying as it varies.
        scale: float32 [], derivative of the objective by the head's result.
        weights: derivative of the objective by each of the stage's losses.
        accumulate: dtype of the sums of gradients over microbatches.
        reduce: what becomes of each layer's gradients once the last microbatch is in them, while the layer before it
            is at work: a reduction over other replicas, or nothing.

    Returns:
        Sums over microbatches; gradients of this device's own copies, the blocks' as `reduce` leaves them.
    """
    outer, blocks, count = params["outer"], params["blocks"], table.microbatches
    stack = Stack(work.layer, blocks, x, varying(jnp.int32(0), ("pp",)))
    end = range(table.stages - 1, table.stages)
    ring = stack.ring(table.slots(range(table.stages)))
    (_, losses), stats, _ = _kinds(stack.forward, x, stack.m, ring, stack.m)
    zeros = partial(jax.tree.map, lambda p: zeros_of(jax.typeof(p).update(dtype=accumulate)))
    carry = {
        "x": x,
        "d_x": x,
        "d_y": x,
        "y": zeros_of(jax.typeof(x), (table.slots(end),)),
        "saved": ring,
        "head": zeros_of(_kinds(work.head, outer, x, jnp.int32(0))),
        "losses": jax.tree.map(zeros_of, losses),
        "stats": jax.tree.map(zeros_of, stats),
        "outer": zeros(outer),
        "blocks": zeros(blocks),
        "squares": (),
        "zero": jnp.int32(0),
    }

    def tick(carry: dict, row: dict[str, jax.Array], backward: Callable[..., Back]) -> dict:
        if "forward" in row:
            carry = _forward(carry, row["forward"], work.embed, stack.forward, outer, count)
        if "head" in row:
            carry = _head(carry, row["head"], work, outer, scale)
        if "backward" in row:
            carry = _backward(carry, row["backward"], work, outer, count, weights, backward)
        return carry

    for ticks in phases(table.ticks[:-1]):
        carry, _ = lax.scan(lambda carry, row: (tick(carry, row, stack.backward), None), carry, _rows(ticks))
    # the last tick's work may depend on nothing before it, and XLA would do both at once: in twice the memory, and on
    # CPU devices with the collectives of both in any order, which ends the process
    last = jax.tree.map(lambda rows: rows[0] + carry["zero"], _rows(table.ticks[-1:]))
    carry = tick(carry, last, partial(stack.last_backward, reduce=reduce))
    return Result(*(carry[name] for name in ("head", "losses", "stats", "outer", "blocks", "squares")))


def evaluate(table: Table, work: Work, params: dict[str, Tree], x: jax.Array) -> Result:
    """The head's results, losses and statistics summed over microbatches, without gradients. Arguments: see `train`."""

    def layers(x: jax.Array, m: jax.Array, ring: Ring, slot: jax.Array) -> tuple[tuple[jax.Array, Tree], Tree, Ring]:
        del slot
        return *run(work.layer, params["blocks"], x, m), ring

    outer, stage = params["outer"], varying(jnp.int32(0), ("pp",))
    (_, losses), stats, _ = _kinds(layers, x, stage, [], stage)
    head = _kinds(work.head, outer, x, jnp.int32(0))
    totals = {"head": head, "losses": losses, "stats": stats}
    carry = {"x": x, "y": x[None], "saved": [], **jax.tree.map(zeros_of, totals)}

    def tick(carry: dict, row: dict[str, jax.Array]) -> tuple[dict, None]:
        carry = _forward(carry, row["forward"], work.embed, layers, outer, table.microbatches)
        if "head" in row:
            result = work.head(outer, _from_last(carry["y"][0]), row["head"])
            carry = carry | {"head": jax.tree.map(jnp.add, carry["head"], result)}
        return carry, None

    for ticks in phases(table.ticks):
        carry, _ = lax.scan(tick, carry, _rows(ticks))
    return Result(carry["head"], carry["losses"], carry["stats"])
