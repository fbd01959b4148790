"""What sequence parallelism saves: the activations that a layer keeps, array by array, by tensor-parallel size.

Claim: tensor parallelism over t devices leaves 10 of the textbook's 34 bytes for each of the s b h elements of the
residual stream whole on every device, and sequence parallelism splits those too; a layer that keeps just what the
textbook counts has its bytes by the GPU compiler, within 5 %, and this library's layers have theirs.

    python run_experiment.py sequence_memory            about 5 minutes on 2 CPU cores; no GPU needed
    python run_experiment.py sequence_memory --quick    under a minute: tp 8 with sp alone is compiled

The textbook is Korthikanti et al., arXiv:2205.05198, equations 2 to 4: s b h (34 + 5 a s / h) bytes on one device,
s b h (10 + 24 / t + 5 a s / (h t)) on t, s b h / t (34 + 5 a s / h) with sequence parallelism. Without the term in s^2
where attention is recomputed, or a flash kernel.

Expected: this library keeps 8 + 16 / t and 24 / t. It draws masks of dropout again (two of 1 byte, and a s / h on
attention's weights) and computes GELU's result again (8); flash attention keeps a log-sum-exp (4 a / h) instead of
attention's weights. Llama's layer of fewer key and value heads keeps less of those, and two products in its MLP. Both
layers keep the inputs of column-parallel products split and gather them again in the backward pass, as the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch04_sequence_and_context._memory_figure import figure
from experiments.ch04_sequence_and_context._memory_rows import NAMES, Case, Megatron, Name, Row
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from jax5d.config import ConfigError, MeshConfig
from jax5d.costs.gpus import gpu as find_gpu
from jax5d.measure.aot import check_compiler

Layout = Literal["tp", "tp + sp"]

CAPSULES = [24]
CLAIM = "Of a layer tensor parallelism keeps 10 + 24/t bytes an element, with sequence parallelism 34/t, within 5 %"
NEEDS = "8 fake CPU devices, JAX's CUDA plugin but no GPU, and 5 minutes on 2 cores"

LIMIT = 0.05
"""Largest difference between theory and compiler, relative to theory."""

TEXTBOOK: Name = "gpt3-7b-plain"
"""The model whose layers are also Megatron's."""


@dataclass(frozen=True)
class SequenceMemoryOptions(Options):
    """Options of this experiment."""

    gpu: str = "h100"
    """GPU that is compiled for: a100-40, a100-80, h100, h200, b200 or rtx4090."""
    models: tuple[Name, ...] = NAMES
    """Models whose layers are traced at every tp that the mesh has devices for."""
    compiled: tuple[int, ...] = (1, 2, 4, 8)
    """Sizes of tp, of those that are traced, for which the first model and Megatron's layer are compiled."""
    layouts: tuple[Layout, ...] = get_args(Layout)
    """Layouts that are compiled, where tp is above 1."""
    others: tuple[Name, ...] = ("llama3-8b",)
    """Models that are compiled for the largest of those sizes only."""
    squares: bool = True
    """Compile Megatron's layer also with attention's weights kept, for the largest size."""
    depths: tuple[int, int] = (24, 48)
    """Layers of the two models that are compiled; deep enough that memory peaks at the same moment in both."""


DEFAULTS = SequenceMemoryOptions(mesh=MeshConfig(tp=8))
QUICK = replace(DEFAULTS, models=("gpt3-7b",), compiled=(8,), layouts=("tp + sp",), others=(), squares=False)


def check(options: SequenceMemoryOptions, folder: Path) -> None:
    """Refuse what cannot be traced or compiled, before anything is."""
    find_gpu(options.gpu)
    check_compiler(options.gpu)
    for name in ("models", "compiled", "layouts"):
        if not getattr(options, name):
            raise ConfigError(f"{name} has no value; give one or more, as the default {getattr(DEFAULTS, name)[0]}")
    low, high = options.depths
    if not 1 <= low < high:
        raise ConfigError(f"depths={low} {high} are no two numbers of layers; give a smaller one and a larger one")
    if not set(options.compiled) & set(sizes(options)):
        have = " ".join(map(str, sizes(options)))
        raise ConfigError(f"compiled={options.compiled[0]} is no size of tp that is traced; give some of {have}")
    for name in options.others:
        if name not in options.models:
            raise ConfigError(f"others={name} is not among the models; add it to --models")


def sizes(options: SequenceMemoryOptions) -> list[int]:
    """Powers of two up to 8, as far as there are devices. The mesh only says how many there are."""
    return [t for t in (1, 2, 4, 8) if t <= options.mesh.size]


def compiled_sizes(options: SequenceMemoryOptions) -> list[int]:
    """Those that are compiled."""
    return [t for t in sizes(options) if t in options.compiled]


def is_compiled(case: Case, options: SequenceMemoryOptions) -> bool:
    """Whether its size and layout are asked for; one device is both layouts."""
    layout = "tp + sp" if case.sequence else "tp"
    return case.tp in compiled_sizes(options) and (case.tp == 1 or layout in options.layouts)


