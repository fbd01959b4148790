"""The loop around the step: feeds batches, logs, evaluates, saves and stops."""

from __future__ import annotations

import math
import resource
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from jax5d.config import RunConfig
from jax5d.costs.flops import flops_per_token, peak_flops
from jax5d.data.batches import Batches, Windows, check_enough, evaluation_batches, stream
from jax5d.data.tokens import TokenFile
from jax5d.train.checkpoint import Checkpoints, check_resume, read_about
from jax5d.train.metrics import MetricsLog, jsonable, read_metrics
from jax5d.train.noise import NoiseScale
from jax5d.train.profile import Profile
from jax5d.train.signals import Stopped, StopRequest
from jax5d.train.step import Trainer, TrainState

QUIET_SECONDS = 10
"""Without a terminal, a line is printed at least this often."""


SMALLEST_SCALE = 1.0
"""float16 training whose gradients overflow below this loss scale has diverged."""


@dataclass(frozen=True)
class Data:
    """A token file cut into the windows of a run."""

    train: Windows
    validation: Windows
    batches: Batches

    @property
    def record(self) -> dict[str, Any]:
        """What identifies the data: a run does not go on with other data."""
        counts = {"train_windows": len(self.train), "validation_windows": len(self.validation)}
        return counts | {"digest": self.train.digest}


def open_data(config: RunConfig, file: TokenFile) -> Data:
    """Cut `file` for a run. Raises `ConfigError` where it is too short or its vocabulary is too large."""
    train = Windows(file, "train", config.train.seq_len, config.model.vocab)
    validation = Windows(file, "validation", config.train.seq_len, config.model.vocab)
    batches = Batches(train, config.seed, config.train.global_batch, config.parallel.microbatches, config.data.repeat)
    check_enough(batches, config.train.steps)
    return Data(train, validation, batches)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    state: TrainState
    validation_loss: float
    """Token-weighted mean cross-entropy in nats."""
    records: list[dict[str, Any]]
    """The metrics of every step, those before a resume included."""


def evaluate(trainer: Trainer, state: TrainState, windows: Windows) -> float:
    """Exact token-weighted mean cross-entropy, in nats, of `train.eval_sequences` windows of the split, each once."""
    config = trainer.config
    total, tokens = 0.0, 0
    for batch in evaluation_batches(
        windows,
        config.train.global_batch,
        config.parallel.microbatches,
        config.train.eval_sequences,
        trainer.batch_sharding,
    ):
        sums = jax.device_get(trainer.evaluate(state.params, batch))
        total, tokens = total + float(sums["loss_sum"]), tokens + int(sums["tokens"])
    return total / max(tokens, 1)


def fit(trainer: Trainer, data: Data, folder: Path, console: Console) -> Run:
    """Train to `train.steps`, going on from the newest whole checkpoint in `folder`.

    Raises:
        ConfigError: the checkpoints there are of another run.
        SaveError: a checkpoint could not be written.
        Stopped: SIGINT or SIGTERM came; the state is saved.
        FloatingPointError: the loss or the gradient is not finite; checkpoints before it are kept.
    """
    saved = check_resume(folder / "checkpoints", trainer.config, data.record)
    start = saved or 0
    parallel = trainer.config.parallel
    if parallel.zero > trainer.zero.stage:
        axes = " = ".join(parallel.zero_axes)
        _say(
            console, f"parallel.zero={parallel.zero} has nothing to share out where {axes} = 1: the run is one without"
        )
    with Checkpoints(folder / "checkpoints", trainer, data.record) as checkpoints:
        state = trainer.init() if saved is None else _go_on(checkpoints, saved, console)
        with (
            MetricsLog(folder, start) as log,
            StopRequest() as stop,
            _progress(console) as bar,
            Profile(folder / "profile", trainer.config.train, start, partial(_say, console)) as profile,
        ):
            noise = NoiseScale(read_metrics(folder))
            state = _Loop(trainer, data, checkpoints, log, stop, bar, profile, noise).run(state, start)
            checkpoints.finish()
    records = read_metrics(folder)
    done_before = start == trainer.config.train.steps  # then the log's loss may be of another number of sequences
    loss = evaluate(trainer, state, data.validation) if done_before else records[-1]["validation_loss"]
    return Run(state, loss, records)


def _go_on(checkpoints: Checkpoints, step: int, console: Console) -> TrainState:
    """The state saved at `step`; says so, and where the run now ends at another step."""
    before = read_about(checkpoints.folder, step)["config"]["train"]["steps"]
    steps = checkpoints.trainer.config.train.steps
    if before != steps:
        text = f"train.steps was {before} and is now {steps}: the learning rate now decays to step {steps}"
        console.print(text, style="yellow", highlight=False)
    _say(console, f"going on from step {step} in {checkpoints.folder}")
    return checkpoints.restore(step)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


