"""Seconds of a collective by the alpha-beta model: alpha for each message, bytes over beta for its content.

Payloads K are those of `jax5d.costs.collectives`: the operand's bytes on one device. Chan et al., "Collective
communication: theory, practice, and experience", 2007; trees: Sanders, Speck, Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", 2009, which NCCL uses since 2.4 (Jeaugey, "Massively scale your deep learning
training with NCCL 2.4", 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2


@dataclass(frozen=True)
class Link:
    """What joins two devices."""

    alpha: float
    """Seconds that a message takes beyond its content."""
    beta: float
    """Bytes/s, one direction."""

    def send(self, payload: float) -> float:
        """Point to point (ppermute): alpha + K / beta seconds."""
        return self.alpha + payload / self.beta


def reduce_scatter(n: int, payload: float, link: Link) -> float:
    """Ring: (n-1) messages of K/n bytes. Seconds; K is the whole array."""
    return (n - 1) * link.send(payload / n)


def all_gather(n: int, payload: float, link: Link) -> float:
    """Ring: (n-1) messages of K bytes. Seconds; K is one device's shard."""
    return (n - 1) * link.send(payload)


def ring_all_reduce(n: int, payload: float, link: Link) -> float:
    """Reduce-scatter, then all-gather: 2 (n-1) (alpha + K / (n beta)) seconds."""
    return reduce_scatter(n, payload, link) + all_gather(n, payload / n, link)


def tree_all_reduce(n: int, payload: float, link: Link, *, slowdown: float = 1.0) -> float:
    """Double binary tree: 2 log2(n) alpha + 2 K / beta seconds, up the trees and down again.

    Each of the two trees carries half of the payload, and a device that is inner in one is a leaf of the other, so both
    directions of its link are used in full: the content travels twice at beta / `slowdown`. The messages are taken as
    cut finely enough for the trees' levels to overlap, at no further cost.
    """
    return 2 * log2(n) * link.alpha + 2 * slowdown * payload / link.beta


def crossover(n: int, alpha: float, beta: float, *, slowdown: float = 1.0) -> float:
    """Bytes below which the tree is faster than the ring: alpha beta (n - 1 - log2 n) / (slowdown - 1 + 1/n).

    0 where the tree is never faster (n of 1 or 2). Both sides are linear in K; they are equal there.
    """
    return alpha * beta * max(n - 1 - log2(n), 0.0) / (slowdown - 1 + 1 / n)


def two_level_all_reduce(hosts: int, per_host: int, payload: float, inner: Link, outer: Link) -> float:
    """Reduce-scatter in the host, all-reduce over hosts of a shard by each device, all-gather in the host. Seconds.

    Args:
        hosts: number of hosts.
        per_host: devices of a host.
        payload: bytes of the array on one device.
        inner: between devices of a host.
        outer: between hosts, for each device.
    """
    shard = payload / per_host
    inside = reduce_scatter(per_host, payload, inner) + all_gather(per_host, shard, inner)
    return inside + ring_all_reduce(hosts, shard, outer)


def all_to_all(n: int, payload: float, link: Link) -> float:
    """Pairwise: (n-1) messages of K/n bytes. Seconds; K is what one device holds."""
    return (n - 1) * link.send(payload / n)
