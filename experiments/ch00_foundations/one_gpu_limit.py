"""The limit of one GPU: what it can hold, what it can train, and how long that takes.

Claim: for GPT-2 from 124M to 1.5B and Llama from 1.3B to 80B, the formula says within 5 % of what the GPU compiler
reserves how much memory a training step needs, and so whether one H100 of 80 GB holds it, and with how many sequences.

    python run_experiment.py one_gpu_limit            8 models and the edge of 3, about 3 minutes on 2 CPU cores; no GPU
    python run_experiment.py one_gpu_limit --quick    one model and the edge of another, under a minute

The settings are those that need least: bfloat16 computation, layers recomputed, the loss in pieces, one sequence of
the model's context. Weights, gradients and AdamW's moments are float32, with no master copy beside them: 16 bytes a
parameter, as the 2 + 2 + 12 of Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1. Expected: up to 3.57B
one H100 holds them; 8.86B needs 142 GB for these alone, whatever the batch. In pure bfloat16 (8 bytes) it fits, at the
cost of updates that are rounded away. Long before memory ends, time does: 20 tokens a parameter (Hoffmann et al.,
arXiv:2203.15556, table 3) take one H100 9 days for 1.5B and 61 years for 80B.

A step fits here if it is no larger than what the driver shows. A CUDA context, libraries' workspaces and fragments take
a few hundred MB of that, and JAX gives a program 75 % of it unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. XLA
compiles what does not fit, too, and no differently; only the scheduler complains, where arguments alone take more than
80 % of the memory. So the models that are too large are compiled for a device that is told to have more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch00_foundations._compared import GB, LIMIT, PARTS, Compared, refuse_mesh, stacked
from experiments.ch00_foundations._one_gpu import OneGpu
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from jax5d.config import PRESETS, ConfigError, check_model
from jax5d.config import check as check_config
from jax5d.costs.flops import training_days
from jax5d.costs.gpus import GPUS, Gpu
from jax5d.costs.gpus import gpu as find_gpu
from jax5d.costs.memory import memory
from jax5d.costs.parameters import count
from jax5d.measure.aot import check_compiler

CAPSULES = [1]
CLAIM = "What one GPU can train, from 124M to 80B, follows from a formula within 5 % of the compiler's bytes"
NEEDS = "no GPU but JAX's CUDA plugin, and 3 minutes on 2 CPU cores"

YEAR = 365.25


@dataclass(frozen=True)
class LimitOptions(Options):
    """Options of one_gpu_limit."""

    gpu: str = "h100"
    """The GPU: a100-40, a100-80, h100, h200, b200 or rtx4090."""
    models: tuple[str, ...] = tuple(
        name for name in PRESETS if name.startswith(("gpt2", "llama")) and "tiny" not in name
    )
    """Dense models, presets of --model.name."""
    compiled: tuple[str, ...] = models
    """Those of them that are compiled with one sequence."""
    edges: tuple[str, ...] = ("gpt2-xl", "llama-1b", "llama-3b")
    """Those of them that are compiled with the most sequences that fit, and with one more."""
    pure: tuple[str, ...] = ("llama-9b",)
    """The same in pure bfloat16."""
    loss_chunks: int = 16
    """Pieces of a microbatch's tokens for which logits exist at one time."""
    mfu: float = 0.4
    """Share of its peak that a GPU reaches, above 0 and up to 1."""
    tokens_per_parameter: float = 20.0
    """Tokens that a model is trained on for each of its parameters."""
    cluster: int = 512
    """GPUs of the larger of the two machines that the days are for."""

    @property
    def one(self) -> OneGpu:
        """The GPU and what fits it."""
        return OneGpu(find_gpu(self.gpu), self.loss_chunks)


@dataclass(frozen=True)
class Job:
    """A model to compile: with one sequence, or at the edge of what fits."""

    name: str
    edge: bool
    pure: bool = False
    """Parameters, gradients and moments of 16 bits."""

    def __str__(self) -> str:
        return f"{self.name} in pure bfloat16" if self.pure else self.name


DEFAULTS = LimitOptions()
QUICK = replace(DEFAULTS, compiled=("llama-80b",), edges=("llama-1b",), pure=())


