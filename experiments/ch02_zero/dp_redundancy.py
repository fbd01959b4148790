"""What data parallelism holds again and again: every byte of its state but one copy.

Claim: of all parameters, gradients and optimizer state that N replicas hold, (N-1)/N are copies, the same to the bit
after several steps of training. ZeRO-1, 2 and 3 leave fewer of them, down to none.

    python run_experiment.py dp_redundancy            about half a minute on 2 CPU cores: 8 fake devices
    python run_experiment.py dp_redundancy --quick    20 seconds: 4

Counted on a tiny GPT-2 that trains, array by array: bytes on each device, and how many of them are distinct. For real
models by formula (Rajbhandari et al., arXiv:1910.02054, section 5 and table 1), 16 bytes a parameter: 2 of 16-bit
weights, 2 of 16-bit gradients, 12 of float32 weights and moments. One of N devices holds 16 without ZeRO, 4 + 12/N
with ZeRO-1, 2 + 14/N with ZeRO-2, 16/N with ZeRO-3.

Expected: more replicas train faster, but not a larger model. llama-80b needs 1.3 TB a GPU on any number of them; shared
out by ZeRO-3, 2.5 GB on 512.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import on_first_devices
from jax5d.config import PRESETS, ConfigError, MeshConfig, RunConfig, TrainConfig
from jax5d.costs.gpus import gpu
from jax5d.costs.parameters import FLOAT32, INT32, count
from jax5d.measure.memory import bytes_on_device

CAPSULES = [14]
CLAIM = "Of the parameters, gradients and optimizer state that N replicas hold, (N-1)/N are bitwise copies"
NEEDS = "8 fake CPU devices and half a minute on 2 cores, or 2 GPUs or more"

DEFAULTS = Options(mesh=MeshConfig(dp=8))
QUICK = replace(DEFAULTS, mesh=MeshConfig(dp=4))

REPLICAS = (2, 4, 8)
"""Numbers of devices N, as far as the mesh has them; they divide the batch."""
STEPS = 3
"""Of training before anything is counted, so that each device has made what it holds."""
RUN = RunConfig(
    model=replace(PRESETS["gpt2-tiny"], layers=2, d_model=32, d_ff=128, vocab=96, context=32),
    train=TrainConfig(steps=STEPS, global_batch=8, seq_len=32, warmup=0),
)

MODELS, SIZES = ("gpt2-xl", "llama-1b", "llama-80b"), (1, 8, 64, 512)
"""By formula."""
MIXED = {"parameters": 2, "gradients": 2, "optimizer": 12}
"""Bytes a parameter, in the order in which ZeRO shares out: the last first."""
PUBLISHED = {
    4: (52.5, 41.3, 30.0),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}
"""GB of 7.5 10^9 parameters on one of N devices by ZeRO-1, 2 and 3: the paper's table 1."""

Tree = Any


@dataclass(frozen=True)
class Held:
    """A bucket on n devices, in bytes."""

    n: int
    bucket: str
    device: int
    """On the first device."""
    total: int
    """On all of them."""
    distinct: int
    """On all of them, where what devices hold alike of an array counts once."""

    @property
    def theory(self) -> int:
        """One copy: float32, and an int32 for each of three counters of steps (the run's, Adam's, the schedule's)."""
        each = {"parameters": (1, 0), "gradients": (1, 0), "optimizer": (2, 3)}[self.bucket]
        return each[0] * count(RUN.model) * FLOAT32 + each[1] * INT32

    @property
    def copies(self) -> float:
        """Share of all bytes that could go, one of each staying."""
        return 1 - self.distinct / self.total


def check(options: Options, folder: Path) -> None:
    """Refuse a single device. The mesh only says how many devices there are to put replicas on."""
    if options.mesh.size < 2:
        raise ConfigError(f"dp_redundancy needs 2 devices or more, the mesh has {options.mesh.size}; write --mesh.dp 8")


def run(options: Options, folder: Path, console: Console) -> Outcome:
    """Count on as many devices as there are, then by formula on up to 512."""
    sizes = [n for n in REPLICAS if n <= options.mesh.size]
    shown = track(sizes, description="replicas", console=console, disable=not console.is_terminal)
    held = [one for n in shown for one in measure(replace(RUN, mesh=MeshConfig(dp=n), seed=options.seed))]
    save_figure(_figure(held), folder, "dp_redundancy")
    metrics = {
        "measured": [vars(one) for one in held],
        "formula": {
            name: {n: [count(PRESETS[name]) * share(stage, n) for stage in range(4)] for n in SIZES} for name in MODELS
        },
    }
    return Outcome(_checks(held), metrics, [_measured_table(held), _formula_table()])


def measure(config: RunConfig) -> Iterator[Held]:
    """Train, then count what each bucket's arrays hold."""
    trainer = on_first_devices(config)
    shape = STEPS + 1, 1, config.train.global_batch, config.train.seq_len + 1
    ids = np.random.default_rng(config.seed).integers(0, config.model.vocab, shape, np.int32)
    batches = jax.device_put([{"inputs": x[..., :-1], "labels": x[..., 1:]} for x in ids], trainer.batch_sharding)
    state = trainer.init()
    for batch in batches[:-1]:
        state, _ = trainer.step(state, batch)
    grads, _ = trainer.gradients(state, batches[-1])
    devices = list(trainer.mesh.devices.flat)
    optimizer = state.opt_state, state.step
    for bucket, tree in {"parameters": state.params, "gradients": grads, "optimizer": optimizer}.items():
        each = [bytes_on_device(tree, device) for device in devices]
        yield Held(len(devices), bucket, each[0], sum(each), distinct_bytes(tree))


