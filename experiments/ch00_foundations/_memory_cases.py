"""The configurations that memory_buckets compiles."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from jax5d.config import PRESETS, MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig


def case(model: str, *, batch: int, length: int = 1024, **options: Any) -> RunConfig:
    """A preset in bfloat16 with 8 chunks of the loss; `options` are fields of mesh, model and parallel layout."""
    named = {"dtype": "bfloat16", "loss_chunks": 8, **options}
    parts: list[dict[str, Any]] = []
    for kind in (MeshConfig, ModelConfig, ParallelConfig):
        names = {field.name for field in fields(kind)}
        parts.append({name: value for name, value in named.items() if name in names})
    mesh, changes, parallel = parts
    preset = PRESETS[model]
    return RunConfig(
        MeshConfig(**mesh),
        replace(preset, context=max(preset.context, length), **changes),
        ParallelConfig(**parallel),
        TrainConfig(global_batch=batch, seq_len=length),
    )


BATCHES = [case("gpt2", batch=batch) for batch in (1, 2, 4, 8, 16)]
"""One device, 1024 tokens: from mostly state to mostly activations."""

LENGTHS = [case("gpt2", batch=4, length=length) for length in (512, 1024, 2048, 4096)]
"""One device, 4 sequences."""

SLOPES = {
    "nothing recomputed": case("gpt2", batch=16),
    "attention recomputed": case("gpt2", batch=16, remat="selective"),
    "layers recomputed": case("gpt2", batch=32, remat="full"),
}
"""Compared at two numbers of layers; recomputed, they keep most of what grows only of larger batches."""

OTHERS = [
    # one device: precision, recomputation, what is kept, accumulation, head
    case("gpt2", batch=8, remat="full"),
    case("gpt2", batch=8, remat="full", layers=24),
    case("gpt2", batch=8, dtype="float32"),
    case("gpt2", batch=8, dtype="float16"),
    case("gpt2", batch=8, param_dtype="bfloat16"),
    case("gpt2", batch=4, attention="plain"),
    case("gpt2", batch=8, tied=False),
    case("gpt2", batch=8, loss_chunks=1),
    case("gpt2", batch=16, microbatches=2),
    case("gpt2", batch=32, microbatches=4),
    case("gpt2", batch=32, microbatches=4, accumulate="bfloat16"),
    case("gpt2-medium", batch=16, remat="full", save=("attention_sum", "qkv", "mlp_in")),
    case("llama-1b", batch=4, length=4096, loss_chunks=16),
    case("llama-1b", batch=4, length=4096, loss_chunks=16, remat="full"),
    # one axis
    case("gpt2", batch=64, dp=8),
    case("gpt2", batch=64, dp=8, reduction="leaf"),
    case("gpt2", batch=64, dp=8, reduction="single"),
    case("gpt2-medium", batch=64, length=512, dp=8, remat="selective", reduction="bucket"),
    case("gpt2-xl", batch=8, dp=8),
    case("gpt2-medium", batch=64, dp=8, microbatches=2),
    case("llama-1b", batch=16, length=2048, dp=8),
    case("gpt2-xl", batch=8, tp=5),
    case("gpt2-medium", batch=8, tp=8, sequence=True),
    case("llama-1b", batch=8, length=4096, tp=4, sequence=True, loss_chunks=16),
    case("gpt2-medium", batch=32, pp=4, microbatches=8),
    case("gpt2-medium", batch=32, pp=4, microbatches=8, schedule="afab"),
    case("gpt2-medium", batch=32, pp=4, microbatches=8, remat="full"),
    case("gpt2", batch=8, length=4096, cp=4),
    case("gpt2", batch=8, length=4096, cp=4, remat="full"),
    case("gpt2", batch=16, length=2048, cp=2, microbatches=4, remat="selective"),
    case("gpt2", batch=16, pp=2, microbatches=4, dtype="float32"),
    case("gpt2", batch=16, pp=2, microbatches=4, dropout=0.1),
    case("gpt2", batch=32, length=2048, dp=4, microbatches=8, dtype="float32", remat="selective"),
    case("llama-1b", batch=32, length=1024, pp=4, remat="full"),
    # several axes
    case("gpt2-medium", batch=16, dp=2, tp=4),
    case("gpt2-medium", batch=16, tp=4, microbatches=2, sequence=True),
    case("gpt2-medium", batch=32, length=512, dp=2, tp=4, sequence=True),
    case("gpt2-medium", batch=8, length=2048, dp=2, cp=4),
    case("gpt2-medium", batch=32, pp=2, dp=2, tp=2, microbatches=4),
    case("gpt2-medium", batch=16, pp=2, tp=2, microbatches=4, sequence=True),
    case("llama-1b", batch=16, length=2048, pp=2, dp=2, tp=2, microbatches=4),
    case("gpt2-medium", batch=16, length=2048, pp=2, cp=2, tp=2, microbatches=4, sequence=True),
    case("gpt2", batch=16, length=4096, pp=2, cp=4, microbatches=4),
    case("gpt2", batch=32, pp=4, dp=2, microbatches=8, remat="full", schedule="afab"),
    case("gpt2-medium", batch=32, length=512, pp=2, dp=2, tp=2, microbatches=4, remat="full", schedule="afab"),
    case("gpt2-xl", batch=64, pp=4, dp=2, microbatches=8, remat="full"),
    # states shared out
    case("gpt2", batch=64, dp=8, zero=3),
    case("gpt2-medium", batch=64, dp=8, remat="full", zero=1),
    case("gpt2-medium", batch=128, dp=8, microbatches=2, zero=1),
    case("gpt2-medium", batch=128, dp=8, microbatches=2, zero=2),
    case("gpt2-medium", batch=64, dp=8, zero=3, regather=False),
    case("gpt2-medium", batch=16, dp=4, tp=2, sequence=True, zero=3),
    case("gpt2-medium", batch=32, pp=2, dp=2, tp=2, microbatches=4, zero=1),
    case("llama-1b", batch=32, length=2048, dp=8, loss_chunks=16, remat="full", microbatches=2, zero=3),
    case("llama-1b", batch=64, length=2048, dp=64, loss_chunks=16, zero=2),
    case("gpt2-xl", batch=64, dp=64, remat="full", zero=3),
    # 64 devices
    case("gpt2-xl", batch=64, pp=8, dp=8, microbatches=8, remat="full"),
    case("gpt2-medium", batch=64, pp=4, dp=4, tp=4, microbatches=4, remat="full"),
    case("llama-1b", batch=32, length=4096, dp=8, tp=8, sequence=True),
    case("llama-1b", batch=64, length=2048, pp=4, dp=4, tp=4, microbatches=8),
]

FEW = [case("gpt2", batch=4), case("gpt2", batch=8, tp=4, remat="full")]
"""What --quick compiles besides one slope."""


def deeper(config: RunConfig) -> RunConfig:
    """The same with twice the layers."""
    return replace(config, model=replace(config.model, layers=2 * config.model.layers))
