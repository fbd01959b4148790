"""Overlapped tensor parallelism: the tokens of a region travel piece by piece, under the products of other pieces.

The gather before a column-parallel layer becomes t - 1 hops round the tp ring, in both directions in turn: a device
multiplies its own piece, then that of the device behind, ahead, two behind, and so on, and while it multiplies one the
next is on its way. The reduce-scatter after a row-parallel layer is the same backwards: a device multiplies the tokens
of the most distant owner first, and a sum goes on its way to its owner while the product that the next device adds is
being made. The transpose of either is the other. Wang et al., "Overlap communication with dependent computation via
decomposition", ASPLOS 2023 (doi:10.1145/3567955.3567959).

Shapes: b batch, s sequence, n = s / t tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jax import lax

from jax5d.parallel.agree import known_together
from jax5d.parallel.data import zeros_of
from jax5d.parallel.sequence import SequenceBoundary
from jax5d.parallel.tensor import Product, Tree


@dataclass(frozen=True)
class OverlappedBoundary(SequenceBoundary):
    """Sequence parallelism whose gathers and scatters run under the products beside them.

    The sums are those of `SequenceBoundary` in another order. Bytes: the same, by ppermute.
    """

    def columns(self, product: Product, x: jax.Array, weights: Tree) -> Tree:
        """Forward: x round the ring. Backward: its gradient, and by `regather` an all_gather of x, for weights."""
        return _columns(product, self, x, weights)

    def rows(self, product: Product, x: Tree, weights: Tree) -> jax.Array:
        """Forward: sums round the ring. Backward: the gradient of the result."""
        return _rows(product, x, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _columns(product: Product, boundary: SequenceBoundary, x: jax.Array, weights: Tree) -> Tree:
    return _gathered_under(lambda piece, _: product(piece, weights), x)


def _columns_fwd(product: Product, boundary: SequenceBoundary, x: jax.Array, weights: Tree) -> tuple[Tree, tuple]:
    if boundary.regather:
        return _columns(product, boundary, x, weights), (x, None, weights)
    out, whole = _gathered_under(lambda piece, _: (product(piece, weights), piece), x)
    return out, (x, whole, weights)


def _columns_bwd(product: Product, boundary: SequenceBoundary, saved: tuple, d_out: Tree) -> tuple[jax.Array, Tree]:
    x, whole, weights = saved
    whole = boundary.enter(x) if boundary.regather else whole
    _, by_x = jax.vjp(lambda x: product(x, weights), x)  # affine: any x of a piece's shape gives the same
    d_x = _scattered_under(lambda d_piece: by_x(d_piece)[0], d_out)
    _, by_weights = jax.vjp(lambda weights: product(whole, weights), weights)
    return d_x, by_weights(d_out)[0]


_columns.defvjp(_columns_fwd, _columns_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(product: Product, x: Tree, weights: Tree) -> jax.Array:
    return _scattered_under(lambda piece: product(piece, weights), x)


def _rows_fwd(product: Product, x: Tree, weights: Tree) -> tuple[jax.Array, tuple]:
    return _rows(product, x, weights), (x, weights)


def _rows_bwd(product: Product, saved: tuple, d_out: jax.Array) -> tuple[Tree, Tree]:
    x, weights = saved

    def by_piece(d_piece: jax.Array, distance: int) -> tuple[Tree, jax.Array]:
        _, by_x = jax.vjp(lambda x: product(x, weights), _take(x, distance))
        return by_x(d_piece)[0], d_piece

    d_x, whole = _gathered_under(by_piece, d_out)
    return d_x, jax.vjp(lambda weights: product(x, weights), weights)[1](whole)[0]


_rows.defvjp(_rows_fwd, _rows_bwd)


def _distances() -> list[int]:
    """From a device to all on the ring, itself first: 0, -1, 1, -2, ..."""
    t = lax.axis_size("tp")
    return sorted(range(-(t // 2), (t + 1) // 2), key=lambda distance: (abs(distance), distance))


def _gathered_under(function: Callable[[jax.Array, int], Tree], x: jax.Array) -> Tree:
    """`function(piece, distance)`, arrays [b, n, ...], of every device's x [b, n, ...] as it comes: [b, t n, ...]."""
    distances = _distances()
    coming, piece, made = {-1: x, 0: x, 1: x}, x, []
    for distance, following in zip(distances, [*distances[1:], 0], strict=True):
        side = _side(following)
        # one after another: left alone, XLA makes all products at once, or hops before there is anything to hide under
        piece, coming[side], made[-1:] = known_together((piece, coming[side], made[-1:]))
        coming[side] = _hop(coming[side], -side)
        made.append(function(piece, distance))
        piece = coming[side]
    whole = jax.tree.map(_empty, made[0])
    for distance, pieces in zip(distances, made, strict=True):
        whole = jax.tree.map(partial(_put, distance=distance), whole, pieces)
    return whole


def _scattered_under(function: Callable[[Tree], jax.Array], x: Tree) -> jax.Array:
    """The sum over tp of `function` of pieces [b, n, ...] of x [b, t n, ...]: this device's tokens of it, [b, n, d]."""
    side, total, arrived = 0, [], {}
    for distance in reversed(_distances()):
        piece, total = known_together((_take(x, distance), total))  # as above
        arrived[side] = [_hop(part, side) for part in total]
        side = _side(distance)
        ways = (side,) if side else (-1, 1)
        total = [sum((part for way in ways for part in arrived.pop(way, ())), function(piece))]
    return total[0]


def _side(distance: int) -> int:
    """-1 behind, 0 here, 1 ahead."""
    return (distance > 0) - (distance < 0)


@jax.named_scope("tp_hop")
def _hop(x: jax.Array, by: int) -> jax.Array:
    """To the next device on the ring, the one before, or nowhere. Bytes: K, or 0. Transpose: by -by."""
    t = lax.axis_size("tp")
    return lax.ppermute(x, "tp", [(i, (i + by) % t) for i in range(t)]) if by else x


def _start(n: int, distance: int) -> jax.Array:
    """Where the tokens of the device so far away begin: int32 []."""
    return (lax.axis_index("tp") + distance) % lax.axis_size("tp") * n


def _take(x: Tree, distance: int) -> Tree:
    """The tokens of the device so far away: of arrays [b, t n, ...], [b, n, ...]."""

    def one(x: jax.Array) -> jax.Array:
        n = x.shape[1] // lax.axis_size("tp")
        return lax.dynamic_slice_in_dim(x, _start(n, distance), n, axis=1)

    return jax.tree.map(one, x)


def _put(whole: jax.Array, piece: jax.Array, distance: int) -> jax.Array:
    """The tokens [b, n, ...] of the device so far away to where they belong in [b, t n, ...]."""
    return lax.dynamic_update_slice_in_dim(whole, piece, _start(piece.shape[1], distance), axis=1)


def _empty(piece: jax.Array) -> jax.Array:
    """Zeros [b, t n, ...] for pieces [b, n, ...]."""
    kind = jax.typeof(piece)
    b, n, *rest = kind.shape
    return zeros_of(kind.update(shape=(b, lax.axis_size("tp") * n, *rest)))