class _Loop:
    """The moving parts of one `fit`."""

    def __init__(
        self,
        trainer: Trainer,
        data: Data,
        checkpoints: Checkpoints,
        log: MetricsLog,
        stop: StopRequest,
        bar: Progress,
        profile: Profile,
        noise: NoiseScale,
    ):
        self.trainer, self.data, self.checkpoints = trainer, data, checkpoints
        self.log, self.stop, self.bar, self.profile, self.noise = log, stop, bar, profile, noise
        self.train = trainer.config.train
        self.clock = self.said = time.perf_counter()

    def run(self, state: TrainState, start: int) -> TrainState:
        """Steps `start` to `train.steps`; the last one, and those that are due, are evaluated and saved."""
        task = self.bar.add_task("compiling", total=self.train.steps, completed=start)
        self.profile.between(start, state)
        for index, batch in stream(self.data.batches, start, self.train.steps, self.trainer.batch_sharding):
            step = index + 1
            state, metrics = self.profile.step(step, self.trainer.step, state, batch)
            self._record(step, metrics, task, state if self._due(step, self.train.eval_every) else None)
            self.profile.between(step, state)
            self.clock = time.perf_counter()
            if self._due(step, self.train.checkpoint_every) or self.stop.number:
                self.log.flush()
                self.checkpoints.save(step, state)
            if self.stop.number and step < self.train.steps:
                self._leave(step)
        return state

    def _due(self, step: int, every: int) -> bool:
        return step == self.train.steps or bool(every and step % every == 0)

    def _leave(self, step: int) -> None:
        self.checkpoints.finish()
        name = signal.Signals(self.stop.number).name
        where = self.checkpoints.folder
        raise Stopped(f"{name} after step {step}: saved in {where}; the same command goes on", self.stop.number)

    def _record(
        self, step: int, metrics: dict[str, jax.Array], task: TaskID, evaluate_state: TrainState | None = None
    ) -> None:
        """Wait for a step's metrics, write and show them."""
        values = {name: jsonable(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        record = _measured(self.trainer, self.data.batches, step, now - self.clock) | values
        _check_finite(step, values)
        record |= self.noise.after(values)
        if evaluate_state is not None:
            record["validation_loss"] = evaluate(self.trainer, evaluate_state, self.data.validation)
        self.log.write(record)
        self._show(record, task)

    def _show(self, record: dict[str, Any], task: TaskID) -> None:
        loss = math.nan if record["loss"] is None else record["loss"]
        text = f"loss {loss:.3f}  {record['tokens_per_second']:,.0f} tokens/s"
        self.bar.update(task, completed=record["step"], description=text)
        validated = "validation_loss" in record
        if validated:
            text += f"  validation loss {record['validation_loss']:.4f}"
        now = time.perf_counter()
        if validated or (self.bar.disable and now - self.said > QUIET_SECONDS):
            self.bar.console.print(f"step {record['step']}/{self.train.steps}  {text}", highlight=False)
            self.said = now


def _check_finite(step: int, values: dict[str, Any]) -> None:
    """Raise `FloatingPointError` where a step went wrong for good; loss scaling leaves an overflow out and goes on."""
    if values.get("skipped"):
        if values["loss_scale"] < SMALLEST_SCALE:
            raise FloatingPointError(
                f"gradients overflow at step {step} even at loss scale {values['loss_scale']}; lower "
                "--train.learning_rate, or write --model.dtype bfloat16"
            )
        return
    for name in ("loss", "grad_norm"):
        if values[name] is None:
            raise FloatingPointError(f"{name} is not finite at step {step}; lower --train.learning_rate")


def _measured(trainer: Trainer, batches: Batches, step: int, seconds: float) -> dict[str, Any]:
    """What is known of a step apart from its own metrics."""
    config = trainer.config
    tokens = config.train.global_batch * config.train.seq_len
    device = trainer.mesh.devices.flat[0]
    peak = peak_flops(device.device_kind)
    flops = tokens / seconds * flops_per_token(config.model, config.train.seq_len)
    return {
        "step": step,
        "epoch": batches.epoch(step - 1),
        "tokens": step * tokens,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": flops / (peak * config.mesh.size) if peak else None,
        "peak_memory_bytes": _peak_memory(),
    }


def _peak_memory() -> int:
    """Largest peak of a local device's memory; on a CPU host the peak of the process, for all its fake devices."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(s.get("peak_bytes_in_use", 0) for s in stats)
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
