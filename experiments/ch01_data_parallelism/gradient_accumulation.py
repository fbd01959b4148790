"""Gradient accumulation: the same update from m smaller microbatches, in less memory, with one reduction a step.

Claim: whatever the number m of microbatches, the update is the same up to rounding, a device sends the same sums once a
step, and what it keeps of each layer for the backward pass is 1/m of the whole batch's.

    python run_experiment.py gradient_accumulation            about 60 seconds on 2 CPU cores: 2 fake devices
    python run_experiment.py gradient_accumulation --quick    25 seconds: m of 1, 4 and 16

Expected: a layer adds 4 b s (8 d + n + f) bytes of activations to the step's memory, for the b rows of a microbatch on
a device, and its gradients at most twice.
Reducing after each microbatch instead would send m times the bytes. Small microbatches also keep a device less busy, so
on real ones the time of a step grows with m.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import Traffic, on_first_devices
from jax5d.config import PRESETS, ConfigError, MeshConfig, RunConfig, TrainConfig
from jax5d.costs.activations import Activations
from jax5d.costs.parameters import FLOAT32, count
from jax5d.measure.memory import kept_by_layer
from jax5d.train.step import Trainer

CAPSULES = [8]
CLAIM = "Any number m of microbatches gives the same update, one reduction a step, and 1/m of the activations"
NEEDS = "2 fake CPU devices and 60 seconds on 2 cores (beside a GPU: --devices 2)"

DEFAULTS = Options(mesh=MeshConfig(dp=2))
QUICK = replace(DEFAULTS, quick=True)

MICROBATCHES, QUICK_MICROBATCHES = (1, 2, 4, 8, 16), (1, 4, 16)
STEPS, ROWS, LENGTH = 3, 32, 64
SHALLOW, DEEP = 8, 12
"""Layers: what the deeper model needs more is that of the layers between. Enough of them that what they keep, and not
the work on one of them or on the head, makes the step's peak."""

RUN = RunConfig(
    mesh=MeshConfig(dp=2),
    model=replace(PRESETS["gpt2-tiny"], layers=DEEP, d_model=64, d_ff=256, vocab=96, context=LENGTH),
    train=TrainConfig(
        optimizer="sgd", learning_rate=0.1, warmup=0, final_lr=1.0, clip=0, global_batch=ROWS, seq_len=LENGTH
    ),
)

Tree = Any


@dataclass(frozen=True)
class Row:
    """One number of microbatches, measured. Bytes are of one device."""

    m: int
    saved: int
    """Of a layer's values that wait for its backward pass, by their types."""
    temporary: int
    """Of the step's temporaries."""
    layer: float
    """Of them, what one layer more adds."""
    off: float
    """Largest difference of a parameter from m = 1, over the largest of its leaf, on the worst device."""
    seconds: float
    """Of one step; the best of several."""
    traffic: Traffic

    @property
    def sums(self) -> int:
        """Sums over dp in a step."""
        return sum(e.count for e in self.traffic.measured)


def check(options: Options, folder: Path) -> None:
    """Refuse a single device; of more than two the others are idle."""
    if options.mesh.size < 2:
        raise ConfigError(f"gradient_accumulation needs 2 devices, the mesh has {options.mesh.size}; write --mesh.dp 2")


def run(options: Options, folder: Path, console: Console) -> Outcome:
    """Train and measure with each number of microbatches."""
    batches = np.random.default_rng(options.seed).integers(0, RUN.model.vocab, (STEPS, ROWS, LENGTH + 1), np.int32)
    every = QUICK_MICROBATCHES if options.quick else MICROBATCHES
    rows: list[Row] = []
    whole: Tree = None
    first = on_first_devices(replace(RUN, seed=options.seed))
    start = jax.tree.map(np.asarray, first.init())
    with jax.default_matmul_precision("float32"):
        for m in track(every, description="microbatches", console=console, disable=not console.is_terminal):
            config = replace(RUN, seed=options.seed, parallel=replace(RUN.parallel, microbatches=m))
            row, params = _measure(config, start, batches, whole)
            whole = whole or params
            rows.append(row)
    save_figure(_figure(rows), folder, "accumulation")
    metrics = {"rows": [{k: v for k, v in vars(row).items() if k != "traffic"} | {"sums": row.sums} for row in rows]}
    return Outcome(_checks(rows), metrics, [_table(rows)])


def _measure(config: RunConfig, start: Tree, batches: np.ndarray, whole: Tree) -> tuple[Row, Tree]:
    """The row, and one copy of the parameters after training from the state `start`.

    `whole` is what they should be; without it those of device 0.
    """
    trainer, step = _compiled(config)
    state, seconds = jax.device_put(start, trainer.shardings), math.inf
    for tokens in batches:
        shape = (config.parallel.microbatches, -1, LENGTH)
        batch = {"inputs": tokens[:, :-1].reshape(shape), "labels": tokens[:, 1:].reshape(shape)}
        batch = jax.device_put(batch, trainer.batch_sharding)
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        seconds = min(seconds, time.perf_counter() - begin)
    _, shallow = _compiled(replace(config, model=replace(config.model, layers=SHALLOW)))
    temporary = [program.memory_analysis().temp_size_in_bytes for program in (step, shallow)]
    copies = [jax.tree.map(lambda x, i=i: np.asarray(x.addressable_shards[i].data), state.params) for i in range(2)]
    whole = whole or copies[0]
    row = Row(
        m=config.parallel.microbatches,
        saved=sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in kept_by_layer(trainer)),
        temporary=temporary[0],
        layer=(temporary[0] - temporary[1]) / (DEEP - SHALLOW),
        off=max(_off(copy, whole) for copy in copies),
        seconds=seconds,
        traffic=Traffic.of(trainer),
    )
    return row, copies[0]


