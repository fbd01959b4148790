"""The sum of a step's gradients over the replicas: in which pieces it is sent, and when.

- *overlap*: layer by layer, while the layer before is still being differentiated; the embedding's last.
- *leaf*: every gradient array by itself, when all are there.
- *bucket*: all gradients laid end to end and cut into pieces of one size: fewer, larger messages.
- *single*: all gradients in one buffer.

The sum itself is XLA's all-reduce or one of the rings of `jax5d.parallel.ring`. Under ZeRO, which overlaps, it is a
reduce-scatter: of a step's sums at stage 1; from stage 2 on of each microbatch's gradients, so that no sum is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.config import ParallelConfig
from jax5d.parallel.agree import agreed
from jax5d.parallel.cuts import Cut, any_cut, scatter, zero_pieces
from jax5d.parallel.data import cast, is_axes, is_spec, spec_axes, squares, zeros_of
from jax5d.parallel.ring import ring_all_reduce, two_level_all_reduce, two_way_ring_all_reduce
from jax5d.parallel.stack import Back, Stack, add, get, put

Tree = Any
AllReduce = Callable[[jax.Array, tuple[str, ...]], jax.Array]
"""(x, axes) -> the sum of x over the axes, the same on every device. Bytes over n devices: 2 (n-1)/n K."""
Backward = Callable[..., Back]
"""A backward pass of a `Stack`."""


class Reduction(Protocol):
    """What becomes of the gradients of a step's microbatches, and when."""

    @property
    def dtype(self) -> Any:
        """Of the sums over microbatches and over replicas."""
        ...

    def zeros(self, held: dict[str, Tree]) -> dict[str, Tree]:
        """Sums over microbatches before the first: {"outer", "blocks"} in the shapes of `held`."""
        ...

    def outer(self, total: Tree, parts: Sequence[Tree]) -> tuple[Tree, Tree]:
        """Add a microbatch's gradients of the outer leaves, in parts; (total, each leaf's sum of squares)."""
        ...

    def backward(self, stack: Stack) -> Backward:
        """The layers' backward pass for a microbatch that is not the last."""
        ...

    def last_backward(self, stack: Stack, sums: Tree, *, fresh: bool) -> tuple[Tree, Backward]:
        """The layers' buffer for the last microbatch, whose gradients come on top of `sums`; and its backward pass.

        `fresh` sums are still zeros, and need not be read.
        """
        ...

    def rest(self, grads: dict[str, Tree]) -> dict[str, Tree]:
        """All of a step's {"outer", "blocks"} afterwards: what `last_backward` has not reduced is reduced."""
        ...


@dataclass(frozen=True)
class _Summed:
    """Gradients are added up on this device, whole, until the last microbatch."""

    specs: Tree
    summed: Tree
    """For each leaf, the axes over which its gradient is summed."""
    all_reduce: AllReduce
    dtype: Any

    def zeros(self, held: dict[str, Tree]) -> dict[str, Tree]:
        return jax.tree.map(lambda x: zeros_of(jax.typeof(x).update(dtype=jnp.dtype(self.dtype))), held)

    def outer(self, total: Tree, parts: Sequence[Tree]) -> tuple[Tree, Tree]:
        new = self._whole(parts)
        return add(total, new), squares(new)

    def backward(self, stack: Stack) -> Backward:
        return stack.backward

    def _whole(self, parts: Sequence[Tree]) -> Tree:
        return jax.tree.map(lambda *leaves: sum(leaves), *(cast(part, self.dtype) for part in parts))


@dataclass(frozen=True)
class AtOnce(_Summed):
    """Everything after the backward pass, in buffers of at most `size` bytes; None sends each leaf by itself."""

    size: float | None

    def last_backward(self, stack: Stack, sums: Tree, *, fresh: bool) -> tuple[Tree, Backward]:
        """Like any other."""
        return sums, stack.backward

    def rest(self, grads: dict[str, Tree]) -> dict[str, Tree]:
        """Leaves that are summed over the same axes, and split over the same, share buffers."""
        if self.size is None:
            return jax.tree.map(lambda axes, g: self.all_reduce(g, axes), self.summed, grads, is_leaf=is_axes)
        leaves, tree = jax.tree.flatten(grads)
        groups: dict[tuple[tuple[str, ...], frozenset[str]], list[int]] = {}
        specs, summed = jax.tree.leaves(self.specs, is_leaf=is_spec), jax.tree.leaves(self.summed, is_leaf=is_axes)
        for i, (spec, axes) in enumerate(zip(specs, summed, strict=True)):
            groups.setdefault((axes, frozenset(spec_axes(spec))), []).append(i)
        for (names, _), members in groups.items():
            flat = jnp.concatenate([leaves[i].ravel() for i in members])
            length = int(max(1, min(flat.size, self.size / flat.dtype.itemsize)))
            flat = jnp.concatenate([self.all_reduce(piece, names) for piece in _pieces(flat, length)])
            for i in members:
                leaves[i], flat = flat[: leaves[i].size].reshape(leaves[i].shape), flat[leaves[i].size :]
        return jax.tree.unflatten(tree, leaves)


