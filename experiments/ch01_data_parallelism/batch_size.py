"""How large a batch pays: three batch sizes to the same loss, and the noise of the gradients that foretells it.

Claim: a larger batch reaches the same loss in fewer steps and more tokens; the critical batch, where the two are in
balance, is of the order of the gradient noise scale, which one run measures, and which grows as the loss falls.

    python run_experiment.py batch_size            about 2 minutes on 2 CPU cores: 4 fake devices
    python run_experiment.py batch_size --quick    under a minute

Expected (McCandlish et al., arXiv:1812.06162): S steps and E sequences to a loss lie on a hyperbola (eq. 2.11),
(S/Smin - 1)(E/Emin - 1) = 1. The critical batch Emin/Smin costs twice either least: some tens of sequences of 32 bytes
here. It is as rough as three runs are: good to a factor, not to a digit. Learning rates grow with the fourth root of
the batch: by the usual square root the largest batch's, 4e-3, is more than this model bears, while 1e-3 to 2e-3 suit
all three. Each run has a folder of its own inside the run's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from rich.console import Console
from rich.table import Table

from experiments.harness import Check, Outcome, save_figure
from experiments.options import TrainingOptions
from experiments.training import open_tokens
from jax5d.config import ConfigError, MeshConfig, ModelConfig, RunConfig, TrainConfig
from jax5d.config import check as check_run
from jax5d.data.tokens import TokenFile
from jax5d.train.checkpoint import check_resume
from jax5d.train.loop import fit, open_data
from jax5d.train.step import Trainer

CAPSULES = [11]
CLAIM = "Larger batches need fewer steps and more tokens; the critical batch is of the order of the noise scale"
NEEDS = "4 fake CPU devices and 2 minutes on 2 cores, or 2 GPUs or more"

FACTORS = {1: 1.0, 4: 0.5, 16: 0.35}
"""Multiples of train.global_batch, and the share of train.steps that each is given."""
AGREEMENT = 5
"""Factor within which the critical batch and the noise scale agree. Both are rough: crossings of three curves, whose
learning rates follow a rule instead of being tuned; a mean of steps between which the noise scale itself grows."""
ABOVE = (0.3, 0.15, 0.0)
"""Nats of the target losses above the lowest that all runs reach."""

DEFAULTS = TrainingOptions(
    mesh=MeshConfig(dp=4),
    model=ModelConfig(layers=2, d_model=64, d_ff=256, context=32),
    train=TrainConfig(
        steps=500,
        global_batch=8,
        seq_len=32,
        learning_rate=1e-3,
        warmup=10,
        final_lr=1.0,
        weight_decay=0.0,
        clip=0.0,
        checkpoint_every=0,
        eval_every=10,
        eval_sequences=128,
    ),
)
"""A constant learning rate, so that a curve does not depend on where it ends. The rate is the smallest batch's."""
QUICK = replace(DEFAULTS, train=replace(DEFAULTS.train, steps=200))


@dataclass(frozen=True)
class Curve:
    """One batch size."""

    batch: int
    """Sequences."""
    rate: float
    """Learning rate."""
    losses: np.ndarray
    """Training loss of each step."""
    validation: np.ndarray
    """[evaluations, 2]: steps done, and validation loss."""
    signal: np.ndarray
    """Estimate of |G|^2 of each step."""
    noise: np.ndarray
    """Estimate of tr(S) of each step, in units of one sequence."""

    def noise_scale(self, start: float, stop: float) -> float:
        """tr(S) / |G|^2 in sequences, each averaged over the steps [start, stop)."""
        part = slice(round(start), max(round(stop), round(start) + 1))
        return float(self.noise[part].mean() / self.signal[part].mean())

    def steps_to(self, loss: float) -> float:
        """Steps to the first validation loss that is not above `loss`, between evaluations by a straight line."""
        steps, losses = self.validation.T
        i = int(np.argmax(losses <= loss))
        if i == 0:
            return float(steps[0])
        return float(np.interp(loss, [losses[i], losses[i - 1]], [steps[i], steps[i - 1]]))