def _compiled(config: RunConfig) -> tuple[Trainer, Any]:
    trainer = on_first_devices(config)
    return trainer, trainer.step.lower(*trainer.arguments).compile()


def saved_theory(m: int) -> int:
    """What a layer's backward pass needs, in float32: 4 b s (8 d + n + f) bytes, as `costs.activations` has it.

    Of each token both norms' inputs and results, queries, keys, values and attention's result, d each; the log-sum-exp
    of n heads; the MLP's f hidden values before the GELU.
    """
    return Activations(replace(RUN, parallel=replace(RUN.parallel, microbatches=m))).layer


def layer_theory(m: int) -> tuple[float, float]:
    """Least and most bytes that a layer adds to the temporaries.

    Its activations; and its gradients, which may find room where something else was before, or of which a loop may hold
    copies. XLA packs what lives at different times into one arena, and not always in the tightest way: 5 % either way.
    """
    gradients = FLOAT32 * (count(RUN.model) - count(replace(RUN.model, layers=DEEP - 1)))
    return 0.95 * saved_theory(m), 1.05 * saved_theory(m) + 2 * gradients


def _off(got: Tree, want: Tree) -> float:
    apart = jax.tree.map(lambda g, w: float(np.max(np.abs(g - w)) / np.max(np.abs(w))), got, want)
    return max(jax.tree.leaves(apart))


def _checks(rows: list[Row]) -> list[Check]:
    checks = []
    for row in rows:
        where = f"m = {row.m}"
        least, most = layer_theory(row.m)
        middle, half = (least + most) / 2, (most - least) / 2
        checks += [
            Check.below(f"{where}: off from m = 1, over the largest of a leaf", row.off, 2e-6),
            Check.equal(f"{where}: bytes that a layer keeps, by type", row.saved, saved_theory(row.m)),
            Check.equal(f"{where}: bytes that a layer adds to the step", row.layer, middle, half),
            Check.equal(f"{where}: sums over dp in a step", row.sums, 4 + 14 * DEEP + 2 + 3),
            *row.traffic.checks(where),
        ]
    return checks


def _per_microbatch(row: Row) -> float:
    """Bytes that a device would send if it reduced the gradients of each microbatch, by theory; dp 2: 2 (2-1)/2 K."""
    return row.m * FLOAT32 * count(RUN.model)


def _table(rows: list[Row]) -> Table:
    columns = ("m", "temporaries, MB", "of a layer", "kept, by type", "theory", "sums", "sent, MB", "each m", "ms here")
    table = Table(*columns, title=f"A step of {ROWS} sequences on dp 2, per device")
    for row in rows:
        memory = (row.temporary, row.layer, row.saved, saved_theory(row.m))
        sent = (row.traffic.bytes, _per_microbatch(row))
        cells = [*(f"{x / 1e6:.3f}" for x in memory), str(row.sums), *(f"{x / 1e6:.3f}" for x in sent)]
        table.add_row(str(row.m), *cells, f"{row.seconds * 1e3:.0f}")
    return table


def _figure(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    memory, sent, seconds = figure.subplots(1, 3)
    m = [row.m for row in rows]
    memory.plot(m, [row.temporary / 1e6 for row in rows], "o-", color="black", label="temporaries of the step")
    memory.plot(m, [DEEP * row.layer / 1e6 for row in rows], "s-", color="#d9622b", label=f"of its {DEEP} layers")
    theory = [DEEP * saved_theory(k) / 1e6 for k in m]
    memory.plot(m, theory, "--", color="#1f4e9c", label="activations by theory, proportional to 1/m")
    memory.set(ylabel="MB on a device", title="Temporary memory falls with m")
    sent.plot(m, [row.traffic.bytes / 1e6 for row in rows], "o-", color="#2a9d5c", label="once a step: this library")
    sent.plot(
        m, [_per_microbatch(row) / 1e6 for row in rows], "--", color="0.4", label="after each microbatch, by theory"
    )
    sent.set(ylabel="MB that a device sends in a step", title="One reduction, whatever m")
    seconds.plot(m, [row.seconds * 1e3 for row in rows], "o-", color="#1f4e9c", label="best of 3 steps")
    seconds.set(ylabel="milliseconds of a step", title="Time here, for information", ylim=(0, None))
    for axes in (memory, sent):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes in (memory, sent, seconds):
        axes.set_xscale("log", base=2)
        axes.set_xticks(m, [str(k) for k in m])
        axes.set_xlabel("microbatches m")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.suptitle(f"Gradient accumulation: {ROWS} sequences of {LENGTH} tokens a step, in m microbatches, on dp 2")
    return figure
