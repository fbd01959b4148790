"""A leaf in pieces: along which dim replicas cut it, and how its pieces travel.

Each device along a cut's axes owns one piece: `scatter` brings it the piece's summed gradient, `gather` gives all
devices the whole leaf again. Large leaves travel each by itself, small ones together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.parallel.agree import agreed
from jax5d.parallel.data import cast, spec_axes, varying, varying_axes, zeros_of

Tree = Any

SMALL = 16
"""A leaf is small that has at most so small a part of the elements of the largest beside it."""


class Cut(NamedTuple):
    """Where a leaf is cut."""

    axes: tuple[str, ...]
    """Mesh axes over which its pieces lie; none leaves it whole."""
    dim: int
    """Counted from the end, so that it is the same for a stack of layers and for one of them."""
    size: int
    """Of that dim before it is cut, on one device."""


def is_cut(x: object) -> bool:
    """Whether a leaf of a tree of cuts."""
    return isinstance(x, Cut)


def cut_of(shape: tuple[int, ...], spec: P, axes: tuple[str, ...], sizes: dict[str, int]) -> Cut:
    """The cut of a leaf over those of `axes` that its spec does not name: along the dim that needs least padding.

    Of equals the first. A dim that is split already is cut only where no padding is needed, since padding would move
    the split. Layers are never cut: a spec that begins with "pp" is a stack's.
    """
    axes = tuple(a for a in axes if a not in spec_axes(spec))
    n, parts = prod(sizes[a] for a in axes), _parts(spec, len(shape))
    found = []
    for i in range(1 if spec and spec[0] == "pp" else 0, len(shape)):
        split = prod(sizes[a] for a in parts[i])
        local = shape[i] // split
        if split == 1 or local % n == 0:
            found.append((ceil(local / n) * n / local, i, local))
    if not axes or not found:
        return Cut((), -1, 0)
    _, i, local = min(found)
    return Cut(axes, i - len(shape), local)


def _parts(spec: P, rank: int) -> list[tuple[str, ...]]:
    """The axes that a spec names for each dim."""
    named = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in spec]
    return named + [()] * (rank - len(named))


def stored_spec(spec: P, cut: Cut, rank: int) -> P:
    """The spec of a cut leaf: the cut's axes behind those that split its dim already."""
    if not cut.axes:
        return spec
    parts = _parts(spec, rank)
    parts[cut.dim] += cut.axes
    return P(*(p if len(p) > 1 else p[0] if p else None for p in parts))


def padded(x: jax.Array, cut: Cut, n: int) -> jax.Array:
    """Zeros behind the cut dim of a whole leaf, up to the next multiple of `n`."""
    if not cut.axes:
        return x
    dim = cut.dim % x.ndim
    return jnp.pad(x, [(0, -x.shape[i] % n if i == dim else 0) for i in range(x.ndim)])


@jax.named_scope("zero_gather")
def gather(tree: Tree, cuts: Tree, dtype: Any, *, alike: bool = False) -> Tree:
    """The whole leaves of pieces, cast to `dtype` first: all_gather over each cut's axes.

    Bytes over n devices: (n-1)/n of the padded leaf in `dtype`. Transpose: `scatter`.

    Args:
        alike: type the result as the same on every device of a cut's axes, as a state needs it.
    """
    send = partial(lax.all_gather, tiled=True, **({"to": "invarying"} if alike else {}))

    def alone(cut: Cut, x: jax.Array) -> jax.Array:
        dim = cut.dim % x.ndim
        return lax.slice_in_dim(send(x, cut.axes, axis=dim), 0, cut.size, axis=dim)

    def together(some: Sequence[Cut], pieces: Sequence[jax.Array]) -> list[jax.Array]:
        rows = send(_laid_out([x.reshape(1, -1) for x in pieces]), some[0].axes, axis=0)
        ends = accumulate(x.size for x in pieces)
        return [
            _restored(_whole(rows[:, end - x.size : end], x.shape, cut), x, cut.axes if alike else ())
            for x, end, cut in zip(pieces, ends, some, strict=True)
        ]

    return _each_message(cast(tree, dtype), cuts, alone, together)


