"""A transformer block under tensor parallelism: its four collectives, with sequence parallelism, and overlapped.

Claim: a block of GPT-2 or Llama on t devices gives one device's outputs and gradients on every shard. It sends four
all-reduces, two forward and two backward; with sequence parallelism the same bytes forward and half as many again
backward, and it keeps 1/t of the activations; in pieces under the products it sends as much.

    python run_experiment.py tp_block            about a minute on 2 CPU cores: 8 fake devices
    python run_experiment.py tp_block --quick    under half a minute: 4

An all-reduce of K bytes sends 2 (t-1)/t K a device, a gather and a reduce-scatter half of it each (Megatron-LM,
arXiv:1909.08053, section 3; Korthikanti et al., arXiv:2205.05198, section 4.2.2). Sequence parallelism keeps the inputs
of its regions split, and so gathers them once more for the gradients of the weights: 6 instead of 4 halves backward. A
block that is recomputed gathers them then, and not once more. Fewer heads of keys and values change no bytes here: with
fewer than t of them the gradients of their weights come in parts, which are summed once a step, as those of the norms
under sequence parallelism are.

Expected: of a GPT-2 block TP keeps 4 + 8/t arrays of K, sequence parallelism 12/t (and the softmax's statistics).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch03_tensor_parallelism._block_figure import figure
from experiments.ch03_tensor_parallelism._block_program import WAYS, Block, Case, draw, run_of, units
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from jax5d.config import PRESETS, ConfigError, MeshConfig, ModelConfig
from jax5d.costs.parameters import BYTES

CAPSULES = [20]
CLAIM = "A block sends 2 + 2 all-reduces; split sequences send as much forward, keep 1/t and give the same gradients"
NEEDS = "8 fake CPU devices and a minute on 2 cores, or 2 GPUs or more"

DEFAULTS = Options(mesh=MeshConfig(tp=8))
QUICK = replace(DEFAULTS, mesh=MeshConfig(tp=4))

COUNTS = (2, 4, 8)
"""Numbers of devices, as far as the mesh has them."""
ROWS = 2
TOLERANCE = 5e-6
"""Of the largest difference from one device over the largest value: float32 sums of at most 256 terms."""

_TINY = {"layers": 1, "d_model": 64, "heads": 8, "d_ff": 256, "vocab": 96, "context": 32}
MODELS: dict[str, ModelConfig] = {
    "GPT-2": replace(PRESETS["gpt2-tiny"], **_TINY),
    "Llama, 2 kv heads": replace(PRESETS["llama-tiny"], **_TINY, kv_heads=2),
}
REAL = {"gpt2-medium": 8, "llama-9b": 8}
"""Blocks of a real size, only traced, and on how many devices."""
SHORT = {"psum": "AR", "all_gather": "AG", "psum_scatter": "RS", "ppermute": "hops"}


def check(options: Options, folder: Path) -> None:
    """Refuse a single device. The mesh only says how many devices there are, of which 8 at most are used."""
    if options.mesh.size < 2:
        raise ConfigError(
            f"tp_block splits a block over 2 devices or more, the mesh has {options.mesh.size}; write --devices 8"
        )


def run(options: Options, folder: Path, console: Console) -> Outcome:
    """Count, measure what is kept, and compute every block in every way."""
    counts = [t for t in COUNTS if t <= options.mesh.size]
    todo = [(name, t, way, remat) for name in MODELS for t in counts for way in WAYS for remat in ("none", "full")]
    shown = track(todo, description="counting", console=console, disable=not console.is_terminal)
    cases = [Case.of(name, run_of(MODELS[name], way, t, rows=ROWS, remat=remat), way) for name, t, way, remat in shown]
    with jax.default_matmul_precision("float32"):
        errors = _errors(cases, options.seed, console)
    real = [
        Case.of(name, run_of(replace(PRESETS[name], dtype="bfloat16"), way, t, rows=1), way)
        for name, t in REAL.items()
        for way in WAYS
        if t <= options.mesh.size
    ]
    save_figure(figure(cases), folder, "tp_block")
    metrics = {"blocks": [case.metrics() for case in (*cases, *real)], "errors": errors}
    return Outcome(_checks([*cases, *real], errors), metrics, [_table(cases), *([_real_table(real)] if real else [])])


def _errors(cases: list[Case], seed: int, console: Console) -> dict[str, dict[str, float]]:
    """By model, t and way: distances from one device. What is recomputed is what was computed."""
    plain = [case for case in cases if case.remat == "none"]
    arrays = {name: draw(model, ROWS, seed) for name, model in MODELS.items()}
    one = {name: Block(run_of(model, "TP", 1, rows=ROWS)).run(arrays[name]) for name, model in MODELS.items()}
    want = jax.tree.map(np.asarray, one)
    shown = track(plain, description="computing", console=console, disable=not console.is_terminal)
    return {case.name: Block(case.config).error(arrays[case.model], want[case.model]) for case in shown}


def _checks(cases: list[Case], errors: dict[str, dict[str, float]]) -> list[Check]:
    checks = []
    for name in next(iter(errors.values())):
        worst = max(found[name] for found in errors.values())
        checks.append(Check.below(f"all ways: {name} on any device off from one device's", worst, TOLERANCE))
    differing = sum(len(set(a) ^ set(b)) for case in cases for a, b in zip(case.sent, case.theory, strict=True))
    checks.append(Check.equal("all ways: collectives that differ from theory in op, count or bytes", differing, 0))
    off = max(abs(case.kept[0] - case.kept[1]) for case in cases)
    checks.append(Check.equal("all ways: bytes kept for the backward pass, off from the formula", off, 0))
    for case in cases:
        if case.remat == "none":
            forward, backward = (float(units(entries, case.config)) for entries in case.sent)
            checks.append(Check.equal(f"{case.name}: sent forward, in (t-1)/t K", forward, 4))
            checks.append(Check.equal(f"{case.name}: sent backward", backward, 4 if case.way == "TP" else 6))
            checks += [Check.equal(f"{case.name}: kept, in K", case.kept[0] / case.whole, _kept(case), 1e-9)]
    return checks


def _kept(case: Case) -> float:
    """By hand, in K: inputs of two norms and two regions, which only sequence parallelism splits; queries and what
    becomes of them, keys and values, the MLP's products; and a float32 of the softmax for each head and token.
    """
    m, t = case.config.model, case.t
    products = 2 if m.architecture == "llama" else 1
    split = 2 + 2 * max(m.groups, t) / m.heads + products * m.d_ff / m.d_model
    statistics = 4 * m.heads / (m.d_model * BYTES[m.dtype])
    return (4 if case.way == "TP" else 4 / t) + (split + statistics) / t


def _table(cases: list[Case]) -> Table:
    columns = ("block", "t", "way", "forward", "backward", "(t-1)/t K", "kept, K", "and recomputed, K")
    table = Table(
        *columns, title="What one device sends, by the program's ledger, and keeps; K: bytes of one [b, s, d]"
    )
    full = {(c.model, c.t, c.way): c for c in cases if c.remat == "full"}
    for case in cases:
        if case.remat == "none":
            sums = " + ".join(f"{float(units(entries, case.config)):.0f}" for entries in case.sent)
            again = full[case.model, case.t, case.way]
            kept = (f"{c.kept[0] / c.whole:.2f}" for c in (case, again))
            table.add_row(case.model, str(case.t), case.way, *map(_ops, case.sent), sums, *kept)
    return table


def _ops(entries: list) -> str:
    return " + ".join(f"{e.count} {SHORT[e.op]}" for e in entries)


def _real_table(cases: list[Case]) -> Table:
    table = Table(
        "block", "t", "way", "K, MB", "sent forward, MB", "backward, MB", "kept, MB", title="Of real blocks, bfloat16"
    )
    for case in cases:
        sent = (float(sum(e.wire_bytes for e in entries)) for entries in case.sent)
        cells = (f"{value / 1e6:.1f}" for value in (case.whole, *sent, case.kept[0]))
        table.add_row(case.model, str(case.t), case.way, *cells)
    return table