@dataclass(frozen=True)
class Balance:
    """What a target loss costs at each batch size, and the hyperbola through it."""

    loss: float
    steps: np.ndarray
    sequences: np.ndarray
    least_steps: float
    """Smin: however large the batch."""
    least_sequences: float
    """Emin: however small."""
    noise_scale: float
    """Geometric mean over the runs, each over the second half of its way to the loss."""

    @property
    def critical(self) -> float:
        """Emin / Smin, in sequences."""
        return self.least_sequences / self.least_steps

    @property
    def misfit(self) -> float:
        """How far the runs are off the hyperbola: the largest |Smin/S + Emin/E - 1|."""
        return float(np.max(np.abs(self.least_steps / self.steps + self.least_sequences / self.sequences - 1)))


def check(options: TrainingOptions, folder: Path) -> None:
    """Refuse a mesh without replicas to compare, and data or checkpoints that these runs cannot use."""
    mesh = options.mesh
    if mesh.batch_shards < 2 or mesh.batch_shards != mesh.size:
        sizes = " ".join(f"mesh.{axis}={size}" for axis, size in vars(mesh).items())
        raise ConfigError(f"batch_size compares whole replicas, but has {sizes}; write --mesh.dp 4 and no other axis")
    file = open_tokens(options)
    for config in configs(options):
        check_run(config)
        check_resume(_place(folder, config) / "checkpoints", config, open_data(config, file).record)


def configs(options: TrainingOptions) -> list[RunConfig]:
    """A run for each batch size, the learning rate growing with its fourth root."""
    base, found = options.run_config, []
    for factor, share in FACTORS.items():
        train = replace(
            base.train,
            steps=math.ceil(base.train.steps * share),
            global_batch=base.train.global_batch * factor,
            learning_rate=base.train.learning_rate * factor**0.25,
        )
        found.append(replace(base, train=train))
    return found


def _place(folder: Path, config: RunConfig) -> Path:
    return folder / f"batch_{config.train.global_batch}"


def run(options: TrainingOptions, folder: Path, console: Console) -> Outcome:
    """Train with each batch size, then read off what the same losses cost."""
    file = open_tokens(options)
    curves = [_fit(config, file, _place(folder, config), console) for config in configs(options)]
    lowest = max(float(curve.validation[:, 1].min()) for curve in curves)
    found = [balance(curves, lowest + above) for above in ABOVE]
    save_figure(_curves_figure(curves, found, options.train.seq_len), folder, "curves")
    save_figure(_balance_figure(curves, found), folder, "balance")
    metrics = {
        "curves": [vars(curve) for curve in curves],
        "targets": [vars(b) | {"critical_batch": b.critical, "misfit": b.misfit} for b in found],
    }
    return Outcome(_checks(curves, found[-1]), metrics, [_table(curves, found)])


def _fit(config: RunConfig, file: TokenFile, folder: Path, console: Console) -> Curve:
    folder.mkdir(exist_ok=True)
    console.print(f"{config.train.global_batch} sequences a step", highlight=False)
    records = fit(Trainer.create(config), open_data(config, file), folder, console).records
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    series = {name: np.array([r[name] for r in records]) for name in ("loss", "gradient_signal", "gradient_noise")}
    return Curve(config.train.global_batch, config.train.learning_rate, series["loss"], np.array(validation),
                 series["gradient_signal"], series["gradient_noise"])  # fmt: skip


def balance(curves: list[Curve], loss: float) -> Balance:
    """What `loss` cost. On the hyperbola Smin/S + Emin/E = 1, which is linear in the least numbers."""
    steps = np.array([curve.steps_to(loss) for curve in curves])
    sequences = steps * [curve.batch for curve in curves]
    least, *_ = np.linalg.lstsq(np.stack([1 / steps, 1 / sequences], axis=1), np.ones(len(curves)), rcond=None)
    scales = [curve.noise_scale(n / 2, n) for curve, n in zip(curves, steps, strict=True)]
    return Balance(loss, steps, sequences, float(least[0]), float(least[1]), math.exp(np.mean(np.log(scales))))


