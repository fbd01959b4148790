"""The figure of `tp_block`: the block with what is sent where, and the bytes sent and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from experiments.ch03_tensor_parallelism._block_program import WAYS, Case, units

WHOLE, TOKENS, WIDTH = "#d0d0d0", "#a6d5a0", "#9ecae1"
"""Colours: the same on every device; tokens split; heads or width split."""
BOXES = (
    "norm",
    "q, k, v\nby columns",
    "attention",
    "out\nby rows",
    "norm",
    "MLP in\nby columns",
    "GELU",
    "MLP out\nby rows",
)
"""A block, residual additions left out."""
ENTER, LEAVE = (1, 5), (4, 8)
"""Boxes before which a region begins and ends."""
SENT = {
    "TP": (("", "all-reduce"), ("all-reduce", "")),
    "TP + SP": (("all-gather", "reduce-scatter,\nall-gather again"), ("reduce-scatter", "all-gather")),
    "overlapped": (("t-1 hops", "t-1 hops,\nall-gather again"), ("t-1 hops", "t-1 hops")),
}
"""Forward and backward where a region begins, and where it ends."""
OPS = {
    "psum": ("all-reduce", "tab:red"),
    "all_gather": ("all-gather", "tab:olive"),
    "psum_scatter": ("reduce-scatter", "tab:cyan"),
    "ppermute": ("hops", "tab:purple"),
}


def figure(cases: Sequence[Case]) -> Figure:
    """Diagrams by way; bytes sent on the most devices; bytes kept by number of devices. Of the first model."""
    mine = [case for case in cases if case.model == cases[0].model and case.remat == "none"]
    most = max(case.t for case in mine)
    figure = Figure(figsize=(14, 11), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.35, 1))
    top, bottom = parts
    for axes, way in zip(top.subplots(len(WAYS), 1), WAYS, strict=True):
        _diagram(axes, way)
    names = {"the same on every device": WHOLE, "tokens split over tp": TOKENS, "heads or width split over tp": WIDTH}
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="0.3") for colour in names.values()]
    top.legend(handles, [*names], loc="outside upper center", ncols=3, frameon=False)
    left, right = bottom.subplots(1, 2)
    _sent(left, [case for case in mine if case.t == most])
    _kept(right, mine)
    figure.suptitle("One transformer block under tensor parallelism: four collectives, or the same bytes in pieces")
    return figure


def _diagram(axes: Axes, way: str) -> None:
    for i, name in enumerate(BOXES):
        inside = any(begin <= i < end for begin, end in zip(ENTER, LEAVE, strict=True))
        colour = WIDTH if inside else WHOLE if way == "TP" else TOKENS
        axes.add_patch(FancyBboxPatch((1.6 * i, 0), 1, 1, boxstyle="round,pad=0.05", facecolor=colour, edgecolor="0.3"))
        axes.text(1.6 * i + 0.5, 0.5, name, ha="center", va="center", fontsize=10)
        if i + 1 < len(BOXES):
            axes.annotate(
                "", (1.6 * i + 1.55, 0.5), (1.6 * i + 1.05, 0.5), arrowprops={"arrowstyle": "->", "color": "0.4"}
            )
    for places, (forward, backward) in zip((ENTER, LEAVE), SENT[way], strict=True):
        for place in places:
            x = 1.6 * place - 0.3
            axes.plot([x, x], [-0.15, 1.15], color="black", linestyle=":", linewidth=1)
            axes.text(x, 1.2, forward, ha="center", va="bottom", color="#1f4e9c", fontsize=10)
            axes.text(x, -0.2, backward, ha="center", va="top", color="#d9622b", fontsize=10)
    axes.text(-0.9, 0.5, way, ha="center", va="center", fontsize=12, fontweight="bold")
    stream = "every device has all tokens" if way == "TP" else "a device has 1/t of the tokens"
    axes.text(-0.9, 0.12, stream.replace(" has ", " has\n"), ha="center", va="top", fontsize=8)
    axes.text(13.35, 1.2, "forward", va="bottom", color="#1f4e9c", fontsize=10, fontstyle="italic")
    axes.text(13.35, -0.2, "backward", va="top", color="#d9622b", fontsize=10, fontstyle="italic")
    axes.set(xlim=(-1.9, 14.3), ylim=(-0.9, 1.6))
    axes.axis("off")


def _sent(axes: Axes, cases: Sequence[Case]) -> None:
    """Forward and backward, in (t-1)/t K."""
    places = [i + shift for i in range(len(cases)) for shift in (-0.2, 0.2)]
    passes = [(case, entries) for case in cases for entries in case.theory]
    bottom = np.zeros(len(places))
    for op, (name, colour) in OPS.items():
        height = np.array([float(units([e for e in entries if e.op == op], case.config)) for case, entries in passes])
        axes.bar(places, height, 0.36, bottom=bottom, color=colour, label=f"{name}, theory")
        bottom += height
    ledgers = [float(units(entries, case.config)) for case in cases for entries in case.sent]
    axes.plot(places, ledgers, "kD", mfc="none", markersize=7, label="the program's ledger")
    for place, text in zip(places, ("forward", "backward") * len(cases), strict=True):
        axes.text(place, -0.01, text, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=8)
    axes.set_xticks(range(len(cases)), [f"\n{case.way}" for case in cases])
    axes.tick_params(axis="x", length=0)
    case = cases[0]
    axes.set(
        title=f"Sent by a device: {case.model}, t = {case.t}",
        ylabel="(t-1)/t K,  K: bytes of one [b, s, d]",
        ylim=(0, 9),
    )
    axes.legend(ncols=2, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _kept(axes: Axes, cases: Sequence[Case]) -> None:
    """Kept for the backward pass, in K."""
    styles = {"TP": ("tab:red", "o", 6), "TP + SP": ("tab:cyan", "o", 6), "overlapped": ("black", "D", 10)}
    for way, (colour, marker, size) in styles.items():
        mine = [case for case in cases if case.way == way]
        counts = [case.t for case in mine]
        measured, formula = zip(*((each / case.whole for each in case.kept) for case in mine), strict=True)
        axes.plot(
            counts, measured, marker, color=colour, mfc="none", markersize=size, label=f"{way}, the program's types"
        )
        if way in ("TP", "TP + SP"):
            axes.plot(counts, formula, color=colour, label=f"{way}, formula")
    axes.axhline(4, color="0.5", linestyle="--", label="4 K: inputs of norms and regions, not split by TP")
    axes.set(
        title=f"Kept by a device for the backward pass: {cases[0].model}",
        xlabel="devices t",
        ylabel="K",
        xticks=sorted({case.t for case in cases}),
    )
    axes.set_ylim(0, 1.45 * axes.get_ylim()[1])
    axes.legend(fontsize=9, ncols=2, loc="upper center")
    axes.grid(alpha=0.3)
