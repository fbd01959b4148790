"""Sequence parallelism: one device's training, with a part of the tokens on each tp device between the products.

Claim: with norms, dropout and residual sums on 1/t of the tokens each, losses, gradients and updated parameters are one
device's up to rounding; gradients of norms and biases are so only after a sum over tp.

    python run_experiment.py sequence_parallel            about 3 minutes on 2 CPU cores: 8 fake devices
    python run_experiment.py sequence_parallel --quick    under a minute: 4, overlapped only

Expected: with the sum over tp left out each device's gradient of a norm or bias is off by the others' parts, which is
nearly all of it, and the devices' copies part ways. Dropout's masks are a function of a token's place in the batch, so
they are the same on every mesh. On the wire a layer's 4 all-reduces become 4 all-gathers and 4 reduce-scatters of the
same bytes, 8 (t-1)/t K, and 2 more gathers: inputs of column-parallel products are kept split and gathered again in the
backward pass (Korthikanti et al., arXiv:2205.05198, section 4.2.2). That quarter more is the price of keeping 1/t of a
layer's activations. Overlapped, the same bytes go as ppermute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch04_sequence_and_context import _sequence_figure
from experiments.ch04_sequence_and_context._sequence_runs import (
    LAYOUTS,
    LENGTH,
    ROWS,
    Architecture,
    Batch,
    Leaves,
    Trained,
    apart,
    configure,
    draw,
    parts,
    summed_over_tp,
    trained,
    trainer_of,
)
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import Traffic
from jax5d.config import ConfigError, MeshConfig, RunConfig
from jax5d.costs.activations import Activations
from jax5d.costs.parameters import FLOAT32
from jax5d.measure.memory import kept_by_layer

CAPSULES = [25]
CLAIM = "Sequence parallelism trains as one device does, once norms' and biases' gradients are summed over tp"
NEEDS = "8 fake CPU devices and 3 minutes on 2 cores, or 8 GPUs"

LIMIT = 5e-6
"""Largest difference of a leaf, over its largest entry: float32 sums in another order."""

ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
Layout = Literal["tp + sp", "tp + sp, overlapped"]


@dataclass(frozen=True)
class SequenceOptions(Options):
    """Options of this experiment."""

    sizes: tuple[int, ...] = (2, 4, 8)
    """Sizes of tp, of those that the mesh has devices for: 2, 4 or 8."""
    layouts: tuple[Layout, ...] = get_args(Layout)
    """Ways that are trained."""


DEFAULTS = SequenceOptions(mesh=MeshConfig(tp=8))
QUICK = replace(DEFAULTS, mesh=MeshConfig(tp=4), sizes=(4,), layouts=("tp + sp, overlapped",))


@dataclass(frozen=True)
class Run:
    """A mesh's training beside one device's."""

    architecture: Architecture
    t: int
    layout: str
    loss: float
    """Largest difference of a step's loss, relative."""
    gradients: dict[str, float]
    """Of each leaf, over its largest entry."""
    params: dict[str, float]
    summed: list[str]
    """Leaves whose gradients are summed over tp."""

    @property
    def name(self) -> str:
        """For checks."""
        return f"{self.architecture}, tp {self.t}{self.layout.removeprefix('tp')}"

    @classmethod
    def of(cls, architecture: Architecture, t: int, layout: str, seed: int, want: Trained) -> Run:
        """Train it."""
        trainer = trainer_of(replace(configure(architecture, t, layout), seed=seed))
        got = trained(trainer, draw(seed))
        loss = max(abs(a / b - 1) for a, b in zip(got.losses, want.losses, strict=True))
        gradients, params = apart(got.gradients, want.gradients), apart(got.params, want.params)
        return cls(architecture, t, layout, loss, gradients, params, summed_over_tp(trainer))

    def checks(self) -> list[Check]:
        """Everything within rounding."""
        return [
            Check.below(f"{self.name}: loss of 3 steps, off from one device", self.loss, 2e-6),
            Check.below(f"{self.name}: gradients, off over the leaf's largest", max(self.gradients.values()), LIMIT),
            Check.below(f"{self.name}: parameters after 3 steps, alike", max(self.params.values()), LIMIT),
        ]


