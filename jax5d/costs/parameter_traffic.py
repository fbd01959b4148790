"""What parameters and their gradients send in a training step: ZeRO's pieces, the sums over replicas, their norms.

As in `jax5d.costs.communication`, whose table holds all of it, from the algorithms alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from jax5d.config import AXES, ConfigError, RunConfig
from jax5d.costs.collectives import Collective, sent
from jax5d.costs.parameters import BYTES, FLOAT32, Axes, Leaf, Piece, leaves
from jax5d.costs.zero import Shares

Pairs = list[tuple[Leaf, Piece]]
"""Leaves with a device's pieces of them."""


def messages(pieces: Pairs, size: Callable[[Leaf, Piece], int]) -> list[Pairs]:
    """Cut leaves that travel together: those of the same axes that have at most 1/16 of the largest's elements."""
    largest = max((size(*pair) for pair in pieces), default=0)
    together: dict[str | Axes, Pairs] = {}
    for leaf, piece in pieces:
        if piece.axes:
            alone = size(leaf, piece) * 16 > largest
            together.setdefault(leaf.name if alone else piece.axes, []).append((leaf, piece))
    return list(together.values())


@dataclass(frozen=True)
class ParameterTraffic:
    """The collectives of one training step that carry parameters, their gradients, or sums of their squares."""

    config: RunConfig

    @cached_property
    def shares(self) -> Shares:
        """What ZeRO cuts."""
        return Shares(self.config)

    @cached_property
    def ticks(self) -> int:
        """Ticks with a backward pass: M + p - 1."""
        return self.config.parallel.microbatches + self.config.mesh.pp - 1

    @cached_property
    def width(self) -> int:
        """Bytes of one computed element."""
        return BYTES[self.config.model.dtype]

    def entries(self) -> Iterator[Collective]:
        """All of them."""
        pieces = list(self.shares.pieces())
        for stacked, layers in ((True, self.shares.layers), (False, 1)):
            yield from self._scattered([pair for pair in pieces if pair[0].stacked == stacked], layers)
        yield from self._parameters(pieces)
        yield from self._reduction(pieces)
        yield from self._noise([leaf for leaf, _ in pieces])
        for axes in {frozenset(piece.split) for _, piece in pieces}:
            yield from self._of("psum", tuple(axes), FLOAT32, 1)  # the norm

    def _of(self, op: str, axes: tuple[str, ...], payload: int, count: int) -> Iterator[Collective]:
        return sent(self.config.mesh, op, axes, payload, count)

    def _scattered(self, pieces: Pairs, layers: int) -> Iterator[Collective]:
        """Gradients into pieces, each layer's by itself: at stage 1 of their sum, later of each microbatch."""
        times = (self.ticks if self.shares.stage >= 2 else 1) * layers
        width = BYTES[self.config.parallel.accumulate]
        for message in messages(pieces, lambda leaf, _: leaf.local_size(self.config.mesh)):
            axes = message[0][1].axes
            whole = sum(piece.size for _, piece in message) * prod(getattr(self.config.mesh, a) for a in axes)
            yield from self._of("psum_scatter", axes, whole // layers * width, times)

    def _parameters(self, pieces: Pairs) -> Iterator[Collective]:
        """Whole leaves of pieces, once: after the update, or at stage 3 before the step, but for the layers there."""
        if self.shares.stage < 3:
            yield from self._gathered(pieces, 1, lambda _: 1)
            return
        stacked, outer = ([pair for pair in pieces if pair[0].stacked == which] for which in (True, False))
        yield from self._gathered(outer, 1, lambda _: 1)
        forward, again = self.ticks * self.shares.layers, self._regathers
        yield from self._gathered(
            stacked, self.shares.layers, lambda message: forward + again * any(self._read_again(x) for x, _ in message)
        )

    def _gathered(self, pieces: Pairs, layers: int, times: Callable[[Pairs], int]) -> Iterator[Collective]:
        """Messages of the parts of a layer in the pieces of `layers` of them."""
        for message in messages(pieces, lambda _, piece: piece.size):
            size = sum(piece.size for _, piece in message) // layers
            yield from self._of("all_gather", message[0][1].axes, size * self.width, times(message))

    @property
    def _regathers(self) -> int:
        """Layers that stage 3 gathers for backward passes: in each L, and the first again, as its loop runs ahead by
        one to the end. One less where a forward pass stands right before it, whose last layer is there still: in M
        ticks of 1F1B."""
        parallel = self.config.parallel
        there = parallel.microbatches if parallel.schedule == "1f1b" else 0
        return self.ticks * (self.shares.layers + 1) - there if parallel.regather else 0

    def _read_again(self, leaf: Leaf) -> bool:
        """Whether a layer's backward pass reads the leaf: biases only to compute again what was not kept."""
        parallel = self.config.parallel
        saved = {"mlp.b_in": "mlp_in" in parallel.save, "mlp.b_out": True}
        saved |= dict.fromkeys(("attention.b_q", "attention.b_kv"), "qkv" in parallel.save)
        again = parallel.remat == "full" and not saved.get(leaf.name.removeprefix("blocks."), False)
        return again or not (leaf.name.endswith(".bias") or ".b_" in leaf.name)

    def _reduction(self, pieces: list[tuple[Leaf, Piece]]) -> Iterator[Collective]:
        """Gradients, of ZeRO their pieces, summed as `parallel.reduction` says over all that has parts of the sum."""
        parallel = self.config.parallel
        groups: dict[tuple[Axes, Axes], int] = {}
        for leaf, piece in pieces:
            axes = tuple(a for a in self._reduced(leaf) if a not in piece.axes)
            groups[axes, leaf.axes] = groups.get((axes, leaf.axes), 0) + piece.size
            layers = self.shares.layers if leaf.stacked else 1
            if parallel.reduction == "overlap":
                yield from self._all_reduce(axes, piece.size // layers, layers)
            elif parallel.reduction == "leaf":
                yield from self._all_reduce(axes, piece.size, 1)
        width = BYTES[parallel.accumulate]
        for (axes, _), size in groups.items() if parallel.reduction in ("bucket", "single") else ():
            bucket = size if parallel.reduction == "single" else max(1, int(parallel.bucket_mb * 1e6 / width))
            yield from self._all_reduce(axes, bucket, size // bucket)
            yield from self._all_reduce(axes, size % bucket, 1 if size % bucket else 0)

    def _all_reduce(self, axes: Axes, size: int, count: int) -> Iterator[Collective]:
        """`count` sums of `size` elements each: psum, or 2 (n-1) steps of a ring with a chunk in each."""
        parallel = self.config.parallel
        width, n = BYTES[parallel.accumulate], prod(getattr(self.config.mesh, a) for a in axes)
        hosts = n // parallel.inner
        chunk = ceil(size / n)
        if parallel.all_reduce == "psum":
            yield from self._of("psum", axes, size * width, count)
        elif parallel.all_reduce == "ring":
            yield from self._of("ppermute", axes, chunk * width, count * 2 * (n - 1))
        elif parallel.all_reduce == "two_way_ring":
            yield from self._of("ppermute", axes, ceil(size / (2 * n)) * width, count * 4 * (n - 1))
        else:
            yield from self._of("ppermute", axes, hosts * chunk * width, count * 2 * (parallel.inner - 1))
            yield from self._of("ppermute", axes, chunk * width, count * 2 * (hosts - 1))

    def _noise(self, every: list[Leaf]) -> Iterator[Collective]:
        """Two squares for each set of axes over which gradients of whole sequences are summed, if there are several."""
        sizes = vars(self.config.mesh)
        for reduced, split in {(self._reduced(leaf), leaf.axes) for leaf in every}:
            large = {a for a in reduced if sizes[a] > 1}
            if large <= {"dp", "ep"} and (large or self.config.parallel.microbatches > 1):
                yield from self._of("psum", (*reduced, *split), 2 * FLOAT32, 1)

    def _reduced(self, leaf: Leaf) -> Axes:
        """Axes whose devices have parts of a leaf's gradient."""
        tp = ("tp",) if leaf.shared or self.config.parallel.sequence else ()
        return tuple(a for a in AXES if a in ("pp", "dp", "ep", "cp", *tp) and a not in leaf.axes)


def check_bucket(config: RunConfig) -> None:
    """Raise `ConfigError` where reduction=bucket would have a bucket that all gradients of a device do not fill."""
    parallel = config.parallel
    elements = sum(leaf.local_size(config.mesh) for leaf in leaves(config.model, config.mesh))
    total = elements * BYTES[parallel.accumulate] / 1e6
    if parallel.reduction == "bucket" and parallel.bucket_mb > total:
        raise ConfigError(
            f"parallel.bucket_mb={parallel.bucket_mb} is larger than all gradients of a device, {total:.3f} MB; write "
            f"--parallel.bucket_mb {total / 4:.2g}, or --parallel.reduction single for one buffer"
        )
