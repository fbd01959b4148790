"""FLOPs of training by formula, against published formulae and runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny

from jax5d.config import PRESETS, ConfigError
from jax5d.costs.flops import (
    backward,
    flops_per_token,
    forward,
    peak_flops,
    recomputation,
    step_flops,
    training_days,
)
from jax5d.costs.gpus import gpu
from jax5d.costs.parameters import count

GPT3 = replace(PRESETS["gpt2"], layers=96, d_model=12_288, heads=96, d_ff=4 * 12_288, vocab=51_200, context=2048)


def test_parts_of_gpt2():
    """GPT-2 124M at 1024 tokens, by hand: a layer has 4 h^2 weights in attention, 8 h^2 in the MLP, two squares."""
    s, h, layers = 1024, 768, 12
    assert forward(PRESETS["gpt2"], s) == {
        "qkv": layers * 2 * s * h * 3 * h,
        "scores": layers * 2 * s * s * h,
        "values": layers * 2 * s * s * h,
        "output": layers * 2 * s * h * h,
        "mlp_in": layers * 2 * s * h * 4 * h,
        "mlp_out": layers * 2 * s * h * 4 * h,
        "head": 2 * s * h * 50257,
    }
    whole, half = forward(PRESETS["gpt2"], s), forward(PRESETS["gpt2"], s, causal=True)
    assert sum(whole.values()) - sum(half.values()) == layers * 2 * s * s * h


def test_whole_step_of_gpt3():
    """Korthikanti et al., arXiv:2205.05198, appendix A: 72 L s h^2 (1 + s / 6h + v / 12hL) a sequence."""
    s, h, layers, v = 2048, 12_288, 96, 51_200
    total = sum(forward(GPT3, s).values()) + sum(backward(GPT3, s).values())
    assert total == 72 * layers * s * h * h + 12 * layers * s * s * h + 6 * s * h * v


def test_convention_counts_every_parameter():
    """6 s N + 12 L h s^2 is more by 6 s for each parameter that is in no product: positions, norms and biases."""
    model, s = PRESETS["gpt2"], 1024
    h, layers = model.d_model, model.layers
    exact = sum(forward(model, s).values()) + sum(backward(model, s).values())
    assert s * flops_per_token(model, s) - exact == 6 * s * (model.context * h + 13 * layers * h + 2 * h)
    assert s * flops_per_token(model, s) == 6 * s * count(model) + 12 * layers * h * s * s
    causal = sum(forward(model, s, causal=True).values()) + sum(backward(model, s, causal=True).values())
    assert s * flops_per_token(model, s) - exact == s * flops_per_token(model, s, causal=True) - causal


def test_experts_that_a_token_meets():
    """Two experts of 32 x 128 twice, a router of 32 x 4, in each of four layers; capacity bounds what is computed."""
    run = tiny.config(moe=True)
    parts = forward(run.model, 32)
    assert parts["mlp_in"] == parts["mlp_out"] == 4 * 2 * 32 * 2 * 32 * 128
    assert parts["router"] == 4 * 2 * 32 * 32 * 4
    capped = tiny.config(moe=True, capacity_factor=1.5, group=8)  # 1.5 x 8 x 2 / 4 = 6 slots for 8 tokens, 4 experts
    assert step_flops(run)["mlp_in"] == 3 * 8 * parts["mlp_in"] * 4 // 2
    assert step_flops(capped)["mlp_in"] == 3 * 8 * parts["mlp_in"] * 3 // 2


def test_recomputation():
    """GPT-3: full recomputation adds a third of the layers' work; selective 4 s^2 h of 72 s h^2 + 12 s^2 h a layer."""
    s, h, layers = 2048, 12_288, 96
    layer = 72 * s * h * h + 12 * s * s * h
    assert recomputation(GPT3, s, "none") == {}
    assert sum(recomputation(GPT3, s, "selective").values()) == layers * 4 * s * s * h
    assert 3 * sum(recomputation(GPT3, s, "full").values()) == layers * layer
    with pytest.raises(ConfigError, match=r"policy='all' .* none, selective, full"):
        recomputation(GPT3, s, "all")


def test_training_days():
    """LLaMA 65B (arXiv:2302.13971): 1.4T tokens on 2048 A100s at 380 tokens/s each "takes approximately 21 days".

    380 tokens/s are 6 x 65.2e9 x 380 = 1.487e14 FLOP/s of 312e12. GPT-3 175B (Narayanan et al., arXiv:2104.04473,
    section 5.1): 300B tokens on 1024 A100s at 140 TFLOP/s, 34 days with 8 N FLOPs a token, so 25.5 with 6 N.
    """
    days = training_days(65.2e9, 1.4e12, gpu("a100-80"), mfu=1.487e14 / 312e12, count=2048)
    assert round(days) == 21
    days = training_days(175e9, 300e9, gpu("a100-80"), mfu=140 / 312, count=1024)
    assert days == pytest.approx(34 * 6 / 8, rel=0.01)


def test_peak_flops():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops("cpu") is None
