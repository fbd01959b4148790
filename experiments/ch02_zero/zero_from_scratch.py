"""From plain data parallelism to ZeRO-3 in four training steps that can be read in one go.

Claim: as plain data parallelism grows into ZeRO-1, 2 and 3, a few lines at a time, the loss curve stays that of one
device, and what a device holds and sends is theory's to the byte. The library's trainer has one at all stages too.

    python run_experiment.py zero_from_scratch            about a minute on 2 CPU cores: 8 fake devices
    python run_experiment.py zero_from_scratch --quick    half a minute: 2

Read `_steps.py` beside this file; the run prints which lines change from step to step. With K bytes of gradients and N
devices a step sends 2K (N-1)/N bytes a device at stages 0 to 2, and 3K (N-1)/N at stage 3, which gathers the parameters
twice (Rajbhandari et al., arXiv:1910.02054, section 7). That is with one microbatch. Of M microbatches, stages 2 and 3
scatter each one's gradients by itself, and stage 3 gathers for each: (M+1)K and 3MK.

Expected: losses that differ by less than 1e-6: float32 sums in another order. Of 16 bytes a parameter in float32 a
device holds 16 at stage 0, 8 + 12/N at 1, 4 + 16/N at 2, 16/N at 3; activations, which ZeRO does not cut, are not
counted.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from experiments.ch02_zero._scratch_figure import figure
from experiments.ch02_zero._steps import (
    LAYERS,
    OPTIMIZER,
    ROWS,
    STEPS,
    Batch,
    D,
    F,
    Result,
    State,
    Tree,
    layer,
    one_device,
)
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import on_first_devices, wire_total
from jax5d.config import PRESETS, ConfigError, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.measure.ledger import ledger
from jax5d.measure.memory import bytes_on_device
from jax5d.mesh import DATA_AXES, make_mesh
from jax5d.parallel.data import is_spec

CAPSULES = [17]
CLAIM = "Plain data parallelism grows into ZeRO-3 with one loss curve, holding and sending the bytes of theory"
NEEDS = "8 fake CPU devices and a minute on 2 cores, or 2 GPUs or more"

DEFAULTS = Options(mesh=MeshConfig(dp=8))
QUICK = replace(DEFAULTS, mesh=MeshConfig(dp=2))

STEP_COUNT, MICROBATCHES = 50, 2
TOLERANCE = 1e-6
"""Of a loss."""

PARAMETERS = LAYERS * 2 * D * F
K = 4 * PARAMETERS
"""Bytes of the parameters, and of their gradients, in float32."""

HELD = (
    {"parameters": (K, 0), "gradients": (K, 0), "optimizer": (2 * K + 4, 0)},
    {"parameters": (K, 0), "gradients": (K, 0), "optimizer": (4, 3 * K)},
    {"parameters": (K, 0), "gradients": (0, K), "optimizer": (4, 3 * K)},
    {"parameters": (0, K), "gradients": (0, K), "optimizer": (4, 2 * K)},
)
"""Theory, by stage: bytes that every device holds, and bytes that all share out. Adam counts its steps in 4 bytes."""

GPT2 = RunConfig(
    model=replace(PRESETS["gpt2-tiny"], layers=2, d_model=32, d_ff=128, vocab=32, context=16),
    parallel=ParallelConfig(microbatches=MICROBATCHES),
    train=TrainConfig(steps=STEP_COUNT, global_batch=MICROBATCHES * ROWS, seq_len=16, learning_rate=3e-3, warmup=5),
)


@dataclass(frozen=True)
class Row:
    """One of the steps, measured on n devices."""

    stage: int
    n: int
    losses: list[float]
    held: dict[str, int]
    """Bytes on a device, by bucket."""
    sent: dict[int, float]
    """Bytes that a device sends in a step, by number of microbatches."""

    @property
    def held_theory(self) -> dict[str, int]:
        """By `HELD`."""
        return {bucket: each + shared // self.n for bucket, (each, shared) in HELD[self.stage].items()}

    def sent_theory(self, microbatches: int) -> float:
        """The gradients and parameters, and the loss."""
        times = (2, 2, microbatches + 1, 3 * microbatches)[self.stage]
        return float(Fraction(self.n - 1, self.n) * (times * K + 2 * 4))


def check(options: Options, folder: Path) -> None:
    """Refuse devices that nothing can be shared out over. The mesh only says how many there are."""
    n = options.mesh.size
    if n < 2 or D % n:
        sizes = ", ".join(str(k) for k in range(2, D + 1) if D % k == 0)
        raise ConfigError(
            f"zero_from_scratch cuts weights of width {D} into pieces, but the mesh has {n} devices; give one of "
            f"{sizes}, such as --devices 8"
        )


def run(options: Options, folder: Path, console: Console) -> Outcome:
    """Train by every step from the same start, then by every stage of the library."""
    shown = {"console": console, "disable": not console.is_terminal}
    start, batches = draw(options.seed)
    mesh = make_mesh(MeshConfig(dp=options.mesh.size))
    with jax.default_matmul_precision("float32"):
        alone = train_alone(start, batches)
        rows = [measure(i, start, batches, mesh) for i in track(range(4), description="from scratch", **shown)]
        config = replace(GPT2, mesh=MeshConfig(dp=options.mesh.size), seed=options.seed)
        library = [train_gpt2(config, stage) for stage in track(range(4), description="library", **shown)]
    save_figure(figure(alone, rows, library), folder, "zero_from_scratch")
    metrics = {
        "one_device": alone,
        "steps": [vars(row) for row in rows],
        "library": library,
    }
    return Outcome(_checks(alone, rows, library), metrics, [_changes(), _table(rows)])


def draw(seed: int) -> tuple[Tree, list[Batch]]:
    """Weights to start from, and batches of inputs with what another network, the teacher, makes of them."""
    random = np.random.default_rng(seed)

    def weights() -> Tree:
        shapes = {"w_in": (D, F), "w_out": (F, D)}
        draws = [{name: random.standard_normal(s, np.float32) for name, s in shapes.items()} for _ in range(LAYERS)]
        return jax.tree.map(lambda x: jnp.asarray(x * 0.7 / x.shape[0] ** 0.5), draws)

    start, teacher = weights(), weights()
    inputs = random.standard_normal((STEP_COUNT, MICROBATCHES, ROWS, D), np.float32)
    targets = jnp.asarray(inputs)
    for w in teacher:
        targets = layer(w, targets)
    return start, list(zip(inputs, targets, strict=True))


def train_alone(start: Tree, batches: list[Batch]) -> list[float]:
    """Losses of one device."""
    state, losses, step = State(start, OPTIMIZER.init(start)), [], jax.jit(one_device)
    for batch in batches:
        state, loss, _ = step(state, batch)
        losses.append(float(loss))
    return losses


def measure(stage: int, start: Tree, batches: list[Batch], mesh: jax.sharding.Mesh) -> Row:
    """Train by one of the steps; bytes from the arrays that it leaves, and from its program."""
    batch_spec, device = P(None, DATA_AXES), mesh.devices.flat[0]

    def body(state: State, batch: Batch) -> Result:
        state, loss, sums = STEPS[stage](state, batch)
        return Result(state, loss, jax.tree.map(lambda x: x[None], sums))  # each device's own, side by side

    state = State(start, OPTIMIZER.init(start), start if stage in (1, 2) else ())
    specs = _specs(state, P(None, DATA_AXES) if stage else P())
    results = Result(specs, P(), P(DATA_AXES))  # pyright: ignore[reportArgumentType]
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, batch_spec), out_specs=results))
    state = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec))
    inputs, targets = batches[0]
    sent = {m: wire_total(ledger(step, state, (inputs[:m], targets[:m]))) for m in (1, MICROBATCHES)}
    losses, sums = [], ()
    for batch in batches:
        state, loss, sums = step(state, batch)
        losses.append(float(loss))
    computed, updated = (state.replica, state.params) if state.replica else (state.params, ())
    held = {"parameters": computed, "gradients": sums, "optimizer": (updated, state.moments)}
    return Row(stage, mesh.size, losses, {name: bytes_on_device(tree, device) for name, tree in held.items()}, sent)


def _specs(state: State, spec: P) -> Any:
    """Of a state whose parameters lie by `spec`, and their moments likewise."""
    moments = optax.tree.map_params(OPTIMIZER, lambda _: spec, state.moments, transform_non_params=lambda _: P())
    return State(jax.tree.map(lambda _: spec, state.params), moments, jax.tree.map(lambda _: P(), state.replica))


def train_gpt2(config: RunConfig, stage: Any) -> list[float]:
    """Losses of the library's trainer on counting: each token is one or two above the last, modulo the vocabulary."""
    config = replace(config, parallel=replace(config.parallel, zero=stage))
    trainer = on_first_devices(config)
    shape = STEP_COUNT, MICROBATCHES, ROWS, config.train.seq_len + 1
    hops = np.random.default_rng(config.seed).integers(1, 3, shape, np.int32)
    state, losses = trainer.init(), []
    for ids in np.cumsum(hops, axis=-1, dtype=np.int32) % config.model.vocab:
        batch = jax.device_put({"inputs": ids[..., :-1], "labels": ids[..., 1:]}, trainer.batch_sharding)
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def _apart(curve: list[float], other: list[float]) -> float:
    return float(np.max(np.abs(np.subtract(curve, other))))


