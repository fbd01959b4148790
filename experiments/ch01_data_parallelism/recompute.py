"""Recomputation: what each policy keeps of a layer, and what it makes again in the backward pass.

Claim: under each policy the program keeps of a layer, and computes in a step, to the byte and to the FLOP what theory
says; the GPU compiler's memory grows with the layers by that much; and the gradients are the same.

    python run_experiment.py recompute            about 3 minutes on 2 CPU cores; no GPU needed
    python run_experiment.py recompute --quick    under a minute: fewer policies, one of them compiled

Expected of gpt2 with 8 x 1024 tokens: flash attention keeps less than half of what plain attention does and makes only
scores again. Full recomputation keeps a sixth of that for 16 % more work, where one more forward pass of the layers
would be 24 %: no backward pass reads the results of a layer's two last products. It repeats attention's sum over tp
unless that is kept. Selective recomputation pays with plain attention only: flash attention has nothing left to save.

Beside them the formulas of Korthikanti et al., arXiv:2205.05198, for Megatron's layer: s b h (34 + 5 a s / h) bytes, 34
s b h, 2 s b h. Here it is 24 + 2 a s / h, 24 and 4. GELU's result (8) is not kept, nor are masks of dropout (two of 1,
and a s / h); this gpt2 has no dropout, whose result on the weights would be another 2 a s / h; and full recomputation
keeps attention's sum (2) beside the input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch01_data_parallelism import _recompute_figure, _recompute_gpt3, _recompute_tiny
from experiments.ch01_data_parallelism._recompute_policies import Policy, Row, under
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import on_first_devices
from jax5d.config import PRESETS, ConfigError, MeshConfig, RunConfig, TrainConfig, check_model
from jax5d.costs.activations import Activations
from jax5d.costs.flops import recomputation, step_flops
from jax5d.costs.gpus import gpu as find_gpu
from jax5d.costs.parameters import FLOAT32, leaves
from jax5d.measure.aot import check_compiler, compile_step
from jax5d.measure.memory import kept_by_layer
from jax5d.measure.operations import operations
from jax5d.train.step import Trainer

CAPSULES = [7]
CLAIM = "Each recomputation policy keeps the bytes and makes again the FLOPs of theory, and leaves the gradients alone"
NEEDS = "2 fake CPU devices, JAX's CUDA plugin but no GPU, and 3 minutes on 2 cores"

ROW_SUMS = "bsnh,bsnh->bns"
"""Elementwise products of our own flash attention's backward pass, spelled as an einsum: theory does not count them."""


@dataclass(frozen=True)
class RecomputeOptions(Options):
    """Options of this experiment."""

    gpu: str = "h100"
    """GPU that is compiled for: a100-40, a100-80, h100, h200, b200 or rtx4090."""
    preset: str = "gpt2"
    """Dense model that is trained, in bfloat16."""
    rows: int = 8
    """Sequences of a step."""
    seq_len: int = 1024
    """Tokens of each."""
    utilisation: float = 0.4
    """Share of the GPU's peak that its products reach, for the modelled times."""
    policies: tuple[Policy, ...] = get_args(Policy)
    """Policies that are traced."""
    compiled: tuple[Policy, ...] = ("plain", "plain-selective", "flash", "flash-full", "flash-bare", "flash-rich")
    """Those of them that are compiled for the GPU; none needs no CUDA plugin."""
    differentiated: tuple[Policy, ...] = get_args(Policy)
    """Policies whose gradients are compared with those of the first."""
    depths: tuple[int, int] = (24, 48)
    """Layers of the two models that are compiled; deep enough that memory peaks at the same moment in both."""


DEFAULTS = RecomputeOptions(mesh=MeshConfig(tp=2))
QUICK = replace(
    DEFAULTS,
    policies=("plain", "plain-selective", "plain-full", "flash", "flash-full", "flash-rich"),
    compiled=("flash-full",),
    differentiated=("plain", "flash-full"),
)


def check(options: RecomputeOptions, folder: Path) -> None:
    """Refuse what cannot be traced or compiled, before anything is."""
    if options.mesh.size < 2:
        raise ConfigError(f"recompute needs 2 devices for tp but the mesh has {options.mesh.size}; write --devices 2")
    check_model(replace(PRESETS["gpt2"], name=options.preset))
    model = PRESETS[options.preset]
    if model.experts:
        raise ConfigError(f"preset={options.preset} has experts, of which no formula here knows; give a dense model")
    if not 1 <= options.seq_len <= model.context:
        raise ConfigError(f"seq_len={options.seq_len} is outside 1..{model.context}, {model.name}'s context")
    if options.rows < 1:
        raise ConfigError(f"rows={options.rows} is below 1; give the sequences of a step")
    find_gpu(options.gpu)
    if options.compiled:
        check_compiler(options.gpu)
    if not 0 < options.utilisation <= 1:
        raise ConfigError(f"utilisation={options.utilisation} is outside (0, 1]; give a share such as 0.4")
    for name in options.compiled:
        if name not in options.policies:
            raise ConfigError(f"compiled={name} is not among the policies; add it to --policies")
    if len(options.differentiated) < 2:
        raise ConfigError(f"differentiated has {len(options.differentiated)} policies; give 2 or more to compare")
    low, high = options.depths
    if not 1 <= low < high:
        raise ConfigError(f"depths={low} {high} are no two numbers of layers; give a smaller one and a larger one")


