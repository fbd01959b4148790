"""ZeRO-2 and 3: gradients and parameters in pieces too; what that saves, sends and hides.

Claim: over N replicas a device holds 2 + 16/N bytes a parameter at stage 2 and 16/N at stage 3, to the byte. With M
microbatches stage 2 sends M reduce-scatters and one gather, (M + 1) elements a parameter, stage 3 two gathers and a
reduce-scatter for each, 3 M; and at least 90 % of what stage 3 sends of gpt2-xl travels while matrix products run.

    python run_experiment.py zero_2_3            about 6 minutes on 2 CPU cores: 8 fake devices, 19 compilations, no GPU
    python run_experiment.py zero_2_3 --quick    under a minute: 4 fake devices, one compilation

The paper (Rajbhandari et al., arXiv:1910.02054, figure 1 and section 7) has 2 + 14/N and 16/N bytes, and 2 and 3
elements; our sums of gradients are float32, and stage 3 keeps no 16-bit pieces beside its master's. Stage 3 sends a
little less than 3 M: the embedding and the last norm are gathered once a step. Kept from the forward pass
(--parallel.no-regather; FSDP's SHARD_GRAD_OP, Zhao et al., arXiv:2304.11277) the layers are gathered once: one element
a parameter less on the wire, 2 bytes a parameter more in memory.

Expected of the compiler for H100s: 96 % of the gathers and 93 % of the scatters hidden, on 512 GPUs (--hidden 512) too;
exposed are the embedding and one layer. Stages 1 and 2 hide their scatters alike, but not the gather that follows the
update. Of models of GPT-3's aspect, 64 GPUs hold one of 4.5 billion parameters at stage 0, 11 at stage 1, 25 at
stage 2 and about 150 at stage 3, with a tenth of the memory left free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch02_zero._compiled import (
    Case,
    Row,
    ZeroOptions,
    check_clusters,
    check_options,
    compile_all,
    compiled_checks,
    exposed_by_theory,
    memory_table,
)
from experiments.ch02_zero._figures import compiled_panel, held_panel, hidden_panel, sent_panel
from experiments.ch02_zero._largest import Found, Largest, largest_panel, largest_table
from experiments.ch02_zero._sizes import Held, Sent, every, held_table, loss_checks, losses, sent_table, tiny
from experiments.harness import Check, Outcome, save_figure
from jax5d.config import MeshConfig
from jax5d.costs.gpus import gpu as find_gpu

CAPSULES = [16]
CLAIM = "ZeRO-2 holds 2 + 16/N and ZeRO-3 16/N bytes a parameter; stage 3 hides 90 % of the 3 N elements that it sends"
NEEDS = "8 fake CPU devices, JAX's CUDA plugin but no GPU, and 6 minutes on 2 cores"

HIDDEN = 0.9
"""Least share of stage 3's bytes, gathered and scattered, that travel while matrix products run."""

OPS = ("all_gather", "psum_scatter")


@dataclass(frozen=True)
class Zero23Options(ZeroOptions):
    """Options of zero_2_3."""

    hidden: tuple[int, ...] = (8, 64)
    """Numbers of GPUs for which stage 3's schedule is read, with one microbatch."""
    microbatches: tuple[int, ...] = (1, 2, 4)
    """Microbatches of the steps whose traffic is counted."""
    largest: bool = True
    """Compile the largest model of each stage and cluster; otherwise it is known by formula alone."""


DEFAULTS = Zero23Options(mesh=MeshConfig(dp=8))
QUICK = replace(DEFAULTS, mesh=MeshConfig(dp=4), hidden=(8,), microbatches=(1, 2), largest=False, steps=6)


def check(options: Zero23Options, folder: Path) -> None:
    """Refuse what cannot be measured or compiled, before anything is."""
    check_clusters("hidden", options.hidden, options.gpu)
    check_options(options, "zero_2_3")


