"""Column-parallel and row-parallel layers in every pairing: where each must talk, and how often a bias counts.

Claim: two linear layers, each cut by columns or by rows, give the plain layers' output, loss and gradients on every
device, and send what theory says at the start, between them and at the end; a bias added before the sum counts t times.

    python run_experiment.py column_row            10 seconds on 2 CPU cores: 1, 2, 4 and 8 fake devices
    python run_experiment.py column_row --quick    the same

A layer by columns takes its input whole and leaves its output split; one by rows takes it split and leaves partial
sums, which are summed before the bias is added (Megatron-LM, arXiv:1909.08053, section 3). Each pairing runs twice:
with input and output as its cuts have them, and with both whole, as a residual stream has them.

Expected: columns then rows needs nothing in between. The others need there an all-gather (columns, columns), a
reduce-scatter (rows, rows) or an all-reduce (rows, columns) forward, and its transpose backward: a reduce-scatter, an
all-gather, an all-reduce. At the end rows need an all-reduce forward, at the start columns need one backward.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch03_tensor_parallelism._column_row_figure import SHORT, figure
from experiments.ch03_tensor_parallelism._pairs import (
    COUNTS,
    ORDERS,
    Pair,
    Row,
    Widths,
    draw,
    measure,
    natural,
    place,
    streamed,
)
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import wire_total
from jax5d.config import ConfigError, MeshConfig
from jax5d.mesh import make_mesh
from jax5d.parallel.data import sum_over_varying, varying
from jax5d.parallel.linear import keep, linear

CAPSULES = [19]
CLAIM = "Every pairing of column and row layers gives the plain layers' results and sends theory's bytes, biases once"
NEEDS = "8 fake CPU devices and 10 seconds on 2 cores, or 2 GPUs or more"

DEFAULTS = Options(mesh=MeshConfig(tp=8))
QUICK = DEFAULTS

WIDTHS = Widths(n=64, d=96, h=384, f=160)
"""All different, so that a collective of the wrong array has the wrong bytes."""
TOLERANCE = 1e-5
"""Of the largest difference from one device over the largest value: float32 sums of at most 384 terms."""
NAMES = {"psum": "all-reduce", "all_gather": "all-gather", "psum_scatter": "reduce-scatter"}
STAGES = ("start", "between", "end")


def check(options: Options, folder: Path) -> None:
    """Refuse a single device. The mesh only says how many devices there are, of which 8 at most are used."""
    if options.mesh.size < 2:
        raise ConfigError(
            f"column_row cuts layers over 2 devices or more, the mesh has {options.mesh.size}; write --devices 8"
        )


def run(options: Options, folder: Path, console: Console) -> Outcome:
    """Every pairing on every number of devices, then a bias at both places."""
    counts = [t for t in COUNTS if t <= options.mesh.size]
    kinds = [[make(*order) for order in ORDERS] for make in (natural, streamed)]
    cases = [(pair, t) for pair in dict.fromkeys(chain(*kinds)) for t in counts]  # columns, rows is of both kinds
    with jax.default_matmul_precision("float32"):
        problem = draw(options.seed, WIDTHS, keep)
        shown = track(cases, description="pairings", console=console, disable=not console.is_terminal)
        rows = [measure(pair, t, problem) for pair, t in shown]
        biases = {t: bias_counts(t, options.seed) for t in counts}
    last = {row.pair: row for row in rows if row.t == counts[-1]}
    bare, whole = ([last[pair] for pair in pairs] for pairs in kinds)
    save_figure(figure(bare, whole, biases), folder, "column_row")
    checks = [*_pairing_checks(rows), *_bias_checks(biases)]
    metrics = {
        "pairings": [_metrics(row) for row in rows],
        "bias_counts": {str(t): found for t, found in biases.items()},
    }
    tables = [_table(bare, "X and Y as the cuts have them"), _table(whole, "X and Y whole, as a residual stream is")]
    return Outcome(checks, metrics, [*tables, _bias_table(biases)])


def bias_counts(t: int, seed: int) -> dict[str, float]:
    """How often a bias counts in a layer by rows and in the bias's gradient, added after the sum and before it.

    Counted as the component along b of what the bias has added to the product, and that of the gradient along the
    plain layer's gradient.
    """
    random = np.random.default_rng(seed)
    n, d, f, _ = WIDTHS
    x, w, d_y = (random.standard_normal(shape, np.float32) for shape in ((n, d), (d, f), (n, f)))
    b = random.standard_normal(f, np.float32)
    mesh = make_mesh(MeshConfig(tp=t), jax.devices()[:t])
    specs = (P(None, "tp"), P("tp"), P(), P())

    def after(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return linear(x, w, b, cut="rows", given="split", left="whole")

    def before(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return sum_over_varying(x @ w + varying(b, ("tp",))[None])

    found = {}
    for name, layer in (("after", after), ("before", before)):

        def step(x: jax.Array, w: jax.Array, b: jax.Array, d_y: jax.Array, layer=layer) -> tuple:
            y, vjp = jax.vjp(layer, x, w, b)
            return y, vjp(d_y)[2]

        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()))
        y, d_b = (np.asarray(a, np.float64) for a in mapped(*place(mesh, (x, w, b, d_y), specs)))
        added, plain = (y - x.astype(np.float64) @ w).mean(axis=0), d_y.astype(np.float64).sum(axis=0)
        found |= {
            f"{name} the sum": float(added @ b / (b @ b)),
            f"{name}, gradient": float(d_b @ plain / (plain @ plain)),
        }
    return found


def _pairing_checks(rows: list[Row]) -> list[Check]:
    checks = []
    for row in rows:
        if row.t == rows[-1].t:
            where = f"{_layout(row.pair)}, {row.pair.name}, t={row.t}"
            sent = ((row.forward, False, "forward"), (row.backward, True, "backward"))
            checks += [
                Check.equal(f"{where}: bytes sent {way}", wire_total(found), wire_total(row.theory(backward=b)))
                for found, b, way in sent
            ]
    for name in rows[0].error:
        worst = max(row.error[name] for row in rows)
        what = "outputs Y" if name == "y" else f"gradients of {name}"
        checks.append(
            Check.below(f"all pairings and t: {what} on any device off from the plain layers'", worst, TOLERANCE)
        )
    return [
        *checks,
        Check.below("all pairings and t: losses off from the plain layers'", max(row.loss for row in rows), TOLERANCE),
        Check.equal("all pairings and t: collectives that differ from theory", sum(row.differing for row in rows), 0),
    ]


def _bias_checks(biases: dict[int, dict[str, float]]) -> list[Check]:
    return [
        Check.equal(f"bias {place}, t={t}: times it counts", count, t if place.startswith("before") else 1, 1e-5 * t)
        for t, found in biases.items()
        for place, count in found.items()
        if t > 1
    ]


def _layout(pair: Pair) -> str:
    """Of what goes in and comes out."""
    return f"{pair.given} to {pair.left}"


def _metrics(row: Row) -> dict:
    return {
        "first": row.pair.first,
        "second": row.pair.second,
        "input": row.pair.given,
        "middle": row.pair.middle,
        "output": row.pair.left,
        "t": row.t,
        "forward": [vars(e) | {"wire_bytes": float(e.wire_bytes)} for e in row.forward],
        "backward": [vars(e) | {"wire_bytes": float(e.wire_bytes)} for e in row.backward],
        "error": row.error,
        "loss_difference": row.loss,
    }


def _table(rows: list[Row], what: str) -> Table:
    """The answer: what goes where, forward and backward, and the bytes that the programs send."""
    columns = ("pairing", "pass", "start: X", "between", "end: Y", "sent, kB")
    table = Table(*columns, title=f"{what}: on {rows[0].t} devices, by ledger (theory)")
    for row in rows:
        pairing = f"{SHORT[row.pair.first]}, {SHORT[row.pair.second]}"
        for name, backward in (("forward", False), ("backward", True)):
            measured, theory = (row.backward if backward else row.forward), row.theory(backward=backward)
            sent = f"{wire_total(measured) / 1e3:.0f} ({wire_total(theory) / 1e3:.0f})"
            table.add_row(pairing, name, *(_ops(row, stage, backward) for stage in STAGES), sent)
        table.add_section()
    return table


def _ops(row: Row, stage: str, backward: bool) -> str:
    hops = [hop for hop in row.pair.hops(row.widths) if (hop.stage, hop.backward) == (stage, backward)]
    return ", ".join(NAMES[hop.op] for hop in hops) or "-"


def _bias_table(biases: dict[int, dict[str, float]]) -> Table:
    places = list(biases[1])
    table = Table("t", *places, title="How often the bias of a layer by rows counts: added after the sum, before it")
    for t, found in biases.items():
        table.add_row(str(t), *(f"{found[place]:.4f}" for place in places))
    return table
