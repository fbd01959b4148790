"""A stage's layers: one scan forward, one scan back.

The backward scan adds each layer's gradient to the accumulator in place. In a step's last backward pass the gradient of
a layer is final as soon as its scan iteration ends, so it may leave for the other replicas while the layers before it
are still being differentiated: iteration i reduces the gradient of layer i + 1, on which nothing in it depends. PyTorch
DDP does so with buckets and hooks (Li et al., arXiv:2006.15704, section 3.2.3); here a layer is the bucket, and the
loop's carry is the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.data import squares, varying, varying_axes, zeros_of
from jax5d.parallel.halves import Halves, halve

Tree = Any
Layer = Callable[[Tree, jax.Array, tuple[jax.Array, jax.Array]], tuple[tuple[jax.Array, Tree], Tree]]
"""(params, x, (m, index)) -> ((y, losses), stats): one layer; m is the microbatch, index the layer's of the model."""
Ring = list[jax.Array]
"""What layers saved of the microbatches in flight, each array [slots, layers, ...]. Written and read a layer at a time,
so that there is one copy of it."""
Add = Callable[[Tree, Tree], Tree]
Reduce = Callable[[Tree], Tree]
Slope = tuple[jax.Array, Tree]
"""Derivatives of the objective by a layer's y and by its losses."""


class Back(NamedTuple):
    """What a backward pass gives."""

    grads: Tree
    """Accumulated gradients of the parameters."""
    d_x: jax.Array
    """Gradient of the stage's input."""
    squares: Tree = ()
    """Of the last backward pass: each leaf's sum of squares before it was reduced, float32 []."""


def layer_indices(blocks: Tree) -> jax.Array:
    """Places in the model of this stage's layers: int32 [layers of the stage]."""
    local = jax.tree.leaves(blocks)[0].shape[0]
    return lax.axis_index("pp") * local + jnp.arange(local)


def total(per_layer: Tree) -> Tree:
    """Sums over a leading layers dim."""
    return jax.tree.map(lambda v: jnp.sum(v, axis=0), per_layer)


def run(layer: Layer, blocks: Tree, x: jax.Array, m: jax.Array) -> tuple[tuple[jax.Array, Tree], Tree]:
    """The layers one after another, without gradients: ((y, losses), stats), summed over layers."""

    def step(x: jax.Array, scanned: tuple[Tree, jax.Array]) -> tuple[jax.Array, Tree]:
        params, index = scanned
        (y, losses), stats = layer(params, x, (m, index))
        return y, (losses, stats)

    y, sums = lax.scan(step, x, (blocks, layer_indices(blocks)))
    losses, stats = total(sums)
    return (y, losses), stats


