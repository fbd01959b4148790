"""A profile of training: what each device does in a step, and how much of its communication hides under compute.

Claim: the profile of a training run has every step that was asked for; in each of them, on each device, it has exactly
the collectives of the step's program, and compute, communication and idle time add up to the step's length.

    python run_experiment.py profiling            about 40 seconds on 2 CPU cores: 4 fake devices, dp tp = 2
    python run_experiment.py profiling --quick    half of that
    python run_experiment.py profiling --mesh.pp 2 --train.profile_start 4 --train.profile_steps 1    another mesh

Expected: the numbers agree on any mesh. On fake devices, which share the CPU's cores, most of a collective is waiting
for a device that has not had its turn, so communication is the larger part, and next to none of it is hidden.

Any training run makes such a profile with --train.profile_steps 2. Open it with

    pip install tensorboard xprof && tensorboard --logdir RUN    then the Profile tab, Trace Viewer
    https://ui.perfetto.dev                                      with the perfetto_trace.json.gz of this experiment
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.harness import Check, Outcome, save_figure
from experiments.options import TrainingOptions
from experiments.training import Traffic, mesh_name, open_tokens
from jax5d.config import ConfigError, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from jax5d.measure.intervals import union
from jax5d.measure.trace import Share, Trace, read_trace
from jax5d.train.checkpoint import check_resume
from jax5d.train.loop import Run, fit, open_data
from jax5d.train.step import Trainer

CAPSULES = [12]
CLAIM = "A profile has every step asked for, each collective of the step's program, and time shares that add up"
NEEDS = "4 fake CPU devices and a minute on 2 cores, or GPUs"

DEFAULTS = TrainingOptions(
    mesh=MeshConfig(dp=2, tp=2),
    model=ModelConfig(),
    parallel=ParallelConfig(microbatches=2),
    train=TrainConfig(steps=12, checkpoint_every=0, eval_sequences=32, profile_start=4, profile_steps=3),
)
QUICK = replace(
    DEFAULTS,
    model=replace(DEFAULTS.model, layers=2, d_model=64, d_ff=256),
    train=replace(DEFAULTS.train, steps=6, profile_start=3, profile_steps=2),
)

OPCODES = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
}
"""What XLA makes of the ledger's collectives."""

PARTS = {
    "compute": "tab:blue",
    "communication under compute": "tab:purple",
    "communication alone": "tab:orange",
    "idle": "lightgray",
}

SIZE_LIMIT = 100_000_000
"""Bytes that the profile of a few steps stays under."""


def check(options: TrainingOptions, folder: Path) -> None:
    """Refuse a run without a profile, or one that goes on from within or behind the profiled steps."""
    train = options.train
    if not train.profile_steps:
        raise ConfigError("train.profile_steps=0 leaves nothing to read; write --train.profile_steps 2")
    data = open_data(options.run_config, open_tokens(options))
    saved = check_resume(folder / "checkpoints", options.run_config, data.record) or 0
    if saved > train.profile_start:
        raise ConfigError(
            f"{folder} goes on from step {saved}, behind train.profile_start={train.profile_start}; give another "
            f"--out, or --train.profile_start {saved} with --train.steps {saved + train.profile_steps} or more"
        )


def run(options: TrainingOptions, folder: Path, console: Console) -> Outcome:
    """Train with a profile, and read it back."""
    trainer = Trainer.create(options.run_config)
    result = fit(trainer, open_data(options.run_config, open_tokens(options)), folder, console)
    traffic = Traffic.of(trainer)
    trace = read_trace(folder / "profile")
    save_figure(_figure(trace, options), folder, "profile")
    text = f"tensorboard --logdir {folder} (pip install tensorboard xprof), or {for_perfetto(trace.file)} at "
    text += "https://ui.perfetto.dev"
    console.print(f"open the profile with {text}", highlight=False, markup=False, soft_wrap=True)
    return Outcome(
        checks=_checks(trace, result, traffic, options),
        metrics={
            "trace": str(trace.file.relative_to(folder)),
            "shares_ms": [_milliseconds(share) for share in trace.shares],
            "collectives": [
                {"step": step, "device": device, **found} for (step, device), found in trace.collectives().items()
            ],
            "complaints": trace.complaints,
        },
        tables=[_shares(trace), _operations(trace)],
    )


def for_perfetto(file: Path) -> Path:
    """Write perfetto_trace.json.gz beside a trace: its trace.json.gz without the metadata, unknown to Perfetto."""
    (source,) = file.parent.glob(f"{file.name.removesuffix('.xplane.pb')}.trace.json.gz")
    events = json.loads(gzip.decompress(source.read_bytes()))
    del events["metadata"]
    target = file.parent / "perfetto_trace.json.gz"
    target.write_bytes(gzip.compress(json.dumps(events).encode(), compresslevel=6))
    return target


