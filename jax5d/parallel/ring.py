"""All-reduce, written with `ppermute` alone: what `psum` does on the wire.

An array is cut into n chunks. In n-1 steps each device sends one chunk to the next device and adds what it receives
to its own copy of that chunk, so that every device ends with the whole sum of one chunk (reduce-scatter). In n-1 more
the sums go round once (all-gather). Each of the 2(n-1) steps sends 1/n of the array: 2 (n-1)/n K bytes a device, the
least that any algorithm sends. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009.

Shapes: n devices of a ring, c elements of a chunk. A buffer is [n, c]; chunk r ends at the device at position r.
All run inside a `shard_map`, on arrays of any shape and numeric dtype. None is differentiable: they sum gradients.

Sums travel in the array's dtype, and are rounded to it at each step. Adding in float32 on the way would change
nothing; to keep float32 sums, give a float32 array, at its bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.config import AXES
from jax5d.parallel.agree import agreed
from jax5d.parallel.data import varying


class Ring(NamedTuple):
    """Where a device sends: the devices along some axes form rings of `size`, all of which turn at once."""

    axes: tuple[str, ...]
    """Mesh axes. Devices are numbered along them in mesh order, the outermost first."""
    size: int
    """Devices in each ring."""
    stride: int = 1
    """Neighbours are so far apart in that numbering."""
    turn: int = 1
    """1: a device sends to the next one; -1: to the one before."""

    @property
    def ordered(self) -> tuple[str, ...]:
        """`axes` in mesh order: ppermute numbers devices so, in whatever order it is given the axes."""
        return tuple(sorted(self.axes, key=AXES.index))

    def position(self) -> jax.Array:
        """This device's place in its ring, int32."""
        return lax.axis_index(self.ordered) // self.stride % self.size

    @jax.named_scope("ring_send")
    def send(self, x: jax.Array) -> jax.Array:
        """To the neighbour, by ppermute over `axes`. Transpose: to the other neighbour. Bytes: K."""
        places = [(i, i // self.stride % self.size) for i in range(lax.axis_size(self.axes))]
        pairs = [(i, i + ((p + self.turn) % self.size - p) * self.stride) for i, p in places]
        return lax.ppermute(x, self.ordered, pairs)


Buffers = tuple[jax.Array, ...]
"""[n, c] for each of the rings that turn at the same time."""


def reduce_step(buffer: jax.Array, ring: Ring, t: jax.Array | int) -> jax.Array:
    """Step t = 0 .. n-2 of the reduce-scatter: pass on the sum so far of one chunk, add what came to the next.

    `buffer` is [n, c], varying over the ring's axes; so is the result. Bytes: one chunk, by ppermute.
    """
    sent = ring.position() - ring.turn * (t + 1)
    came, where = ring.send(_chunk(buffer, ring, sent)), sent - ring.turn
    return _put(buffer, ring, where, _chunk(buffer, ring, where) + came)


def gather_step(buffer: jax.Array, ring: Ring, t: jax.Array | int) -> jax.Array:
    """Step t = 0 .. n-2 of the all-gather: pass on the whole sum that came last, keep the one that comes.

    `buffer` is [n, c], varying over the ring's axes; so is the result. Bytes: one chunk, by ppermute.
    """
    sent = ring.position() - ring.turn * t
    return _put(buffer, ring, sent - ring.turn, ring.send(_chunk(buffer, ring, sent)))


def reduce_scatter(buffers: Buffers, rings: tuple[Ring, ...]) -> Buffers:
    """Afterwards the device at position r holds the whole sum of chunk r; its other chunks are sums under way.

    Chunk r is added up from the device after r to r itself: ((x[r+1] + x[r+2]) + ...) + x[r], positions mod n and
    in the direction of the turn. Bytes per device and ring: n-1 chunks.
    """

    def step(buffers: Buffers, t: jax.Array) -> tuple[Buffers, None]:
        return tuple(reduce_step(b, ring, t) for b, ring in zip(buffers, rings, strict=True)), None

    return lax.scan(step, buffers, jnp.arange(rings[0].size - 1))[0]


def all_gather(buffers: Buffers, rings: tuple[Ring, ...]) -> Buffers:
    """Chunk r of the device at position r, on every device of its ring. Bytes per device and ring: n-1 chunks."""

    def step(buffers: Buffers, t: jax.Array) -> tuple[Buffers, None]:
        return tuple(gather_step(b, ring, t) for b, ring in zip(buffers, rings, strict=True)), None

    return lax.scan(step, buffers, jnp.arange(rings[0].size - 1))[0]


def ring_all_reduce(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of `x` over the n devices along `axes`, the same bits on each.

    2(n-1) steps, each of ceil(size / n) elements. Order of additions: that of `reduce_scatter`.
    """
    return _around(x, (Ring(axes, lax.axis_size(axes)),))


def two_way_ring_all_reduce(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """As `ring_all_reduce`: the first half of the elements goes round one way, the other half the other way.

    2(n-1) steps, each of ceil(size / 2n) elements to both neighbours: as many bytes, over twice as many links.
    """
    n = lax.axis_size(axes)
    return _around(x, (Ring(axes, n), Ring(axes, n, turn=-1)))


def two_level_all_reduce(x: jax.Array, axes: tuple[str, ...], inner: int) -> jax.Array:
    """As `ring_all_reduce`, where each `inner` neighbouring devices are a host, with faster links inside.

    Reduce-scatter inside the host, all-reduce of each shard across the n / inner hosts, all-gather inside the host.
    Bytes per device, c = ceil(size / n) elements: 2 (inner-1) n / inner chunks of c inside a host and
    2 (n / inner - 1) across, where a single ring sends 2(n-1) over every link. Order of additions: that of
    `reduce_scatter` inside the host, then of the hosts' sums.

    Raises:
        ValueError: `inner` does not divide n.
    """
    n = lax.axis_size(axes)
    if inner < 1 or n % inner:
        raise ValueError(f"inner={inner} does not divide the {n} devices along {axes}; give a divisor of {n}")
    host, across = Ring(axes, inner), Ring(axes, n // inner, stride=inner)
    cut = _cut(varying(x, axes), inner, n // inner)
    (buffer,) = reduce_scatter((cut.reshape(inner, -1),), (host,))
    shard = _chunk(buffer, host, host.position()).reshape(cut.shape[1:])
    (shard,) = all_gather(reduce_scatter((shard,), (across,)), (across,))
    (buffer,) = all_gather((_put(buffer, host, host.position(), shard.reshape(-1)),), (host,))
    return agreed(_uncut(buffer, x), axes)


def _around(x: jax.Array, rings: tuple[Ring, ...]) -> jax.Array:
    """All-reduce of an equal part of `x` on each of the rings, at the same time."""
    axes, size = rings[0].axes, rings[0].size
    buffers = tuple(_cut(varying(x, axes), len(rings), size))
    return agreed(_uncut(jnp.stack(all_gather(reduce_scatter(buffers, rings), rings)), x), axes)


def _cut(x: jax.Array, *dims: int) -> jax.Array:
    """The elements of `x`, and zeros behind them, as [*dims, c] with the smallest c."""
    c = math.ceil(x.size / math.prod(dims))
    return jnp.pad(x.reshape(-1), (0, math.prod(dims) * c - x.size)).reshape(*dims, c)


def _uncut(chunks: jax.Array, x: jax.Array) -> jax.Array:
    """The inverse of `_cut`, to the shape of `x`."""
    return chunks.reshape(-1)[: x.size].reshape(x.shape)


def _chunk(buffer: jax.Array, ring: Ring, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(buffer, index % ring.size, keepdims=False)


def _put(buffer: jax.Array, ring: Ring, index: jax.Array, chunk: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(buffer, chunk, index % ring.size, 0)