def run(options: Zero23Options, folder: Path, console: Console) -> Outcome:
    """Measure arrays and traffic on fake devices, train, compile, and search for the largest models."""
    bar = {"console": console, "disable": not console.is_terminal}
    todo = every((0, 1, 2, 3), options.mesh.size, few=options.quick)
    n = todo[-1][1]
    held = [Held.of(stage, n, options.seed) for stage, n in track(todo, description="measuring", **bar)]
    sent = [Sent.of(config) for config in track(_counted(options, n), description="counting", **bar)]
    curves = losses((0, 2, 3), n, options.steps, options.seed)
    rows = compile_all(_cases(options), options, console)
    found = _search(options, bar)
    _figures(options, folder, held, sent, rows, found)
    checks = [c for each in (*held, *sent) for c in each.checks()]
    checks += [*loss_checks(curves), *compiled_checks(rows), *_hidden_checks(rows, options)]
    checks += [c for each in found for c in each.checks()]
    metrics = {
        "held": [each.metrics() for each in held],
        "sent": {each.name: each.metrics() for each in sent},
        "losses": {f"stage {stage}": curve for stage, curve in curves.items()},
        "compiled": {row.case.name: row.metrics() for row in rows},
        "largest": {each.of.name: each.metrics() for each in found},
    }
    tables = [
        held_table(held),
        sent_table(sent),
        memory_table(rows, options),
        _hidden_table(rows),
        largest_table(found),
    ]
    return Outcome(checks, metrics, tables)


def _counted(options: Zero23Options, n: int) -> list:
    """Every stage with every number of microbatches; stage 3 also without a second gather."""
    ways = [(0, True), (1, True), (2, True), (3, True), (3, False)]
    return [tiny(n, stage, microbatches=m, regather=again) for m in options.microbatches for stage, again in ways]


def _cases(options: Zero23Options) -> list[Case]:
    """For the schedule one microbatch of stage 3; for memory two, whose gradients are added up, of every stage."""
    found = [Case(n, 3) for n in options.hidden]
    ways = [(1, True), (2, True), (3, True), (3, False)]
    return found + [Case(n, stage, 2, again) for n in options.clusters for stage, again in ways if not options.quick]


def _search(options: Zero23Options, bar: dict) -> list[Found]:
    chip = find_gpu(options.gpu)
    wanted = [Largest(chip, n, stage) for n in options.clusters for stage in range(4)]
    return [Found.search(each, compiled=options.largest) for each in track(wanted, description="largest", **bar)]


def _hidden_checks(rows: list[Row], options: Zero23Options) -> list[Check]:
    found = []
    for row in rows:
        theory = exposed_by_theory(options.preset, row.case)
        for op in OPS if row.case.stage == 3 else OPS[1:]:
            exposed, name = 1 - row.hidden(op), f"share of {op} exposed, {row.case.name}"
            found.append(Check.below(name, exposed, 1 - HIDDEN))
            found.append(Check.equal(f"the same against theory, {name.partition(', ')[2]}", exposed, theory[op], 0.01))
    return found


def _hidden_table(rows: list[Row]) -> Table:
    heads = ("gathered", "hidden, %", "scattered", "hidden, %")
    table = Table("stage", "GPUs", "M", *heads, title="GB that a GPU sends in a step, and what hides them")
    for row in rows:
        cells = [cell for op in OPS for cell in (f"{float(row.sent(op)) / 1e9:.2f}", f"{100 * row.hidden(op):.1f}")]
        table.add_row(*row.case.cells, *cells)
    return table


def _figures(
    options: Zero23Options, folder: Path, held: list[Held], sent: list[Sent], rows: list[Row], found: list[Found]
) -> None:
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    held_panel(left, held)
    title = f"Compiled for {options.gpu}s: {options.preset}, {options.rows} x 1024 tokens a microbatch"
    compiled_panel(right, [row for row in rows if row.case.microbatches == 2] or rows, title)
    figure.suptitle("Memory by stage of ZeRO (Z)")
    save_figure(figure, folder, "memory")
    figure = Figure(figsize=(max(7, 0.75 * len(sent)), 4.8), layout="constrained")
    axes = figure.subplots()
    sent_panel(axes, sent, [_label(each) for each in sent])
    axes.set_title("On the wire in a step by stage (Z) and microbatches (M), by the ledger")
    save_figure(figure, folder, "traffic")
    figure = Figure(figsize=(max(6, 1.2 * len(rows)), 4.8), layout="constrained")
    hidden_panel(figure.subplots(), rows, HIDDEN)
    work = f"{options.preset}, {options.rows} x 1024 tokens in each of M microbatches"
    figure.suptitle(f"Sent while matrix products run, as scheduled for {options.gpu}s:\n{work}")
    save_figure(figure, folder, "hidden")
    figure = Figure(figsize=(9, 5), layout="constrained")
    largest_panel(figure.subplots(), found)
    save_figure(figure, folder, "largest")


def _label(sent: Sent) -> str:
    parallel = sent.config.parallel
    return f"Z{parallel.zero}{'' if parallel.regather else ' kept'}\nM = {parallel.microbatches}"