def _checks(trace: Trace, result: Run, traffic: Traffic, options: TrainingOptions) -> list[Check]:
    first, last = options.train.profile_start, options.train.profile_start + options.train.profile_steps
    asked = list(range(first + 1, min(last, options.train.steps) + 1))
    found = trace.collectives()
    differing = sum(not _as_written(counts, traffic) for counts in found.values())
    seconds = {record["step"]: record["step_seconds"] for record in result.records}
    over = max((step.end - step.start) / 1e9 - seconds[step.number] for step in trace.steps)
    unaccounted = max(abs(s.compute + s.communication - s.overlapped + s.idle - s.window) for s in trace.shares)
    return [
        Check.equal("profiled steps", len(trace.steps), len(asked)),
        Check.equal("of them not asked for", len({step.number for step in trace.steps} - set(asked)), 0),
        Check.equal("devices in the profile", len(trace.devices), options.mesh.size),
        Check.equal("steps x devices whose collectives are not those of theory", differing, 0),
        Check.equal("nanoseconds of a step that its shares leave out", unaccounted, 0),
        Check.below("seconds of a profiled step beyond what the loop's clock gives it", over, 0),
        Check.below("bytes of the profile", trace.file.stat().st_size, SIZE_LIMIT),
        Check.equal("complaints of the profiler", len(trace.complaints), 0),
    ]


def _as_written(counts: Counter[str], traffic: Traffic) -> bool:
    """Whether a device executed the collectives of theory in a step.

    Fake devices exchange as many arrays as theory says. XLA drops a send that nobody reads, such as the last of a ring,
    and a GPU's kernel may carry several arrays: there each kind has to come, at most that often.
    """
    theory = Counter[str]()
    for entry in traffic.theory:
        theory[OPCODES[entry.op]] += entry.count
    loose = set(theory) if jax.default_backend() != "cpu" else {"collective-permute"}
    return counts.keys() == theory.keys() and all(
        0 < counts[op] <= n if op in loose else counts[op] == n for op, n in theory.items()
    )


def _milliseconds(share: Share) -> dict[str, float]:
    times = {name: getattr(share, name) / 1e6 for name in ("window", "compute", "communication", "overlapped", "idle")}
    return {"step": share.step, "device": share.device, **times}


def _shares(trace: Trace) -> Table:
    columns = ("step", "device", "length", "compute", "communication", "of it under compute", "idle")
    table = Table(*columns, title="Milliseconds of each step")
    for share in trace.shares:
        step, device, *times = _milliseconds(share).values()
        table.add_row(str(step), str(device), *(f"{time:.2f}" for time in times))
    return table


def _operations(trace: Trace) -> Table:
    table = Table("operation", "scope", "kind", "times", "ms", title="Longest operations, per device and step")
    for total in trace.totals()[:10]:
        runs = len(trace.steps) * len(trace.devices)
        numbers = (f"{total.count / runs:.1f}", f"{total.time / runs / 1e6:.3f}")
        table.add_row(total.name, total.scope or "-", total.kind, *numbers)
    return table


def _figure(trace: Trace, options: TrainingOptions) -> Figure:
    figure = Figure(figsize=(12, 3 + 0.55 * len(trace.devices) + 3.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=[0.55 * len(trace.devices) + 1.5, 3.5])
    _lanes(top, trace)
    _bars(bottom, trace)
    devices = f"{len(trace.devices)} {'fake CPU devices' if jax.default_backend() == 'cpu' else 'GPUs'}"
    figure.suptitle(f"What {devices} do in a training step: {options.model.name} on {mesh_name(options.mesh)}")
    return figure


def _lanes(axes: Axes, trace: Trace) -> None:
    """One lane for each device: above what it computes, below what it communicates."""
    begin = trace.steps[0].start
    for lane, device in enumerate(trace.devices):
        for kind, low, colour in (("compute", -0.4, "tab:blue"), ("communication", 0.0, "tab:orange")):
            times = union((op.start, op.end) for op in trace.ops if op.device == device and op.kind == kind)
            spans = [((start - begin) / 1e6, (end - start) / 1e6) for start, end in times]
            axes.broken_barh(spans, (lane + low, 0.4), facecolors=colour, label=kind if lane == 0 else None)
    for step in trace.steps:
        start, end = (step.start - begin) / 1e6, (step.end - begin) / 1e6
        place = ((start + end) / 2, 1.01)
        axes.annotate(f"step {step.number}", place, xycoords=("data", "axes fraction"), ha="center")
        axes.axvline(start, color="black", linewidth=0.8)
        axes.axvline(end, color="black", linewidth=0.8)
    for before, after in pairwise(trace.steps):
        gap = ((before.end - begin) / 1e6, (after.start - begin) / 1e6)
        axes.axvspan(*gap, color="0.9", label="between steps" if before is trace.steps[0] else None)
    axes.set(xlabel="milliseconds since the first profiled step began", xlim=(0, (trace.steps[-1].end - begin) / 1e6))
    axes.set_yticks(range(len(trace.devices)), [f"device {device}" for device in trace.devices])
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _bars(axes: Axes, trace: Trace) -> None:
    """A bar for each step and device, cut into its shares."""
    places = [i + i // len(trace.devices) for i in range(len(trace.shares))]  # a gap between steps
    left = [0.0] * len(places)
    for name, colour in PARTS.items():
        heights = [_parts(share)[name] / 1e6 for share in trace.shares]
        axes.bar(places, heights, bottom=left, color=colour, label=name, width=0.9)
        left = [low + height for low, height in zip(left, heights, strict=True)]
    names = [f"{s.device}\nstep {s.step}" if s.device == trace.devices[0] else str(s.device) for s in trace.shares]
    axes.set_xticks(places, names)
    axes.set(xlabel="device", ylabel="milliseconds", title="How each device spends each step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.grid(axis="y", alpha=0.3)


def _parts(share: Share) -> dict[str, int]:
    times = (share.compute - share.overlapped, share.overlapped, share.communication - share.overlapped, share.idle)
    return dict(zip(PARTS, times, strict=True))