def cases(model: Name, sizes: Sequence[int]) -> list[Case]:
    """With and without sequence parallelism; one device has nothing to split."""
    return [Case(model, t, sequence) for sequence in (False, True) for t in sizes if t > 1 or not sequence]


def run(options: SequenceMemoryOptions, folder: Path, console: Console) -> Outcome:
    """Trace and compile every case, and the textbook's layer beside them."""
    shown = {"console": console, "disable": not console.is_terminal}
    every = [case for model in options.models for case in cases(model, sizes(options))]
    rows = [_row(case, options) for case in track(every, description="layers", **shown)]
    book = [(case, True) for case in cases(TEXTBOOK, compiled_sizes(options)) if is_compiled(case, options)]
    if options.squares:
        largest = cases(TEXTBOOK, [max(compiled_sizes(options))])
        book += [(case, False) for case in largest if is_compiled(case, options)]
    megatron = [
        Megatron.of(case, options.gpu, options.depths, selective=selective)
        for case, selective in track(book, description="textbook's layer", **shown)
    ]
    save_figure(figure(rows, megatron, options.gpu), folder, "sequence_memory")
    checks = [check for model in options.models for check in _exact([r for r in rows if r.case.model == model])]
    checks += [_within(f"Bytes of a layer by XLA, {r.case.name}", r.compiled, r.formula) for r in rows if r.compiled]
    checks += [_within(f"Bytes of a layer by XLA, {m.name}", m.compiled, m.textbook) for m in megatron]
    metrics = {
        "layers": {row.case.name: row.metrics() for row in rows},
        "megatron": {m.name: [m.compiled / m.case.elements, m.textbook / m.case.elements] for m in megatron},
        "terms": {row.case.name: [vars(term) for term in row.terms] for row in rows},
    }
    largest = [row for row in rows if row.case.tp == sizes(options)[-1] and not row.case.sequence]
    return Outcome(checks, metrics, [*map(_terms_table, largest), _megatron_table(megatron), _table(rows)])


def _row(case: Case, options: SequenceMemoryOptions) -> Row:
    first = case.model == options.models[0] and is_compiled(case, options)
    other = case.model in options.others and case.tp == max(compiled_sizes(options)) and is_compiled(case, options)
    return Row.of(case, options.gpu, options.depths if first or other else None)


def _within(name: str, measured: float, expected: float) -> Check:
    return Check.equal(name, measured, expected, LIMIT * expected)


def _exact(rows: list[Row]) -> list[Check]:
    """Of one model: what is kept is the textbook's less what is named, and what is split is split evenly."""
    model, alone = rows[0].case.model, next(row for row in rows if row.case.tp == 1).traced
    counted = max(abs(row.textbook - row.case.elements * sum(t.textbook for t in row.terms)) for row in rows)
    stream = sum(term.here for term in rows[0].terms if term.split == "stream") * rows[0].case.elements
    apart = {
        "the textbook's formula and its terms": counted,
        "the program's types and the textbook less the terms named": max(abs(r.traced - r.here) for r in rows),
        "the library's formula and the program's types": max(abs(r.formula - r.traced) for r in rows),
        "a layer with sequence parallelism, and 1/t of one device's": max(
            (abs(r.traced - alone / r.case.tp) for r in rows if r.case.sequence), default=0
        ),
        "a layer without it, and 1/t of all but the stream": max(
            abs(r.traced - stream - (alone - stream) / r.case.tp) for r in rows if not r.case.sequence
        ),
    }
    return [Check.equal(f"{model}, bytes between {what}", value, 0, 0.5) for what, value in apart.items()]


def _terms_table(row: Row) -> Table:
    t = row.case.tp
    title = f"{row.case.model}: bytes kept for each of the s b h elements of a layer's stream, before any split"
    table = Table("array", f"split over tp {t}", "textbook", "here", "why", title=title)
    for term in row.terms:
        scale = t if term.split == "tp" else 1
        split = "tp" if term.split == "tp" else "sp alone"
        table.add_row(term.array, split, f"{scale * term.textbook:g}", f"{scale * term.here:g}", term.why)
    return table


def _megatron_table(rows: list[Megatron]) -> Table:
    title = "Megatron's layer, gpt3-7b: bytes per element of s b h"
    table = Table("layer", "textbook", "XLA", "difference, %", title=title)
    for m in rows:
        numbers = (m.textbook / m.case.elements, m.compiled / m.case.elements, 100 * (m.compiled / m.textbook - 1))
        table.add_row(m.name.partition(", ")[2], *(f"{x:.3f}" for x in numbers))
    return table


def _table(rows: list[Row]) -> Table:
    table = Table(title="A layer's activations on one device: bytes per element of s b h")
    table.add_column("model", no_wrap=True)
    for head in ("tp", "sp", "textbook", "less named", "program", "XLA", "MB"):
        table.add_column(head, justify="right")
    for row in rows:
        numbers = (row.textbook, row.here, row.traced, row.compiled)
        cells = ("-" if x is None else f"{x / row.case.elements:.3f}" for x in numbers)
        where = (row.case.model, str(row.case.tp), "yes" if row.case.sequence else "no")
        table.add_row(*where, *cells, f"{row.traced / 1e6:.1f}")
    return table
