"""A real model's step under ZeRO, compiled for clusters that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch00_foundations._compared import GB, Compared
from experiments.harness import Check
from experiments.options import Options
from jax5d.config import PRESETS, ConfigError, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.communication import StepTraffic
from jax5d.costs.gpus import gpu as find_gpu
from jax5d.costs.memory import memory
from jax5d.costs.parameters import count, leaves
from jax5d.costs.textbook import zero_bytes_per_parameter
from jax5d.measure.aot import Compiled, check_compiler, compile_step

LENGTH, CHUNKS = 1024, 8
"""Tokens of a sequence; pieces of a microbatch for which logits exist at one time."""

SCALAR = 1024
"""Bytes; a collective of less is a norm or a count."""


@dataclass(frozen=True)
class ZeroOptions(Options):
    """Options of the experiments that compile a step under ZeRO."""

    gpu: str = "h100"
    """GPU that is compiled for: a100-40, a100-80, h100, h200, b200 or rtx4090."""
    preset: str = "gpt2-xl"
    """Dense model that is compiled, in bfloat16, layers recomputed."""
    rows: int = 8
    """Sequences of 1024 tokens on each GPU in each microbatch."""
    clusters: tuple[int, ...] = (8, 64)
    """Numbers of GPUs."""
    microbatches: tuple[int, ...] = (1, 2)
    """Microbatches of the steps that are compared."""
    steps: int = 20
    """Steps of the loss curves."""


def check_options(options: ZeroOptions, name: str) -> None:
    """Refuse what can be neither measured nor compiled. The mesh only says how many devices there are."""
    if not options.microbatches or min(options.microbatches) < 1:
        given = " ".join(map(str, options.microbatches)) or "nothing"
        raise ConfigError(f"microbatches={given}: give one number of 1 or more, or several")
    if options.steps < 2:
        raise ConfigError(f"steps={options.steps} is no curve; give 2 or more")
    if options.mesh.size < 2:
        raise ConfigError(f"{name} needs 2 devices or more, the mesh has {options.mesh.size}; write --mesh.dp 8")
    if options.preset not in PRESETS or PRESETS[options.preset].experts:
        dense = [known for known, model in PRESETS.items() if not model.experts]
        raise ConfigError(f"preset={options.preset!r} is no dense preset; choose one of {', '.join(dense)}")
    if PRESETS[options.preset].context < LENGTH:
        context = PRESETS[options.preset].context
        raise ConfigError(f"preset={options.preset!r} has a context of {context}, below {LENGTH}; write gpt2-xl")
    chip = find_gpu(options.gpu)
    check_clusters("clusters", options.clusters, options.gpu)
    if options.rows < 1:
        raise ConfigError(f"rows={options.rows} is below 1; give the sequences of each {chip.name}")
    check_compiler(options.gpu)


def check_clusters(option: str, sizes: Sequence[int], gpu: str) -> None:
    """Refuse numbers of GPUs that are no whole hosts, none at all, and one twice."""
    per_host = find_gpu(gpu).per_host
    if not sizes or len(set(sizes)) < len(sizes):
        given = " ".join(map(str, sizes)) or "nothing"
        raise ConfigError(f"{option}={given}: give one number of GPUs or more, each once, such as {per_host}")
    for n in sizes:
        if n < 2 or (n > per_host and n % per_host):
            raise ConfigError(
                f"{option}: {n} GPUs are no data parallelism on hosts of {per_host}; give 2 or more, "
                f"and whole hosts beyond {per_host}"
            )


@dataclass(frozen=True)
class Case:
    """A stage on a cluster."""

    n: int
    stage: Any
    microbatches: int = 1
    regather: bool = True

    @property
    def cells(self) -> tuple[str, str, str]:
        """Stage, GPUs and microbatches, for tables."""
        return f"{self.stage}{'' if self.regather else ' kept'}", str(self.n), str(self.microbatches)

    @property
    def name(self) -> str:
        """For checks."""
        stage, gpus, microbatches = self.cells
        return f"stage {stage}, {gpus} GPUs, M = {microbatches}"

    def config(self, options: ZeroOptions) -> RunConfig:
        """What is compiled."""
        return RunConfig(
            mesh=MeshConfig(dp=self.n),
            model=replace(PRESETS[options.preset], dtype="bfloat16"),
            parallel=ParallelConfig(
                remat="full",
                loss_chunks=CHUNKS,
                zero=self.stage,
                microbatches=self.microbatches,
                regather=self.regather,
            ),
            train=TrainConfig(global_batch=options.rows * self.n * self.microbatches, seq_len=LENGTH),
        )


@dataclass(frozen=True)
class Row:
    """A case, compiled."""

    case: Case
    compiled: Compiled
    compared: Compared

    @classmethod
    def of(cls, case: Case, options: ZeroOptions) -> Row:
        """Compile it, for a GPU that is told to have room for it."""
        config = case.config(options)
        formula = memory(config)
        room = max(find_gpu(options.gpu).visible, 2 * formula.total)
        per_host = min(case.n, find_gpu(options.gpu).per_host)
        compiled = compile_step(config, options.gpu, gpus_per_host=per_host, memory=room)
        return cls(case, compiled, Compared(config, formula, compiled.memory))

    def sent(self, op: str, *, hidden: bool | None = None) -> Fraction:
        """Bytes that a GPU sends by an op in a step: all, or those with or without matrix products to hide behind."""
        entries = [e for e in self.compiled.timeline if e.op == op and e.payload_bytes // e.count >= SCALAR]
        return sum((e.wire_bytes for e in entries if hidden in (None, e.hidden)), Fraction(0))

    def hidden(self, op: str) -> float:
        """Share of an op's bytes with matrix products to hide behind."""
        return float(self.sent(op, hidden=True) / self.sent(op))

    @property
    def book(self) -> float:
        """Bytes of the states by the paper: 2 + 2 + 12 a parameter, shared out."""
        return zero_bytes_per_parameter(self.case.stage, self.case.n) * count(self.compared.config.model)

    def metrics(self) -> dict[str, Any]:
        """For result.json."""
        ops = ("psum", "psum_scatter", "all_gather")
        return self.compared.metrics() | {
            "book_states": self.book,
            "sent_bytes": {op: float(self.sent(op)) for op in ops},
            "hidden_share": {op: self.hidden(op) for op in ops if self.sent(op)},
            "compile_seconds": self.compiled.compile_seconds,
        }


