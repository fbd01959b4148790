"""Overlap: the gradients' sum, compiled for GPUs that are not there, and what it hides behind.

Claim: reduced layer by layer under the backward pass (the default), at least 90 % of the bytes of gpt2-xl's gradients
travel while matrix products run, on 8 H100s and on 64; reduced after the backward pass, array by array or in buckets,
hardly any do. What stays exposed is what theory says: the embedding and the last layer to be differentiated.

    python run_experiment.py overlap            about 2 minutes on 2 CPU cores; no GPU needed
    python run_experiment.py overlap --quick    under a minute: 8 GPUs only

Expected: 7 % exposed with overlap. In time, a fast link is hidden whole; where the network takes longer than the layer
that hides it, part of the hidden bytes is waited for all the same: the model's second figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from jax5d.config import PRESETS, ConfigError, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.cluster import all_reduce_seconds
from jax5d.costs.collectives import wire_bytes
from jax5d.costs.flops import step_flops
from jax5d.costs.gpus import gpu as find_gpu
from jax5d.costs.parameters import BYTES, count, leaves
from jax5d.measure.aot import Compiled, check_compiler, compile_step
from jax5d.measure.timeline import Scheduled

CAPSULES = [13]
CLAIM = "Reduced layer by layer under the backward pass, at least 90 % of gpt2-xl's gradient bytes are hidden"
NEEDS = "no GPU but JAX's CUDA plugin, and 2 minutes on 2 CPU cores"

Reduction = Literal["overlap", "leaf", "bucket", "single"]
LIMIT = 0.1
"""Share of the gradients' bytes that the default may expose."""
SCALAR = 1024
"""Bytes; a sum of less than that is a norm or a count, not a gradient."""


@dataclass(frozen=True)
class OverlapOptions(Options):
    """Options of this experiment."""

    gpu: str = "h100"
    """GPU that is compiled for: a100-40, a100-80, h100, h200, b200 or rtx4090."""
    preset: str = "gpt2-xl"
    """Model that is trained."""
    rows: int = 8
    """Sequences of 1024 tokens on each GPU."""
    sizes: tuple[int, ...] = (8, 64)
    """Numbers of GPUs."""
    reductions: tuple[Reduction, ...] = ("overlap", "leaf", "bucket", "single")
    """Ways to reduce (see --parallel.reduction of a training run)."""


DEFAULTS = OverlapOptions()
QUICK = replace(DEFAULTS, sizes=(8,), reductions=("overlap", "leaf"))


