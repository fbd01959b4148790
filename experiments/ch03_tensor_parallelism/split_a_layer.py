"""Splitting a layer: what columns, rows or both cost in memory and on the wire, and why columns come before rows.

Claim: a weight cut by columns sends nothing forward and sums dX backward, cut by rows the reverse; both give one
device's results. Of the four orders to cut an MLP's two weights, columns then rows alone sends nothing in between.

    python run_experiment.py split_a_layer            about 1 minute on 2 CPU cores: 4096 tokens, GPT-2's MLP
    python run_experiment.py split_a_layer --quick    half a minute: 512 tokens

One product Y = X W first: [tokens, d_model] x [d_model, d_ff] on 1, 2, 4 and 8 devices. Its 2-D cut lays rows over the
axis cp and columns over tp, here two plain axes of devices. Then an MLP, GeLU(X W1 + b1) W2 + b2, between whole arrays,
as a residual stream has them (Megatron-LM, arXiv:1909.08053, section 3).

Expected: columns then rows is one all-reduce of [tokens, d_model] forward and one backward; every other order also
sends the hidden array, four times as wide. GeLU works on columns as they are; of rows it would see partial sums, and
GeLU(a + b) is not GeLU(a) + GeLU(b): on 8 devices that is wrong by half of the values' size. Rows, rows keep less for
the backward pass, a piece of X only, but the stream that it is taken from holds X whole. The 2-D cut sends less than
the others where W is square and there are 4 devices or more, of d_model x 4 d_model not before 16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch03_tensor_parallelism import _one_product as one
from experiments.ch03_tensor_parallelism import _pairs as pairs
from experiments.ch03_tensor_parallelism._larger import LARGER, seconds
from experiments.ch03_tensor_parallelism._split_figures import pairs_figure, product_figure
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import apart, wire_total
from jax5d.config import ConfigError, MeshConfig
from jax5d.mesh import make_mesh
from jax5d.parallel.data import sum_over_varying
from jax5d.parallel.linear import product

CAPSULES = [18]
CLAIM = "Columns send nothing forward, rows nothing backward; columns then rows alone sends nothing between two layers"
NEEDS = "8 fake CPU devices and 1 minute on 2 cores, or 4 GPUs or more"


@dataclass(frozen=True)
class SplitOptions(Options):
    """Options of this experiment. The mesh only says how many devices there are, of which 8 at most are used."""

    tokens: int = 4096
    """Rows of X."""
    d_model: int = 768
    """Width of the layer's input, and of the MLP's output."""
    d_ff: int = 3072
    """Width of the layer's output, which is the MLP's hidden one."""


DEFAULTS = SplitOptions(mesh=MeshConfig(tp=8))
QUICK = replace(DEFAULTS, tokens=512)

TOLERANCE = 1e-5
"""Of the largest difference from one device over the largest value: float32 sums of thousands of terms."""


NORMAL = one.Shape(512, 768, 3072)
"""Of the product that GeLU's error is measured on: enough values for that to be the one of normal distributions."""


def check(options: SplitOptions, folder: Path) -> None:
    """Refuse too few devices, and widths that cannot be cut."""
    n = options.mesh.size
    if n < 4:
        raise ConfigError(
            f"split_a_layer cuts by rows and columns at once, on 4 devices, but has {n}; write --devices 8"
        )
    if options.tokens < 1:
        raise ConfigError(f"tokens={options.tokens} is below 1; write --tokens 4096")
    most = _counts(options)[-1]
    for name, width in (("d_model", options.d_model), ("d_ff", options.d_ff)):
        if width < 1 or width % most:
            nearest = max(1, round(width / most)) * most
            raise ConfigError(f"{name}={width} cannot be cut into {most} equal pieces; write --{name} {nearest}")