def _checks(curves: list[Curve], last: Balance) -> list[Check]:
    largest = curves[-1]
    steps = len(largest.losses)
    early, late = largest.noise_scale(0, steps / 10), largest.noise_scale(2 * steps / 3, steps)
    pairs = zip(curves, curves[1:], range(len(curves)), strict=False)
    checks = []
    for small, large, i in pairs:
        where = f"of batch {large.batch} below those of {small.batch}"
        checks.append(Check.below(f"steps to {last.loss:.2f} nats {where}", last.steps[i + 1], last.steps[i]))
        more = f"sequences of batch {small.batch} below those of {large.batch}"
        checks.append(Check.below(f"{more}, to {last.loss:.2f} nats", last.sequences[i], last.sequences[i + 1]))
    apart = abs(math.log(last.critical / last.noise_scale)) if last.critical > 0 else math.inf
    return [
        *checks,
        Check.equal("runs off the hyperbola, largest |Smin/S + Emin/E - 1|", last.misfit, 0, 0.2),
        Check.below("critical batch and noise scale apart, by a factor of", math.exp(apart), AGREEMENT),
        Check.below(f"noise scale of the first tenth of batch {largest.batch}, below the last third's", early, late),
    ]


def _table(curves: list[Curve], found: list[Balance]) -> Table:
    names = [f"steps, sequences at batch {curve.batch}" for curve in curves]
    table = Table("loss", *names, "critical batch", "noise scale", title="What a validation loss costs")
    for b in found:
        costs = [f"{s:.0f}, {e:.0f}" for s, e in zip(b.steps, b.sequences, strict=True)]
        table.add_row(f"{b.loss:.3f}", *costs, f"{b.critical:.0f}", f"{b.noise_scale:.0f}")
    return table


def _curves_figure(curves: list[Curve], found: list[Balance], seq_len: int) -> Figure:
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, per_step in ((left, {c.batch: 1 for c in curves}), (right, {c.batch: c.batch * seq_len for c in curves})):
        for curve in curves:
            steps, losses = curve.validation.T
            label = f"batch {curve.batch}, learning rate {curve.rate:.3g}"
            axes.plot(steps * per_step[curve.batch], losses, ".-", markersize=4, label=label)
        for b in found:
            axes.axhline(b.loss, color="gray", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    left.set(
        xlabel="optimizer steps", ylabel="validation loss, nats per token", title="Fewer steps with larger batches"
    )
    right.set(xlabel="tokens", title="Fewer tokens with smaller ones")
    left.legend()
    right.plot([], [], color="gray", linestyle=":", label="losses compared")
    right.legend(handles=right.lines[-1:])
    return figure


def _balance_figure(curves: list[Curve], found: list[Balance]) -> Figure:
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for b, color in zip(found, ("tab:olive", "tab:orange", "tab:red"), strict=True):
        batches = np.geomspace(curves[0].batch / 3, curves[-1].batch * 3, 100)
        steps = b.least_steps * (1 + b.critical / batches)  # E = B S on the hyperbola
        left.plot(steps, steps * batches, color=color, label=f"{b.loss:.2f} nats: critical batch {b.critical:.0f}")
        left.plot(b.steps, b.sequences, "o", color=color)
    for curve, steps, sequences in zip(curves, found[-1].steps, found[-1].sequences, strict=True):
        left.annotate(f"batch {curve.batch}", (steps, sequences), (8, 4), textcoords="offset points")
    left.set(xscale="log", yscale="log", xlabel="steps S", ylabel="sequences E")
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter(ScalarFormatter())
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_title("Costs of a loss, and (S/Smin - 1)(E/Emin - 1) = 1")
    left.legend()
    _noise_lines(right, curves)
    last = found[-1]
    right.axhline(last.critical, color="tab:red", linestyle="--", label=f"critical batch at {last.loss:.2f} nats")
    right.set(yscale="log", xlabel="training loss, nats per token", ylabel="sequences")
    right.set_title("The gradient noise scale grows as the loss falls")
    right.invert_xaxis()
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
    return figure


def _noise_lines(axes: Axes, curves: list[Curve]) -> None:
    """The noise scale of each run against its loss, both over twelfths of the run."""
    for curve in curves:
        points: list[tuple[Any, ...]] = []
        for part in np.array_split(np.arange(len(curve.losses)), 12):
            scale = curve.noise_scale(part[0], part[-1] + 1)
            points += [(curve.losses[part].mean(), scale)] if scale > 0 else []
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=f"noise scale, batch {curve.batch}")