def run(options: RecomputeOptions, folder: Path, console: Console) -> Outcome:
    """Trace and compile the policies, compare gradients, and count what tensor parallelism sends."""
    shown = track(options.policies, description="policies", console=console, disable=not console.is_terminal)
    rows = [_measure(options, name) for name in shown]
    title = f"{options.preset}, {options.rows} x {options.seq_len} tokens in bfloat16"
    save_figure(_recompute_figure.figure(rows, title), folder, "recompute")
    checks = [c for row in rows for c in _row_checks(row)]
    checks += [
        *_made_again(rows),
        *_recompute_tiny.gradients(options.differentiated, options.seed),
        *_recompute_tiny.sums_over_tp(),
        *_recompute_gpt3.checks(),
    ]
    return Outcome(checks, {row.name: _metrics(row) for row in rows}, [_table(rows, options), _recompute_gpt3.table()])


def _config(options: RecomputeOptions, name: Policy) -> RunConfig:
    model = replace(PRESETS[options.preset], dtype="bfloat16")
    train = TrainConfig(global_batch=options.rows, seq_len=options.seq_len)
    return under(name, RunConfig(model=model, train=train, seed=options.seed))


def _measure(options: RecomputeOptions, name: Policy) -> Row:
    config = _config(options, name)
    trainer = on_first_devices(config)
    kept: dict[str, int] = {}
    for kind in kept_by_layer(trainer):
        what = _recompute_figure.kind_of(kind.shape, config)
        kept[what] = kept.get(what, 0) + prod(kind.shape) * kind.dtype.itemsize
    compiled = _growth(config, options) if name in options.compiled else None
    return Row(name, config, kept, _count(trainer), compiled)


def _count(trainer: Trainer) -> int:
    """FLOPs of the products of a step's gradients."""
    found = operations(trainer.gradients, *trainer.arguments)
    products = (op for op in found if op.name.startswith("dot_") and ROW_SUMS not in op.where)
    return sum(op.flops * op.count for op in products)


def _growth(config: RunConfig, options: RecomputeOptions) -> float:
    """What one more layer adds to the compiler's temporaries, less the layer's float32 gradients."""
    config = replace(config, parallel=replace(config.parallel, loss_chunks=8))
    deep = [replace(config, model=replace(config.model, layers=n)) for n in options.depths]
    low, high = (compile_step(each, options.gpu).memory.temporaries for each in deep)
    return (high - low) / (options.depths[1] - options.depths[0]) - _layer_gradients(config)


def _layer_gradients(config: RunConfig) -> int:
    blocks = [leaf for leaf in leaves(config.model, config.mesh) if leaf.name.startswith("blocks.")]
    return sum(prod(leaf.shape) for leaf in blocks) // config.model.layers * FLOAT32


def _row_checks(row: Row) -> list[Check]:
    """A policy against theory."""
    kept = Activations(row.config).layer
    checks = [
        Check.equal(f"bytes that the program keeps of a layer, {row.name}", row.bytes, kept),
        Check.equal(f"FLOPs of a step, {row.name}", row.flops, sum(step_flops(row.config).values())),
    ]
    if row.compiled is not None:
        checks.append(Check.equal(f"bytes of a layer by the compiler, {row.name}", row.compiled, kept, 0.05 * kept))
    return checks


def _made_again(rows: list[Row]) -> list[Check]:
    """FLOPs that policies add to their attention's own, by hand.

    In tokens n of all layers, hidden h, MLP f: a product of queries and keys or of weights and values is 2 n s h; full
    recomputation makes all of a layer's forward pass again but attention's and the MLP's last products, 2 n h (h + f).
    Plain attention's backward pass reads its weights and so its scores, flash attention's also its result.
    """
    flops = {row.name: row.flops for row in rows}
    config = rows[0].config
    m, s = config.model, config.train.seq_len
    tokens = config.train.global_batch * s * m.layers
    square = 2 * tokens * s * m.d_model
    full = config.train.global_batch * sum(recomputation(m, s, "full").values())
    theory = {
        "plain-selective": square,
        "plain-full": full - 2 * tokens * m.d_model * (m.d_model + m.d_ff),
        "flash-selective": 2 * square,
        "flash-full": full - 2 * tokens * m.d_model * (m.d_model + m.d_ff),
        "flash-bare": full - 2 * tokens * m.d_model * m.d_ff,
    }
    pairs = [(name, name.partition("-")[0]) for name in theory]
    return [
        Check.equal(f"FLOPs made again, {name}", flops[name] - flops[alone], theory[name])
        for name, alone in pairs
        if {name, alone} <= flops.keys()
    ]


def _metrics(row: Row) -> dict[str, Any]:
    return {
        "kept_bytes": row.bytes,
        "kept_bytes_by_kind": row.kept,
        "kept_bytes_compiled": row.compiled,
        "kept_bytes_megatron": row.textbook,
        "flops": row.flops,
        "added_share": row.added,
        "added_share_literature": row.literature,
    }


def _table(rows: list[Row], options: RecomputeOptions) -> Table:
    layers, most = rows[0].config.model.layers, rows[0].bytes
    speed = find_gpu(options.gpu).peak("bfloat16") * options.utilisation
    title = (
        f"{options.preset}, {options.rows} x {options.seq_len} tokens. MB that a layer keeps: by the program's types, "
        "by XLA, by the paper. FLOPs made again: here, by the paper. Of a step: GB saved, ms added on "
        f"{options.gpu} at {options.utilisation:.0%} of its peak"
    )
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for name in ("MB types", "MB XLA", "MB paper", "% here", "% paper", "GB saved", "ms added"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.bytes / 1e6:.1f}",
            "-" if row.compiled is None else f"{row.compiled / 1e6:.1f}",
            "-" if row.config.model.attention == "flash" else f"{row.textbook / 1e6:.1f}",
            f"{100 * row.added:.1f}",
            f"{100 * row.literature:.1f}",
            f"{(most - row.bytes) * layers / 1e9:.2f}",
            f"{1e3 * row.added * row.useful / speed:.2f}",
        )
    return table
