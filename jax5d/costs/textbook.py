"""The textbook's memory formulas, as they stand, for comparison with `jax5d.costs.memory`.

They are of Megatron's layer at 16 bits, with dropout, whose backward pass keeps what PyTorch's operators keep.
"""

from __future__ import annotations

from jax5d.config import RunConfig
from jax5d.costs.activations import Activations


def state_bytes_per_parameter(*, mixed: bool, float32_gradients: bool = False) -> int:
    """Parameters, gradients and AdamW's moments; Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1.

    float32: 4 + 4 + 8. Mixed: 2 + 2 + a float32 master copy of 4 + 8, and 4 more where gradients are accumulated in
    float32 beside the 16-bit ones.
    """
    return 20 if mixed and float32_gradients else 16


def zero_bytes_per_parameter(stage: int, replicas: int, k: int = 12) -> float:
    """Bytes of states for each parameter by ZeRO's stages, mixed precision; arXiv:1910.02054, figure 1.

    2 + 2 + k, 2 + 2 + k / n, 2 + (2 + k) / n and (2 + 2 + k) / n: weights, gradients, and k of the optimizer, 12 for
    Adam with a float32 copy of the weights.
    """
    parts = (2, 2, k)  # shared out from the last on
    kept = len(parts) - stage
    return sum(parts[:kept]) + sum(parts[kept:]) / replicas


def zero_traffic(stage: int) -> int:
    """Elements that a device sends in a step for each parameter, over many replicas; arXiv:1910.02054, section 7.

    Stages 0, 1 and 2: gradients reduce-scattered, then gradients or parameters all-gathered. Stage 3: parameters
    gathered for the forward pass and again for the backward pass, gradients reduce-scattered.
    """
    return 3 if stage == 3 else 2


def layer_bytes(config: RunConfig) -> float:
    """What one layer keeps of one microbatch, in bytes; Korthikanti et al., arXiv:2205.05198, table 2.

    s b h (34 + 5 a s / h) on one device; s b h (10 + 24 / t + 5 a s / (h t)) over t tensor-parallel devices; with
    sequence parallelism all of it over t. Selective recomputation drops the term in s^2, full recomputation keeps the
    layer's input, 2 s b h. Context parallelism, which the paper does not have, makes s the shard's part.
    """
    a, m, parallel, t = Activations(config), config.model, config.parallel, config.mesh.tp
    elements = a.tokens * m.d_model
    square = 0.0 if parallel.remat == "selective" else 5 * m.heads * a.length / m.d_model
    if parallel.remat == "full":
        return 2 * elements / (t if parallel.sequence else 1)
    if parallel.sequence:
        return elements * (34 + square) / t
    return elements * (10 + 24 / t + square / t)
