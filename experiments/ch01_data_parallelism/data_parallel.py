"""Data parallelism, from a plain training loop up to the library's trainer: equal updates, and what they cost.

Claim: N replicas that each take 1/N of the rows and sum their gradients make the updates of one device, up to rounding,
for 2(N-1)/N times the gradients' bytes a device and step; in one buffer, buckets, leaves or layer by layer under the
backward pass, the bytes are the same and the number of sums is theory's.

    python run_experiment.py data_parallel            about 40 seconds on 2 CPU cores: 8 fake devices
    python run_experiment.py data_parallel --quick    25 seconds: 4

Expected: a mean of the replicas' means is off by as much as it changes where they have different numbers of tokens, and
replicas whose gradients are not summed drift apart. By the alpha-beta model of H100s, few large sums cost least where
nothing hides them. Layer by layer under the backward pass nearly all is hidden on one host; on hundreds of GPUs the
latency of so many sums is longer than the backward pass of the layers that should hide it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch01_data_parallelism._reduction_model import (
    MODELS,
    REDUCTIONS,
    SIZES,
    TOKENS,
    cost,
    hidden_ratio,
    pieces,
    ratio_by_links,
    times_figure,
    updates_figure,
)
from experiments.ch01_data_parallelism._replicas import (
    Batches,
    mean_of_means,
    not_summed,
    one_device,
    replicas,
    summed,
)
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import Traffic
from jax5d.config import PRESETS, ConfigError, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.parameters import FLOAT32, count
from jax5d.mesh import make_mesh
from jax5d.train.step import Trainer

CAPSULES = [9]
CLAIM = "N replicas that sum their gradients make one device's updates for 2(N-1)/N of the gradients' bytes"
NEEDS = "8 fake CPU devices and 40 seconds on 2 cores, or 2 GPUs or more"

DEFAULTS = Options(mesh=MeshConfig(dp=8))
QUICK = replace(DEFAULTS, mesh=MeshConfig(dp=4))

REPLICAS = (2, 3, 4, 6, 8, 12, 24)
"""Numbers of devices N, as far as the mesh has them; they divide the rows."""
ROWS, STEPS, RATE = 24, 5, 0.1

RUN = RunConfig(
    model=replace(PRESETS["gpt2-tiny"], layers=2, d_model=32, d_ff=128, vocab=96, context=32),
    parallel=ParallelConfig(bucket_mb=0.03),
    train=TrainConfig(
        optimizer="sgd", learning_rate=RATE, warmup=0, final_lr=1.0, clip=0, global_batch=ROWS, seq_len=32
    ),
)
SCALARS, SCALAR_BYTES = 2 + 3, 2 * FLOAT32 + 3 * 2 * FLOAT32
"""What else a step sums over dp: the tokens and the loss; two squares for each set of axes that may split a leaf."""

Tree = Any


@dataclass(frozen=True)
class Sent:
    """What a device sends in a step, measured."""

    n: int
    reduction: str
    traffic: Traffic

    @property
    def sums(self) -> int:
        """Sums of gradients."""
        return sum(e.count for e in self.traffic.measured) - SCALARS

    @property
    def bytes(self) -> Fraction:
        """Bytes of gradients that a device sends."""
        return Fraction(self.traffic.bytes) - Fraction(2 * (self.n - 1), self.n) * SCALAR_BYTES


def check(options: Options, folder: Path) -> None:
    """Refuse a single device. The mesh only says how many devices there are to put replicas on."""
    if options.mesh.size < 2:
        raise ConfigError(f"data_parallel needs 2 devices or more, the mesh has {options.mesh.size}; write --mesh.dp 8")


def run(options: Options, folder: Path, console: Console) -> Outcome:
    """Train in every way, then count what the trainer sends."""
    config = replace(RUN, seed=options.seed)
    sizes = [n for n in REPLICAS if n <= options.mesh.size]
    shown = {"description": "replicas", "console": console, "disable": not console.is_terminal}
    with jax.default_matmul_precision("float32"):
        off = updates(config, sizes[-1], draw(options.seed))
    sent = [_sent(config, n, "overlap") for n in track(sizes, **shown)]
    sent += [_sent(config, sizes[-1], reduction) for reduction in REDUCTIONS if reduction != "overlap"]
    save_figure(updates_figure(off, [(s.n, float(s.bytes) / _gradients()) for s in sent], sizes[-1]), folder, "updates")
    save_figure(times_figure(), folder, "times")
    metrics = {
        "off_by_step": off,
        "sent": [{"n": s.n, "reduction": s.reduction, "sums": s.sums, "bytes": float(s.bytes)} for s in sent],
        "modelled": [vars(cost(model, n, way)) for model in MODELS for n in SIZES for way in REDUCTIONS],
    }
    return Outcome(_checks(off, sent), metrics, [_table(sent), _times_table(), _hiding_table()])


def draw(seed: int) -> Batches:
    """Random tokens; of row r's labels 32 (r+1)/24 count, so that replicas have different numbers of them."""
    tokens = np.random.default_rng(seed).integers(0, RUN.model.vocab, (STEPS, ROWS, RUN.train.seq_len + 1), np.int32)
    lengths = RUN.train.seq_len * np.arange(1, ROWS + 1) // ROWS
    labels = np.where(np.arange(RUN.train.seq_len) < lengths[:, None], tokens[..., 1:], -1)
    return jnp.asarray(tokens[..., :-1]), jnp.asarray(labels)