@dataclass(frozen=True)
class Row:
    """One reduction on one number of GPUs, as compiled."""

    reduction: Reduction
    devices: int
    compiled: Compiled

    @property
    def gradients(self) -> list[Scheduled]:
        """The sums of gradients in the program's schedule."""
        return [e for e in self.compiled.timeline if e.op == "psum" and e.payload_bytes // e.count >= SCALAR]

    def sent(self, *, hidden: bool) -> Fraction:
        """Bytes that a GPU sends of them in a step, with or without matrix products to hide behind."""
        return sum((e.wire_bytes for e in self.gradients if e.hidden == hidden), Fraction(0))

    @property
    def exposed(self) -> float:
        """Share of the bytes with nothing to hide behind."""
        return float(self.sent(hidden=False) / (self.sent(hidden=False) + self.sent(hidden=True)))

    def seconds(self, gpu: str) -> tuple[float, float]:
        """Modelled: the sums' own time, and how much of it is waited for where kernels run at the GPU's peak."""
        chip, total, waited = find_gpu(gpu), 0.0, 0.0
        for entry in self.gradients:
            one = all_reduce_seconds(chip, self.devices, entry.payload_bytes / entry.count)
            cover = entry.cover_flops / entry.count / chip.peak("bfloat16")
            total, waited = total + entry.count * one, waited + entry.count * max(0.0, one - cover)
        return total, waited


def check(options: OverlapOptions, folder: Path) -> None:
    """Refuse what cannot be compiled, before anything is."""
    if options.preset not in PRESETS or PRESETS[options.preset].experts:
        dense = [name for name, model in PRESETS.items() if not model.experts]
        raise ConfigError(f"preset={options.preset!r} is no dense preset; choose one of {', '.join(dense)}")
    chip = find_gpu(options.gpu)
    for n in options.sizes:
        if n < 2 or (n > chip.per_host and n % chip.per_host):
            raise ConfigError(
                f"sizes: {n} GPUs are no data parallelism on hosts of {chip.per_host}; give 2 or more, "
                f"and whole hosts beyond {chip.per_host}"
            )
    if options.rows < 1:
        raise ConfigError(f"rows={options.rows} is below 1; give the sequences of each GPU")
    check_compiler(options.gpu)


def run(options: OverlapOptions, folder: Path, console: Console) -> Outcome:
    """Compile the step for each reduction and size, and read the schedules."""
    todo: list[tuple[int, Reduction]] = [(n, reduction) for n in options.sizes for reduction in options.reductions]
    shown = track(todo, description="compiling", console=console, disable=not console.is_terminal)
    rows = [_compile(options, n, reduction) for n, reduction in shown]
    save_figure(_figure(rows, options), folder, "overlap")
    checks = []
    for row in rows:
        where = f"{row.reduction} on {row.devices} GPUs"
        sent = float(row.sent(hidden=True) + row.sent(hidden=False))
        theory = float(wire_bytes("psum", count(PRESETS[options.preset]) * BYTES["float32"], row.devices))
        checks.append(Check.equal(f"bytes of gradients that a GPU sends, {where}", sent, theory, theory * 1e-3))
        if row.reduction == "overlap":
            checks.append(Check.below(f"share of them exposed, {where}", row.exposed, LIMIT))
            checks.append(Check.equal(f"the same against theory, {where}", row.exposed, _last(options.preset), 0.005))
    metrics = {f"{row.reduction} {row.devices}": _metrics(row, options.gpu) for row in rows}
    return Outcome(checks, metrics, [_table(rows, options), _models()])


def _config(options: OverlapOptions, n: int, reduction: Reduction) -> RunConfig:
    model = replace(PRESETS[options.preset], dtype="bfloat16")
    parallel = ParallelConfig(remat="full", loss_chunks=8, reduction=reduction)
    train = TrainConfig(global_batch=options.rows * n, seq_len=1024)
    return RunConfig(mesh=MeshConfig(dp=n), model=model, parallel=parallel, train=train)


def _compile(options: OverlapOptions, n: int, reduction: Reduction) -> Row:
    per_host = min(n, find_gpu(options.gpu).per_host)
    return Row(reduction, n, compile_step(_config(options, n, reduction), options.gpu, gpus_per_host=per_host))


def _last(preset: str) -> float:
    """Share of the parameters whose gradients are final only when the backward pass ends: all but L-1 of L layers."""
    model = PRESETS[preset]
    sizes = {x.name: x.local_size(MeshConfig()) for x in leaves(model, MeshConfig())}
    blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    return 1 - blocks * (model.layers - 1) / model.layers / sum(sizes.values())


def _metrics(row: Row, gpu: str) -> dict[str, float]:
    total, waited = row.seconds(gpu)
    return {
        "exposed_share": row.exposed,
        "hidden_bytes": float(row.sent(hidden=True)),
        "exposed_bytes": float(row.sent(hidden=False)),
        "sums": sum(e.count for e in row.gradients),
        "modelled_seconds": total,
        "modelled_seconds_waited": waited,
        "peak_bytes": row.compiled.memory.peak,
        "compile_seconds": row.compiled.compile_seconds,
    }


def _table(rows: list[Row], options: OverlapOptions) -> Table:
    title = f"{options.preset}, {options.rows} x 1024 tokens on each {options.gpu}; per GPU and step"
    table = Table(
        "GPUs",
        "reduction",
        "sums",
        "GB hidden",
        "GB exposed",
        "exposed",
        "ms, model",
        "ms waited",
        "peak, GB",
        title=title,
    )
    for row in rows:
        total, waited = row.seconds(options.gpu)
        cells = (float(row.sent(hidden=True)) / 1e9, float(row.sent(hidden=False)) / 1e9)
        table.add_row(
            str(row.devices),
            row.reduction,
            str(sum(e.count for e in row.gradients)),
            *(f"{cell:.2f}" for cell in cells),
            f"{row.exposed:.1%}",
            f"{1e3 * total:.1f}",
            f"{1e3 * waited:.1f}",
            f"{row.compiled.memory.peak / 1e9:.1f}",
        )
    return table


def _models() -> Table:
    """What theory says that the default exposes of each model: the larger the vocabulary's share, the more."""
    table = Table("model", "exposed by theory", title="Embedding and one layer, as a share of all parameters")
    for name, model in PRESETS.items():
        if not model.experts and not name.endswith("tiny"):
            table.add_row(name, f"{_last(name):.1%}")
    return table


def _figure(rows: list[Row], options: OverlapOptions) -> Figure:
    figure = Figure(figsize=(12, 4.8))
    left, right = figure.subplots(1, 2)
    places = np.arange(len(rows)) + np.array([0.6 * (row.devices != options.sizes[0]) for row in rows])
    names = [f"{row.reduction}\n{row.devices} GPUs" for row in rows]
    hidden, exposed = (np.array([float(row.sent(hidden=h)) / 1e9 for row in rows]) for h in (True, False))
    left.bar(places, hidden, color="tab:green", label="while matrix products run")
    left.bar(places, exposed, bottom=hidden, color="tab:red", label="exposed")
    for place, row, top in zip(places, rows, hidden + exposed, strict=True):
        left.text(place, top, f"{row.exposed:.0%}\nexposed", ha="center", va="bottom", fontsize=9)
    left.set(ylabel="GB that a GPU sends in a step", title="Gradients on the wire, as scheduled by the compiler")
    seconds = np.array([row.seconds(options.gpu) for row in rows]) * 1e3
    compute = _compute_seconds(options) * 1e3
    right.bar(places, seconds[:, 0] - seconds[:, 1], color="tab:green", label="hidden")
    right.bar(places, seconds[:, 1], bottom=seconds[:, 0] - seconds[:, 1], color="tab:red", label="waited for")
    right.axhline(compute, color="black", linestyle="--", label=f"the step's products at peak: {compute:.0f} ms")
    right.set(ylabel="ms of a step", title="Modelled: alpha-beta sums, products at peak FLOP/s")
    for axes in (left, right):
        axes.set_xticks(places, names, fontsize=8)
        axes.set_ylim(top=1.25 * axes.get_ylim()[1])
        axes.legend(loc="upper left", fontsize=8, ncols=3)
        axes.grid(axis="y", alpha=0.3)
    work = f"{options.rows} x 1024 tokens a GPU in bfloat16, gradients in float32"
    figure.suptitle(f"{options.preset} on {options.gpu}s: {work}")
    figure.tight_layout()
    return figure


def _compute_seconds(options: OverlapOptions) -> float:
    """The products of a GPU's step at the peak."""
    config = _config(options, 1, "overlap")
    return sum(step_flops(config).values()) / find_gpu(options.gpu).peak("bfloat16")
