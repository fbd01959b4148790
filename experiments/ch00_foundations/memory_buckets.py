"""Where the memory of a training step goes: four buckets, and the room to work in, held against the GPU compiler.

Claim: the state of a step is known to the byte, and all of its memory within 5 %, before anything is compiled: for
dense models over pp, dp, cp and tp, up to 64 devices, ZeRO's stages, batches, sequences, precisions and recomputation.

    python run_experiment.py memory_buckets            73 compilations, about 20 minutes on 2 CPU cores; no GPU
    python run_experiment.py memory_buckets --quick    4 of them, under a minute

Expected: with one short sequence a step is mostly parameters, gradients and AdamW's moments, which do not grow with
the batch; activations do, in proportion to tokens, and overtake them. The compiler's account is that of XLA for an
H100: the bytes reserved while the step runs, arguments + outputs - outputs that replace arguments + temporaries, as
they were packed. Its own peak leaves the packing out; it is in result.json.

The formula was made with these 73 at hand. Of 17 others, 11 of them with ZeRO, compiled afterwards, 15 came within 4 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch00_foundations._compared import GB, LIMIT, Compared, refuse_mesh, stacked
from experiments.ch00_foundations._memory_cases import BATCHES, FEW, LENGTHS, OTHERS, SLOPES, case, deeper
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import mesh_name
from jax5d.config import RunConfig
from jax5d.costs import textbook
from jax5d.costs.activations import Activations
from jax5d.costs.memory import memory
from jax5d.measure.aot import check_compiler

CAPSULES = [4]
CLAIM = "Before anything is compiled, the state of a training step is known to the byte and its memory within 5 %"
NEEDS = "JAX's CUDA wheels on Linux and 20 minutes on 2 CPU cores; no GPU"


@dataclass(frozen=True)
class MemoryOptions(Options):
    """Options of memory_buckets."""

    gpu: str = "h100"
    """The GPU that is compiled for: a100-40, a100-80, h100, h200 or b200."""


DEFAULTS = MemoryOptions()
QUICK = DEFAULTS


def check(options: MemoryOptions, folder: Path) -> None:
    """Refuse a mesh, as the meshes are the experiment's own, and what cannot be compiled for."""
    refuse_mesh(options, "memory_buckets")
    check_compiler(options.gpu)


def run(options: MemoryOptions, folder: Path, console: Console) -> Outcome:
    """Compile every configuration once, and compare."""
    slopes = dict(list(SLOPES.items())[:1]) if options.quick else SLOPES
    wanted = [*slopes.values(), *map(deeper, slopes.values())]
    wanted += FEW if options.quick else [*BATCHES, *LENGTHS, *OTHERS]
    once = list(dict.fromkeys(wanted))
    shown = track(once, description="compiling", console=console, disable=not console.is_terminal)
    found = {config: Compared.of(config, options.gpu) for config in shown}
    rows = list(found.values())
    save_figure(_buckets(found, options.gpu), folder, "memory_buckets")
    save_figure(_scatter(rows, options.gpu), folder, "formula_and_compiler")
    worst = max(rows, key=lambda row: abs(row.error))
    metrics = {
        "configurations": len(rows),
        "worst": {"name": _name(worst.config), "error": worst.error},
        "median_error": median(abs(row.error) for row in rows),
        "rows": [{"name": _name(row.config)} | row.metrics() for row in rows],
    }
    checks = [*_checks(rows), *(_slope(name, found[c], found[deeper(c)]) for name, c in slopes.items())]
    return Outcome(checks, metrics, [_table(rows), _layers()])


def _checks(rows: list[Compared]) -> list[Check]:
    different = sum(row.compiler.arguments != row.formula.state + row.formula.batch for row in rows)
    totals = [
        Check.equal(f"bytes on a device, {_name(r.config)}", r.formula.total, r.compiler.peak, LIMIT * r.compiler.peak)
        for r in rows
    ]
    return [
        Check.equal("configurations whose state and batch differ from the compiler's arguments", different, 0),
        *totals,
    ]


def _slope(name: str, shallow: Compared, deep: Compared) -> Check:
    """The compiler's own peaks at twice the layers and at the layers: their difference, less state and gradients.

    Not the bytes reserved, whose packing differs from one program to the next.
    """

    def rest(row: Compared) -> int:
        return (row.compiler.compiler_peak or row.compiler.peak) - row.formula.state - row.formula.gradients

    expected = deep.formula.activations - shallow.formula.activations
    return Check.equal(
        f"bytes of activations of 12 layers, {name}", rest(deep) - rest(shallow), expected, LIMIT * expected
    )


