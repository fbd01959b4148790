"""The figures of `gpu_anatomy`: the rooflines with the block's groups below them, and the bytes that are saved."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.ch00_foundations._block import COPIES, FLASH, Build, Group, Moved, roofline
from jax5d.costs.gpus import GPUS, Gpu
from jax5d.measure.ceilings import Ceilings

PRODUCT, OTHER, FUSED = "#1f4e9c", "#d9622b", "#2a9d5c"
"""Colours: of products, of all else, of flash attention."""
SHOWN = ("a100-80", "h100", "h200", "b200", "rtx4090")
"""GPUs with a thin line."""


def roofline_figure(title: str, parts: list[Group], chip: Gpu, measured: Ceilings | None) -> Figure:
    """Roofs above; below, on the same intensities, a row for each group with its share of the time."""
    names = list(dict.fromkeys(part.name for part in parts))
    figure = Figure(figsize=(11, 10))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 6))
    _roofs(above, chip, measured)
    for part in parts:
        if part.name == COPIES:  # no FLOPs: on a logarithmic axis nowhere
            continue
        style = _style(part)
        speed = roofline(chip, product=part.product).attainable(part.intensity)
        above.plot(part.intensity, speed, **style, zorder=4)
        below.plot(part.intensity, names.index(part.name), **style, zorder=4)
    _rows(below, parts, names, chip)
    colours = {"products": PRODUCT, "flash attention": FUSED, "all else": OTHER}
    handles = [Line2D([], [], color=colour, linewidth=6, label=name) for name, colour in colours.items()]
    for name, backward in (("forward", False), ("backward", True)):
        handles.append(Line2D([], [], linestyle="", label=name, **_marker("0.3", backward)))
    below.legend(handles=handles, loc="lower left", ncols=5, framealpha=1)
    figure.suptitle(f"Rooflines: {title}\noperations one by one, on {chip.name}", y=0.99)
    figure.tight_layout()
    return figure


def _style(part: Group) -> dict:
    return _marker(FUSED if part.name == FLASH else PRODUCT if part.product else OTHER, part.backward)


def _marker(colour: str, backward: bool) -> dict:
    """A dot, and round it a ring, so that both are seen at one place."""
    if backward:
        return {"marker": "o", "markersize": 11, "color": colour, "markerfacecolor": "none", "markeredgewidth": 1.8}
    return {"marker": "o", "markersize": 6, "color": colour}


def _roofs(axes: Axes, chip: Gpu, measured: Ceilings | None) -> None:
    intensity = np.geomspace(0.03, 10_000, 400)

    def draw(peak: float, bandwidth: float, **style) -> None:
        axes.loglog(intensity, np.minimum(peak, bandwidth * intensity), **style)

    for name, colour in zip([n for n in SHOWN if n != chip.name], ("0.35", "0.5", "0.6", "0.7", "0.8"), strict=False):
        row = GPUS[name]
        label = f"{name}: {row.half / 1e12:.0f} TFLOP/s, {row.bandwidth / 1e9:.0f} GB/s"
        draw(row.half, row.bandwidth, color=colour, linewidth=1, linestyle=(0, (4, 2)), label=label)
    label = f"{chip.name}: {chip.half / 1e12:.0f} TFLOP/s in bfloat16, {chip.bandwidth / 1e9:.0f} GB/s"
    draw(chip.half, chip.bandwidth, color="black", linewidth=2.5, label=label)
    label = f"{chip.name} without tensor cores: {chip.float32 / 1e12:.0f} TFLOP/s in float32"
    draw(chip.float32, chip.bandwidth, color="black", linewidth=1.2, linestyle=":", label=label)
    if measured:
        roof = measured.roofline
        label = f"measured here: {roof.peak / 1e12:.0f} TFLOP/s, {roof.bandwidth / 1e9:.0f} GB/s"
        draw(roof.peak, roof.bandwidth, color="crimson", linewidth=2, label=label)
    axes.set(ylabel="attainable FLOP/s", xlim=(intensity[0], intensity[-1]), ylim=(2e10, 6e15))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, loc="lower right")


def _rows(axes: Axes, parts: list[Group], names: list[str], chip: Gpu) -> None:
    """The lower panel's ridge, names and shares of time."""
    total = sum(part.seconds for part in parts if part.name != FLASH)
    ridge = roofline(chip, product=True).ridge
    axes.axvline(ridge, color="black", linewidth=1.5)
    axes.text(ridge * 0.95, -0.9, "memory is the limit", va="center", ha="right", fontsize=9)
    axes.text(ridge * 1.05, -0.9, f"compute is: ridge {ridge:.0f}", va="center", fontsize=9)
    for row, name in enumerate(names):
        seconds = sum(part.seconds for part in parts if part.name == name)
        share = f"{100 * seconds / total:.1f} %" + (" instead" if name == FLASH else "")
        axes.annotate(share, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    axes.annotate("share of time", (1.01, -0.9), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    labels = {FLASH: f"{FLASH}\ninstead of these three", COPIES: f"{COPIES}, no FLOPs"}
    axes.set_yticks(range(len(names)), [labels.get(name, name) for name in names])
    axes.set(ylim=(len(names) + 0.6, -1.5), xlabel="intensity, FLOPs for each byte read or written")
    axes.grid(alpha=0.25)


def bytes_figure(title: str, heads: int, bars: list[Moved], builds: list[Build]) -> Figure:
    """Bytes moved, one by one and compiled; temporaries over the sequence length. `heads` of all sequences."""
    figure = Figure(figsize=(13, 5.5))
    left, right = figure.subplots(1, 2)
    _bars(left, bars)
    _temporaries(right, heads, builds)
    figure.suptitle(f"What fusion and flash attention save: {title}")
    figure.tight_layout()
    return figure


def _bars(axes: Axes, bars: list[Moved]) -> None:
    places = range(len(bars))
    products, other = (np.array([getattr(bar, name) for bar in bars]) / 1e9 for name in ("products", "other"))
    axes.bar(places, products, color=PRODUCT, label="products and attention kernels")
    axes.bar(places, other, bottom=products, color=OTHER, label="everything else")
    for place, bar in zip(places, bars, strict=True):
        text = f"{bar.total / 1e9:.1f} GB\n{1e3 * bar.seconds:.2f} ms"
        axes.text(place, bar.total / 1e9, text, ha="center", va="bottom", fontsize=10)
    axes.set_xticks(places, [bar.label.replace(", ", "\n") for bar in bars])
    axes.set(
        ylabel="GB read and written, forward and backward", title="Bytes moved, and the least time by the roofline"
    )
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])
    axes.legend()
    axes.grid(axis="y", alpha=0.3)


def _temporaries(axes: Axes, heads: int, builds: list[Build]) -> None:
    lengths = np.array(sorted({build.seq_len for build in builds}))
    for name, colour, power in (("plain", OTHER, 2), ("flash", FUSED, 1)):
        sizes = [build.memory.temporaries / 1e6 for build in builds if build.attention == name]
        label = f"{name} attention: x {sizes[-1] / sizes[0]:.1f}"
        axes.loglog(lengths, sizes, "o-", color=colour, linewidth=2, markersize=8, label=label)
        guide = sizes[0] * (lengths / lengths[0]) ** power
        axes.loglog(lengths, guide, color="0.4", linestyle=":", label=None if power == 2 else "as $s^2$, as $s$")
    square = 4 * heads * lengths**2 / 1e6
    axes.loglog(lengths, square, "k--", linewidth=1.2, label="attention weights and their gradient: $4 a s^2 b$ bytes")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(low, 5 * high)  # room for the legend
    ticks = [mantissa * 10**power for power in range(-3, 9) for mantissa in (1, 2, 5)]
    axes.set_yticks([tick for tick in ticks if low < tick < 5 * high])
    axes.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
    axes.set(xlabel="tokens of a sequence, s", ylabel="MB", title="Temporaries of the compiled block")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