def check(options: LimitOptions, folder: Path) -> None:
    """Refuse unknown names and numbers that mean nothing, and a JAX that cannot compile for GPUs."""
    refuse_mesh(options, "one_gpu_limit")
    for option in ("loss_chunks", "tokens_per_parameter", "cluster"):
        if not getattr(options, option) > 0:
            raise ConfigError(
                f"{option}={getattr(options, option)} is not above 0; give for example {getattr(DEFAULTS, option)}"
            )
    for name in options.models:
        check_model(replace(PRESETS["gpt2"], name=name))
        check_config(options.one.config(name))
        if PRESETS[name].experts:
            raise ConfigError(f"models: {name} has {PRESETS[name].experts} experts; the formula is of dense models")
    for option in ("compiled", "edges", "pure"):
        for name in getattr(options, option):
            if name not in options.models:
                raise ConfigError(f"{option}: {name} is not one of --models {' '.join(options.models)}; add it there")
    if not (options.compiled or options.edges or options.pure):
        raise ConfigError("compiled, edges and pure name 0 models: nothing would be compared; give one of --models")
    if not 0 < options.mfu <= 1:
        raise ConfigError(f"mfu={options.mfu} is not above 0 and at most 1; give a share of the peak such as 0.4")
    check_compiler(options.gpu)


def run(options: LimitOptions, folder: Path, console: Console) -> Outcome:
    """Formulas for every model, the compiler for some."""
    jobs = [Job(name, edge=False) for name in options.compiled]
    jobs += [Job(name, edge=True) for name in options.edges]
    jobs += [Job(name, edge=True, pure=True) for name in options.pure]
    shown = track(jobs, description="compiling", console=console, disable=not console.is_terminal)
    done = {job: _edge(job, options) if job.edge else _one(job, options) for job in shown}
    compiled = {job.name: found[0] for job, found in done.items() if not job.edge}
    save_figure(_figure(options, compiled), folder, "one_gpu_limit")
    named = {f"{job}, batch {_sequences(one)}": one for job, found in done.items() for one in found}
    checks = [c for name, one in named.items() for c in one.checks(name)]
    checks += [_edge_check(job, found, options) for job, found in done.items() if job.edge]
    metrics = {
        "models": {name: _metrics(name, options) for name in options.models},
        "compiled": {name: one.metrics() for name, one in named.items()},
    }
    tables = [_bytes_table(options, compiled), _limits_table(options), _gpu_table(options), _days_table(options)]
    return Outcome(checks, metrics, tables)


def _days(name: str, options: LimitOptions, chip: Gpu, gpus: int = 1) -> float:
    parameters = count(PRESETS[name])
    return training_days(parameters, options.tokens_per_parameter * parameters, chip, mfu=options.mfu, count=gpus)


def _one(job: Job, options: LimitOptions) -> list[Compared]:
    """With one sequence, for a GPU that is told to have room for it."""
    config = options.one.config(job.name)
    return [Compared.of(config, options.gpu, max(options.one.chip.visible, 2 * memory(config).total))]


