"""Tensor parallelism on 8 H100s that are not there, by the library and by the automatic partitioner.

    python benchmarks/tensor.py [--layers 8] [--rows 1] [--only NAME ...] [--json FILE]

Layers of the 8.86B size (d_model 4096, 32 heads, d_ff 14336; GPT-2's kind, which both sides have), 4096 tokens a
sequence, bfloat16 from a float32 master, cuDNN's attention, logits for an eighth of the tokens at a time, nothing
recomputed. Bytes are those one device sends in a step by ring algorithms; they count as hidden where the schedule puts
a matrix multiply or attention kernel between a collective's start and its done. Nothing runs, so this says nothing of
time. About two minutes on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import automatic, automatic_fsdp
from benchmarks.zero import GPU, Side, arguments
from jax5d.config import MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.measure.aot import Memory, absent_gpus, compile_step
from jax5d.measure.timeline import Scheduled, timeline
from jax5d.mesh import make_mesh, use_cpu_devices
from jax5d.train.step import Trainer

SEQUENCE = 4096

WINDOWED = {"xla_gpu_threshold_for_windowed_einsum_mib": 0, "xla_gpu_multi_streamed_windowed_einsum": True}
"""XLA's own way to break a product and its collective into pieces."""

Found = tuple[Memory, list[Scheduled]]


def config(layers: int, rows: int) -> RunConfig:
    """The run that all sides do, but for the layout of the residual stream and the pieces."""
    model = ModelConfig(
        layers=layers, d_model=4096, heads=32, d_ff=14336, vocab=131072, context=SEQUENCE, dtype="bfloat16"
    )
    return RunConfig(
        mesh=MeshConfig(tp=8),
        model=model,
        parallel=ParallelConfig(loss_chunks=8),
        train=TrainConfig(global_batch=rows, seq_len=SEQUENCE),
    )


def library(run: RunConfig, **options: Any) -> Found:
    """The library's step, with options of its parallel layout."""
    compiled = compile_step(replace(run, parallel=replace(run.parallel, **options)), GPU)
    return compiled.memory, compiled.timeline


def partitioner(run: RunConfig, stream: tuple[str | None, ...], flags: dict[str, Any]) -> Found:
    """The automatic partitioner's step with that layout of the residual stream, under XLA flags without dashes."""
    mesh = make_mesh(run.mesh, absent_gpus(GPU, run.mesh.size))
    trainer = Trainer.create(run, mesh=mesh)
    program = automatic.Program(
        remat=run.parallel.remat,
        dtype=run.model.dtype,
        attend=automatic_fsdp.cudnn_attention,
        head=automatic_fsdp.cross_entropy_in_chunks(run.parallel.loss_chunks, run.mesh.dp),
        stream=stream,
    )
    shardings = automatic_fsdp.named(trainer)
    step: Any = automatic.make_step(mesh, trainer.optimizer, shardings, program, clip=run.train.clip)
    compiled = step.lower(*arguments(trainer, shardings, mesh)).compile(compiler_options=flags)
    return Memory.of(compiled), timeline(compiled.as_text(), run.mesh)


WHOLE, SPLIT = ("dp", None, None), ("dp", "tp", None)
SIDES: dict[str, Callable[[RunConfig], Found]] = {
    "library": library,
    "library, sequence": lambda run: library(run, sequence=True),
    "library, overlap": lambda run: library(run, sequence=True, overlap=True),
    "partitioner": lambda run: partitioner(run, WHOLE, {}),
    "partitioner, sequence": lambda run: partitioner(run, SPLIT, {}),
    "partitioner, windowed": lambda run: partitioner(run, SPLIT, WINDOWED),
}


def show(sides: list[Side], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    table.add_column("side", no_wrap=True)
    for heading in ("peak", "temporary", "sent", "hidden", "share"):
        table.add_column(heading, justify="right")
    for side in sides:
        sent, hidden = side.wire(), side.wire(hidden=True)
        numbers = side.memory.peak, side.memory.temporaries, sent, hidden
        table.add_row(side.name, *(f"{n / 1e9:.2f}" for n in numbers), f"{hidden / sent:.0%}")
    Console(width=120).print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="layers (default 8; all are alike)")
    parser.add_argument("--rows", type=int, default=1, help=f"sequences of {SEQUENCE} tokens (default 1)")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), help="sides to compile (default all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    options = parser.parse_args()
    use_cpu_devices(1)
    run = config(options.layers, options.rows)
    sides = [Side(name, run.mesh.size, *SIDES[name](run)) for name in options.only]
    show(sides, f"tp 8, {options.layers} layers of 4096, {options.rows} x {SEQUENCE} tokens on 8 {GPU}; GB of a device")
    if options.json:
        reports = [side.report() for side in sides]
        options.json.write_text(json.dumps({"jax": jax.__version__, "sides": reports}, indent=1))


if __name__ == "__main__":
    main()