@dataclass(frozen=True)
class LeftOut:
    """A leaf's gradient on the devices of tp, before their sum; norms relative to one device's."""

    leaf: str
    own: float
    """The least that a device's own part is off."""
    worst: float
    missing: float
    """Largest norm of the others' parts beside `worst`: what the same device lacks."""
    summed: float
    """The sum of all parts, off over the largest entry."""

    @classmethod
    def of(cls, leaf: str, found: np.ndarray, want: np.ndarray) -> LeftOut:
        """From the parts [t, ...] and one device's gradient."""
        whole = found.sum(axis=0)
        off = [_norm(part - want) / _norm(want) for part in found]
        missing = [_norm(whole - part) / _norm(want) for part in found]
        at = int(np.argmax(off))
        return cls(leaf, min(off), off[at], missing[at], apart({leaf: whole}, {leaf: want})[leaf])

    def checks(self, where: str) -> list[Check]:
        """Off by what is missing, and right once nothing is."""
        return [
            Check.equal(f"{where}, {self.leaf}: not summed, off by the others' parts", self.worst, self.missing, 1e-5),
            Check.below(f"{where}, {self.leaf}: the sum of all parts, off from one device", self.summed, LIMIT),
            Check.below(f"{where}, {self.leaf}: rounding over what is off unsummed", self.summed / self.own, 1e-3),
        ]


@dataclass(frozen=True)
class Cost:
    """What a layout sends in a step and keeps of a layer, on one device."""

    architecture: Architecture
    t: int
    layout: str
    traffic: Traffic
    layer: float
    """Bytes sent for one more layer."""
    kept: int
    """Bytes of one layer's activations, by the program's types."""

    @classmethod
    def of(cls, architecture: Architecture, t: int, layout: str) -> Cost:
        """Trace it with 2 layers and with 3."""
        trainer = trainer_of(configure(architecture, t, layout))
        kept = sum(prod(kind.shape) * kind.dtype.itemsize for kind in kept_by_layer(trainer))
        traffic, more = Traffic.of(trainer), Traffic.of(trainer_of(configure(architecture, t, layout, layers=3)))
        return cls(architecture, t, layout, traffic, more.bytes - traffic.bytes, kept)

    @property
    def config(self) -> RunConfig:
        """Of the 2 layers."""
        return configure(self.architecture, self.t, self.layout)

    def checks(self) -> list[Check]:
        """Against theory, and by hand."""
        name = f"{self.architecture}, tp {self.t}{self.layout.removeprefix('tp')}"
        return [
            *self.traffic.checks(name),
            Check.equal(f"{name}: bytes a device sends for a layer, by hand", self.layer, sent_by_hand(self.config)),
            Check.equal(f"{name}: bytes kept of a layer", self.kept, Activations(self.config).layer),
        ]


def stream_bytes() -> int:
    """K: the whole residual stream [b, s, d] in float32."""
    return ROWS * LENGTH * configure("gpt2").model.d_model * FLOAT32


def sent_by_hand(config: RunConfig) -> float:
    """Bytes that a device sends for one layer, forward and backward, and for the sums of its gradients.

    Tensor parallelism: 4 all-reduces of 2 (t-1)/t K. Sequence parallelism: 4 gathers, 4 scatters and 2 gathers again,
    (t-1)/t K each; and sums over tp of the gradients of two norms (d each, GPT-2 2 d) and of GPT-2's biases after
    attention and MLP. Weights of keys and values that devices share are summed either way.
    """
    m, t, sequence = config.model, config.mesh.tp, config.parallel.sequence
    gpt2 = m.architecture == "gpt2"
    alone = (6 if gpt2 else 2) * m.d_model if sequence else 0
    shared = 2 * m.groups * m.head_dim * (m.d_model + (1 if gpt2 else 0)) if m.groups % t else 0
    return (t - 1) / t * ((10 if sequence else 8) * stream_bytes() + 2 * (alone + shared) * FLOAT32)


def check(options: SequenceOptions, folder: Path) -> None:
    """Refuse sizes that the tiny models or the mesh do not have."""
    for t in options.sizes:
        if t not in (2, 4, 8) or t > options.mesh.size:
            raise ConfigError(f"sizes={t} is none of 2, 4, 8 up to the mesh's {options.mesh.size} devices; write 2")
    if not options.sizes or not options.layouts:
        raise ConfigError("sizes and layouts need a value each; write --sizes 2 --layouts 'tp + sp'")


