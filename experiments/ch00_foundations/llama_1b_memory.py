"""The memory of a 1B Llama, bucket by bucket, on 1, 8 and 64 GPUs.

Claim: for seven layouts of Llama 1.34B on H100s the state of a GPU is known to the byte, and all that a step reserves
within 5 %, before anything is compiled.

    python run_experiment.py llama_1b_memory            7 layouts, about a minute on 2 CPU cores; no GPU
    python run_experiment.py llama_1b_memory --quick    2 of them, under a minute

By hand: h = 2048, L = 16, f = 8192, v = 131072, tied: N = h v + L (4 h^2 + 3 h f + 2 h) + h = 1,342,244,864.
Parameters, gradients and two moments in float32 are 16 N = 21.5 GB, as the textbook's 2 + 2 + 4 + 8 (ZeRO,
arXiv:1910.02054, section 3.1): there a float32 copy stands beside 16-bit weights and gradients, here the parameters are
that copy and are cast as they are used. Data parallelism divides nothing of it, tensor and pipeline parallelism divide
all of it but the norms.

One layer keeps sbh (34 + 5 a s / h) bytes by the textbook (Korthikanti et al., arXiv:2205.05198, equation 1) and
sbh (32 + 4 a / h) here. Attention 11 and 10, without dropout's mask; MLP 19 and 18, likewise without a mask, and with
SwiGLU's two factors of 4 h each where the other keeps GELU's input and result; norms 4 and 4. Scores, their softmax and
its mask, 5 a s / h = 320 at 4096 tokens, are never whole in fused attention, which keeps one float32 a row instead.
Sequence parallelism divides the textbook's layer by t; here what the products read stays gathered, 4 of the 32.

The rows of ZeRO are formula alone; memory_buckets holds it against the compiler.

Expected, with 8 sequences of 4096 tokens: 59 GB on one GPU and on each of dp8 and dp64, 16 on tp8, 10 on pp2-dp2-tp2,
whose microbatches are of one sequence, 3 on pp4-dp2-tp8. By ZeRO-3 over dp64 0.3 of the 41 GB left are states, 35
activations, and 6 room to work in, where a table's gradient is as whole as before and the table is gathered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch00_foundations._compared import GB, PARTS, Compared, refuse_mesh, stacked
from experiments.ch00_foundations._memory_cases import case
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from jax5d.config import AXES, PRESETS, ConfigError, RunConfig
from jax5d.config import check as check_config
from jax5d.costs import textbook
from jax5d.costs.activations import Activations
from jax5d.costs.gpus import gpu as find_gpu
from jax5d.costs.memory import Memory, memory
from jax5d.costs.parameters import count
from jax5d.measure.aot import check_compiler

CAPSULES = [6]
CLAIM = "A 1B Llama on 1, 8 and 64 GPUs: state to the byte, memory within 5 % of the compiler's, bucket by bucket"
NEEDS = "no GPU but JAX's CUDA plugin, and a minute on 2 CPU cores"

MODEL, TOKENS = "llama-1b", 4096

PARAMETERS = 2048 * 131072 + 16 * (4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048) + 2048
"""By hand."""


@dataclass(frozen=True)
class LlamaOptions(Options):
    """Options of llama_1b_memory."""

    gpu: str = "h100"
    """The GPU: a100-40, a100-80, h100, h200, b200 or rtx4090."""
    layouts: tuple[str, ...] = ("one", "dp8", "tp8", "pp2-dp2-tp2", "dp64", "dp8-tp8", "pp4-dp2-tp8")
    """Meshes: axes with their sizes, or one for a single GPU. With tp comes sequence parallelism, with pp a microbatch
    for each sequence."""
    sequences: int = 8
    """Sequences of 4096 tokens in a step of each replica."""


DEFAULTS = LlamaOptions()
QUICK = replace(DEFAULTS, layouts=("one", "pp2-dp2-tp2"))


def check(options: LlamaOptions, folder: Path) -> None:
    """Refuse layouts that are no mesh or do not divide the model, and a JAX that cannot compile for GPUs."""
    refuse_mesh(options, "llama_1b_memory")
    if not options.layouts:
        raise ConfigError("layouts names 0 meshes, so nothing would be compared; give one such as dp8")
    for layout in options.layouts:
        check_config(_config(layout, options.sequences))
    check_compiler(options.gpu)


def run(options: LlamaOptions, folder: Path, console: Console) -> Outcome:
    """Compile every layout, and compare."""
    shown = track(options.layouts, description="compiling", console=console, disable=not console.is_terminal)
    rows = {name: Compared.of(_config(name, options.sequences), options.gpu) for name in shown}
    save_figure(_figure(options, rows), folder, "llama_1b_memory")
    checks = [c for name, row in rows.items() for c in row.checks(name)]
    metrics = {
        "layouts": {name: row.metrics() for name, row in rows.items()},
        "zero": {
            f"{name} zero {stage}": vars(_with_zero(row, stage))
            for name, row in _replicated(rows)
            for stage in (1, 2, 3)
        },
    }
    return Outcome([*_by_hand(), *checks], metrics, [_buckets(rows), _zero(rows), _layers(rows)])


def _config(layout: str, sequences: int) -> RunConfig:
    """The layout's mesh, in bfloat16 with nothing recomputed, the loss in 16 pieces."""
    mesh = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", layout)}
    spelled = "-".join(f"{axis}{size}" for axis, size in mesh.items()) or "one"
    if layout != spelled or not set(mesh) <= set(AXES):
        raise ConfigError(f"layouts: {layout!r} is no mesh; give axes of {', '.join(AXES)} with sizes, as in dp8-tp8")
    if sequences < 1:
        raise ConfigError(f"sequences={sequences} is below 1; give the sequences of each replica")
    replicas = mesh.get("dp", 1) * mesh.get("ep", 1)
    return case(
        MODEL,
        batch=sequences * replicas,
        length=TOKENS,
        loss_chunks=16,
        sequence="tp" in mesh,
        microbatches=sequences if "pp" in mesh else 1,
        **mesh,
    )


