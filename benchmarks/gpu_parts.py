"""The parts of `benchmarks/gpu.py`, each run in a process of its own: python -m benchmarks.gpu_parts PART [...].

A part prints one JSON object on its last line of standard output.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jax5d.config import PRESETS, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.flops import flops_per_token
from jax5d.mesh import make_mesh
from jax5d.train.step import Trainer

STEPS = 5
"""Steps whose loss is compared with the CPU's."""
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of a loss from float32 on the CPU."""
BATCHES = (64, 32, 16, 8, 4, 2, 1)
"""Sequences of a step to try, largest first."""
HEADROOM = 0.9
"""Share of the device's memory that a step may take."""
WARM, TIMED = 3, 12
"""Steps that are not timed, and steps that are."""


Device = Any
"""A JAX device; JAX exports its type as a variable, which no type checker accepts."""


def probe(device: Device) -> dict[str, Any]:
    """Which device, and which JAX."""
    return {"device": device.device_kind, "memory_bytes": memory_limit(device), "jax": jax.__version__}


def memory_limit(device: Device) -> int | None:
    """Bytes that JAX may allocate, where the device says."""
    return (device.memory_stats() or {}).get("bytes_limit")


def batch_of(trainer: Trainer, rows: int, seed: int) -> dict[str, jax.Array]:
    """Random tokens, laid out for the trainer."""
    config = trainer.config
    shape = (1, rows, config.train.seq_len + 1)
    tokens = np.random.default_rng(seed).integers(config.model.vocab, size=shape, dtype=np.int32)
    parts = {"inputs": tokens[..., :-1], "labels": tokens[..., 1:]}
    return {name: jax.device_put(part, trainer.batch_sharding) for name, part in parts.items()}


def trainer_on(device: Device, model: ModelConfig, rows: int, chunks: int) -> Trainer:
    """A trainer on a mesh of one."""
    config = RunConfig(
        model=model,
        parallel=ParallelConfig(loss_chunks=chunks),
        train=TrainConfig(global_batch=rows, seq_len=model.context, warmup=2),
    )
    return Trainer.create(config, mesh=make_mesh(config.mesh, [device]))


def losses(device: Device, dtype: str) -> list[float]:
    """The tiny model's loss over a few steps."""
    trainer = trainer_on(device, replace(PRESETS["gpt2-tiny"], dtype=dtype), 8, 1)
    with jax.default_matmul_precision("highest"):  # float32 in full, where a GPU would take TF32
        state, found = trainer.init(), []
        for i in range(STEPS):
            state, metrics = trainer.step(state, batch_of(trainer, 8, i))
            found.append(float(metrics["loss"]))
    return found


def loss(device: Device) -> dict[str, Any]:
    """This device's losses beside the CPU's."""
    expected = losses(jax.devices("cpu")[0], "float32")
    checks = []
    for dtype, limit in LIMITS.items():
        found = losses(device, dtype)
        difference = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        checks.append(
            {"name": dtype, "losses": found, "difference": difference, "limit": limit, "held": difference <= limit}
        )
    return {"cpu": expected, "checks": checks, "held": all(c["held"] for c in checks)}


def speed(device: Device, name: str) -> dict[str, Any]:
    """Step time of one preset in bfloat16, at the largest batch that fits."""
    model = replace(PRESETS[name], dtype="bfloat16")
    for rows in BATCHES if device.platform != "cpu" else (2,):
        trainer = trainer_on(device, model, rows, 8)
        batch = batch_of(trainer, rows, 0)
        start = time.perf_counter()
        compiled = trainer.step.lower(trainer.shapes, batch).compile()
        seconds, needed, limit = time.perf_counter() - start, _needed(compiled), memory_limit(device)
        if limit is None or needed <= HEADROOM * limit:
            per_step, last = _timed(compiled, trainer.init(), batch)
            return report(model, rows, per_step) | {
                "compile_seconds": seconds,
                "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", needed),
                "planned_bytes": needed,
                "loss": last,
            }
    return {"error": f"{name} does not fit at one sequence a step"}


def _needed(compiled: Any) -> int:
    """Bytes that a compiled step needs; its donated state counts once."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def _timed(compiled: Any, state: Any, batch: dict[str, jax.Array]) -> tuple[float, float]:
    """Seconds a step, steps enqueued back to back; and the last loss."""
    metrics, start = {}, 0.0
    for i in range(WARM + TIMED):
        if i == WARM:
            jax.block_until_ready(state)
            start = time.perf_counter()
        state, metrics = compiled(state, batch)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / TIMED, float(metrics["loss"])


def report(model: ModelConfig, rows: int, seconds: float) -> dict[str, Any]:
    """Numbers of a step of `seconds` with `rows` sequences."""
    tokens = rows * model.context
    return {
        "model": model.name,
        "batch": rows,
        "tokens": tokens,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_token": flops_per_token(model, model.context),
    }


def torch(name: str, rows: int, where: str) -> dict[str, Any]:
    """The same preset and batch in PyTorch on "cuda" or "cpu"; {"skipped": why} where torch cannot."""
    try:
        from benchmarks import torch_gpt2
    except ImportError as error:
        return {"skipped": f"torch cannot be imported ({error})"}
    if where == "cuda" and not torch_gpt2.has_cuda():
        return {"skipped": "torch finds no CUDA device"}
    model = PRESETS[name]
    seconds, rest = torch_gpt2.step_seconds(model, rows, where, warm=WARM, timed=TIMED)
    return report(model, rows, seconds) | rest


def main() -> None:
    """The command line: run one part and print what it found."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("part", choices=("probe", "loss", "speed", "torch"))
    parser.add_argument("model", nargs="?", default="gpt2", help="preset, for speed and torch")
    parser.add_argument("rows", nargs="?", type=int, default=8, help="sequences of a step, for torch")
    parser.add_argument("--cpu", action="store_true", help="on the CPU")
    options = parser.parse_args()
    if options.cpu or options.part == "torch":  # PyTorch has the GPU's memory to itself
        jax.config.update("jax_platforms", "cpu")
    else:
        jax.config.update("jax_platforms", "cuda,cpu")
    if options.part == "torch":
        found = torch(options.model, options.rows, "cpu" if options.cpu else "cuda")
    else:
        parts = {"probe": probe, "loss": loss, "speed": partial(speed, name=options.model)}
        device = jax.devices()[0]
        if device.platform == "cpu" and not options.cpu:  # JAX falls back in silence
            raise SystemExit("JAX finds only CPUs")
        found = parts[options.part](device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