def _edge(job: Job, options: LimitOptions) -> list[Compared]:
    """The most sequences that fit by the compiler's bytes, if any do, and one more; sought near the formula's."""
    one, found = options.one, {}

    def spare(rows: int) -> int:
        if rows not in found:
            found[rows] = Compared.of(one.config(job.name, rows, pure=job.pure), options.gpu)
        return one.chip.visible - found[rows].compiler.peak

    rows = max(1, one.rows(job.name, pure=job.pure))
    rows = max(0, rows + spare(rows) // one.row_bytes(job.name, pure=job.pure))
    while rows and spare(rows) < 0:
        rows -= 1
    while spare(rows + 1) >= 0:
        rows += 1
    return [found[n] for n in (rows, rows + 1) if n]


def _sequences(found: Compared) -> int:
    return found.config.train.global_batch


def _edge_check(job: Job, found: list[Compared], options: LimitOptions) -> Check:
    """Formula and compiler agree on the edge, to the sequences that 5 % of the memory hold."""
    one = options.one
    tolerance = max(1, LIMIT * one.chip.visible // one.row_bytes(job.name, pure=job.pure))
    by_formula, by_compiler = one.rows(job.name, pure=job.pure), _sequences(found[-1]) - 1
    return Check.equal(f"most sequences of {job} that fit, formula and compiler", by_formula, by_compiler, tolerance)


def _metrics(name: str, options: LimitOptions) -> dict[str, Any]:
    one, chip = options.one, options.one.chip
    return {
        "parameters": count(PRESETS[name]),
        "formula": vars(memory(one.config(name))),
        "sequences_that_fit": one.rows(name),
        "sequences_that_fit_in_pure_bfloat16": one.rows(name, pure=True),
        "gpus_for_states": one.gpus(name, batch=False),
        "gpus_with_a_sequence_each": one.gpus(name, batch=True),
        "days_on_one": _days(name, options, chip),
        "days_on_the_cluster": _days(name, options, chip, options.cluster),
    }


def _bytes_table(options: LimitOptions, compiled: dict[str, Compared]) -> Table:
    chip = find_gpu(options.gpu)
    title = f"GB of a step with 1 sequence on one {chip.name}, which shows {chip.visible / GB:.1f}"
    heads = ("param.", "grad.", "optim.", "activ.", "work", "formula", "compiler", "%")
    table = Table("model", *heads, title=title)
    for name in options.models:
        formula, found = memory(options.one.config(name)), compiled.get(name)
        parts = (f"{getattr(formula, part) / GB:.2f}" for part in (*PARTS, "total"))
        other = (f"{found.compiler.peak / GB:.2f}", f"{100 * found.error:+.1f}") if found else ()
        table.add_row(name, *parts, *other)
    return table


def _limits_table(options: LimitOptions) -> Table:
    one, chip = options.one, options.one.chip
    heads = ("10^9 parameters", "sequences that fit", "GPUs for states", "with a sequence each")
    table = Table("model", *heads, "days on one", f"days on {options.cluster}", title=f"What follows for {chip.name}")
    for name in options.models:
        gpus = (one.gpus(name, batch=batch) for batch in (False, True))
        days = (_number(_days(name, options, chip, n)) for n in (1, options.cluster))
        rows = str(one.rows(name) or "none")
        table.add_row(name, f"{count(PRESETS[name]) / 1e9:.3g}", rows, *(str(n or "-") for n in gpus), *days)
    return table


def _gpu_table(options: LimitOptions) -> Table:
    """Another GPU, or 16-bit states."""
    table = Table("model", *GPUS, title="Most sequences that fit, by formula: float32 states/pure bfloat16")
    for name in options.models:
        cells = []
        for chip in GPUS.values():
            pair = (replace(options.one, chip=chip).rows(name, pure=pure) for pure in (False, True))
            cells.append("/".join(str(rows or "-") for rows in pair))
        table.add_row(name, *cells)
    return table


def _days_table(options: LimitOptions) -> Table:
    title = f"Days on one GPU to {options.tokens_per_parameter:g} tokens a parameter at {options.mfu:.0%} of its peak"
    table = Table("model", *GPUS, title=title)
    for name in options.models:
        table.add_row(name, *(_number(_days(name, options, chip)) for chip in GPUS.values()))
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _figure(options: LimitOptions, compiled: dict[str, Compared]) -> Figure:
    figure = Figure(figsize=(13, 5))
    left, right = figure.subplots(1, 2)
    _bars(left, options, compiled)
    _times(right, options)
    figure.tight_layout()
    return figure


def _bars(axes: Axes, options: LimitOptions, compiled: dict[str, Compared]) -> None:
    """Stacks, cut off at twice the GPU's memory."""
    one, chip = options.one, options.one.chip
    memories = [memory(one.config(name)) for name in options.models]
    stacked(axes, options.models, memories)
    top = 2.2 * chip.visible / GB
    for place, (name, found) in enumerate(zip(options.models, memories, strict=True)):
        rows, height = one.rows(name), found.total / GB
        text = f"{height:,.0f} GB\n" + (f"{rows} seq. fit" if rows else "does not fit")
        axes.text(
            place,
            min(height + 0.025 * top, 0.9 * top),
            text,
            ha="center",
            va="bottom",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
        )
    shown = {n: c.compiler.peak / GB for n, c in compiled.items() if c.compiler.peak / GB < top}
    axes.plot(list(shown), list(shown.values()), "kD", markersize=5, label="reserved by the compiler")
    axes.axhline(chip.visible / GB, color="black", linestyle="--", label=f"one {chip.name}: {chip.visible / GB:.1f} GB")
    axes.set(ylim=(0, top), ylabel="GB on one GPU", title="Memory of a step with one sequence, bfloat16, recomputed")
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(fontsize=8, loc="upper left")
    axes.grid(axis="y", alpha=0.3)


def _times(axes: Axes, options: LimitOptions) -> None:
    chip = find_gpu(options.gpu)
    names = sorted(options.models, key=lambda name: count(PRESETS[name]))
    sizes = np.array([count(PRESETS[name]) for name in names])
    for gpus, marker in ((1, "o"), (options.cluster, "s")):
        label = f"{gpus} {chip.name}" + ("s" if gpus > 1 else "")
        axes.plot(sizes, [_days(name, options, chip, gpus) for name in names], marker=marker, label=label)
    for days, label in ((1, "a day"), (30, "a month"), (YEAR, "a year"), (100 * YEAR, "a century")):
        axes.axhline(days, color="grey", linewidth=0.8, linestyle=":")
        axes.text(sizes[0], days * 1.1, label, fontsize=8, color="grey", va="bottom")
    title = f"Time to {options.tokens_per_parameter:g} tokens a parameter at {options.mfu:.0%} MFU"
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="days", title=title)
    axes.legend(fontsize=9, loc="lower right")
    axes.grid(which="major", alpha=0.3)
