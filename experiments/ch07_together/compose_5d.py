"""All five axes at once: the MoE on pp = dp = ep = cp = tp = 2 learns exactly as on one device.

Claim: the loss curve on 32 devices, every axis at work, is the curve of one device up to float rounding.

    python run_experiment.py compose_5d            about a minute on 2 CPU cores: 32 fake devices
    python run_experiment.py compose_5d --quick    under a minute

Expected: float32 losses that differ by some 1e-6 nats until rounding flips a token's choice between two experts that
are as good as equal, by at most 1e-3 from then on, and a ledger that equals theory. The run on one device has a folder
of its own inside the run's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.harness import Check, Outcome, save_figure
from experiments.options import TrainingOptions
from experiments.training import Traffic, mesh_name, open_tokens
from jax5d.config import AXES, PRESETS, ConfigError, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.data.tokens import TokenFile
from jax5d.mesh import make_mesh
from jax5d.train.checkpoint import check_resume
from jax5d.train.loop import Run, fit, open_data
from jax5d.train.step import Trainer

CAPSULES = [37]
CLAIM = "An MoE on pp = dp = ep = cp = tp = 2 (32 devices) has the loss curve of one device"
NEEDS = "32 fake CPU devices and a minute on 2 cores, or 32 GPUs"

TOLERANCE = 1e-3
"""Nats. Rounding differs from mesh to mesh by 1e-6; where it flips a token's choice between two experts that are as
good as equal, that token's whole contribution differs, and the curves part by some 1e-4."""

ALONE = "one_device"
"""Folder, inside the run's, of the run on one device."""

DEFAULTS = TrainingOptions(
    mesh=MeshConfig(pp=2, dp=2, ep=2, cp=2, tp=2),
    model=replace(PRESETS["moe-tiny"], layers=2, d_model=64, d_ff=128),
    parallel=ParallelConfig(sequence=True, microbatches=2),
    train=TrainConfig(steps=60, seq_len=64, learning_rate=3e-3, eval_every=0, eval_sequences=64),
)
QUICK = replace(DEFAULTS, train=replace(DEFAULTS.train, steps=10))


def check(options: TrainingOptions, folder: Path) -> None:
    """Refuse a mesh on which an axis has nothing to do, and data or checkpoints that this run cannot use."""
    idle = [axis for axis in AXES if getattr(options.mesh, axis) == 1]
    if idle:
        raise ConfigError(
            f"compose_5d needs all five axes but mesh.{idle[0]}=1; write --devices 32, or five sizes of 2 or more"
        )
    data = open_data(options.run_config, open_tokens(options))
    for config, place in zip(_configs(options), (folder, folder / ALONE), strict=True):
        check_resume(place / "checkpoints", config, data.record)


def _configs(options: TrainingOptions) -> tuple[RunConfig, RunConfig]:
    """The run on its mesh, and on one device."""
    config = options.run_config
    return config, replace(config, mesh=MeshConfig(), parallel=replace(config.parallel, sequence=False))


def run(options: TrainingOptions, folder: Path, console: Console) -> Outcome:
    """The same training twice, from the same seed."""
    composed, alone = _configs(options)
    file = open_tokens(options)
    trainer = Trainer.create(composed)
    runs = {
        mesh_name(composed.mesh): fit(trainer, open_data(composed, file), folder, console),
        "one device": _fit_alone(alone, file, folder / ALONE, console),
    }
    losses = {name: np.array([record["loss"] for record in run.records]) for name, run in runs.items()}
    first, second = losses.values()
    apart = np.abs(first - second)
    save_figure(_figure(losses, apart), folder, "losses")
    traffic = Traffic.of(trainer)
    validation = [run.validation_loss for run in runs.values()]
    return Outcome(
        checks=[
            Check.equal("largest difference of the two loss curves, nats", apart.max(), 0, TOLERANCE),
            Check.equal("difference at the first step, nats", apart[0], 0, 1e-5),
            Check.equal("difference of the validation losses, nats", validation[0] - validation[1], 0, TOLERANCE),
            Check.below("loss at the end, nats, below the loss at the start", first[-1], first[0]),
            *traffic.checks(),
        ],
        metrics={"losses": losses, "validation_losses": validation, "largest_difference": apart.max()},
        tables=[traffic.table()],
    )


def _fit_alone(config: RunConfig, file: TokenFile, folder: Path, console: Console) -> Run:
    folder.mkdir(exist_ok=True)
    trainer = Trainer.create(config, mesh=make_mesh(config.mesh, jax.devices()[:1]))
    return fit(trainer, open_data(config, file), folder, console)


def _figure(losses: dict[str, np.ndarray], apart: np.ndarray) -> Figure:
    figure = Figure(figsize=(8, 6))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = np.arange(1, len(apart) + 1)
    for (name, curve), style in zip(losses.items(), ({"linewidth": 5, "alpha": 0.4}, {"linewidth": 1.5}), strict=True):
        top.plot(steps, curve, label=name, **style)
    top.set(ylabel="training loss, nats per token", title="An MoE on all five axes and on one device")
    top.legend()
    bottom.semilogy(steps, np.maximum(apart, 1e-9), ".-", color="tab:gray")
    bottom.axhline(TOLERANCE, color="tab:red", linestyle="--", linewidth=1, label=f"tolerance {TOLERANCE:g}")
    bottom.set(xlabel="optimizer step", ylabel="difference, nats")
    bottom.legend()
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return figure
