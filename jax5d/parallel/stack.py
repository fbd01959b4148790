"""A stage's layers: one scan forward, one scan back.

The backward scan adds each layer's gradient to the accumulator in place. Where a microbatch's gradients leave for the
other replicas, that of a layer is final as soon as its scan iteration ends, so it may travel while the layers before it
are still being differentiated: iteration i sends the gradient of layer i + 1, on which nothing in it depends. PyTorch
DDP does so with buckets and hooks (Li et al., arXiv:2006.15704, section 3.2.3); here a layer is the bucket, and the
loop's carry is the hook. In the same way a layer's parameters may be on their way here while another layer is at work:
that is for its `Supply` to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.agree import zero_once
from jax5d.parallel.data import squares, varying, varying_axes, zeros_of
from jax5d.parallel.halves import Halves, halve

Tree = Any
Layer = Callable[[Tree, jax.Array, tuple[jax.Array, jax.Array]], tuple[tuple[jax.Array, Tree], Tree]]
"""(params, x, (m, index)) -> ((y, losses), stats): one layer; m is the microbatch, index the layer's of the model."""
Ring = list[jax.Array]
"""What layers saved of the microbatches in flight, each array [slots, layers, ...]. Written and read a layer at a time,
so that there is one copy of it."""
Slope = tuple[jax.Array, Tree]
"""Derivatives of the objective by a layer's y and by its losses."""
Hand = Tree
"""What a supply fetched ahead."""


class Supply(Protocol):
    """Where a pass over the layers gets their parameters."""

    ahead: ClassVar[int]
    """Layers before its turn that one is fetched: 0 or 1."""

    def fetch(self, at: Any) -> Hand:
        """Begin to get the layer at `at`."""
        ...

    def layer(self, hand: Hand, at: Any, kept: list[jax.Array]) -> Tree:
        """Its parameters, from what was fetched and what the forward pass kept of them."""
        ...


@dataclass(frozen=True)
class Resident:
    """All layers are on this device: `blocks` has a leading layers dim."""

    blocks: Tree
    ahead: ClassVar[int] = 0

    def fetch(self, at: Any) -> Hand:
        """Nothing to do."""
        return ()

    def layer(self, hand: Hand, at: Any, kept: list[jax.Array]) -> Tree:
        """A slice."""
        return get(self.blocks, at)


@dataclass(frozen=True)
class Weights:
    """A stage's layers as the two passes get them."""

    count: int
    """Layers of the stage."""
    forward: Supply
    backward: Supply
    keeps: bool = False
    """Whether the forward pass keeps the parameters that it fetched for the backward pass."""


class Leave(Protocol):
    """What becomes of a layer's gradients of a microbatch, where they leave for other replicas."""

    def ready(self, grads: Tree, at: Any, new: Tree) -> Tree:
        """What is sent once the layer at `at` has been differentiated."""
        ...

    def put(self, grads: Tree, at: Any, ready: Tree) -> Tree:
        """Send it, and put what comes back into `grads`."""
        ...


class Back(NamedTuple):
    """What a backward pass gives."""

    grads: Tree
    """Accumulated gradients of the parameters."""
    d_x: jax.Array
    """Gradient of the stage's input."""
    squares: Tree
    """The sum of squares of each leaf's gradient of this microbatch, float32 []."""


def total(per_layer: Tree) -> Tree:
    """Sums over a leading layers dim."""
    return jax.tree.map(lambda v: jnp.sum(v, axis=0), per_layer)


def add(tree: Tree, new: Tree) -> Tree:
    """Sum in the dtype of `tree`."""
    return jax.tree.map(lambda t, n: t + n.astype(t.dtype), tree, new)


def only_where(valid: jax.Array, tree: Tree) -> Tree:
    """Zeros in place of what belongs to no microbatch. `where`, not a product: an idle tick may hold nan."""
    return jax.tree.map(lambda x: jnp.where(valid, x, jnp.zeros((), x.dtype)), tree)