@dataclass(frozen=True)
class Stack:
    """The layers of a stage, differentiable. `blocks` is the stage's parameters with a leading layers dim."""

    layer: Layer
    blocks: Tree
    x: jax.Array
    """A layer's input; only its type matters."""
    m: jax.Array
    """A microbatch's index; only its type matters."""

    @cached_property
    def halves(self) -> Halves:
        """Forward and backward pass of one layer."""
        first = jax.tree.map(lambda p: p[0], self.blocks)
        return halve(self.layer, first, self.x, (self.m, layer_indices(self.blocks)[0]))

    def forward(
        self, x: jax.Array, m: jax.Array, ring: Ring, slot: jax.Array
    ) -> tuple[tuple[jax.Array, Tree], Tree, Ring]:
        """((y, losses), stats, ring): losses and stats summed over layers; what each layer saves is in `slot`."""

        def step(carry: tuple[jax.Array, Ring], scanned: tuple) -> tuple[tuple[jax.Array, Ring], Tree]:
            x, ring = carry
            params, at, index = scanned
            (y, losses), stats, saved = self.halves.forward(params, x, (m, index))
            ring = [_write(r, value, slot, at) for r, value in zip(ring, saved, strict=True)]
            return (y, ring), (losses, stats)

        places = jnp.arange(self._count), layer_indices(self.blocks)
        (y, ring), sums = lax.scan(step, (x, ring), (self.blocks, *places))
        losses, stats = total(sums)
        return (y, losses), stats, ring

    def ring(self, slots: int) -> Ring:
        """Zeros for what a stage's layers save of `slots` microbatches: each [slots, layers, ...]."""
        return [zeros_of(kind, (slots, self._count)) for kind in self.halves.saved]

    def backward(self, m: jax.Array, ring: Ring, slot: jax.Array, d: Slope, add: Add, grads: Tree) -> Back:
        """Add a microbatch's gradients to `grads`, which has a leading layers dim.

        Args:
            ring, slot: what `forward` saved of the microbatch.
            d: derivatives of the objective by the last layer's y and by every layer's losses.
            add: (total, new) -> total of one layer.
        """

        def step(carry: tuple[jax.Array, Tree], at: jax.Array) -> tuple[tuple[jax.Array, Tree], None]:
            d_y, grads = carry
            new, d_x = self._one(at, m, ring, slot, (d_y, d[1]))
            return (d_x, _put(grads, at, add(_get(grads, at), new))), None

        (d_x, grads), _ = lax.scan(step, (d[0], grads), jnp.arange(self._count), reverse=True)
        return Back(grads, d_x)

    def last_backward(
        self,
        m: jax.Array,
        ring: Ring,
        slot: jax.Array,
        d: Slope,
        add: Add,
        grads: Tree,
        reduce: Reduce,
    ) -> Back:
        """The same for the step's last microbatch, and `reduce` of each layer's total while the next one is at work.

        The reduced gradients are typed as `grads` is.
        """
        last = self._count - 1

        def step(carry: tuple[jax.Array, Tree, Tree], at: jax.Array) -> tuple[tuple[jax.Array, Tree, Tree], Tree]:
            d_y, grads, ready = carry
            new, d_x = self._one(at, m, ring, slot, (d_y, d[1]))
            grads = _put(grads, at + 1, reduce(ready))
            # read from what was just written: read before, XLA may copy all layers' totals to keep the old ones
            return (d_x, grads, add(_get(grads, at), new)), squares(ready)

        new, d_x = self._one(last, m, ring, slot, d)
        ready = add(_get(grads, last), new)
        (d_x, grads, ready), norms = lax.scan(step, (d_x, grads, ready), jnp.arange(last), reverse=True)
        return Back(_put(grads, 0, reduce(ready)), d_x, jax.tree.map(jnp.add, total(norms), squares(ready)))

    @property
    def _count(self) -> int:
        return jax.tree.leaves(self.blocks)[0].shape[0]

    def _one(self, at: Any, m: jax.Array, ring: Ring, slot: jax.Array, d: Slope) -> tuple[Tree, jax.Array]:
        """Gradients by the parameters and the input of the layer at `at`."""
        saved = [_read(r, slot, at) for r in ring]
        return self.halves.backward(_get(self.blocks, at), (m, layer_indices(self.blocks)[at]), saved, d)


def _write(ring: jax.Array, value: jax.Array, slot: jax.Array, at: jax.Array) -> jax.Array:
    """Put `value` at [slot, at] of [slots, layers, ...]; slots go round."""
    return lax.dynamic_update_slice(ring, value[None, None], (slot % ring.shape[0], at, *(0 for _ in value.shape)))


def _read(ring: jax.Array, slot: jax.Array, at: Any) -> jax.Array:
    """What is at [slot, at] of [slots, layers, ...]; slots go round."""
    shape = ring.shape[2:]
    return lax.dynamic_slice(ring, (slot % ring.shape[0], at, *(0 for _ in shape)), (1, 1, *shape)).reshape(shape)


def _get(stacked: Tree, at: Any) -> Tree:
    return jax.tree.map(lambda s: lax.dynamic_index_in_dim(s, at, keepdims=False), stacked)


def _put(stacked: Tree, at: Any, values: Tree) -> Tree:
    """Write one layer's values; they vary as the buffer does."""

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        value = varying(value, varying_axes(buffer))
        return lax.dynamic_update_index_in_dim(buffer, value, at, 0)

    return jax.tree.map(put, stacked, values)
