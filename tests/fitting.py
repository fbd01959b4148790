"""Small training runs for the tests of the loop and of checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny
from rich.console import Console

from jax5d.config import RunConfig, check
from jax5d.data.tokenizer import ByteTokenizer
from jax5d.data.tokens import TokenFile, write_tokens
from jax5d.mesh import make_mesh
from jax5d.train.loop import Data, Run, fit, open_data
from jax5d.train.step import Trainer

SEQUENCES, VALIDATION = 40, 10
COUNTER = 16_777_217
"""2^24 + 1: the first integer that float32 cannot hold."""


def token_file(folder: Path, sequences: int = SEQUENCES) -> TokenFile:
    """`sequences` windows of 32 distinct-looking bytes to train on and 10 to validate on."""
    train, held = sequences * tiny.LENGTH + 1, VALIDATION * tiny.LENGTH + 1
    ids = np.random.default_rng(0).integers(0, 256, train + held)
    return write_tokens(folder / "text.tokens", [ids], ByteTokenizer(), validation=held / (train + held))


def config(mesh: dict[str, int] | None = None, **options: Any) -> RunConfig:
    """An AdamW run of 6 steps with dropout; `options` as in `tiny.config`."""
    defaults = {
        "vocab": 257,
        "optimizer": "adamw",
        "learning_rate": 1e-2,
        "warmup": 4,
        "final_lr": 0.1,
        "clip": 1.0,
        "dropout": 0.1,
        "steps": 6,
        "checkpoint_every": 3,
        "keep": 9,
        "eval_every": 0,
        "layers": 4,
    }
    return tiny.config(mesh, **(defaults | options))


def trainer(run: RunConfig) -> Trainer:
    """The run's trainer, on the first devices."""
    check(run)
    return Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[: run.mesh.size]))


def train(run: RunConfig, file: TokenFile, folder: Path, built: Trainer | None = None) -> tuple[Run, Trainer, Data]:
    """Fit in `folder`, which may hold an earlier part of the run. `built` saves compiling its step again."""
    folder.mkdir(exist_ok=True)
    built = built or trainer(run)
    data = open_data(run, file)
    return (
        fit(replace(built, config=run) if built.config != run else built, data, folder, Console(quiet=True)),
        built,
        data,
    )


def killed_after(whole: Path, step: int, folder: Path) -> Path:
    """A copy of a run as kill -9 would have left it: its newest whole checkpoint is of `step`, its log runs on."""
    shutil.copytree(whole, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    (folder / "checkpoints" / f"{step + 3}.orbax-checkpoint-tmp").mkdir()
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 99, "lo')  # a line torn by the kill
    return folder


def losses(run: Run) -> list[float]:
    """Training loss of every step."""
    return [record["loss"] for record in run.records]