@jax.named_scope("zero_scatter")
def scatter(tree: Tree, cuts: Tree) -> Tree:
    """Sums of whole leaves over each cut's axes, of which a device keeps its piece: psum_scatter.

    Bytes over n devices: (n-1)/n of the padded leaf. Transpose: `gather`.
    """

    def alone(cut: Cut, x: jax.Array) -> jax.Array:
        x = padded(x, cut, lax.axis_size(cut.axes))
        return lax.psum_scatter(x, cut.axes, scatter_dimension=cut.dim % x.ndim, tiled=True)

    def together(some: Sequence[Cut], leaves: Sequence[jax.Array]) -> list[jax.Array]:
        rows = [_rows(x, cut) for x, cut in zip(leaves, some, strict=True)]
        mine = lax.psum_scatter(_laid_out(rows), some[0].axes, scatter_dimension=0, tiled=True)
        ends = accumulate(x.shape[1] for x in rows)
        return [
            _restored(mine[:, end - row.shape[1] : end].reshape(_piece_shape(x, cut)), x, ())
            for x, row, end, cut in zip(leaves, rows, ends, some, strict=True)
        ]

    return _each_message(tree, cuts, alone, together)


def _each_message(tree: Tree, cuts: Tree, alone: Callable, together: Callable) -> Tree:
    """Leaves that are cut, each `alone(cut, leaf)`, or small ones `together(cuts, leaves)`; the others as they are."""
    leaves, structure = jax.tree.flatten(tree)
    flat = jax.tree.leaves(cuts, is_leaf=is_cut)
    for members in _messages([x.size for x in leaves], flat):
        if len(members) == 1:
            (i,) = members
            leaves[i] = alone(flat[i], leaves[i])
            continue
        for i, x in zip(members, together([flat[i] for i in members], [leaves[i] for i in members]), strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def _messages(sizes: Sequence[int], cuts: Sequence[Cut]) -> list[list[int]]:
    """Places of the leaves that travel in one message: what it takes beside its bytes is then taken once."""
    messages: dict[Any, list[int]] = {}
    for i, (size, cut) in enumerate(zip(sizes, cuts, strict=True)):
        if cut.axes:
            messages.setdefault(cut.axes if size * SMALL <= max(sizes) else i, []).append(i)
    return list(messages.values())


def _laid_out(rows: Sequence[jax.Array]) -> jax.Array:
    """Arrays [n, k] side by side; they vary along every axis where any of them does."""
    axes = tuple({axis for row in rows for axis in varying_axes(row)})
    return jnp.concatenate([varying(row, axes) for row in rows], axis=1)


def _restored(x: jax.Array, before: jax.Array, known: tuple[str, ...]) -> jax.Array:
    """`x`, which varies as `before` did, but not along `known`: beside others it was taken to vary as they do."""
    gained = set(varying_axes(x)) - (set(varying_axes(before)) - set(known))
    return agreed(x, tuple(gained)) if gained else x


def _rows(x: jax.Array, cut: Cut) -> jax.Array:
    """A whole leaf as its pieces, one a row: [n, elements of a piece]."""
    n, dim = lax.axis_size(cut.axes), cut.dim % x.ndim
    x = padded(x, cut, n)
    pieces = x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])
    return jnp.moveaxis(pieces, dim, 0).reshape(n, -1)


def _whole(rows: jax.Array, piece: tuple[int, ...], cut: Cut) -> jax.Array:
    """The way back: rows that are pieces of a shape."""
    dim = cut.dim % len(piece)
    pieces = jnp.moveaxis(rows.reshape(-1, *piece), 0, dim)
    return lax.slice_in_dim(pieces.reshape(*piece[:dim], -1, *piece[dim + 1 :]), 0, cut.size, axis=dim)


def _piece_shape(x: jax.Array, cut: Cut) -> tuple[int, ...]:
    """Of one device's piece of a whole leaf."""
    shape = list(x.shape)
    if cut.axes:
        shape[cut.dim] = ceil(cut.size / lax.axis_size(cut.axes))
    return tuple(shape)


def any_cut(cuts: Tree) -> bool:
    """Whether any leaf is cut."""
    return any(cut.axes for cut in jax.tree.leaves(cuts, is_leaf=is_cut))


def zero_pieces(tree: Tree, cuts: Tree) -> Tree:
    """Zeros in the shapes of the pieces of whole leaves."""

    def one(cut: Cut, x: jax.Array) -> jax.Array:
        return zeros_of(jax.typeof(x).update(shape=_piece_shape(x, cut)))

    return jax.tree.map(one, cuts, tree, is_leaf=is_cut)
