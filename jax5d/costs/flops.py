"""Floating-point operations of training, and how long they take.

A multiply-add counts as two, and only matrix products count. Attention's scores and values are counted for the full
s x s square, as the Ultra-Scale Playbook does and as this project's own attention computes within a context shard; with
`causal=True` for the half of it that a causal model needs.

Letters: s tokens of a sequence, h d_model, L layers, N parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

from jax5d.config import ConfigError, MeshConfig, ModelConfig, RunConfig
from jax5d.costs.gpus import Gpu, gpu_of_kind
from jax5d.costs.parameters import Leaf, count, leaves

Parts = dict[str, int]
"""FLOPs by part."""

PARTS = ("qkv", "scores", "values", "output", "router", "mlp_in", "mlp_out", "head")
"""The products of a model in their order; only an MoE has a router."""


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token meets: all of a dense model's, top_k of an MoE's experts."""
    if not model.experts:
        return count(model)
    expert = sum(x.local_size(MeshConfig()) for x in leaves(model, MeshConfig()) if x.axes[:2] == ("pp", "ep"))
    return count(model) - expert * (model.experts - model.top_k) // model.experts


def flops_per_token(model: ModelConfig, seq_len: int, *, causal: bool = False) -> int:
    """The convention: 6 N (forward 2 N, backward 4 N) + 12 L h s, recomputation not counted.

    Of a sequence 6 s N + 12 L h s^2. It differs from `forward` and `backward` by 6 for each parameter that is in no
    product: positions, norms, biases.
    """
    return 6 * active_parameters(model) + (6 if causal else 12) * model.layers * model.d_model * seq_len


def forward(model: ModelConfig, seq_len: int, *, causal: bool = False) -> Parts:
    """FLOPs of one sequence's forward pass by part: 2 s for each weight of a matrix that a token meets.

    Scores and values: 2 s^2 h each and layer. An MoE's token meets top_k experts.
    """
    return _forward(model, seq_len, Fraction(model.top_k), causal)


def _forward(model: ModelConfig, seq_len: int, experts: Fraction, causal: bool = False) -> Parts:
    """Of a model whose every token is sent to that many experts."""
    parts: Parts = defaultdict(int)
    for leaf in leaves(model, MeshConfig()):
        part = _part(leaf)
        met = experts / model.experts if "ep" in leaf.axes else 1
        if part is not None:
            parts[part] += int(2 * seq_len * math.prod(leaf.shape) * met)
    square = 2 * seq_len**2 * model.heads * model.head_dim * model.layers
    parts["scores"] = parts["values"] = square // 2 if causal else square
    parts["head"] = 2 * seq_len * model.vocab * model.d_model
    return {part: parts[part] for part in PARTS if part in parts}


def _part(leaf: Leaf) -> str | None:
    """The part whose product a block's leaf belongs to: the matrices are named w_..., but for the router."""
    *path, name = leaf.name.split(".")
    if name == "router":
        return "router"
    if path[:1] != ["blocks"] or not name.startswith("w_"):
        return None
    inward, outward = ("qkv", "output") if "attention" in path else ("mlp_in", "mlp_out")
    return outward if name == "w_out" else inward


def backward(model: ModelConfig, seq_len: int, *, causal: bool = False) -> Parts:
    """FLOPs of one sequence's backward pass by part: each product has two in it, of its input and of its weight."""
    return {part: 2 * flops for part, flops in forward(model, seq_len, causal=causal).items()}


def recomputation(model: ModelConfig, seq_len: int, policy: str, *, causal: bool = False) -> Parts:
    """FLOPs that a recomputation policy adds to one sequence, as the literature counts.

    none: nothing. selective: attention's scores and values once more (Korthikanti et al., arXiv:2205.05198, section 5).
    full: all of the layers' forward pass once more.
    """
    again = {"none": (), "selective": ("scores", "values"), "full": PARTS[:-1]}
    if policy not in again:
        raise ConfigError(f"policy={policy!r} is not known; choose one of {', '.join(again)}")
    return {part: n for part, n in forward(model, seq_len, causal=causal).items() if part in again[policy]}


def step_flops(config: RunConfig) -> Parts:
    """FLOPs that a step of this library computes by part, forward, backward and again, over all devices.

    Flash attention, the ring as well as cuDNN's, always makes its scores again in the backward pass (FlashAttention,
    arXiv:2205.14135); plain attention keeps its weights. parallel.remat = selective makes attention's result again too.
    full adds all of a layer's products but those of which no backward pass needs the result (a dense MLP's last, and
    attention's last where its sum over tp is saved) and those that parallel.save names. An MoE's experts compute all
    their slots, filled or not, and gradients of the gates need their results.

    What differs on a mesh is not counted: idle ticks of a pipeline, what cp devices skip of the causal square, padding
    of the vocabulary and of loss chunks, a router that every tp device computes (without sequence parallelism).
    """
    model, seq_len = config.model, config.train.seq_len
    once = _forward(model, seq_len, _slots(config))
    again = _again(config)
    return {part: config.train.global_batch * n * (3 + again.get(part, 0)) for part, n in once.items()}


def _again(config: RunConfig) -> Parts:
    """How often the backward pass makes the result of each part's products once more."""
    parallel, flash = config.parallel, int(config.model.attention == "flash")
    if parallel.remat == "none":
        return {"scores": flash}
    if parallel.remat == "selective":
        return {"scores": flash + 1, "values": flash}
    saved = {name: 1 - int(name in parallel.save) for name in ("qkv", "attention_sum", "mlp_in")}
    attention = {"qkv": saved["qkv"], "scores": flash + 1, "values": 1, "output": saved["attention_sum"]}
    return attention | {"router": 1, "mlp_in": saved["mlp_in"], "mlp_out": int(config.model.experts > 0)}


def _slots(config: RunConfig) -> Fraction:
    """Expert slots for each token: without a capacity every expert has one for it."""
    m = config.model
    if not (m.experts and m.capacity_factor):
        return Fraction(m.experts)
    return Fraction(m.experts * min(m.group, math.ceil(m.capacity_factor * m.group * m.top_k / m.experts)), m.group)


def training_days(parameters: float, tokens: float, gpu: Gpu, *, mfu: float, count: int = 1) -> float:
    """Days of training in bfloat16: 6 N tokens over count GPUs that reach `mfu` (0..1) of their peak."""
    return 6 * parameters * tokens / (gpu.peak("bfloat16") * mfu * count) / 86_400


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of a device in dense bfloat16, or None where it is not known (a CPU)."""
    found = gpu_of_kind(device_kind)
    return found and found.peak("bfloat16")
