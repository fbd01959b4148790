"""ZeRO-3 of gpt2-xl by the library and by the automatic partitioner, compiled for H100s that are not there.

    python benchmarks/zero.py [--gpus 8 64] [--only NAME ...] [--save NAME ...] [--json FILE]

Both keep parameters, gradients and AdamW's state sharded over dp, compute in bfloat16 from a float32 master, sum
gradients in bfloat16, use cuDNN's attention, recompute every layer and make logits for an eighth of the tokens at a
time; 8 x 1024 tokens a device, hosts of 8. Memory is the compiler's account. Bytes are those one device sends in a
step by ring algorithms; they count as hidden where the schedule puts a matrix multiply or attention kernel between a
collective's start and its done. Nothing runs, so this says nothing of time. About a minute on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

from benchmarks import automatic, automatic_fsdp
from jax5d.config import PRESETS, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.layers.names import NAMES
from jax5d.measure.aot import Memory, absent_gpus, compile_step
from jax5d.measure.timeline import Scheduled, timeline
from jax5d.mesh import make_mesh, use_cpu_devices
from jax5d.train.step import Trainer

GPU = "h100"
ROWS_A_GPU = 8
SEQUENCE = 1024

PIPELINED = {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,  # without this one no reduce-scatter is hidden
}
"""XLA's passes that move a loop's collectives to the iteration before or behind."""
ONE_GATHER = {"xla_gpu_all_gather_combine_threshold_bytes": 2**28}
"""A layer's weights in one message, as `jax5d.mesh.gpu_options` has it for its gradients."""


@dataclass(frozen=True)
class Side:
    """One program, compiled."""

    name: str
    gpus: int
    memory: Memory
    timeline: list[Scheduled]

    def wire(self, *ops: str, hidden: bool = False) -> float:
        """Bytes that a device sends in a step by `ops` (none: by all); with `hidden`, those of them that are."""
        entries = [e for e in self.timeline if (not ops or e.op in ops) and (e.hidden or not hidden)]
        return float(sum(e.wire_bytes for e in entries))

    def report(self) -> dict[str, Any]:
        """All of it, in bytes."""
        moved = [asdict(e) | {"wire_bytes": float(e.wire_bytes)} for e in self.timeline]
        return {
            "name": self.name,
            "gpus": self.gpus,
            "peak": self.memory.peak,
            "memory": asdict(self.memory),
            "timeline": moved,
        }


def config(gpus: int, save: tuple[Any, ...]) -> RunConfig:
    """The run that both sides do, but for the stage of ZeRO."""
    return RunConfig(
        mesh=MeshConfig(dp=gpus),
        model=replace(PRESETS["gpt2-xl"], dtype="bfloat16"),
        parallel=ParallelConfig(remat="full", save=save, loss_chunks=8, accumulate="bfloat16"),
        train=TrainConfig(global_batch=ROWS_A_GPU * gpus, seq_len=SEQUENCE),
    )


def library(run: RunConfig) -> tuple[Memory, list[Scheduled]]:
    """The library's step."""
    compiled = compile_step(replace(run, parallel=replace(run.parallel, zero=3)), GPU)
    return compiled.memory, compiled.timeline


def partitioner(run: RunConfig, flags: dict[str, Any]) -> tuple[Memory, list[Scheduled]]:
    """The automatic partitioner's step, under XLA flags by name without dashes."""
    mesh = make_mesh(run.mesh, absent_gpus(GPU, run.mesh.size))
    trainer = Trainer.create(run, mesh=mesh)
    base = automatic.Program(
        remat=run.parallel.remat,
        save=run.parallel.save,
        dtype=run.model.dtype,
        attend=automatic_fsdp.cudnn_attention,
        head=automatic_fsdp.cross_entropy_in_chunks(run.parallel.loss_chunks, run.mesh.dp),
    )
    program, shardings = automatic_fsdp.lay_out(base, trainer, 3)
    step: Any = automatic.make_step(mesh, trainer.optimizer, shardings, program, clip=run.train.clip)
    compiled = step.lower(*arguments(trainer, shardings, mesh)).compile(compiler_options=flags)
    return Memory.of(compiled), timeline(compiled.as_text(), run.mesh)


def arguments(trainer: Trainer, shardings: tuple[Any, Any], mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """Parameters, optimizer state and batch of the partitioner's step as ShapeDtypeStructs."""
    shapes = trainer.shapes.params, trainer.shapes.opt_state
    params, opt_state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )
    batch = NamedSharding(mesh, automatic.BATCH_SPEC)
    train = trainer.config.train
    ids = jax.ShapeDtypeStruct((train.global_batch, train.seq_len), jnp.int32, sharding=batch)
    return params, opt_state, {"inputs": ids, "labels": ids}


SIDES: dict[str, Callable[[RunConfig], tuple[Memory, list[Scheduled]]]] = {
    "library": library,
    "partitioner": lambda run: partitioner(run, {}),
    "pipelined": lambda run: partitioner(run, PIPELINED),
    "pipelined-combined": lambda run: partitioner(run, PIPELINED | ONE_GATHER),
}
"""By name: the library; the partitioner as XLA is, with pipelining, and with a layer's gathers combined as well."""

COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("all-gather", ("all_gather",)),
    ("reduce-scatter", ("psum_scatter",)),
    ("all-reduce", ("psum", "pmax")),
    ("others", ("all_to_all", "ppermute")),
    ("together", ()),
)
"""Heading of a column of bytes, and the operations in it."""


def show(sides: list[Side]) -> None:
    """Print the table."""
    table = Table(title=f"gpt2-xl, ZeRO-3, {ROWS_A_GPU} x {SEQUENCE} tokens on each {GPU}; GB of a device")
    for heading in ("GPUs", "side"):
        table.add_column(heading, no_wrap=True)
    for heading in ("peak", *(name for name, _ in COLUMNS), "gathers hidden", "sums hidden"):
        table.add_column(heading, justify="right")
    for side in sides:
        sent = [f"{side.wire(*ops) / 1e9:.2f}" for _, ops in COLUMNS]
        hidden = [_share(side, "all_gather"), _share(side, "psum_scatter", "psum")]
        table.add_row(str(side.gpus), side.name, f"{side.memory.peak / 1e9:.2f}", *sent, *hidden)
    Console(width=140).print(table)


def _share(side: Side, *ops: str) -> str:
    """Hidden bytes of `ops`, and their part of all."""
    hidden, every = side.wire(*ops, hidden=True), side.wire(*ops)
    return f"{hidden / 1e9:.2f} ({hidden / every:.0%})" if every else ""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64], help="sizes of the cluster (default 8 64)")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), help="sides to compile (default all)")
    parser.add_argument("--save", nargs="*", choices=NAMES, default=[], help="values of a layer to keep (default none)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    options = parser.parse_args()
    use_cpu_devices(1)
    sides = [
        Side(name, gpus, *SIDES[name](config(gpus, tuple(options.save))))
        for gpus in options.gpus
        for name in options.only
    ]
    show(sides)
    if options.json:
        reports = [side.report() for side in sides]
        options.json.write_text(json.dumps({"jax": jax.__version__, "save": options.save, "sides": reports}, indent=1))


if __name__ == "__main__":
    main()