@dataclass(frozen=True)
class Overlapped(_Summed):
    """Layers while others are at work; at the end the embedding's leaves, which are final only then.

    A leaf that is cut (ZeRO-1) is scattered to its pieces, and summed over those axes alone that its cut does not name.
    """

    cuts: Tree
    """{"outer", "blocks"}: a `zero.Cut` for each leaf."""

    def last_backward(self, stack: Stack, sums: Tree, *, fresh: bool) -> tuple[Tree, Backward]:
        """Sums of uncut leaves are reduced where they are, others into pieces of their own."""
        cuts = self.cuts["blocks"]
        into = zero_pieces(sums, cuts) if any_cut(cuts) else sums
        if fresh:
            return into, partial(stack.leaving_backward, leave=_Alone(self._reduced, self.dtype))
        return into, partial(stack.leaving_backward, leave=_Once(None if into is sums else sums, self._reduced))

    def rest(self, grads: dict[str, Tree]) -> dict[str, Tree]:
        """The outer leaves; the blocks have been summed, layer by layer, in a buffer whose type could not show it."""
        return self._agree(grads | {"outer": scatter(grads["outer"], self.cuts["outer"])})

    def _agree(self, grads: dict[str, Tree]) -> dict[str, Tree]:
        return {
            "outer": self._each(self.all_reduce, "outer", grads["outer"]),
            "blocks": self._each(agreed, "blocks", grads["blocks"]),
        }

    @jax.named_scope("reduce_gradients")
    def _layer(self, grads: Tree) -> Tree:
        """Sums of one layer's leaves, each by itself."""
        return self._each(self.all_reduce, "blocks", grads)

    def _scattered(self, grads: Tree) -> Tree:
        """One layer's leaves to their pieces."""
        return scatter(grads, self.cuts["blocks"])

    def _reduced(self, grads: Tree) -> Tree:
        """One layer's leaves, scattered and summed."""
        return self._layer(self._scattered(grads))

    def _each(self, sum_over: AllReduce, part: str, grads: Tree) -> Tree:
        """`sum_over` of each leaf, over the axes along which replicas of it, or of its piece, have parts of the sum."""

        def one(axes: tuple[str, ...], cut: Cut, grad: jax.Array) -> jax.Array:
            return sum_over(grad, tuple(a for a in axes if a not in cut.axes))

        return jax.tree.map(one, self.summed[part], self.cuts[part], grads, is_leaf=is_axes)


@dataclass(frozen=True)
class Scattered(Overlapped):
    """Nothing whole is kept (ZeRO-2 and 3): each microbatch's gradients are scattered at once, and pieces added up.

    What the cut does not name is summed once, over the pieces.
    """

    def outer(self, total: Tree, parts: Sequence[Tree]) -> tuple[Tree, Tree]:
        new = self._whole(parts)
        return add(total, scatter(new, self.cuts["outer"])), squares(new)

    def backward(self, stack: Stack) -> Backward:
        return partial(stack.leaving_backward, leave=_Pieces(self._scattered, lambda grads: grads, self.dtype))

    def last_backward(self, stack: Stack, sums: Tree, *, fresh: bool) -> tuple[Tree, Backward]:
        """Into the sums."""
        added = _Pieces(self._scattered, self._layer, self.dtype)
        return sums, partial(stack.leaving_backward, leave=_Alone(self._reduced, self.dtype) if fresh else added)

    def rest(self, grads: dict[str, Tree]) -> dict[str, Tree]:
        """The outer leaves' pieces."""
        return self._agree(grads)


@dataclass(frozen=True)
class _Alone:
    """A layer's gradient of the only microbatch leaves."""

    reduce: Callable[[Tree], Tree]
    dtype: Any

    def ready(self, grads: Tree, at: Any, new: Tree) -> Tree:
        return cast(new, self.dtype)

    def put(self, grads: Tree, at: Any, ready: Tree) -> Tree:
        return put(grads, at, self.reduce(ready))


@dataclass(frozen=True)
class _Once:
    """A layer's sum over all microbatches leaves."""

    before: Tree | None
    """Sums of all microbatches but the last; None: they are in the buffer itself."""
    reduce: Callable[[Tree], Tree]

    def ready(self, grads: Tree, at: Any, new: Tree) -> Tree:
        return add(get(grads if self.before is None else self.before, at), new)

    def put(self, grads: Tree, at: Any, ready: Tree) -> Tree:
        return put(grads, at, self.reduce(ready))


@dataclass(frozen=True)
class _Pieces:
    """A layer's gradient of one microbatch leaves, and its piece is added to the others."""

    scatter: Callable[[Tree], Tree]
    finish: Callable[[Tree], Tree]
    dtype: Any

    def ready(self, grads: Tree, at: Any, new: Tree) -> Tree:
        return cast(new, self.dtype)

    def put(self, grads: Tree, at: Any, ready: Tree) -> Tree:
        return put(grads, at, self.finish(add(get(grads, at), self.scatter(ready))))


def _pieces(flat: jax.Array, length: int) -> Iterator[jax.Array]:
    for start in range(0, flat.size, length):
        yield flat[start : start + length]


def make_reduction(parallel: ParallelConfig, specs: Tree, summed: Tree, cuts: Tree) -> Reduction:
    """The configured reduction of gradients laid out by `specs`, each over its axes in `summed`.

    `cuts` says where leaves are cut; where none is, every stage of ZeRO is stage 0.
    """
    all_reduce: AllReduce = {
        "psum": lax.psum,
        "ring": ring_all_reduce,
        "two_way_ring": two_way_ring_all_reduce,
        "two_level": partial(two_level_all_reduce, inner=parallel.inner),
    }[parallel.all_reduce]
    common = specs, summed, all_reduce, parallel.accumulate
    if parallel.reduction == "overlap":
        return (Scattered if parallel.zero >= 2 and any_cut(cuts) else Overlapped)(*common, cuts)
    size = {"leaf": None, "bucket": parallel.bucket_mb * 1e6, "single": float("inf")}[parallel.reduction]
    return AtOnce(*common, size)
