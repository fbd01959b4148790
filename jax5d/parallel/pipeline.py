"""Pipeline parallelism: the layers are split over pp, and a table says who works on what when.

Every device runs the same program: a loop over the table's ticks. A stage takes its input from the stage before it
(ppermute), works, and hands on. What a forward pass saves waits in a ring of slots for its backward pass. The
embedding and the head belong to all stages (their vocabulary is split over pp and tp), so no stage waits for another's.

A pipeline of one stage is gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.agree import known_together, zero_once
from jax5d.parallel.data import cast, squares, varying, varying_axes, zeros_of
from jax5d.parallel.reduction import Reduction
from jax5d.parallel.schedules import Table, Tick, phases
from jax5d.parallel.stack import Back, Hand, Layer, Ring, Stack, add, only_where, run
from jax5d.parallel.stages import from_last, is_first, is_last, step_to

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
    squares: Tree = None
    """The sum of squares of each leaf's gradient of a microbatch, added up over microbatches, float32 []."""


def _kinds(function: Callable[..., Tree], *args: Tree) -> Tree:
    """Types of a function's results, with their varying axes; nothing is computed."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)


def _rows(ticks: tuple[Tick, ...]) -> dict[str, jax.Array]:
    """A phase as arrays to scan over: forward and backward int32 [ticks, p], head int32 [ticks]."""
    names = ("forward", "backward", "head")
    columns = {name: [getattr(tick, name) for tick in ticks] for name in names}
    return {name: jnp.asarray(column, jnp.int32) for name, column in columns.items() if column[0] is not None}


def _is_real(m: jax.Array, count: int) -> jax.Array:
    """Whether `m` is one of `count` microbatches, and no idle stage's: bool []. A single stage is never idle."""
    return (m >= 0) & (m < count) if lax.axis_size("pp") > 1 else jnp.bool_(True)


def _forward(
    carry: dict, row: jax.Array, embed: Callable[..., jax.Array], layers: Callable[..., tuple], outer: Tree, count: int
) -> tuple[dict, Hand]:
    """Every stage's forward pass of one tick, and what its layers' supply fetched last. `row` int32 [p]."""
    m = row[lax.axis_index("pp")]
    real = jnp.clip(m, 0, count - 1)
    with jax.named_scope("embed"):
        x = jnp.where(is_first(), embed(outer, jnp.clip(row[0], 0, count - 1)), carry["x"])
    with jax.named_scope("layers"):
        (y, losses), stats, ring, hand = layers(x, real, carry["saved"], m)
    valid = _is_real(m, count)
    new = carry | {
        "x": step_to(y, 1),
        "saved": ring,
        "y": lax.dynamic_update_index_in_dim(carry["y"], y, m % carry["y"].shape[0], 0),
        "losses": add(carry["losses"], only_where(valid, losses)),
        "stats": add(carry["stats"], only_where(valid, stats)),
    }
    return new, hand


@dataclass(frozen=True)
class _Step:
    """What all ticks of a training step share; for the fields see `train`."""

    work: Work
    stack: Stack
    outer: Tree
    count: int
    """Microbatches."""
    scale: jax.Array
    weights: Tree
    reduction: Reduction

    def tick(self, carry: dict, row: dict[str, jax.Array], layers: Callable[..., Back]) -> dict:
        """One tick, with the kinds of work that its row has; `layers` is the backward pass of the layers."""
        begin, d_outer = self.stack.begin_backward, ()
        if "forward" in row:
            carry, hand = _forward(carry, row["forward"], self.work.embed, self.stack.forward, self.outer, self.count)
            begin = partial(self.stack.turn, hand)
        if "head" in row:
            carry, *d_outer = self._head(carry, row["head"])
        if "backward" in row:
            carry = self._backward(carry, row["backward"], partial(layers, hand=begin()), d_outer)
        return carry

    def _head(self, carry: dict, m: jax.Array) -> tuple[dict, Tree]:
        """The head's loss of microbatch `m`, on all stages together, and its gradient by `outer`."""
        y = lax.dynamic_index_in_dim(carry["y"], m % carry["y"].shape[0], 0, keepdims=False)
        with jax.named_scope("head"):
            loss, vjp = jax.vjp(lambda o, y: self.work.head(o, from_last(y), m), self.outer, y)
            d_outer, d_y = vjp(varying(self.scale, varying_axes(loss)))
            # cast before the layers' backward pass, which it waits through
            d_outer, d_y = known_together((cast(d_outer, self.reduction.dtype), d_y))
        return carry | {"head": carry["head"] + loss, "d_y": d_y}, d_outer

    def _backward(self, carry: dict, row: jax.Array, layers: Callable[..., Back], d_outer: Sequence[Tree]) -> dict:
        """Every stage's backward pass of one tick, and the embedding's for the microbatch that leaves stage 0.

        `d_outer` is the head's gradient, if there was one.
        """
        m = row[lax.axis_index("pp")]
        valid = _is_real(m, self.count)
        d_losses = jax.tree.map(
            lambda w, loss: varying(jnp.asarray(w, loss.dtype), varying_axes(loss)), self.weights, carry["losses"]
        )
        d = jnp.where(is_last(), carry["d_y"], carry["d_x"]), d_losses
        with jax.named_scope("layers"):
            back = layers(jnp.clip(m, 0, self.count - 1), carry["saved"], m, d, valid, carry["blocks"])
        leaving = jnp.clip(row[0], 0, self.count - 1)
        with jax.named_scope("embed"):
            _, unembed = jax.vjp(lambda o: jnp.where(is_first(), self.work.embed(o, leaving), 0), self.outer)
            (d_embedded,) = unembed(jnp.where(valid & is_first(), back.d_x, 0))
        outer, norms = self.reduction.outer(carry["outer"], [*d_outer, d_embedded])
        return carry | {
            "d_x": step_to(back.d_x, -1),
            "blocks": back.grads,
            "outer": outer,
            "squares": add(carry["squares"], {"outer": norms, "blocks": back.squares}),
            "zero": zero_once([*jax.tree.leaves(outer), min(jax.tree.leaves(back.grads), key=lambda leaf: leaf.size)]),
        }


