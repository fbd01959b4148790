"""Mixed precision: what 16 bits can hold, what they lose, and four trainings that show when it matters.

Claim: with float32 master weights and sums, bfloat16 compute, and float16 with loss scaling, train as float32 does;
with bfloat16 for everything most updates are rounded away, and the loss shows it.

    python run_experiment.py mixed_precision            about 2 minutes on 2 CPU cores: 4 fake devices
    python run_experiment.py mixed_precision --quick    under a minute

Expected: range and precision of each format follow from its bits, and the device rounds as they say. In bfloat16
counting stops at 256. The mixed runs end within 0.01 nats of float32, the pure one some 0.05 above it. State is 12
bytes per parameter (weights and AdamW's two moments) where weights are float32 and 6 where they are not; gradients add
4 or 2 while a step lasts. Micikevicius et al., arXiv:1710.03740.

The experiment fixes --model.dtype, --model.param_dtype and --parallel.accumulate. Each run has a folder of its own
inside the run's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.ch00_foundations import _precision_facts as facts
from experiments.ch00_foundations._precision_figures import curves_figure, formats_figure, losses_figure
from experiments.harness import Check, Outcome, save_figure
from experiments.options import TrainingOptions
from experiments.training import open_tokens
from jax5d.config import ConfigError, MeshConfig, ModelConfig, RunConfig, TrainConfig
from jax5d.config import check as check_run
from jax5d.costs.formats import FORMATS
from jax5d.data.batches import device_batch
from jax5d.data.tokens import TokenFile
from jax5d.measure.memory import bytes_on_device
from jax5d.train.checkpoint import check_resume
from jax5d.train.loop import Data, Run, fit, open_data
from jax5d.train.step import Trainer

CAPSULES = [5]
CLAIM = "16-bit compute trains as float32 does while weights and sums are float32; pure bfloat16 loses most updates"
NEEDS = "4 fake CPU devices and 2 minutes on 2 cores, or GPUs"

RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": "float32"}, "float32"),
    "bfloat16, float32 weights": ({"dtype": "bfloat16"}, "float32"),
    "float16, scaled loss": ({"dtype": "float16"}, "float32"),
    "pure bfloat16": ({"dtype": "bfloat16", "param_dtype": "bfloat16"}, "bfloat16"),
}
"""Options of the model, and the dtype of gradient sums."""
MIXED, PURE = list(RECIPES)[1:3], list(RECIPES)[3]

TOLERANCE = 0.01
"""Nats between the validation losses of a mixed run and of float32's, which begin with the same weights and see the
same text. Another seed moves float32's own loss by up to 0.07."""

DEFAULTS = TrainingOptions(
    mesh=MeshConfig(dp=4),
    model=ModelConfig(layers=2, d_model=64, d_ff=256, context=64),
    train=TrainConfig(
        steps=300, seq_len=64, learning_rate=1e-3, warmup=10, checkpoint_every=0, eval_every=20, eval_sequences=256
    ),
)
QUICK = replace(
    DEFAULTS, mesh=MeshConfig(dp=2), train=replace(DEFAULTS.train, steps=100, eval_every=25, eval_sequences=128)
)


@dataclass(frozen=True)
class Trained:
    """One recipe's run."""

    trainer: Trainer
    data: Data
    run: Run
    state_bytes: float
    """Of weights and moments, per parameter."""
    gradient_bytes: int
    """Of the gradient sums, per parameter; they exist while a step lasts."""
    unchanged: float
    """Share of parameters that the step after the last leaves bitwise as they are."""


def check(options: TrainingOptions, folder: Path) -> None:
    """Refuse other axes than dp, and data or checkpoints that these runs cannot use."""
    if options.mesh.dp < 2 or options.mesh.dp != options.mesh.size:
        sizes = " ".join(f"mesh.{axis}={size}" for axis, size in vars(options.mesh).items())
        raise ConfigError(f"mixed_precision sums over dp alone, but has {sizes}; write --mesh.dp 4 and no other axis")
    file = open_tokens(options)
    for name, config in configs(options).items():
        check_run(config)
        check_resume(_place(folder, name) / "checkpoints", config, open_data(config, file).record)