def run(options: SplitOptions, folder: Path, console: Console) -> Outcome:
    """One product cut each way, then a pair of them in each order."""
    shown = {"console": console, "disable": not console.is_terminal}
    n, d, f = options.tokens, options.d_model, options.d_ff
    cases = [(t, way) for t in _counts(options) for way in one.ways(t)]
    orders = [(t, pairs.streamed(*order)) for order in pairs.ORDERS for t in _counts(options)]
    with jax.default_matmul_precision("float32"):
        arrays, answer = one.draw(options.seed, one.Shape(n, d, f))
        products = [one.measure(way, arrays, answer) for _, way in track(cases, description="one product", **shown)]
        problem = pairs.draw(options.seed, pairs.Widths(n, d, f, d), gelu)
        rows = [pairs.measure(pair, t, problem) for t, pair in track(orders, description="pairs", **shown)]
        x, w, _ = one.draw(options.seed, NORMAL)[0]
        wrong = {t: early_gelu(t, x, w) for t in _counts(options)}
        pieces = max(gelu_of_columns(t, x, w) for t in wrong)
    theory = {t: early_gelu_theory(t) for t in wrong}
    save_figure(product_figure(products), folder, "one_product")
    save_figure(pairs_figure(rows, wrong, theory), folder, "pairs")
    checks = [*_product_checks(products), *_pair_checks(rows), *_gelu_checks(wrong, theory, pieces)]
    metrics = {
        "one_product": [_product_metrics(row) for row in products],
        "pairs": [_pair_metrics(row) for row in rows],
        "gelu_before_the_sum": {str(t): {"measured": wrong[t], "theory": theory[t]} for t in wrong},
        "h100": [
            {"d_model": d, "tokens": n, "order": p.name, **seconds(p, n, d)} for n, d in LARGER for p in _orders()
        ],
    }
    return Outcome(checks, metrics, [_product_table(products), _pair_table(rows), _larger_table()])


def _counts(options: SplitOptions) -> list[int]:
    return [t for t in pairs.COUNTS if t <= options.mesh.size]


def _orders() -> list[pairs.Pair]:
    return [pairs.streamed(*order) for order in pairs.ORDERS]


@jax.checkpoint
def gelu(x: jax.Array) -> jax.Array:
    """GPT-2's, by tanh. Of it the backward pass keeps the input alone."""
    return jax.nn.gelu(x, approximate=True)


def gelu_of_columns(t: int, x: np.ndarray, w: np.ndarray) -> float:
    """GeLU of each device's columns against one device's: see `apart`."""
    mesh = make_mesh(MeshConfig(tp=t), jax.devices()[:t])
    whole, columns = P(), P(None, "tp")
    layer = partial(product, cut="columns", given="whole", left="split")
    mapped = jax.shard_map(lambda x, w: gelu(layer(x, w)), mesh=mesh, in_specs=(whole, columns), out_specs=columns)
    arrays = pairs.place(mesh, (x, w), (whole, columns))
    return apart(jax.jit(mapped)(*arrays), np.asarray(jax.jit(lambda x, w: gelu(x @ w))(x, w)))


def early_gelu(t: int, x: np.ndarray, w: np.ndarray) -> float:
    """GeLU of t partial sums, summed, against GeLU of the sum: root mean square of the difference over the values'."""
    mesh = make_mesh(MeshConfig(tp=t), jax.devices()[:t])
    specs = (P(None, "tp"), P("tp"))

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = x @ w
        return sum_over_varying(gelu(part)), gelu(sum_over_varying(part))

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))
    early, right = (np.asarray(a, np.float64) for a in mapped(*pairs.place(mesh, (x, w), specs)))
    return float(np.sqrt(np.mean((early - right) ** 2) / np.mean(right**2)))


