"""One GPT-2 step by the library and by the automatic partitioner, side by side on 8 fake CPU devices.

    python benchmarks/gspmd.py [--rounds 9] [--remat none|full] [--zero 0|1|2|3] [--json FILE]

Both start from the same weights and see the same batches in float32, with AdamW, clipping and recomputation alike, and
with --zero the same stage of ZeRO over dp; their losses must agree to 1e-5 over three steps before anything is timed.
They are timed in turn, round by round, each first in every second round, and the medians are printed: a noisy machine
is noisy for both, and processor time hardly sees what else runs. Bytes are counted from both compiled programs by one
counter (`jax5d.measure.timeline`), and the library's also from its jaxpr. About 3 minutes on 2 CPU cores that have
nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table

from benchmarks import automatic, automatic_fsdp
from jax5d.config import MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig, check
from jax5d.measure.ledger import ledger
from jax5d.measure.timeline import timeline
from jax5d.mesh import use_cpu_devices
from jax5d.train.step import Trainer

MESHES = (MeshConfig(dp=8), MeshConfig(dp=4, tp=2), MeshConfig(dp=2, tp=4))
MODEL = ModelConfig(layers=8, d_model=256, heads=8, d_ff=1024, vocab=8192, context=256)
TRAIN = TrainConfig(global_batch=16, seq_len=256, clip=1.0)
STEPS = 3
"""Steps over which the two losses are compared."""
CLOSE = 1e-5
"""Largest relative difference of the losses."""


@dataclass
class Side:
    """One of the two ways, compiled: `run(batch)` does a step and returns its loss."""

    run: Callable[[dict[str, np.ndarray]], jax.Array]
    compiled: Any
    trace_seconds: float
    compile_seconds: float
    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def time(self, batch: dict[str, np.ndarray]) -> None:
        """One step under both clocks: the wall's, and that of the processor time of all this process's threads."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.run(batch)
        self.step_seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)

    def report(self, mesh: MeshConfig) -> dict[str, Any]:
        """What is printed, in SI units."""
        moved = timeline(self.compiled.as_text(), mesh)
        return {
            "step_seconds": median(self.step_seconds),
            "cpu_seconds": median(self.cpu_seconds),
            "all_step_seconds": self.step_seconds,
            "all_cpu_seconds": self.cpu_seconds,
            "trace_seconds": self.trace_seconds,
            "compile_seconds": self.compile_seconds,
            "collectives": sum(m.count for m in moved),
            "payload_bytes": sum(m.payload_bytes for m in moved),
            "wire_bytes": float(sum(m.wire_bytes for m in moved)),
            "temporary_bytes": self.compiled.memory_analysis().temp_size_in_bytes,
        }


def build(step: Any, args: tuple) -> tuple[Any, float, float]:
    """A jitted step, compiled for `args`; seconds of tracing and of compiling."""
    start = time.perf_counter()
    lowered = step.lower(*args)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return compiled, traced - start, time.perf_counter() - traced