def distinct_bytes(tree: Tree) -> int:
    """Bytes of what the devices hold of a tree, but of equal contents of an array only one's."""
    leaves = jax.tree.leaves(tree)
    contents = ({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards} for leaf in leaves)
    return sum(len(content) for of_leaf in contents for content in of_leaf)


def share(stage: int, n: int) -> float:
    """Bytes a parameter on one of n devices in mixed precision: ZeRO shares out the last `stage` buckets of `MIXED`."""
    whole = len(MIXED) - stage
    return sum(size / (1 if i < whole else n) for i, size in enumerate(MIXED.values()))


def left(stage: int, n: int) -> float:
    """Share of all bytes that are copies: what n devices hold, less one of each."""
    return 1 - sum(MIXED.values()) / (n * share(stage, n))


def _checks(held: list[Held]) -> list[Check]:
    checks = []
    for one in held:
        where = f"{one.bucket}, N = {one.n}"
        checks += [
            Check.equal(f"{where}: bytes on a device", one.device, one.theory),
            Check.equal(f"{where}: distinct bytes on all, one copy", one.distinct, one.theory),
            Check.equal(f"{where}: share of copies, (N-1)/N", one.copies, (one.n - 1) / one.n, 1e-12),
        ]
    wrong = sum(
        abs(7.5 * share(stage, n) - gigabytes) > (0.0501 if gigabytes > 2 else 0.0051)
        for n, row in PUBLISHED.items()
        for stage, gigabytes in enumerate(row, 1)
    )
    return [
        *checks,
        Check.equal("of 15 sizes in the paper's table 1, the formula misses beyond their rounding", wrong, 0),
    ]


def _measured_table(held: list[Held]) -> Table:
    columns = ("N", "bucket", "on a device", "on all", "distinct", "copies")
    table = Table(*columns, title=f"kB of a tiny GPT-2 of {count(RUN.model)} parameters after {STEPS} steps")
    for one in held:
        sizes = (one.device, one.total, one.distinct)
        table.add_row(str(one.n), one.bucket, *(f"{size / 1e3:.1f}" for size in sizes), f"{one.copies:.1%}")
    return table


def _formula_table() -> Table:
    stages = ["none", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    table = Table("model", "N", *stages, title="By formula: GB on a device; share of all bytes held that are copies")
    for name in MODELS:
        for n in SIZES:
            sizes = [count(PRESETS[name]) * share(stage, n) / 1e9 for stage in range(4)]
            cells = [f"{_short(size)}; {left(stage, n):.1%}" for stage, size in enumerate(sizes)]
            table.add_row(name, str(n), *cells)
        table.add_section()
    return table


def _short(size: float) -> str:
    return f"{size:.3g}" if size < 1000 else f"{size:.0f}"


def _figure(held: list[Held]) -> Figure:
    figure = Figure(figsize=(16, 5.2), layout="constrained")
    first, *others = figure.subplots(1, 3)
    _bars(first, held)
    for axes, name in zip(others, ("gpt2-xl", "llama-80b"), strict=True):
        _lines(axes, name)
    figure.suptitle("Data parallelism holds N copies of its state; ZeRO shares it out")
    return figure


def _bars(axes: Axes, held: list[Held]) -> None:
    """Distinct bytes below, copies above them."""
    sizes = list(dict.fromkeys(one.n for one in held))
    buckets = {"parameters": "#4292c6", "gradients": "#9ecae1", "optimizer": "#d9a441"}
    bottom = np.zeros(len(sizes))
    for part in ("one copy", "copies"):
        for bucket, colour in buckets.items():
            rows = [one for one in held if one.bucket == bucket]
            height = np.array([r.distinct if part == "one copy" else r.total - r.distinct for r in rows]) / 1e3
            style = {} if part == "one copy" else {"hatch": "//", "edgecolor": "white", "linewidth": 0}
            label = bucket if part == "one copy" else f"copies of {bucket}"
            axes.bar(range(len(sizes)), height, 0.6, bottom=bottom, color=colour, label=label, **style)
            bottom += height
    for place, (n, top) in enumerate(zip(sizes, bottom, strict=True)):
        axes.text(place, top, f"{(n - 1) / n:.1%} copies", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(sizes)), [str(n) for n in sizes])
    axes.set(xlabel="replicas N", ylabel="kB on all devices", title="Measured: a tiny GPT-2, without ZeRO")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _lines(axes: Axes, name: str) -> None:
    """Bytes on a device against N."""
    model, sizes = PRESETS[name], [2**k for k in range(10)]
    for stage in range(4):
        gigabytes = [count(model) * share(stage, n) / 1e9 for n in sizes]
        axes.plot(sizes, gigabytes, "osv^"[stage] + "-", markersize=4, label=f"ZeRO-{stage}" if stage else "no ZeRO")
    limit = gpu("h100").memory / 1e9
    axes.axhline(limit, color="black", linestyle="--", label=f"an H100: {limit:.0f} GB")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.set(
        xlabel="replicas N", ylabel="GB on a device", title=f"Formula: {name}, {count(model) / 1e9:.3g}B parameters"
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
