"""Hosts of GPUs, joined by a network: which link a collective waits for."""

from __future__ import annotations

from jax5d.costs.gpus import Gpu
from jax5d.costs.links import Link, ring_all_reduce, two_level_all_reduce

HOST_ALPHA, NETWORK_ALPHA = 3.4e-6, 14e-6
"""Seconds a step of a ring takes beyond its content, over NVLink and over a network: NCCL's tuning model,
src/graph/tuning.cc, protocol Simple."""


def host_link(gpu: Gpu) -> Link:
    """Between the GPUs of a host."""
    return Link(HOST_ALPHA, gpu.link)


def network_link(gpu: Gpu) -> Link:
    """Between hosts, each GPU by an adapter of its own."""
    return Link(NETWORK_ALPHA, gpu.network)


def all_reduce_seconds(gpu: Gpu, n: int, payload: float) -> float:
    """A sum over `n` GPUs: a ring inside one host, two levels across hosts."""
    if n <= gpu.per_host:
        return ring_all_reduce(n, payload, host_link(gpu))
    return two_level_all_reduce(n // gpu.per_host, gpu.per_host, payload, host_link(gpu), network_link(gpu))