def early_gelu_theory(t: int) -> float:
    """The same for sums s = p_1 + ... + p_t ~ N(0, 1) of independent equal parts, by Gauss-Hermite quadrature.

    E(sum g(p_i) - g(s))^2 = t E g(p)^2 + t (t-1) (E g(p))^2 - 2 t E g(p_1) g(s) + E g(s)^2.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()

    def g(h: np.ndarray) -> np.ndarray:
        return h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))

    part, rest = nodes / np.sqrt(t), nodes * np.sqrt(1 - 1 / t)
    square = weights @ g(nodes) ** 2
    cross = weights @ (g(part)[:, None] * g(part[:, None] + rest[None])) @ weights
    error = t * weights @ g(part) ** 2 + t * (t - 1) * (weights @ g(part)) ** 2 - 2 * t * cross + square
    return float(np.sqrt(max(error, 0) / square))


def _product_checks(rows: list[one.Row]) -> list[Check]:
    last = [row for row in rows if row.n == rows[-1].n]
    checks = []
    for row in last:
        held, where = row.way.held(row.shape), f"{row.way.name}, n={row.n}"
        forward, backward = row.way.sums(row.shape)
        checks += [Check.equal(f"{where}: bytes of {a} on a device", max(row.held[a]), held[a]) for a in held]
        checks += [
            Check.equal(f"{where}: bytes sent forward", wire_total(row.forward), wire_total(forward)),
            Check.equal(f"{where}: bytes sent backward", wire_total(row.backward), wire_total(backward)),
        ]
    worst = max(error for row in rows for error in row.error.values())
    return [
        *checks,
        Check.equal("one product, all n: arrays on a device of other bytes than theory's", _total(rows, "unlike"), 0),
        Check.equal("one product, all n: collectives that differ from theory", _total(rows, "differing"), 0),
        Check.below("one product, all n: Y, dX, dW on any device off from one device's", worst, TOLERANCE),
    ]


def _pair_checks(rows: list[pairs.Row]) -> list[Check]:
    last = [row for row in rows if row.t == rows[-1].t]
    checks = []
    for row in last:
        where = f"{row.pair.name}, t={row.t}"
        forward, backward = (wire_total(row.theory(backward=b)) for b in (False, True))
        checks += [
            Check.equal(f"{where}: bytes sent forward", wire_total(row.forward), forward),
            Check.equal(f"{where}: bytes sent backward", wire_total(row.backward), backward),
            Check.equal(f"{where}: bytes kept for the backward pass", row.kept, row.pair.kept(row.widths, row.t)),
        ]
    worst = max(error for row in rows for error in row.error.values())
    silent = [row.pair.name for row in last if sum(e.count for e in row.forward) == 1]
    others = [name for name in silent if name != "columns, rows"]
    return [
        *checks,
        Check.equal("columns, rows: collectives forward", sum(e.count for e in _row(last).forward), 1),
        Check.equal("other orders with a single collective forward", len(others), 0),
        Check.equal("pairs, all t: collectives that differ from theory", _total(rows, "differing"), 0),
        Check.below("pairs, all t: outputs and gradients on any device off from one device's", worst, TOLERANCE),
    ]


def _row(rows: list[pairs.Row]) -> pairs.Row:
    return next(row for row in rows if row.pair.name == "columns, rows")


def _gelu_checks(wrong: dict[int, float], theory: dict[int, float], pieces: float) -> list[Check]:
    return [
        Check.below("GeLU of columns, all t: off from one device's", pieces, TOLERANCE),
        *(
            Check.equal(f"GeLU before the sum of {t} parts: error over the values", wrong[t], theory[t], theory[t] / 50)
            for t in wrong
            if t > 1
        ),
    ]


def _total(rows: list, name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def _product_metrics(row: one.Row) -> dict:
    return {
        "cut": row.way.name,
        "n": row.n,
        "held": row.held,
        "sent_forward": wire_total(row.forward),
        "sent_backward": wire_total(row.backward),
        "error": row.error,
    }


def _pair_metrics(row: pairs.Row) -> dict:
    return {
        "order": row.pair.name,
        "t": row.t,
        "sent_forward": wire_total(row.forward),
        "sent_backward": wire_total(row.backward),
        "kept": row.kept,
        "error": row.error,
        "loss_difference": row.loss,
    }


def _product_table(rows: list[one.Row]) -> Table:
    columns = ("n", "W cut by", "W, MB", "X, MB", "Y, MB", "sent forward, MB", "backward, MB", "off")
    n, d, f = rows[0].shape
    table = Table(*columns, title=f"Y = X W: [{n}, {d}] x [{d}, {f}], per device")
    for row in rows:
        held = (f"{max(row.held[a]) / 1e6:.3f}" for a in one.ARRAYS)
        sent = (_sent(row.forward), _sent(row.backward))
        table.add_row(str(row.n), row.way.name, *held, *sent, f"{max(row.error.values()):.1e}")
    return table


def _sent(entries: list) -> str:
    """Such as psum 11.0."""
    return ", ".join(f"{e.op} {float(e.wire_bytes) / 1e6:.3f}" for e in entries) or "0"


def _pair_table(rows: list[pairs.Row]) -> Table:
    columns = ("t", "W1, W2 cut by", "sent forward, MB", "sent backward, MB", "kept, MB", "off")
    table = Table(*columns, title="GeLU(X W1 + b1) W2 + b2, X and Y whole, per device; kept for the backward pass")
    for row in sorted(rows, key=lambda row: row.t):
        sent = (_sent(row.forward), _sent(row.backward))
        table.add_row(str(row.t), row.pair.name, *sent, f"{row.kept / 1e6:.3f}", f"{max(row.error.values()):.1e}")
    return table


def _larger_table() -> Table:
    columns = ("d_model", "tokens", "order", "MB sent", "wire, ms", "products, ms", "wire / products")
    table = Table(
        *columns, title="By formula: an MLP of 4 d_model on 8 H100s of a host, bfloat16, forward and backward"
    )
    for tokens, d in LARGER:
        for pair in _orders():
            row = seconds(pair, tokens, d)
            times = (f"{row['wire'] * 1e3:.2f}", f"{row['products'] * 1e3:.2f}")
            share = f"{row['wire'] / row['products']:.2f}"
            table.add_row(str(d), str(tokens), pair.name, f"{row['sent_bytes'] / 1e6:.0f}", *times, share)
        table.add_section()
    return table
