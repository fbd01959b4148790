"""Anatomy of a block on a GPU: what its arithmetic limits, what its bytes, and what fusion and flash attention save.

Claim: the FLOPs and intensities of a GPT-2 block are those of a calculation by hand. Compiled, its kernels move fewer
bytes than its operations one by one, and flash attention leaves none of attention's s x s arrays in memory.

    python run_experiment.py gpu_anatomy            about a minute on 2 CPU cores; a GPU is measured too
    python run_experiment.py gpu_anatomy --quick    half of that: two sequence lengths
    python run_experiment.py gpu_anatomy --gpu a100-80 --model gpt2-xl --batch 4

Expected, for GPT-2 at 8 x 1024 tokens on an H100: the products with weights are bound by compute, attention's own
products and all else by memory. Softmax alone takes half of the time, one operation after the other. XLA fuses four
fifths of the bytes away, and flash attention leaves less than half of the rest; its temporaries grow with s, those of
plain attention with s^2.

Everything is of one device, whatever the mesh, with weights in bfloat16 too. The block is compiled for the GPU without
one, if JAX's CUDA plugin is installed; else that part is left out. Speeds are measured only on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch00_foundations._anatomy_checks import check_builds, check_groups, check_moved
from experiments.ch00_foundations._anatomy_figures import bytes_figure, roofline_figure
from experiments.ch00_foundations._block import (
    FLASH,
    Build,
    Group,
    Moved,
    block_model,
    block_step,
    build,
    groups,
    in_order,
    roofline,
)
from experiments.harness import Outcome, save_figure
from experiments.options import Options
from experiments.values import nearest
from jax5d.config import PRESETS, ConfigError
from jax5d.costs.gpus import Gpu, gpu
from jax5d.measure.aot import absent_gpu
from jax5d.measure.ceilings import Ceilings, measure_ceilings
from jax5d.measure.operations import operations

CAPSULES = [2]
CLAIM = "A block's FLOPs and intensities are those by hand; fusion saves bytes; flash attention leaves no s^2 in memory"
NEEDS = "a minute on 2 CPU cores; a GPU is measured too"

SIDES = (2048, 4096, 8192)
"""Of the square products that a GPU is measured with."""
COPIES = (2**26, 2**28, 2**30)
"""Bytes of the arrays that are copied: the largest is more than any cache."""


@dataclass(frozen=True)
class AnatomyOptions(Options):
    """Which block, and for which GPU."""

    gpu: str = "h100"
    """GPU of the model and of the compiler: a100-40, a100-80, h100, h200, b200 or rtx4090."""
    model: str = "gpt2"
    """Preset whose block is taken apart: a dense GPT-2."""
    batch: int = 8
    """Sequences."""
    seq_len: int = 1024
    """Tokens of a sequence, a multiple of 64."""
    longer: tuple[int, ...] = (2048, 4096)
    """Longer sequences, rising, for which it is compiled too."""


DEFAULTS = AnatomyOptions()
QUICK = replace(DEFAULTS, longer=(2048,))


def check(options: AnatomyOptions, folder: Path) -> None:
    """Refuse an unknown GPU or model, and sizes that do not fit."""
    gpu(options.gpu)
    if options.model not in PRESETS:
        raise ConfigError(f"model={options.model!r} is no preset; did you mean {nearest(options.model, PRESETS)}?")
    model = PRESETS[options.model]
    if model.experts or model.architecture != "gpt2":
        raise ConfigError(f"model={options.model} is no dense GPT-2, whose operations are counted here; write gpt2")
    if options.batch < 1:
        raise ConfigError(f"batch={options.batch} is below 1; give 1 or more")
    lengths = [options.seq_len, *options.longer]
    if min(lengths) < 64 or any(length % 64 for length in lengths):
        raise ConfigError(f"seq_len, longer = {lengths} are not all multiples of 64; give lengths such as 1024 2048")
    if len(lengths) < 2 or lengths != sorted(set(lengths)):
        raise ConfigError(f"longer={options.longer} does not rise from seq_len={options.seq_len}; give larger lengths")


def run(options: AnatomyOptions, folder: Path, console: Console) -> Outcome:
    """Count; compile, where that is possible; measure, on a GPU."""
    chip, model = gpu(options.gpu), block_model(options.model, options.seq_len, "plain")
    parts = _groups(options, "plain", jax.devices()[0])
    outcome = Outcome([], {"compiled": None}, [])
    try:
        device = absent_gpu(options.gpu)
    except ConfigError as error:
        console.print(f"the compiled part is left out: {error}", highlight=False, markup=False, soft_wrap=True)
    else:
        flash = _groups(options, "flash", device)
        _compiled(options, {"plain": parts, "flash": flash}, device, folder, console, outcome)
        parts = in_order([*parts, *(part for part in flash if part.name == FLASH)])
    measured = _measure()
    outcome.metrics.update(
        groups={part.label: vars(part) for part in parts},
        measured=measured and {"device": jax.devices()[0].device_kind, **vars(measured)},
    )
    outcome.checks[:0] = check_groups(model, options.batch, parts, roofline(chip, product=True))
    outcome.tables[:0] = [_table(options, parts, chip), _speeds(measured)]
    save_figure(roofline_figure(_title(options), parts, chip, measured), folder, "roofline")
    return outcome


def _groups(options: AnatomyOptions, attention: str, device: Any) -> list[Group]:
    step, args = block_step(block_model(options.model, options.seq_len, attention), options.batch, device)
    return groups(operations(step, *args), gpu(options.gpu))


def _compiled(
    options: AnatomyOptions,
    parts: dict[str, list[Group]],
    device: Any,
    folder: Path,
    console: Console,
    outcome: Outcome,
) -> None:
    """Add to the outcome what the compiler makes of the block with either attention."""
    chip, model = gpu(options.gpu), block_model(options.model, options.seq_len, "plain")
    wanted = [
        block_model(options.model, length, name)
        for length in (options.seq_len, *options.longer)
        for name in ("plain", "flash")
    ]
    shown = track(wanted, description="compiling", console=console, disable=not console.is_terminal)
    builds = [build(each, options.batch, device) for each in shown]
    bars = []
    for first in builds[:2]:  # of seq_len
        alone = Moved.one_by_one(f"{first.attention}, one by one", parts[first.attention])
        fused = Moved.fused(f"{first.attention}, compiled", first, chip)
        outcome.checks.extend(check_moved(model, options.batch, alone, fused))
        bars += [alone, fused]
    outcome.checks.extend(check_builds(model, options.batch, builds))
    outcome.tables.extend([_moved_table(bars), _memory_table(builds)])
    outcome.metrics["compiled"] = {
        "moved": {bar.label: vars(bar) for bar in bars},
        "temporaries": {f"{b.attention}, {b.seq_len}": b.memory.temporaries for b in builds},
    }
    save_figure(bytes_figure(_title(options), options.batch * model.heads, bars, builds), folder, "bytes")


def _measure() -> Ceilings | None:
    """Of the GPU that runs this; None without one."""
    return measure_ceilings(SIDES, COPIES) if jax.default_backend() == "gpu" else None


def _title(options: AnatomyOptions) -> str:
    return f"a block of {options.model}, {options.batch} x {options.seq_len} tokens, bfloat16"


def _table(options: AnatomyOptions, parts: list[Group], chip: Gpu) -> Table:
    total = sum(part.seconds for part in parts if part.name != FLASH)
    columns = ("group", "GFLOP", "MB", "FLOPs/byte", "bound by", "share of time")
    table = Table(*columns, title=f"{_title(options)}: operations one by one on {chip.name}")
    for part in parts:
        roof = roofline(chip, product=part.product)
        share = "instead" if part.name == FLASH else f"{100 * part.seconds / total:.1f} %"
        numbers = (f"{part.flops / 1e9:.2f}", f"{part.bytes / 1e6:.1f}", f"{part.intensity:.3g}")
        table.add_row(part.label, *numbers, roof.bound(part.flops, part.bytes), share)
    return table


def _speeds(measured: Ceilings | None) -> Table:
    table = Table("measured", "size", "speed", title="What this device reaches")
    if measured is None:
        table.add_row("nothing", "there is no GPU", "")
        return table
    for side, speed in measured.products.items():
        table.add_row("product", f"{side} x {side}", f"{speed / 1e12:.1f} TFLOP/s")
    for size, speed in measured.copies.items():
        table.add_row("copy", f"{size / 1e6:.0f} MB", f"{speed / 1e9:.0f} GB/s")
    return table


def _moved_table(bars: list[Moved]) -> Table:
    table = Table("attention", "MB, products", "MB, others", "MB", "modelled ms", title="Bytes read and written")
    for bar in bars:
        sizes = (f"{size / 1e6:.0f}" for size in (bar.products, bar.other, bar.total))
        table.add_row(bar.label, *sizes, f"{1e3 * bar.seconds:.2f}")
    return table


def _memory_table(builds: list[Build]) -> Table:
    table = Table("tokens of a sequence", "plain, MB", "flash, MB", title="Temporaries of the compiled block")
    for plain, flash in zip(builds[::2], builds[1::2], strict=True):
        table.add_row(str(plain.seq_len), *(f"{b.memory.temporaries / 1e6:.0f}" for b in (plain, flash)))
    return table