def ascend(weights: Weights, step: Callable[[Any, Tree, Any], tuple[Any, Tree]], carry: Any) -> tuple[Any, Tree, Hand]:
    """Walk up the layers: step(carry, params, at) -> (carry, sums), any trees. The last layers have no more to fetch.

    Returns:
        The carry, the sums over layers, and what was fetched of the last layer.
    """
    supply, count = weights.forward, weights.count

    def body(carry: tuple[Any, Hand], at: jax.Array) -> tuple[tuple[Any, Hand], Tree]:
        carry, hand = carry
        ahead = supply.fetch(at + supply.ahead)
        carry, sums = step(carry, supply.layer(hand, at, []), at)
        return (carry, ahead), sums

    (carry, hand), sums = lax.scan(body, (carry, supply.fetch(0)), jnp.arange(count - supply.ahead))
    sums = total(sums)
    for at in range(count - supply.ahead, count):
        carry, more = step(carry, supply.layer(hand, at, []), jnp.int32(at))
        sums = add(sums, more)
    return carry, sums, hand


def run(layer: Layer, weights: Weights, x: jax.Array, m: jax.Array) -> tuple[tuple[jax.Array, Tree], Tree]:
    """The layers one after another, without gradients: ((y, losses), stats), summed over layers."""

    def step(x: jax.Array, params: Tree, at: jax.Array) -> tuple[jax.Array, Tree]:
        (y, losses), stats = layer(params, x, (m, _index(weights.count, at)))
        return y, (losses, stats)

    y, (losses, stats), _ = ascend(weights, step, x)
    return (y, losses), stats


def _index(count: int, at: Any) -> jax.Array:
    """The place in the model of this stage's layer at `at`: int32 []."""
    return lax.axis_index("pp") * count + at