def ours(trainer: Trainer) -> tuple[Side, float]:
    """The library's side, and the bytes on the wire that its jaxpr gives."""

    def place(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {name: jax.device_put(value[None], trainer.batch_sharding) for name, value in batch.items()}

    state = trainer.init()
    args = state, place(batch_of(0))
    compiled, trace, compile_ = build(trainer.step, args)
    wire = float(sum(c.wire_bytes for c in ledger(trainer.step, *args)))

    def run(batch: dict[str, np.ndarray]) -> jax.Array:
        nonlocal state
        state, metrics = compiled(state, place(batch))
        jax.block_until_ready(state)
        return metrics["loss"]

    return Side(run, compiled, trace, compile_), wire


def theirs(trainer: Trainer, stage: int) -> Side:
    """The automatic partitioner's side: the library's initial values, its layout but for ZeRO's, and its optimizer."""
    sharding = NamedSharding(trainer.mesh, automatic.BATCH_SPEC)

    def place(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {name: jax.device_put(value, sharding) for name, value in batch.items()}

    config, first = trainer.config, trainer.init()
    program, shardings = automatic_fsdp.lay_out(automatic.Program(remat=config.parallel.remat), trainer, stage)
    step = automatic.make_step(trainer.mesh, trainer.optimizer, shardings, program, clip=config.train.clip)
    state = jax.device_put((first.params, first.opt_state), shardings)
    compiled, trace, compile_ = build(step, (*state, place(batch_of(0))))

    def run(batch: dict[str, np.ndarray]) -> jax.Array:
        nonlocal state
        *state, loss = compiled(*state, place(batch))
        jax.block_until_ready(state)
        return loss

    return Side(run, compiled, trace, compile_)


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Random tokens, a function of the step: int32 [rows, sequence]."""
    tokens = np.random.default_rng(step).integers(
        MODEL.vocab, size=(TRAIN.global_batch, TRAIN.seq_len + 1), dtype=np.int32
    )
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def compare(mesh: MeshConfig, remat: Literal["none", "full"], stage: int, rounds: int) -> dict[str, Any]:
    """Both sides on one mesh, at one stage of ZeRO: losses held together, then timed in turn."""
    config = RunConfig(mesh=mesh, model=MODEL, parallel=ParallelConfig(remat=remat), train=TRAIN)
    check(config)
    plain = sharded = Trainer.create(config)
    if stage:
        config = replace(config, parallel=replace(config.parallel, zero=stage))
        check(config)
        sharded = Trainer.create(config)
    (a, ledger_wire), b = ours(sharded), theirs(plain, stage)
    losses = [(float(a.run(batch_of(i))), float(b.run(batch_of(i)))) for i in range(STEPS)]
    for step, (x, y) in enumerate(losses):
        if abs(x - y) > CLOSE * abs(y):
            raise AssertionError(f"step {step}: loss {x} by the library, {y} by the partitioner")
    for i in range(rounds):
        for side in (a, b) if i % 2 else (b, a):
            side.time(batch_of(STEPS + i))
    return {
        "mesh": asdict(mesh),
        "losses": losses,
        "ours": a.report(mesh) | {"ledger_wire_bytes": ledger_wire},
        "gspmd": b.report(mesh),
    }


ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("step, s", "step_seconds", 1, ".3f"),
    ("step, processor s", "cpu_seconds", 1, ".3f"),
    ("trace, s", "trace_seconds", 1, ".2f"),
    ("compile, s", "compile_seconds", 1, ".2f"),
    ("collectives a step", "collectives", 1, ".0f"),
    ("their operands, MB a device", "payload_bytes", 1e6, ".2f"),
    ("sent, MB a device", "wire_bytes", 1e6, ".2f"),
    ("sent by the jaxpr, MB a device", "ledger_wire_bytes", 1e6, ".2f"),
    ("temporary memory, MB a device", "temporary_bytes", 1e6, ".1f"),
)
"""Label, key of a report, unit and format of each row."""


def show(results: list[dict[str, Any]], setting: str, rounds: int) -> None:
    """Print the table."""
    table = Table(title=f"GPT-2 {MODEL.layers} x {MODEL.d_model}, {setting}, median of {rounds} rounds in turn")
    for column in ("mesh", "quantity"):
        table.add_column(column, no_wrap=True)
    for column in ("jax5d", "partitioner", "ratio"):
        table.add_column(column, justify="right")
    for result in results:
        name = " ".join(f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1)
        for label, key, unit, form in ROWS:
            values = [result[side].get(key) for side in ("ours", "gspmd")]
            cells = ["" if v is None else format(v / unit, form) for v in values]
            ratio = values[0] / values[1] if values[1] else None
            table.add_row(name if key == ROWS[0][1] else "", label, *cells, "" if ratio is None else f"{ratio:.3f}")
        table.add_section()
    Console().print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each side, in turn (default 9)")
    parser.add_argument("--remat", choices=("none", "full"), default="full", help="recomputation (default full)")
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="stage of ZeRO over dp (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    options = parser.parse_args()
    use_cpu_devices(8)
    results = [compare(mesh, options.remat, options.zero, options.rounds) for mesh in MESHES]
    stage = f", ZeRO {options.zero}" if options.zero else ""
    show(results, f"remat {options.remat}{stage}", options.rounds)
    if options.json:
        setting = {"remat": options.remat, "zero": options.zero, "jax": jax.__version__}
        options.json.write_text(json.dumps(setting | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