def train(
    table: Table,
    work: Work,
    params: dict[str, Any],
    held: dict[str, Tree],
    x: jax.Array,
    scale: jax.Array,
    weights: Tree,
    *,
    reduction: Reduction,
) -> Result:
    """Loss and gradients of one step.

    Args:
        table: the schedule, for as many stages as pp has devices.
        work: the model in three parts.
        params: already diverged; "outer" belongs to every stage, "blocks" is this stage's `Weights`.
        held: arrays of the shapes in which this device adds up gradients over microbatches; types alone matter.
        x: zeros [b, s, d] of a stage's input, varying as it varies.
        scale: float32 [], derivative of the objective by the head's result.
        weights: derivative of the objective by each of the stage's losses.
        reduction: what becomes of gradients: of each microbatch, or once the last one is in them; of a layer while the
            layer before it is at work.

    Returns:
        Sums over microbatches, the gradients as `reduction` leaves them.
    """
    outer, count = params["outer"], table.microbatches
    stack = Stack(work.layer, params["blocks"], x, varying(jnp.int32(0), ("pp",)))
    step = _Step(work, stack, outer, count, scale, weights, reduction)
    end = range(table.stages - 1, table.stages)
    ring = stack.ring(table.slots(range(table.stages)))
    (_, losses), stats, *_ = _kinds(stack.forward, x, stack.m, ring, stack.m)
    carry = {
        "x": x,
        "d_x": x,
        "d_y": x,
        "y": zeros_of(jax.typeof(x), (table.slots(end),)),
        "saved": ring,
        "head": zeros_of(_kinds(work.head, outer, x, jnp.int32(0))),
        "losses": jax.tree.map(zeros_of, losses),
        "stats": jax.tree.map(zeros_of, stats),
        **reduction.zeros(held),
        "squares": jax.tree.map(zeros_of, _kinds(squares, {"outer": outer, "blocks": stack.first})),
        "zero": jnp.int32(0),
    }
    for ticks in phases(table.ticks[:-1]):
        layers = reduction.backward(stack)
        carry, _ = lax.scan(
            lambda carry, row, layers=layers: (step.tick(carry, row, layers), None), carry, _rows(ticks)
        )
    # the last tick's work may depend on nothing before it, and XLA would do both at once: in twice the memory, and on
    # CPU devices with the collectives of both in any order, which ends the process
    last = jax.tree.map(lambda rows: rows[0] + carry["zero"], _rows(table.ticks[-1:]))
    blocks, layers = reduction.last_backward(stack, carry["blocks"], fresh=len(table.ticks) == 1)
    carry = step.tick(carry | {"blocks": blocks}, last, layers)
    return Result(*(carry[name] for name in ("head", "losses", "stats", "outer", "blocks", "squares")))


def evaluate(table: Table, work: Work, params: dict[str, Any], x: jax.Array) -> Result:
    """The head's results, losses and statistics summed over microbatches, without gradients. Arguments: see `train`."""

    def layers(x: jax.Array, m: jax.Array, ring: Ring, slot: jax.Array) -> tuple:
        del slot
        return *run(work.layer, params["blocks"], x, m), ring, None

    outer, stage = params["outer"], varying(jnp.int32(0), ("pp",))
    (_, losses), stats, *_ = _kinds(layers, x, stage, [], stage)
    head = _kinds(work.head, outer, x, jnp.int32(0))
    totals = {"head": head, "losses": losses, "stats": stats}
    carry = {"x": x, "y": x[None], "saved": [], **jax.tree.map(zeros_of, totals)}

    def tick(carry: dict, row: dict[str, jax.Array]) -> tuple[dict, None]:
        carry, _ = _forward(carry, row["forward"], work.embed, layers, outer, table.microbatches)
        if "head" in row:
            result = work.head(outer, from_last(carry["y"][0]), row["head"])
            carry = carry | {"head": jax.tree.map(jnp.add, carry["head"], result)}
        return carry, None

    for ticks in phases(table.ticks):
        carry, _ = lax.scan(tick, carry, _rows(ticks))
    return Result(carry["head"], carry["losses"], carry["stats"])
