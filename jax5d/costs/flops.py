"""Floating-point operations of a training step, and what devices can do at most.

A multiply-add counts as two. Per token: 6 N for N parameters (forward 2 N, backward 4 N), and 12 L h s for attention
scores and values with the full s x s square counted, as the Ultra-Scale Playbook does; causal attention needs half.
"""

from __future__ import annotations

from jax5d.config import MeshConfig, ModelConfig
from jax5d.costs.parameters import count, leaves

PEAK_FLOPS = {
    "A100": 312e12,  # NVIDIA A100 data sheet, BF16 tensor core, dense
    "H100 PCIe": 756e12,  # NVIDIA H100 data sheet: 1,513 with sparsity
    "H100": 989e12,  # the same, SXM: 1,979 with sparsity
    "H200": 989e12,  # NVIDIA H200 data sheet: 1,979 with sparsity
    "B200": 2250e12,  # NVIDIA HGX B200 data sheet: 36 PFLOP/s by eight, with sparsity
}
"""Dense bfloat16 FLOP/s by a part of the device's name; the first that fits counts."""


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token meets: all of a dense model's, top_k of an MoE's experts."""
    if not model.experts:
        return count(model)
    expert = sum(x.local_size(MeshConfig()) for x in leaves(model, MeshConfig()) if x.axes[:2] == ("pp", "ep"))
    return count(model) - expert * (model.experts - model.top_k) // model.experts


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """FLOPs of forward and backward pass per token, recomputation not counted."""
    return 6 * active_parameters(model) + 12 * model.layers * model.d_model * seq_len


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of a device in dense bfloat16, or None where it is not known (a CPU)."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_kind), None)
