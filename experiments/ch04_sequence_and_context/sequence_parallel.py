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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch04_sequence_and_context._sequence_compared import LIMIT, LeftOut, Run
from experiments.ch04_sequence_and_context._sequence_costs import Cost, stream_bytes
from experiments.ch04_sequence_and_context._sequence_figure import figure
from experiments.ch04_sequence_and_context._sequence_runs import (
    LAYOUTS,
    Architecture,
    Batch,
    Leaves,
    configure,
    draw,
    parts,
    trained,
    trainer_of,
)
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from jax5d.config import ConfigError, MeshConfig
from jax5d.train.step import Trainer

CAPSULES = [25]
CLAIM = "Sequence parallelism trains as one device does, once norms' and biases' gradients are summed over tp"
NEEDS = "8 fake CPU devices and 3 minutes on 2 cores, or 8 GPUs"

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


def check(options: SequenceOptions, folder: Path) -> None:
    """Refuse sizes that the tiny models or the mesh do not have."""
    if options.mesh.size < 2:
        raise ConfigError(f"sequence_parallel needs 2 devices, the mesh has {options.mesh.size}; write --mesh.tp 8")
    for t in options.sizes:
        if t not in (2, 4, 8):
            raise ConfigError(f"sizes={t} is none of 2, 4, 8, which divide the tiny models' 8 heads; write one of them")
    if not sizes(options) or not options.layouts:
        raise ConfigError("sizes and layouts need a value each that the mesh has room for; write --sizes 2")


def sizes(options: SequenceOptions) -> list[int]:
    """As far as there are devices. The mesh only says how many there are."""
    return [t for t in options.sizes if t <= options.mesh.size]


def every(options: SequenceOptions, layouts: Iterable[str]) -> list[tuple[Architecture, int, str]]:
    """Both models on every size in every layout."""
    return [(a, t, layout) for a in ARCHITECTURES for t in sizes(options) for layout in layouts]


def run(options: SequenceOptions, folder: Path, console: Console) -> Outcome:
    """Train every layout and one device, take gradients apart, and count."""
    shown = {"console": console, "disable": not console.is_terminal}
    batch, largest = draw(options.seed), max(sizes(options))
    with jax.default_matmul_precision("float32"):
        alone = {a: trained(_alone(a, options.seed), batch) for a in ARCHITECTURES}
        todo = every(options, options.layouts)
        runs = [Run.of(*each, options.seed, alone[each[0]]) for each in track(todo, description="training", **shown)]
        left = {a: _left_out(a, largest, options.seed, batch, alone[a].gradients) for a in ARCHITECTURES}
        changed = abs(_without_dropout(options.seed, batch) / alone["gpt2"].losses[0] - 1)
    costs = [Cost.of(*each) for each in track(every(options, LAYOUTS), description="counting", **shown)]
    save_figure(figure(left, runs, costs, stream_bytes()), folder, "sequence_parallel")
    checks = [c for each in (*runs, *costs) for c in each.checks()] + _named(runs) + _left_checks(left, largest)
    rounding = max(run.loss for run in runs)
    checks.append(Check.below("gpt2: rounding of the loss over what dropout changes of it", rounding / changed, 1e-2))
    tables = [_runs_table(runs), _left_table(left, largest), _costs_table(costs)]
    return Outcome(checks, _metrics(runs, left, costs), tables)


def _alone(architecture: Architecture, seed: int) -> Trainer:
    return trainer_of(replace(configure(architecture), seed=seed))


def _without_dropout(seed: int, batch: Batch) -> float:
    """GPT-2's loss before the first step."""
    trainer = _alone("gpt2", seed)
    found = trainer.evaluate(trainer.init().params, jax.device_put(batch, trainer.batch_sharding))
    return float(found["loss_sum"] / found["tokens"])


def _left_out(architecture: Architecture, t: int, seed: int, batch: Batch, want: Leaves) -> list[LeftOut]:
    found = parts(trainer_of(replace(configure(architecture, t, "tp + sp"), seed=seed)), batch)
    return [LeftOut.of(leaf, part, want[leaf]) for leaf, part in found.items()]


def _named(runs: list[Run]) -> list[Check]:
    """Every leaf whose gradient is summed over tp, by its name, at its worst."""
    worst: dict[tuple[str, str], float] = {}
    for run in runs:
        for leaf in run.summed:
            at = run.architecture, leaf
            worst[at] = max(worst.get(at, 0.0), run.gradients[leaf])
    return [Check.below(f"{a}, gradient of {leaf}, summed over tp: off", x, LIMIT) for (a, leaf), x in worst.items()]


def _left_checks(left: Mapping[str, list[LeftOut]], t: int) -> list[Check]:
    """Each leaf is off by what is missing; with nothing missing it is right."""
    found = [leaf for leaves in left.values() for leaf in leaves]
    off, least = max(leaf.summed for leaf in found), min(leaf.least for leaf in found)
    return [
        *(leaf.check(f"{a}, tp {t}") for a, leaves in left.items() for leaf in leaves),
        Check.below("parts of gradients summed by hand: off from one device", off, LIMIT),
        Check.below("rounding over what the least wrong of unsummed gradients is off", off / least, 1e-3),
    ]


def _metrics(runs: list[Run], left: Mapping[str, list[LeftOut]], costs: list[Cost]) -> dict[str, Any]:
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


def _left_table(left: Mapping[str, list[LeftOut]], t: int) -> Table:
    heads = ("model", "gradient", "least", "worst", "others' parts", "all summed")
    table = Table(title=f"Gradients on tp {t} without their sum over tp: off, over one device's norm")
    for head in heads:
        table.add_column(head, no_wrap=head == "gradient")
    for architecture, leaves in left.items():
        for leaf in leaves:
            numbers = (f"{x:.3f}" for x in (leaf.least, leaf.worst, leaf.missing))
            table.add_row(architecture, leaf.leaf.partition(".")[2], *numbers, f"{leaf.summed:.1e}")
    return table


def _costs_table(costs: list[Cost]) -> Table:
    heads = ("model", "tp", "layout", "step, MB sent", "a layer, MB sent", "over K", "a layer, MB kept")
    table = Table(*heads, title=f"On one device in a step of the tiny models, K = {stream_bytes() / 1e6:.4f} MB")
    for c in costs:
        numbers = (f"{x:.4f}" for x in (c.traffic.bytes / 1e6, c.layer / 1e6, c.layer / stream_bytes(), c.kept / 1e6))
        table.add_row(c.architecture, str(c.t), c.layout, *numbers)
    return table