def configs(options: TrainingOptions) -> dict[str, RunConfig]:
    """The same run by each recipe."""
    base = options.run_config
    return {
        name: replace(base, model=replace(base.model, **dtypes), parallel=replace(base.parallel, accumulate=accumulate))
        for name, (dtypes, accumulate) in RECIPES.items()
    }


def _place(folder: Path, name: str) -> Path:
    return folder / name.replace(",", "").replace(" ", "_")


def run(options: TrainingOptions, folder: Path, console: Console) -> Outcome:
    """Formats, small sums, gradients of one batch, and the four trainings."""
    file = open_tokens(options)
    runs = {
        name: _train(config, file, _place(folder, name), console, name) for name, config in configs(options).items()
    }
    pieces = (32,) if options.quick else (1, 2, 4, 8, 16, 32)
    errors = {m: facts.accumulation_error(options.run_config, file, m) for m in pieces}
    half = runs["float16, scaled loss"]
    lost = facts.underflow(half.trainer, half.run.state, half.data)
    counts = {name: facts.running_sums(0, 1, 512, name) for name in ("float32", "float16", "bfloat16")}
    save_figure(formats_figure(), folder, "formats")
    save_figure(losses_figure(counts, errors, lost), folder, "what_is_lost")
    save_figure(curves_figure({name: r.run for name, r in runs.items()}), folder, "losses")
    metrics = {
        "runs": {name: _numbers(r) for name, r in runs.items()},
        "gradient_error_of_bfloat16_sums": {str(m): error for m, error in errors.items()},
        "float16_gradients_lost_by_loss_scale": {str(scale): share for scale, share in lost.items()},
    }
    checks = [
        *_format_checks(options.seed),
        *_sum_checks(options.mesh.dp, counts),
        Check.below("error of one rounding, 2^-8, below the gradient error of bfloat16 sums over 32 microbatches",
                    FORMATS["bfloat16"].epsilon / 2, errors[32]),
        Check.below("share of float16 gradients lost at a loss scale of 2^15", lost[2.0**15], 0.001),
        Check.below("0.05 below the share lost by a mean over 2^10 times as many tokens", 0.05, lost[2.0**-10]),
        *_training_checks(runs),
    ]  # fmt: skip
    return Outcome(checks, metrics, [_formats_table(), _table(runs)])


def _train(config: RunConfig, file: TokenFile, folder: Path, console: Console, name: str) -> Trained:
    folder.mkdir(exist_ok=True)
    console.print(name, highlight=False)
    trainer, data = Trainer.create(config), open_data(config, file)
    done = fit(trainer, data, folder, console)
    state = done.state
    count = sum(x.size for x in jax.tree.leaves(state.params))
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    held = bytes_on_device((state.params, moments), trainer.mesh.devices.flat[0])
    before = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    batch = device_batch(data.batches, config.train.steps, trainer.batch_sharding)
    following, _ = trainer.step(jax.tree.map(lambda x: x.copy(), state), batch)  # the step takes its argument away
    after = jax.tree.leaves(following.params)
    same = sum(int(np.sum(old == np.asarray(new))) for old, new in zip(before, after, strict=True))
    gradients = np.dtype(config.parallel.accumulate).itemsize
    return Trained(trainer, data, done, held / count, gradients, same / count)


def _numbers(trained: Trained) -> dict[str, Any]:
    return {
        "validation_loss": trained.run.validation_loss,
        "losses": [record["loss"] for record in trained.run.records],
        "state_bytes_per_parameter": trained.state_bytes,
        "gradient_bytes_per_parameter": trained.gradient_bytes,
        "share_of_parameters_unchanged_by_a_step": trained.unchanged,
        "skipped_steps": sum(record.get("skipped", 0) for record in trained.run.records),
    }


