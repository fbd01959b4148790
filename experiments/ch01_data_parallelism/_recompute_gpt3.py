"""The literature's numbers for GPT-3 175B, reproduced by formula, beside this library's.

Korthikanti et al., arXiv:2205.05198: selective recomputation saves 70 % of the activations for 2.7 % more FLOPs; full
recomputation was seen to cost 30 to 40 % of time. Their eq. 8 turns the s / 6h of the model's FLOPs into s / 3h: 12 s^2
h a layer, as much as attention's products forward and backward. Its forward pass once more is a third of that, 4 s^2 h.
Here even less is made again: the backward pass of plain attention reads its weights, for which the scores suffice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rich.table import Table

from experiments.harness import Check
from jax5d.config import PRESETS, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.activations import Activations
from jax5d.costs.flops import forward, recomputation, step_flops
from jax5d.costs.textbook import layer_bytes

Remat = Literal["none", "selective", "full"]
REMATS: tuple[Remat, ...] = ("none", "selective", "full")

MODEL = replace(
    PRESETS["gpt2"],
    layers=96,
    d_model=12_288,
    heads=96,
    d_ff=4 * 12_288,
    vocab=51_200,
    context=2048,
    dtype="bfloat16",
    attention="plain",
)
"""GPT-3 175B with their vocabulary."""


def _config(remat: Remat) -> RunConfig:
    """One sequence of 2048 tokens."""
    return RunConfig(
        model=MODEL, parallel=ParallelConfig(remat=remat), train=TrainConfig(global_batch=1, seq_len=MODEL.context)
    )


def _again(remat: Remat) -> float:
    """What a policy's forward pass once more adds to the model's FLOPs."""
    useful = 3 * sum(forward(MODEL, MODEL.context).values())
    return sum(recomputation(MODEL, MODEL.context, remat).values()) / useful


def _equation_8() -> float:
    """(1 + s / 3h + v / 12hL) / (1 + s / 6h + v / 12hL) - 1."""
    s, h, head = MODEL.context, MODEL.d_model, MODEL.vocab / (12 * MODEL.d_model * MODEL.layers)
    return (1 + s / (3 * h) + head) / (1 + s / (6 * h) + head) - 1


def _here(remat: Remat) -> float:
    """What this library's step adds."""
    return sum(step_flops(_config(remat)).values()) / (3 * sum(forward(MODEL, MODEL.context).values())) - 1


def checks() -> list[Check]:
    """The formulas of `jax5d.costs` against what the paper prints."""
    saved = 1 - layer_bytes(_config("selective")) / layer_bytes(_config("none"))
    return [
        Check.equal("GPT-3, share of a layer's bytes that selective recomputation saves", saved, 0.70, 0.005),
        Check.equal("GPT-3, FLOPs that it adds by their eq. 8", _equation_8(), 0.027, 0.0005),
        Check.equal("the same as three forward passes of attention", 3 * _again("selective"), 0.027, 0.0005),
        Check.equal("GPT-3, FLOPs that full recomputation adds, within 30 to 40 %", _again("full"), 0.35, 0.05),
    ]


def table() -> Table:
    """Their numbers and ours; bytes in units of s b h."""
    columns = ("policy", "s b h kept: Megatron", "here", "FLOPs added: paper", "one forward more", "here")
    table = Table(*columns, title="GPT-3 175B, 2048 tokens, plain attention, by formula")
    paper = {"none": "0", "selective": f"{_equation_8():.2%}", "full": "30-40 % of time"}
    unit = MODEL.context * MODEL.d_model
    for remat in REMATS:
        kept = layer_bytes(_config(remat)) / unit, Activations(_config(remat)).layer / unit
        table.add_row(
            remat, f"{kept[0]:.0f}", f"{kept[1]:.0f}", paper[remat], f"{_again(remat):.2%}", f"{_here(remat):.2%}"
        )
    return table
