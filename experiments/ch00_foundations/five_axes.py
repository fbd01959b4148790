"""The five axes, one at a time: what each splits, what it puts on the wire, what it does to memory.

Claim: for each axis alone, at size 2 and 4, the bytes that a step sends and the bytes of state that a device holds are
exactly those of theory.

    python run_experiment.py five_axes            about 2 minutes on 2 CPU cores: 4 fake devices
    python run_experiment.py five_axes --quick    under a minute: size 2 only

Expected: dp splits only the batch, so it saves no state and pays once a step; ep also splits the experts; tp and pp
split every large array and pay in each layer or tick; cp splits the sequence and sends keys and values round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import Traffic, on_first_devices, wire_total
from jax5d.config import PRESETS, ConfigError, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.memory import state_bytes
from jax5d.measure.memory import bytes_on_device, split_leaves

CAPSULES = [3]
CLAIM = "Each axis alone splits the arrays, sends the bytes and saves the state bytes that theory says"
NEEDS = "4 fake CPU devices and 2 minutes on 2 cores, or 4 GPUs"

DEFAULTS = Options(mesh=MeshConfig(dp=4))
QUICK = replace(DEFAULTS, mesh=MeshConfig(dp=2))

RUN = RunConfig(
    model=replace(PRESETS["moe-tiny"], layers=4, d_model=64, d_ff=256),
    parallel=ParallelConfig(microbatches=4),
    train=TrainConfig(global_batch=16, seq_len=128),
)
"""A small MoE, because it has something for every axis to split."""


@dataclass(frozen=True)
class Row:
    """One mesh, measured and from theory. Bytes are per device; traffic is per step."""

    name: str
    splits: list[str]
    traffic: Traffic
    state: int
    state_theory: int
    temporary: int


def check(options: Options, folder: Path) -> None:
    """Refuse a single device. The mesh only says how many devices there are to build axes of 2 and 4 with."""
    if options.mesh.size < 2:
        raise ConfigError(f"five_axes needs 2 or 4 devices but the mesh has {options.mesh.size}; write --devices 4")


def run(options: Options, folder: Path, console: Console) -> Outcome:
    """Measure one device, then each axis at each size that the devices allow."""
    sizes = [n for n in (2, 4) if n <= options.mesh.size]
    meshes = [MeshConfig(), *(MeshConfig(**{axis: n}) for axis in ("dp", "tp", "pp", "cp", "ep") for n in sizes)]
    shown = track(meshes, description="compiling", console=console, disable=not console.is_terminal)
    rows = [_measure(replace(RUN, mesh=mesh, seed=options.seed)) for mesh in shown]
    save_figure(_figure(rows), folder, "five_axes")
    checks = [c for row in rows[1:] for c in row.traffic.checks(row.name)]
    checks += [Check.equal(f"bytes of state on a device, {row.name}", row.state, row.state_theory) for row in rows]
    metrics = {
        row.name: {
            "sent_bytes": row.traffic.bytes,
            "state_bytes": row.state,
            "temporary_bytes": row.temporary,
            "splits": row.splits,
        }
        for row in rows
    }
    return Outcome(checks, metrics, [_table(rows)])


def _measure(config: RunConfig) -> Row:
    mesh = config.mesh
    trainer = on_first_devices(config)
    state = trainer.init()
    memory = trainer.step.lower(*trainer.arguments).compile().memory_analysis()
    assert memory is not None
    shape = trainer.arguments[1]["inputs"].shape
    local = trainer.batch_sharding.shard_shape(shape)
    split = [name for name, whole, part in zip(("rows", "sequence"), shape[1:], local[1:], strict=True) if part < whole]
    name = next((f"{axis} {n}" for axis, n in vars(mesh).items() if n > 1), "one device")
    return Row(
        name,
        splits=[f"batch ({', '.join(split)})"] * bool(split) + _grouped(split_leaves(state.params), state.params),
        traffic=Traffic.of(trainer),
        state=bytes_on_device(state, trainer.mesh.devices.flat[0]),
        state_theory=state_bytes(config),
        temporary=memory.temp_size_in_bytes,
    )


def _grouped(names: list[str], params: dict) -> list[str]:
    """Names of split leaves; "all blocks" where every leaf of the blocks is."""
    blocks = [n for n in names if n.startswith("blocks.")]
    if len(blocks) == len(jax.tree.leaves(params["blocks"])):
        names = [*(n for n in names if n not in blocks), "all blocks"]
    return [n.removeprefix("blocks.").removeprefix("outer.") for n in names]


def _table(rows: list[Row]) -> Table:
    columns = ("axis", "splits", "sent, MB a step", "theory", "state, MB", "theory", "temporary, MB")
    table = Table(*columns, title="Per device")
    for row in rows:
        sent = (row.traffic.bytes, wire_total(row.traffic.theory), row.state, row.state_theory, row.temporary)
        table.add_row(row.name, ", ".join(row.splits) or "nothing", *(f"{n / 1e6:.3f}" for n in sent))
    return table


def _figure(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(12, 5))
    left, right = figure.subplots(1, 2)
    places, labels = np.arange(len(rows)), [row.name for row in rows]
    bottom = np.zeros(len(rows))
    for op in sorted({e.op for row in rows for e in row.traffic.measured}):
        height = np.array([float(sum(e.wire_bytes for e in r.traffic.measured if e.op == op)) for r in rows]) / 1e6
        left.bar(places, height, bottom=bottom, label=op)
        bottom += height
    theory = [wire_total(row.traffic.theory) / 1e6 for row in rows]
    left.plot(places, theory, "k_", markersize=18, markeredgewidth=2, label="theory")
    left.set(ylabel="MB that a device sends in a step", title="On the wire")
    right.bar(places - 0.2, [row.state / 1e6 for row in rows], 0.4, label="state: weights and AdamW")
    right.bar(places + 0.2, [row.temporary / 1e6 for row in rows], 0.4, label="temporaries of the step")
    right.plot(places - 0.2, [r.state_theory / 1e6 for r in rows], "k_", markersize=12, label="state, by theory")
    right.set(ylabel="MB on a device", title="In memory")
    for axes in (left, right):
        axes.set_xticks(places, labels, rotation=45, ha="right")
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for the legend
        axes.legend(fontsize=8, ncols=2, loc="upper left")
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(f"Each axis alone: a small MoE of {RUN.model.layers} layers, {RUN.model.experts} experts")
    return figure