def _format_checks(seed: int) -> list[Check]:
    wrong = sum(facts.format_errors(f) for f in facts.MACHINE)
    rounded = sum(facts.rounding_errors(f, seed) for f in facts.MACHINE)
    return [
        Check.equal("largest, smallest and epsilon of the formats that differ from the machine's", wrong, 0),
        Check.equal("numbers that the device rounds otherwise than the formats' bits say", rounded, 0),
    ]


def _sum_checks(n: int, counts: dict[str, np.ndarray]) -> list[Check]:
    """Sums on the device against rounding on paper."""
    small = {name: facts.running_sums(1, 2.0**-9, 256, name)[-1] for name in ("float32", "bfloat16")}
    rings = {name: facts.ring_sums(n, name) for name in ("float32", "bfloat16")}
    checks = [
        Check.equal(f"counting 512 ones in {name}", counts[name][-1], min(512, FORMATS[name].exact_integers))
        for name in counts
    ]
    wrong = sum(
        int(np.sum(counts[name] != facts.sums_by_rounding(0, 1, 512, FORMATS[name])))
        + int(np.sum(rings.get(name, 0) != facts.ring_by_rounding(n, FORMATS[name]) if name in rings else 0))
        for name in counts
    )
    return [
        *checks,
        Check.equal("1 + 256 x 2^-9 in float32", small["float32"], 1.5),
        Check.equal("1 + 256 x 2^-9 in bfloat16", small["bfloat16"], 1.0),
        Check.equal(f"256 and {n - 1} ones, a ring's sum in float32", rings["float32"].min(), 255 + n),
        Check.equal(f"256 and {n - 1} ones, a ring's sum in bfloat16, from the 256 on", rings["bfloat16"].min(), 256),
        Check.equal("sums on the way that are not those of rounding by hand", wrong, 0),
    ]


def _training_checks(runs: dict[str, Trained]) -> list[Check]:
    plain, pure = runs["float32"], runs[PURE]
    expected = {name: 3 * (2 if name == PURE else 4) for name in runs}  # a weight and two moments
    apart = {name: r.run.validation_loss - plain.run.validation_loss for name, r in runs.items()}
    return [
        *(Check.equal(f"validation loss of {name} less float32's, nats", apart[name], 0, TOLERANCE) for name in MIXED),
        Check.below(f"{TOLERANCE} nats below what pure bfloat16 loses", TOLERANCE, apart[PURE]),
        *(Check.equal(f"bytes of state per parameter, {n}", r.state_bytes, expected[n]) for n, r in runs.items()),
        Check.below("share of parameters that a step leaves alone, float32", plain.unchanged, 0.01),
        Check.below("half below the share that it leaves alone in pure bfloat16", 0.5, pure.unchanged),
    ]  # fmt: skip


def _formats_table() -> Table:
    columns = ("format", "bits", "largest", "smallest normal", "smallest", "epsilon", "counts to")
    table = Table(*columns, title="Formats, from their bits")
    for f in FORMATS.values():
        numbers = (f.largest, f.smallest_normal, f.smallest_subnormal, f.epsilon)
        table.add_row(f.name, str(f.bits), *(f"{x:.2g}" for x in numbers), str(f.exact_integers))
    return table


def _table(runs: dict[str, Trained]) -> Table:
    columns = ("recipe", "loss", "less float32's", "state, bytes", "gradients, bytes", "unchanged by a step")
    table = Table(*columns, title="Four trainings; bytes are per parameter")
    plain = runs["float32"].run.validation_loss
    for name, r in runs.items():
        loss = r.run.validation_loss
        cells = (f"{loss:.4f}", f"{loss - plain:+.4f}", f"{r.state_bytes:.2f}", f"{r.gradient_bytes}")
        table.add_row(name, *cells, f"{r.unchanged:.1%}")
    return table