def run(options: SequenceOptions, folder: Path, console: Console) -> Outcome:
    """Train every layout and one device, take gradients apart, and count."""
    shown = {"console": console, "disable": not console.is_terminal}
    batch, largest = draw(options.seed), max(options.sizes)
    with jax.default_matmul_precision("float32"):
        alone = {a: trained(_alone(a, options.seed), batch) for a in ARCHITECTURES}
        todo = [(a, t, layout) for a in ARCHITECTURES for t in options.sizes for layout in options.layouts]
        runs = [Run.of(*each, options.seed, alone[each[0]]) for each in track(todo, description="training", **shown)]
        left = {a: _left_out(a, largest, options.seed, batch, alone[a].gradients) for a in ARCHITECTURES}
        changed = abs(_without_dropout(options.seed, batch) / alone["gpt2"].losses[0] - 1)
    todo = [(a, t, layout) for a in ARCHITECTURES for t in options.sizes for layout in LAYOUTS]
    costs = [Cost.of(*each) for each in track(todo, description="counting", **shown)]
    save_figure(_sequence_figure.figure(left, runs, costs, stream_bytes()), folder, "sequence_parallel")
    checks = [c for each in (*runs, *costs) for c in each.checks()]
    checks += _named(runs)
    checks += [c for a, leaves in left.items() for leaf in leaves for c in leaf.checks(f"{a}, tp {largest}")]
    rounding = max(run.loss for run in runs)
    checks.append(Check.below("gpt2: rounding of the loss over what dropout changes of it", rounding / changed, 1e-2))
    return Outcome(checks, _metrics(runs, left, costs), [_runs_table(runs), _left_table(left, runs), _costs_table(costs)])


def _alone(architecture: Architecture, seed: int) -> Any:
    return trainer_of(replace(configure(architecture), seed=seed))


def _without_dropout(seed: int, batch: Batch) -> float:
    """GPT-2's loss before the first step."""
    trainer = _alone("gpt2", seed)
    found = trainer.evaluate(trainer.init().params, jax.device_put(batch, trainer.batch_sharding))
    return float(found["loss_sum"] / found["tokens"])


def _left_out(architecture: Architecture, t: int, seed: int, batch: Batch, want: Leaves) -> list[LeftOut]:
    found = parts(trainer_of(replace(configure(architecture, t, "tp + sp"), seed=seed)), batch)
    return [LeftOut.of(leaf, part, want[leaf]) for leaf, part in found.items()]


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.ravel()))


def _named(runs: list[Run]) -> list[Check]:
    """Every leaf whose gradient is summed over tp, by its name, at its worst."""
    worst: dict[tuple[str, str], float] = {}
    for run in runs:
        for leaf in run.summed:
            at = run.architecture, leaf
            worst[at] = max(worst.get(at, 0.0), run.gradients[leaf])
    return [Check.below(f"{a}, gradient of {leaf}, summed over tp: off", off, LIMIT) for (a, leaf), off in worst.items()]


def _metrics(runs: list[Run], left: dict[Any, list[LeftOut]], costs: list[Cost]) -> dict[str, Any]:
    return {
        "runs": [vars(run) for run in runs],
        "left_out": {a: [vars(leaf) for leaf in leaves] for a, leaves in left.items()},
        "costs": [
            {"architecture": c.architecture, "tp": c.t, "layout": c.layout}
            | {"sent": c.traffic.bytes, "sent_for_a_layer": c.layer, "kept_of_a_layer": c.kept}
            for c in costs
        ],
    }


def _runs_table(runs: list[Run]) -> Table:
    table = Table("run", "loss", "gradients", "parameters", title="Largest differences from one device, relative")
    for run in runs:
        numbers = run.loss, max(run.gradients.values()), max(run.params.values())
        table.add_row(run.name, *(f"{x:.1e}" for x in numbers))
    return table


def _left_table(left: dict[Any, list[LeftOut]], runs: list[Run]) -> Table:
    t = max(run.t for run in runs)
    heads = ("model", "gradient", "a device off, least", "worst", "others' parts", "sum of all, off")
    table = Table(*heads, title=f"Gradients on tp {t} without their sum over tp, over one device's norm")
    for architecture, leaves in left.items():
        for leaf in leaves:
            numbers = (f"{x:.3f}" for x in (leaf.own, leaf.worst, leaf.missing))
            table.add_row(architecture, leaf.leaf, *numbers, f"{leaf.summed:.1e}")
    return table


def _costs_table(costs: list[Cost]) -> Table:
    heads = ("model", "tp", "layout", "step, MB sent", "a layer, MB sent", "over K", "a layer, MB kept")
    table = Table(*heads, title=f"On one device in a step of the tiny models, K = {stream_bytes() / 1e6:.4f} MB")
    for c in costs:
        numbers = (f"{x:.4f}" for x in (c.traffic.bytes / 1e6, c.layer / 1e6, c.layer / stream_bytes(), c.kept / 1e6))
        table.add_row(c.architecture, str(c.t), c.layout, *numbers)
    return table
