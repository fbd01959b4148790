"""By formula: the four orders of a larger MLP on the eight H100s of a host, in bfloat16."""

from __future__ import annotations

from experiments.ch03_tensor_parallelism._pairs import FLOAT, Pair, Widths
from jax5d.costs.cluster import host_link
from jax5d.costs.gpus import gpu
from jax5d.costs.links import all_gather, reduce_scatter, ring_all_reduce

T = 8
BFLOAT16 = 2
LARGER = ((8192, 4096), (8192, 8192), (8192, 12288))
"""Tokens and d_model: widths of an 8B, a 70B and a 175B model."""


def seconds(pair: Pair, tokens: int, d_model: int) -> dict[str, float]:
    """Of one MLP, forward and backward: bytes a GPU sends, seconds of that, and of its products at the GPU's peak.

    Collectives by the alpha-beta model over NVLink; products of 12 tokens d_model d_ff FLOPs a GPU, over t.
    """
    h100 = gpu("h100")
    link, hidden = host_link(h100), 4 * d_model
    sent, wire = 0.0, 0.0
    for hop in pair.hops(Widths(tokens, d_model, hidden, d_model)):
        size = hop.whole * BFLOAT16 / FLOAT
        time = {
            "psum": ring_all_reduce(T, size, link),
            "all_gather": all_gather(T, size / T, link),
            "psum_scatter": reduce_scatter(T, size, link),
        }
        sent += float(hop.sent(T)) * BFLOAT16 / FLOAT
        wire += time[hop.op]
    products = 12 * tokens * d_model * hidden / T / h100.peak("bfloat16")
    return {"sent_bytes": sent, "wire": wire, "products": products}