def _by_hand() -> list[Check]:
    """What the docstring derives, against the tables that the formulas read."""
    one = _config("one", 1)
    formula, elements = memory(one), TOKENS * 2048
    states = formula.parameters + formula.gradients + formula.optimizer
    return [
        Check.equal("parameters", count(PRESETS[MODEL]), PARAMETERS),
        Check.equal("bytes of states: 16 a parameter, three counters", states, 16 * PARAMETERS + 3 * 4),
        Check.equal(
            "bytes that a layer keeps: s b h (32 + 4 a / h)", Activations(one).layer, elements * (32 + 4 * 32 / 2048)
        ),
        Check.equal(
            "the textbook's: s b h (34 + 5 a s / h)", textbook.layer_bytes(one), elements * (34 + 5 * 32 * 4096 / 2048)
        ),
    ]


def _replicated(rows: dict[str, Compared]) -> list[tuple[str, Compared]]:
    """Layouts with replicas that could share states."""
    return [(name, row) for name, row in rows.items() if row.config.mesh.dp > 1]


def _with_zero(row: Compared, stage: int) -> Memory:
    """By formula, with the replicas' states shared out."""
    return memory(replace(row.config, parallel=replace(row.config.parallel, zero=stage)))


def _cells(found: Any) -> list[str]:
    return [f"{getattr(found, part) / GB:.2f}" for part in (*PARTS, "total")]


HEADS = ("param.", "grad.", "optim.", "activ.", "work", "formula")


def _buckets(rows: dict[str, Compared]) -> Table:
    table = Table("layout", *HEADS, "compiler", "%", title="GB on a GPU")
    for name, row in rows.items():
        table.add_row(name, *_cells(row.formula), f"{row.compiler.peak / GB:.2f}", f"{100 * row.error:+.1f}")
    return table


def _zero(rows: dict[str, Compared]) -> Table:
    table = Table("layout", "ZeRO", *HEADS, title="GB on a GPU with ZeRO, by formula alone")
    for name, row in _replicated(rows):
        for stage in range(4):
            table.add_row(name, str(stage), *_cells(_with_zero(row, stage)))
    return table


def _layers(rows: dict[str, Compared]) -> Table:
    """What a layer keeps of a microbatch, in the textbook's unit."""
    heads = ("Megatron", "without scores", "here", "GB here, all layers in flight")
    table = Table("layout", *heads, title="Bytes that a layer keeps for each of s b h")
    for name, row in rows.items():
        config, kept = row.config, Activations(row.config)
        unit = kept.tokens * config.model.d_model
        selective = replace(config, parallel=replace(config.parallel, remat="selective"))
        units = (textbook.layer_bytes(config), textbook.layer_bytes(selective), kept.layer)
        table.add_row(name, *(f"{n / unit:.1f}" for n in units), f"{kept.total / GB:.2f}")
    return table


def _figure(options: LlamaOptions, rows: dict[str, Compared]) -> Figure:
    visible, replicated = find_gpu(options.gpu).visible / GB, _replicated(rows)
    figure = Figure(figsize=(13, 5))
    panels = figure.subplots(1, 2 if replicated else 1, sharey=True, squeeze=False)[0]
    names = [f"{name}\n{row.config.mesh.size} GPUs" if name != "one" else "one GPU" for name, row in rows.items()]
    stacked(panels[0], names, [row.formula for row in rows.values()])
    reserved = [row.compiler.peak / GB for row in rows.values()]
    panels[0].plot(names, reserved, "kD", markersize=6, label="reserved by the compiler")
    for place, height in enumerate(reserved):
        panels[0].text(place, height + 0.03 * visible, f"{height:.1f}", ha="center", fontsize=9)
    panels[0].set(ylabel="GB on a GPU", title="Formula (bars) and compiler")
    panels[0].tick_params(axis="x", labelsize=8)
    if replicated:
        name, row = max(replicated, key=lambda item: item[1].config.mesh.dp)
        stages = {f"ZeRO-{stage}" if stage else "none": _with_zero(row, stage) for stage in range(4)}
        stacked(panels[1], list(stages), list(stages.values()), hatch="//", edgecolor="white", linewidth=0)
        panels[1].set(xlabel="stage of ZeRO", title=f"{name} with ZeRO, by formula alone")
    for axes in panels:
        axes.axhline(visible, color="black", linestyle="--", label=f"one {options.gpu}: {visible:.1f} GB")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylim(top=1.3 * max(visible, *reserved))
    panels[0].legend(fontsize=8, ncols=3, loc="upper center")
    figure.suptitle(f"{MODEL} in bfloat16, {options.sequences} x {TOKENS} tokens a replica, nothing recomputed")
    figure.tight_layout()
    return figure