def compile_all(cases: Sequence[Case], options: ZeroOptions, console: Console) -> list[Row]:
    """Every case once."""
    shown = track(cases, description="compiling", console=console, disable=not console.is_terminal)
    return [Row.of(case, options) for case in shown]


def compiled_checks(rows: Sequence[Row]) -> list[Check]:
    """State and batch to the byte, everything within 5 %; each collective that the program asks for is theory's."""
    found = []
    for row in rows:
        differing = set(row.compiled.ledger) ^ set(StepTraffic(row.compared.config).table())
        found += row.compared.checks(row.case.name)
        found.append(Check.equal(f"collectives that differ from theory, {row.case.name}", len(differing), 0))
    return found


def memory_table(rows: Sequence[Row], options: ZeroOptions) -> Table:
    """The compiler's bytes beside the formula's, and the paper's states."""
    title = f"{options.preset}, {options.rows} x {LENGTH} tokens in each of M microbatches; GB on a {options.gpu}"
    heads = ("state", "temp.", "all", "formula", "%", "paper's states")
    table = Table("stage", "GPUs", "M", *heads, title=title)
    for row in rows:
        found, formula = row.compiled.memory, row.compared.formula
        cells = (found.arguments, found.temporaries, found.peak, formula.total)
        error, book = f"{100 * row.compared.error:+.1f}", f"{row.book / GB:.2f}"
        table.add_row(*row.case.cells, *(f"{cell / GB:.2f}" for cell in cells), error, book)
    return table


def exposed_by_theory(preset: str, case: Case) -> dict[str, float]:
    """Shares that have nothing to hide behind.

    Scattered: the last layer to be differentiated and the outer leaves, final only when the backward pass ends.
    Gathered by stage 3: the outer leaves before the step, and the first layer of the first forward pass.
    """
    sizes = {leaf.name: leaf.local_size(MeshConfig()) for leaf in leaves(PRESETS[preset], MeshConfig())}
    blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    outer, layer = sum(sizes.values()) - blocks, blocks / PRESETS[preset].layers
    m, passes = case.microbatches, 2 if case.regather else 1
    return {
        "psum_scatter": (outer + layer) / (outer + blocks),
        "all_gather": (outer + layer) / (outer + m * passes * blocks),
    }
