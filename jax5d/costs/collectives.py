"""Bytes that a collective puts on the wire, by the bandwidth-optimal ring algorithm.

Chan et al., "Collective communication: theory, practice, and experience", 2007. `payload` is the operand's bytes on
one device, `n` the devices that take part; results are exact fractions, bytes sent by one device (the average, where
devices differ).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from jax5d.config import AXES, MeshConfig


@dataclass(frozen=True, order=True)
class Collective:
    """All collectives of one kind over the same axes in one step."""

    op: str
    """psum, pmax, all_gather, psum_scatter, ppermute or all_to_all."""
    axes: tuple[str, ...]
    """Mesh axes of size above 1, in mesh order."""
    count: int
    """How often it runs in a step."""
    payload_bytes: int
    """Operand bytes on one device, summed over the step."""
    wire_bytes: Fraction
    """Bytes that one device sends, summed over the step."""


def wire_bytes(op: str, payload: int, n: int, pairs: int | None = None) -> Fraction:
    """Bytes one device sends for one collective.

    psum, pmax: 2 (n-1)/n K. all_gather (K is the shard): (n-1) K. psum_scatter, all_to_all: (n-1)/n K.
    ppermute: K for each of `pairs` of the n devices (default: a whole ring).
    """
    factors = {
        "psum": Fraction(2 * (n - 1), n),
        "pmax": Fraction(2 * (n - 1), n),
        "all_gather": Fraction(n - 1),
        "psum_scatter": Fraction(n - 1, n),
        "all_to_all": Fraction(n - 1, n),
        "ppermute": Fraction(n if pairs is None else pairs, n),
    }
    return factors[op] * payload


def sent(
    mesh: MeshConfig, op: str, axes: tuple[str, ...], payload: int, count: int, pairs: int | None = None
) -> Iterator[Collective]:
    """`count` collectives of `payload` operand bytes each over axes of a mesh; none where it has one device there."""
    axes = tuple(a for a in AXES if a in axes and getattr(mesh, a) > 1)
    n = prod(getattr(mesh, a) for a in axes)
    if axes and count:
        yield Collective(op, axes, count, payload * count, wire_bytes(op, payload, n, pairs) * count)


def merge(entries: Iterable[Collective]) -> list[Collective]:
    """Add up entries of the same op and axes; sorted."""
    totals: dict[tuple[str, tuple[str, ...]], Collective] = {}
    for e in entries:
        old = totals.get((e.op, e.axes), Collective(e.op, e.axes, 0, 0, Fraction(0)))
        totals[e.op, e.axes] = Collective(
            e.op, e.axes, old.count + e.count, old.payload_bytes + e.payload_bytes, old.wire_bytes + e.wire_bytes
        )
    return sorted(totals.values())
