"""Overlapped tensor parallelism: the tokens of a region travel piece by piece, under the products of other pieces.

The gather before a column-parallel layer becomes t - 1 hops round the tp ring: a device multiplies the piece that it has
while the next one is on its way. The reduce-scatter after a row-parallel layer becomes as many hops of a sum, to which
each device adds its product for the tokens of one owner while the sum before is on its way. The transpose of either is
the other. Both go round the ring in both directions, half of each piece each way. Wang et al., "Overlap communication
with dependent computation via decomposition", ASPLOS 2023 (doi:10.1145/3567955.3567959).

Shapes: b batch, s sequence, n = s / t tokens of a piece. A piece's first half goes to the next device, its second half
to the one before; after j hops a device has halves that came from the devices j before and j behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.data import zeros_of
from jax5d.parallel.sequence import SequenceBoundary
from jax5d.parallel.tensor import Product, Tree


@dataclass(frozen=True)
class OverlappedBoundary(SequenceBoundary):
    """Sequence parallelism whose gathers and scatters run under the products beside them.

    The sums are those of `SequenceBoundary` in another order. Bytes: the same, by ppermute.
    """

    def columns(self, product: Product, x: jax.Array, weights: Tree) -> Tree:
        """Forward: one ring of x. Backward: one ring of its gradient, and of x once more with `regather`."""
        return _columns(product, self, x, weights)

    def rows(self, product: Product, x: jax.Array, weights: Tree) -> jax.Array:
        """Forward: one ring of sums. Backward: one ring of the gradient of the result."""
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
    d_x = _scattered_under(lambda hops: by_x(_take(d_out, x.shape[1], hops))[0])
    _, by_weights = jax.vjp(lambda weights: product(whole, weights), weights)
    return d_x, by_weights(d_out)[0]


_columns.defvjp(_columns_fwd, _columns_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(product: Product, x: jax.Array, weights: Tree) -> jax.Array:
    n = jax.tree.leaves(x)[0].shape[1] // lax.axis_size("tp")
    return _scattered_under(lambda hops: product(_take(x, n, hops), weights))


def _rows_fwd(product: Product, x: jax.Array, weights: Tree) -> tuple[jax.Array, tuple]:
    return _rows(product, x, weights), (x, weights)


def _rows_bwd(product: Product, saved: tuple, d_out: jax.Array) -> tuple[jax.Array, Tree]:
    x, weights = saved

    def by_piece(d_piece: jax.Array, hops: int) -> tuple[jax.Array, jax.Array]:
        piece = _take(x, d_piece.shape[1], hops)
        return jax.vjp(lambda piece: product(piece, weights), piece)[1](d_piece)[0], d_piece

    d_x, whole = _gathered_under(by_piece, d_out)
    return d_x, jax.vjp(lambda weights: product(x, weights), weights)[1](whole)[0]


_rows.defvjp(_rows_fwd, _rows_bwd)


def _gathered_under(function: Callable[[jax.Array, int], Tree], x: jax.Array) -> Tree:
    """`function(piece, hops)`, arrays [b, n, ...], of every device's x [b, n, ...] as it arrives: arrays [b, t n, ...]."""
    out = None
    for hops, piece in enumerate(_arriving(x)):
        made = function(piece, hops)
        if out is None:
            t = lax.axis_size("tp")
            out = jax.tree.map(lambda y: zeros_of(_with_length(jax.typeof(y), t * y.shape[1])), made)
        out = jax.tree.map(partial(_put, hops=hops), out, made)
    return out


def _with_length(kind: Any, length: int) -> Any:
    return kind.update(shape=(kind.shape[0], length, *kind.shape[2:]))


def _arriving(x: jax.Array) -> Iterator[jax.Array]:
    """This device's x, then after each hop what has come: t pieces [b, n, ...]."""
    parts = _halves(x)
    for _ in range(lax.axis_size("tp") - 1):
        coming = _hop(parts)
        yield jnp.concatenate(parts, axis=1)
        parts = coming
    yield jnp.concatenate(parts, axis=1)


def _scattered_under(function: Callable[[int], jax.Array]) -> jax.Array:
    """The sum over tp of every device's `function`, [b, n, d] each: this device's tokens of it.

    `function(hops)` is for the owners that are so many hops away; this device's own tokens come last.
    """
    t, total = lax.axis_size("tp"), None
    for hops in range(1, t + 1):
        parts = _halves(function(hops))
        total = parts if total is None else [a + b for a, b in zip(parts, _hop(total), strict=True)]
    return jnp.concatenate(total, axis=1)


def _halves(x: jax.Array) -> list[jax.Array]:
    """A piece [b, n, ...] as it travels; a single token is not halved."""
    middle = x.shape[1] - x.shape[1] // 2
    return [half for half in (x[:, :middle], x[:, middle:]) if half.shape[1]]


@jax.named_scope("tp_hop")
def _hop(halves: list[jax.Array]) -> list[jax.Array]:
    """The first half one device on, the second one back. Bytes: those of the piece."""
    t = lax.axis_size("tp")
    return [
        lax.ppermute(half, "tp", [(i, (i + by) % t) for i in range(t)]) for half, by in zip(halves, (1, -1), strict=False)
    ]


def _starts(n: int, hops: int) -> list[jax.Array]:
    """Where the halves that came over `hops` hops belong in [b, t n, ...]: int32 [] each."""
    t, rank = lax.axis_size("tp"), lax.axis_index("tp")
    return [(rank - hops) % t * n, (rank + hops) % t * n + n - n // 2]


def _take(x: Tree, n: int, hops: int) -> Tree:
    """The piece of n tokens whose halves belong to the devices `hops` away: of arrays [b, t n, ...], [b, n, ...]."""
    sizes = n - n // 2, n // 2

    def one(x: jax.Array) -> jax.Array:
        places = zip(_starts(n, hops), sizes, strict=True)
        return jnp.concatenate([lax.dynamic_slice_in_dim(x, at, size, axis=1) for at, size in places], axis=1)

    return jax.tree.map(one, x)


def _put(buffer: jax.Array, piece: jax.Array, hops: int) -> jax.Array:
    """A piece [b, n, ...] that came over `hops` hops, where it belongs in [b, t n, ...]."""
    for at, half in zip(_starts(piece.shape[1], hops), _halves(piece), strict=False):
        buffer = lax.dynamic_update_slice_in_dim(buffer, half, at, axis=1)
    return buffer