@dataclass(frozen=True)
class Stack:
    """The layers of a stage, differentiable."""

    layer: Layer
    weights: Weights
    x: jax.Array
    """A layer's input; only its type matters."""
    m: jax.Array
    """A microbatch's index; only its type matters."""

    @cached_property
    def first(self) -> Tree:
        """Parameters of a layer; only their types matter."""
        supply = self.weights.forward
        return supply.layer(supply.fetch(0), 0, [])

    @cached_property
    def halves(self) -> Halves:
        """Forward and backward pass of one layer."""
        return halve(self.layer, self.first, self.x, (self.m, _index(self.weights.count, jnp.int32(0))))

    def forward(
        self, x: jax.Array, m: jax.Array, ring: Ring, slot: jax.Array
    ) -> tuple[tuple[jax.Array, Tree], Tree, Ring, Hand]:
        """((y, losses), stats, ring, hand): losses and stats summed over layers; what each layer saves is in `slot`."""

        def step(carry: tuple[jax.Array, Ring], params: Tree, at: jax.Array) -> tuple[tuple[jax.Array, Ring], Tree]:
            x, ring = carry
            (y, losses), stats, saved = self.halves.forward(params, x, (m, _index(self.weights.count, at)))
            values = saved + (jax.tree.leaves(params) if self.weights.keeps else [])
            return (y, [_write(r, value, slot, at) for r, value in zip(ring, values, strict=True)]), (losses, stats)

        (y, ring), (losses, stats), hand = ascend(self.weights, step, (x, ring))
        return (y, losses), stats, ring, hand

    def ring(self, slots: int) -> Ring:
        """Zeros for what a stage's layers save of `slots` microbatches: each [slots, layers, ...].

        Kept parameters come last, in one slot, as they are the same for all.
        """
        kept = [jax.typeof(p) for p in jax.tree.leaves(self.first)] if self.weights.keeps else []
        zeros = [zeros_of(kind, (slots, self.weights.count)) for kind in self.halves.saved]
        return zeros + [zeros_of(kind, (1, self.weights.count)) for kind in kept]

    def turn(self, hand: Hand) -> Hand:
        """What a backward pass begins with right after a forward pass that ended with `hand`."""
        return hand if self.weights.backward is self.weights.forward else self.begin_backward()

    def begin_backward(self) -> Hand:
        """What a backward pass begins with: the last layer."""
        return self.weights.backward.fetch(self.weights.count - 1)

    def backward(
        self, m: jax.Array, ring: Ring, slot: jax.Array, d: Slope, valid: jax.Array, grads: Tree, hand: Hand
    ) -> Back:
        """Add a microbatch's gradients to `grads`, which has a leading layers dim.

        Args:
            ring, slot: what `forward` saved of the microbatch.
            d: derivatives of the objective by the last layer's y and by every layer's losses.
            valid: bool [], whether there is such a microbatch.
            hand: what `turn` or `begin_backward` gives.
        """
        del hand  # whoever adds up on this device has all layers here

        def step(carry: tuple[jax.Array, Tree], at: jax.Array) -> tuple[tuple[jax.Array, Tree], Tree]:
            d_y, grads = carry
            new, d_x = self._one(at, m, ring, slot, (d_y, d[1]), valid, ())
            return (d_x, put(grads, at, add(get(grads, at), new))), squares(new)

        (d_x, grads), norms = lax.scan(step, (d[0], grads), jnp.arange(self.weights.count), reverse=True)
        return Back(grads, d_x, total(norms))

    def leaving_backward(
        self,
        m: jax.Array,
        ring: Ring,
        slot: jax.Array,
        d: Slope,
        valid: jax.Array,
        grads: Tree,
        hand: Hand,
        *,
        leave: Leave,
    ) -> Back:
        """The same, and each layer's gradients leave while the layer before it is at work."""
        count, supply = self.weights.count, self.weights.backward
        # nothing before the derivative is there, or XLA would begin while the head is at work, and keep more at a time
        last = count - 1 + zero_once([d[0]])

        def step(carry: tuple, at: jax.Array) -> tuple[tuple, Tree]:
            d_y, grads, ready, hand = carry
            # a place of its own, or XLA may fuse what is sent for it with what the other layer's gradients bring back
            ahead = supply.fetch(lax.optimization_barrier(jnp.maximum(at - supply.ahead, 0)))
            new, d_x = self._one(at, m, ring, slot, (d_y, d[1]), valid, hand)
            grads = leave.put(grads, at + 1, ready)
            # read from what was just written: read before, XLA may copy all layers' totals to keep the old ones
            return (d_x, grads, leave.ready(grads, at, new), ahead), squares(new)

        ahead = supply.fetch(jnp.maximum(last - supply.ahead, 0))
        new, d_x = self._one(last, m, ring, slot, d, valid, hand)
        carry = d_x, grads, leave.ready(grads, last, new), ahead
        (d_x, grads, ready, _), norms = lax.scan(step, carry, jnp.arange(count - 1), reverse=True)
        return Back(leave.put(grads, 0, ready), d_x, add(total(norms), squares(new)))

    def _one(
        self, at: Any, m: jax.Array, ring: Ring, slot: jax.Array, d: Slope, valid: jax.Array, hand: Hand
    ) -> tuple[Tree, jax.Array]:
        """Gradients by the parameters and the input of the layer at `at`; the former 0 unless `valid`."""
        values, count = [_read(r, slot, at) for r in ring], len(self.halves.saved)
        params = self.weights.backward.layer(hand, at, values[count:])
        new, d_x = self.halves.backward(params, (m, _index(self.weights.count, at)), values[:count], d)
        return only_where(valid, new), d_x


def _write(ring: jax.Array, value: jax.Array, slot: jax.Array, at: jax.Array) -> jax.Array:
    """Put `value` at [slot, at] of [slots, layers, ...]; slots go round."""
    return lax.dynamic_update_slice(ring, value[None, None], (slot % ring.shape[0], at, *(0 for _ in value.shape)))


def _read(ring: jax.Array, slot: jax.Array, at: Any) -> jax.Array:
    """What is at [slot, at] of [slots, layers, ...]; slots go round."""
    shape = ring.shape[2:]
    return lax.dynamic_slice(ring, (slot % ring.shape[0], at, *(0 for _ in shape)), (1, 1, *shape)).reshape(shape)


def get(stacked: Tree, at: Any) -> Tree:
    """One layer of a stack."""
    return jax.tree.map(lambda s: lax.dynamic_index_in_dim(s, at, keepdims=False), stacked)


def put(stacked: Tree, at: Any, values: Tree) -> Tree:
    """Write one layer's values; they vary as the buffer does."""

    def one(buffer: jax.Array, value: jax.Array) -> jax.Array:
        value = varying(value, varying_axes(buffer))
        return lax.dynamic_update_index_in_dim(buffer, value, at, 0)

    return jax.tree.map(one, stacked, values)
