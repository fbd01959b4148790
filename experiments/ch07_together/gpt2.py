"""The main job: GPT-2 learns real text on a mesh, and writes a few lines of it.

Claim: GPT-2 ends with a validation loss below the bigram entropy of the same validation text (with --quick: below its
unigram entropy), and every collective of its step is one that theory asks for. Without options and without GPUs,
pipeline, data, context and tensor parallelism are all at work.

    python run_experiment.py gpt2                      about 90 seconds on 2 CPU cores: 16 fake devices, pp dp cp tp = 2
    python run_experiment.py gpt2 --quick              under a minute
    python run_experiment.py gpt2 --model.name gpt2 --model.dtype bfloat16 --train.seq_len 1024 ...   on GPUs

Expected on the Python standard library's sources, byte by byte: about 2.1 nats, where bigrams leave 2.4. With the
same --out the run goes on from its newest checkpoint, on this mesh or another.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from experiments.harness import Check, Outcome, save_figure
from experiments.options import TrainingOptions
from experiments.training import Traffic, mesh_name, open_tokens
from jax5d.config import MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from jax5d.data.batches import Windows
from jax5d.data.statistics import bigram_entropy, unigram_entropy
from jax5d.inference.generate import generate
from jax5d.inference.sample import Sampling
from jax5d.train.checkpoint import check_resume
from jax5d.train.loop import Run, fit, open_data
from jax5d.train.step import Trainer

CAPSULES = [38]
CLAIM = "GPT-2 ends below the bigram entropy of its validation text (with --quick: the unigram entropy), on any mesh"
NEEDS = "16 fake CPU devices and 2 minutes on 2 cores, or GPUs"

PROMPT = "def "
WRITTEN = 160
"""Tokens that the trained model adds to the prompt."""

DEFAULTS = TrainingOptions(
    mesh=MeshConfig(pp=2, dp=2, cp=2, tp=2),
    model=ModelConfig(),
    parallel=ParallelConfig(microbatches=2),
    train=TrainConfig(steps=400, learning_rate=3e-3, eval_sequences=512),
)
QUICK = replace(
    DEFAULTS,
    mesh=MeshConfig(pp=2, dp=1, cp=2, tp=2),
    model=replace(DEFAULTS.model, layers=2, d_model=64, d_ff=256),
    train=replace(DEFAULTS.train, steps=60, eval_sequences=128),
)


def check(options: TrainingOptions, folder: Path) -> None:
    """Refuse data or checkpoints that this run cannot use, before anything is written."""
    data = open_data(options.run_config, open_tokens(options))
    check_resume(folder / "checkpoints", options.run_config, data.record)


def run(options: TrainingOptions, folder: Path, console: Console) -> Outcome:
    """Train, evaluate, write."""
    file = open_tokens(options)
    data = open_data(options.run_config, file)
    trainer = Trainer.create(options.run_config)
    result = fit(trainer, data, folder, console)
    unigram, bigram = _entropies(data.validation, options.train.eval_sequences)
    limit, name = (unigram, "unigram") if options.quick else (bigram, "bigram")
    traffic = Traffic.of(trainer)
    save_figure(_curves(result, unigram, bigram, options), folder, "loss")
    prompt = [int(i) for i in file.tokenizer.encode(PROMPT)]
    sampling, window = Sampling(temperature=0.8, seed=options.seed), options.train.seq_len
    (written,) = generate(trainer, result.state.params, [prompt], WRITTEN, sampling=sampling, window=window)
    text = file.tokenizer.decode(written)
    console.print(Panel(Text(text), title="written by the trained model"))
    return Outcome(
        checks=[
            Check.below(f"validation loss below {name} entropy, nats a token", result.validation_loss, limit),
            *traffic.checks(),
        ],
        metrics={
            "validation_loss": result.validation_loss,
            "unigram_entropy": unigram,
            "bigram_entropy": bigram,
            "steps": len(result.records),
            "text": text,
        },
        tables=[traffic.table()],
    )


def _entropies(validation: Windows, limit: int) -> tuple[float, float]:
    """Unigram and bigram entropy, nats per token, of exactly the text that the validation loss is about."""
    rows = np.stack([validation[int(i)] for i in validation.sample(limit)])
    return unigram_entropy(rows[:, 1:], validation.vocab), bigram_entropy(rows, validation.vocab)


def _curves(result: Run, unigram: float, bigram: float, options: TrainingOptions) -> Figure:
    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_subplot()
    steps = [r["step"] for r in result.records]
    axes.plot(steps, [r["loss"] for r in result.records], color="tab:blue", linewidth=1, label="training loss")
    points = [(r["step"], r["validation_loss"]) for r in result.records if "validation_loss" in r]
    axes.plot([s for s, _ in points], [loss for _, loss in points], "o-", color="tab:red", label="validation loss")
    axes.axhline(unigram, color="gray", linestyle=":", label=f"unigram entropy of the validation text, {unigram:.2f}")
    axes.axhline(bigram, color="black", linestyle="--", label=f"bigram entropy of the validation text, {bigram:.2f}")
    title = f"{options.model.name} on {mesh_name(options.mesh)}"
    axes.set(xlabel="optimizer step", ylabel="cross-entropy, nats per token", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
