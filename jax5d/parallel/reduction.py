"""The one sum of a step's gradients over the replicas: in which pieces it is sent, and when.

- *overlap*: layer by layer, while the layer before is still being differentiated; the embedding's last.
- *leaf*: every gradient array by itself, when all are there.
- *bucket*: all gradients laid end to end and cut into pieces of one size: fewer, larger messages.
- *single*: all gradients in one buffer.

The sum itself is XLA's all-reduce or one of the rings of `jax5d.parallel.ring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.config import ParallelConfig
from jax5d.parallel.agree import agreed
from jax5d.parallel.data import is_spec, reduction_axes, spec_axes
from jax5d.parallel.ring import ring_all_reduce, two_level_all_reduce, two_way_ring_all_reduce

Tree = Any
AllReduce = Callable[[jax.Array, tuple[str, ...]], jax.Array]
"""(x, axes) -> the sum of x over the axes, the same on every device. Bytes over n devices: 2 (n-1)/n K."""


class Reduction(Protocol):
    """Two moments at which gradients may be reduced."""

    def layer(self, grads: Tree) -> Tree:
        """One layer's gradients, final, while the layer before it is at work."""
        ...

    def rest(self, grads: Tree) -> Tree:
        """All of a step's {"outer", "blocks"}, the latter as `layer` left them."""
        ...


@dataclass(frozen=True)
class Overlapped:
    """Layers while others are at work; at the end the embedding's leaves, which are final only then."""

    specs: Tree
    token_axes: tuple[str, ...]
    all_reduce: AllReduce

    @jax.named_scope("reduce_gradients")
    def layer(self, grads: Tree) -> Tree:
        """Each leaf of the layer by itself."""
        specs = jax.tree.map(lambda spec: P(*spec[1:]), self.specs["blocks"], is_leaf=is_spec)
        return _each(self.all_reduce, specs, self._block_axes, grads)

    def rest(self, grads: Tree) -> Tree:
        """The outer leaves; the blocks have been summed, layer by layer, in a buffer whose type could not show it."""
        outer = _each(self.all_reduce, self.specs["outer"], self._axes, grads["outer"])
        return {"outer": outer, "blocks": _each(agreed, self.specs["blocks"], self._axes, grads["blocks"])}

    def _axes(self, spec: P) -> tuple[str, ...]:
        return reduction_axes(spec, self.token_axes)

    def _block_axes(self, spec: P) -> tuple[str, ...]:
        """A layer's spec names no pp any more, but pp splits the layers all the same."""
        return tuple(axis for axis in self._axes(spec) if axis != "pp")


@dataclass(frozen=True)
class AtOnce:
    """Everything after the backward pass, in buffers of at most `size` bytes; None sends each leaf by itself."""

    specs: Tree
    token_axes: tuple[str, ...]
    all_reduce: AllReduce
    size: float | None

    def layer(self, grads: Tree) -> Tree:
        """Nothing yet."""
        return grads

    def rest(self, grads: Tree) -> Tree:
        """Leaves that are summed over the same axes, and split over the same, share buffers."""
        axes = partial(reduction_axes, token_axes=self.token_axes)
        if self.size is None:
            return _each(self.all_reduce, self.specs, axes, grads)
        leaves, tree = jax.tree.flatten(grads)
        groups: dict[tuple[tuple[str, ...], frozenset[str]], list[int]] = {}
        for i, spec in enumerate(jax.tree.leaves(self.specs, is_leaf=is_spec)):
            groups.setdefault((axes(spec), frozenset(spec_axes(spec))), []).append(i)
        for (names, _), members in groups.items():
            flat = jnp.concatenate([leaves[i].ravel() for i in members])
            length = int(max(1, min(flat.size, self.size / flat.dtype.itemsize)))
            flat = jnp.concatenate([self.all_reduce(piece, names) for piece in _pieces(flat, length)])
            for i in members:
                leaves[i], flat = flat[: leaves[i].size].reshape(leaves[i].shape), flat[leaves[i].size :]
        return jax.tree.unflatten(tree, leaves)


def _pieces(flat: jax.Array, length: int) -> Iterator[jax.Array]:
    for start in range(0, flat.size, length):
        yield flat[start : start + length]


def _each(sum_over: AllReduce, specs: Tree, axes: Callable[[P], tuple[str, ...]], grads: Tree) -> Tree:
    return jax.tree.map(lambda spec, grad: sum_over(grad, axes(spec)), specs, grads, is_leaf=is_spec)


def make_reduction(parallel: ParallelConfig, specs: Tree, token_axes: tuple[str, ...]) -> Reduction:
    """The configured reduction of gradients laid out by `specs`; for `token_axes` see `data.reduction_axes`."""
    all_reduce: AllReduce = {
        "psum": lax.psum,
        "ring": ring_all_reduce,
        "two_way_ring": two_way_ring_all_reduce,
        "two_level": partial(two_level_all_reduce, inner=parallel.inner),
    }[parallel.all_reduce]
    if parallel.reduction == "overlap":
        return Overlapped(specs, token_axes, all_reduce)
    size = {"leaf": None, "bucket": parallel.bucket_mb * 1e6, "single": float("inf")}[parallel.reduction]
    return AtOnce(specs, token_axes, all_reduce, size)