def updates(config: RunConfig, n: int, batches: Batches) -> dict[str, list[float]]:
    """How far each way's parameters, on its worst device, are from one device's after each step.

    The largest difference of a parameter, over the largest parameter of its leaf.
    """
    start = jax.tree.map(np.asarray, Trainer.create(config, mesh=_mesh(1)).init().params)
    want = one_device(start, batches, RATE)
    ways = {
        f"summed, N = {n}": replicas(start, batches, RATE, _mesh(n), summed),
        f"trainer, dp = {n}": _trained(replace(config, mesh=MeshConfig(dp=n)), batches),
        "mean of means": replicas(start, batches, RATE, _mesh(n), mean_of_means),
        "not summed": replicas(start, batches, RATE, _mesh(n), not_summed),
    }
    return {way: [_off(got, right) for got, right in zip(history, want, strict=True)] for way, history in ways.items()}


def _trained(config: RunConfig, batches: Batches) -> list[Tree]:
    """The library's trainer; parameters [N, ...] with the copy of each device."""
    trainer = Trainer.create(config, mesh=_mesh(config.mesh.size))
    state, history = trainer.init(), []
    for inputs, labels in zip(*batches, strict=True):
        batch = {"inputs": inputs[None], "labels": labels[None]}
        state, _ = trainer.step(state, jax.device_put(batch, trainer.batch_sharding))
        copies = lambda x: np.stack([np.asarray(shard.data) for shard in x.addressable_shards])  # noqa: E731
        history.append(jax.tree.map(copies, state.params))
    return history


def _off(got: Tree, want: Tree) -> float:
    def leaf(got: Any, want: Any) -> float:
        want = np.asarray(want)
        return float(np.max(np.abs(np.asarray(got) - want[None])) / np.max(np.abs(want)))

    return max(jax.tree.leaves(jax.tree.map(leaf, got, want)))


def _mesh(n: int) -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(dp=n), jax.devices()[:n])


def _sent(config: RunConfig, n: int, reduction: Any) -> Sent:
    config = replace(config, mesh=MeshConfig(dp=n), parallel=replace(config.parallel, reduction=reduction))
    return Sent(n, reduction, Traffic.of(Trainer.create(config, mesh=_mesh(n))))


def _gradients() -> int:
    """Bytes of the tiny model's gradients."""
    return FLOAT32 * count(RUN.model)


def _checks(off: dict[str, list[float]], sent: list[Sent]) -> list[Check]:
    right = {way: steps for way, steps in off.items() if way.startswith(("summed", "trainer"))}
    worst = max(max(steps) for steps in right.values())
    checks = [
        Check.below(f"{way}: off from one device, over the largest of a leaf", max(s), 2e-6) for way, s in right.items()
    ]
    for way in ("mean of means", "not summed"):
        checks.append(Check.below(f"rounding over what {way} is off after a step", worst / off[way][0], 1e-2))
    for s in sent:
        where = f"{s.reduction}, N = {s.n}"
        least = Fraction(2 * (s.n - 1), s.n) * _gradients()
        sums = len(pieces(RUN.model, s.reduction, RUN.parallel.bucket_mb * 1e6))
        checks += [
            Check.equal(f"{where}: bytes of gradients a device sends, 2(N-1)/N K", float(s.bytes), float(least)),
            Check.equal(f"{where}: sums of gradients", s.sums, sums),
            s.traffic.checks(where)[0],
        ]
    apart = max(abs(hidden_ratio(n, t) / ratio_by_links("gpt2", n, t) - 1) for n in SIZES for t in (1024, TOKENS))
    return [*checks, Check.below("hidden-communication ratio: formula against links without latency", apart, 1e-12)]


def _table(sent: list[Sent]) -> Table:
    columns = ("N", "reduction", "sums", "sent, MB", "over K", "2(N-1)/N")
    table = Table(*columns, title=f"Gradients in a step of a tiny GPT-2, K = {_gradients() / 1e6:.3f} MB, per device")
    for s in sent:
        ratio, theory = float(s.bytes) / _gradients(), 2 * (s.n - 1) / s.n
        table.add_row(str(s.n), s.reduction, str(s.sums), *(f"{x:.4f}" for x in (float(s.bytes) / 1e6, ratio, theory)))
    return table


def _times_table() -> Table:
    columns = ("model", "H100s", *(f"{way}: sums, ms" for way in REDUCTIONS), "overlap: not hidden, ms", "backward, ms")
    table = Table(*columns, title=f"Reduction by the alpha-beta model, {TOKENS} tokens a GPU")
    for model in MODELS:
        for n in SIZES:
            costs = {way: cost(model, n, way) for way in REDUCTIONS}
            cells = [f"{c.sums}, {c.seconds * 1e3:.1f}" for c in costs.values()]
            overlap = costs["overlap"]
            table.add_row(model, str(n), *cells, f"{overlap.exposed * 1e3:.1f}", f"{overlap.backward * 1e3:.1f}")
    return table


def _hiding_table() -> Table:
    table = Table(
        "H100s", "tokens a GPU", "ratio", "hidden", title="Communication over the backward pass, at peak FLOP/s"
    )
    for n in SIZES:
        for tokens in (2**19 // n, TOKENS, 8 * TOKENS):
            ratio = hidden_ratio(n, tokens)
            table.add_row(str(n), str(tokens), f"{ratio:.3g}", "whole" if ratio <= 1 else f"{100 / ratio:.0f} %")
    return table