def _name(config: RunConfig) -> str:
    """All that differs from a preset in bfloat16 with 8 chunks."""
    model, parallel, train = config.model, config.parallel, config.train
    usual = case(model.name, batch=train.global_batch, length=train.seq_len)
    changed = [
        f"{key} {'+'.join(value) if isinstance(value, tuple) else value}"
        for part, default in ((model, usual.model), (parallel, usual.parallel))
        for key, value in vars(part).items()
        if value != getattr(default, key)
    ]
    return ", ".join([f"{model.name} {train.global_batch} x {train.seq_len}", mesh_name(config.mesh), *changed])


def _table(rows: Iterable[Compared]) -> Table:
    columns = (
        "configuration",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "working",
        "total",
        "compiler",
        "%",
    )
    table = Table(*columns, title="GB on a device, by formula and by compiler")
    for row in rows:
        m = row.formula
        parts = (m.parameters, m.gradients, m.optimizer, m.activations, m.working, m.total, row.compiler.peak)
        table.add_row(_name(row.config), *(f"{part / GB:.2f}" for part in parts), f"{100 * row.error:+.1f}")
    return table


def _layers() -> Table:
    """What a layer keeps, in the textbook's unit: s b h elements of 16 bits are 2."""
    table = Table("a layer of", "recomputed", "attention", "here", "Megatron", title="Bytes kept for each of s b h")
    for model, length in (("gpt2", 1024), ("llama-1b", 4096)):
        for remat, attention in (("none", "plain"), ("none", "flash"), ("selective", "plain"), ("full", "plain")):
            config = case(model, batch=1, length=length, remat=remat, attention=attention)
            unit = length * config.model.d_model
            here, there = Activations(config).layer / unit, textbook.layer_bytes(config) / unit
            table.add_row(model, remat, attention, f"{here:.1f}", f"{there:.1f}")
    return table


def _buckets(found: dict[RunConfig, Compared], target: str) -> Figure:
    figure = Figure(figsize=(12, 5))
    left, right = figure.subplots(1, 2)
    rows = {f"{2**i}": case("gpt2", batch=2**i) for i in range(5)}
    _stacked(left, rows, found)
    left.set(xlabel="sequences of 1024 tokens in a batch", title="Batch", ylabel="GB on the device")
    lengths = {f"{2**i}": case("gpt2", batch=4, length=2**i) for i in range(9, 13)}
    _stacked(right, lengths, found)
    right.set(xlabel="tokens of each of 4 sequences", title="Sequence", ylabel="GB on the device")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="lower center", ncols=6, bbox_to_anchor=(0.5, -0.06), fontsize=9)
    figure.suptitle(f"Memory of a training step: GPT-2 124M, AdamW in float32, bfloat16 computation, one {target}")
    return figure


def _stacked(axes: Axes, bars: dict[str, RunConfig], found: dict[RunConfig, Compared]) -> None:
    stacked(axes, list(bars), [memory(config) for config in bars.values()])
    known = {label: found[config].compiler.peak / GB for label, config in bars.items() if config in found}
    axes.plot(list(known), list(known.values()), "kD", markersize=6, label="reserved by the compiler")
    axes.grid(axis="y", alpha=0.3)


def _scatter(rows: list[Compared], target: str) -> Figure:
    figure = Figure(figsize=(12, 5))
    left, right = figure.subplots(1, 2)
    groups = {
        "one device": lambda c: c.mesh.size == 1,
        "one axis": lambda c: 1 < c.mesh.size < 64 and max(vars(c.mesh).values()) == c.mesh.size,
        "several axes": lambda c: 1 < c.mesh.size < 64 and max(vars(c.mesh).values()) < c.mesh.size,
        "64 devices": lambda c: c.mesh.size >= 64,
    }
    for (name, member), marker in zip(groups.items(), "os^D", strict=True):
        points = [row for row in rows if member(row.config)]
        reserved = [row.compiler.peak / GB for row in points]
        if points:
            left.plot(reserved, [row.formula.total / GB for row in points], marker, alpha=0.7, label=name)
            right.plot(reserved, [100 * row.error for row in points], marker, alpha=0.7, label=name)
    ends = np.array([min(r.compiler.peak for r in rows), max(r.compiler.peak for r in rows)]) / GB * (0.9, 1.1)
    left.plot(ends, ends, "k-", linewidth=0.8, label="equal")
    left.set(xscale="log", yscale="log", ylabel="GB on a device, by formula", title="Totals")
    for sign in (-100, 100):
        right.axhline(sign * LIMIT, color="k", linestyle="--", linewidth=0.8)
    right.axhline(0, color="k", linewidth=0.8)
    right.set(xscale="log", ylim=(-8, 8), ylabel="formula over compiler, %", title="Difference; dashed: 5 %")
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if ends[0] <= tick <= ends[1]]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.yaxis.set_minor_formatter(NullFormatter())
    for axes in (left, right):
        axes.set_xlabel("GB on a device, reserved by the compiler")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(which="major", alpha=0.3)
    left.legend(fontsize=9)
    figure.suptitle(f"{len(rows)} training steps of GPT-2 and Llama: formula against XLA for {target}")
    return figure