def _checks(alone: list[float], rows: list[Row], library: list[list[float]]) -> list[Check]:
    checks = [
        Check.below(
            f"from scratch, stage {row.stage}: loss curve off from one device", _apart(row.losses, alone), TOLERANCE
        )
        for row in rows
    ]
    checks += [
        Check.below(f"library, stage {stage}: loss curve off from stage 0", _apart(curve, library[0]), TOLERANCE)
        for stage, curve in enumerate(library[1:], 1)
    ]
    checks += [
        Check.below("from scratch: last loss, against the first", alone[-1], alone[0]),
        Check.below("library: last loss, against that of knowing nothing", library[0][-1], np.log(GPT2.model.vocab)),
    ]
    for row in rows:
        checks += [
            Check.equal(f"stage {row.stage}: bytes of {bucket} on a device", row.held[bucket], theory)
            for bucket, theory in row.held_theory.items()
        ]
        checks += [
            Check.equal(f"stage {row.stage}, M = {m}: bytes sent", row.sent[m], row.sent_theory(m)) for m in row.sent
        ]
    return checks


def _changes() -> Table:
    """The lines that differ from one step to the next."""
    table = Table("step", "lines that go (-) and come (+)", title="What changes in _steps.py")
    for before, after in pairwise((one_device, *STEPS)):
        lines = difflib.ndiff(_lines(before), _lines(after))
        table.add_row(after.__name__, Text("\n".join(line for line in lines if line[0] in "-+")))
        table.add_section()
    return table


def _lines(step: Any) -> list[str]:
    """A function's statements, without its docstring."""
    (function,) = ast.parse(inspect.getsource(step)).body
    assert isinstance(function, ast.FunctionDef)
    return [ast.unparse(statement) for statement in function.body[1:]]


def _table(rows: list[Row]) -> Table:
    columns = ("stage", "parameters", "gradients", "optimizer", "of 16", *(f"sent, M={m}" for m in rows[0].sent))
    title = f"Each of {rows[0].n} devices: bytes a parameter that it holds, and sends over those of the gradients"
    table = Table(*columns, title=title)
    for row in rows:
        held = [size / PARAMETERS for size in row.held.values()]
        sent = [f"{size / K:.3f}" for size in row.sent.values()]
        table.add_row(str(row.stage), *(f"{size:.2f}" for size in held), f"{sum(held):.2f}", *sent)
    return table
