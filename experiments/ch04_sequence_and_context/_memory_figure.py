"""The figure of `sequence_memory`: a layer's bytes over tp, by theory and by the compiler, and what they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ch04_sequence_and_context._memory_rows import Case, Megatron, Row
from jax5d.costs.textbook import layer_bytes

LAYOUTS = {False: ("tensor parallelism alone", "tab:red"), True: ("with sequence parallelism", "tab:blue")}


def figure(rows: list[Row], megatron: list[Megatron], gpu: str) -> Figure:
    """Megatron's layer, the first model's here, and the arrays of both at the largest tp."""
    figure = Figure(figsize=(16, 5.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    model = rows[0].case.model
    mine = [row for row in rows if row.case.model == model]
    book = {(m.case.tp, m.case.sequence): m.compiled for m in megatron if m.selective}
    at = [(row.case, row.case.tp, row.case.sequence) for row in mine]
    _lines(left, [(case, layer_bytes(case.selective), book.get((t, sp))) for case, t, sp in at], gpu)
    left.set_title("Megatron's layer, attention recomputed:\n10 + 24/t, and 34/t with sp")
    _lines(middle, [(row.case, row.formula, row.compiled) for row in mine], gpu)
    stream, rest = (sum(term.here for term in mine[0].terms if term.split == kind) for kind in ("stream", "tp"))
    middle.set_title(f"This library's layer, {model}:\n{stream:.3g} + {rest:.3g}/t, and {stream + rest:.3g}/t with sp")
    _terms(right, [row for row in mine if row.case.tp == mine[-1].case.tp])
    figure.suptitle("Activations that a layer keeps on each device for its backward pass")
    return figure


def _lines(axes: Axes, found: Iterable[tuple[Case, float, float | None]], gpu: str) -> None:
    """Theory as lines and the compiler's bytes as markers; a layout's line begins at one device."""
    points = [(case, theory / case.elements, x and x / case.elements) for case, theory, x in found]
    for sequence, (label, colour) in LAYOUTS.items():
        some = sorted(
            ((case.tp, theory, x) for case, theory, x in points if case.sequence == sequence or case.tp == 1),
            key=lambda point: point[0],
        )
        axes.plot([t for t, *_ in some], [y for _, y, _ in some], "-", color=colour, label=f"theory, {label}")
        compiled = [(t, x) for t, _, x in some if x is not None]
        if compiled:
            axes.plot(*zip(*compiled, strict=True), "o", ms=8, mfc="none", color=colour, label=f"XLA, {gpu}, {label}")
    ticks = sorted({case.tp for case, *_ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, map(str, ticks))
    marks = [2.0**n for n in range(1, 7)]
    axes.set_yticks(marks, [f"{x:g}" for x in marks])
    axes.set(xlabel="tensor-parallel devices t", ylabel="bytes for each element of s b h (log)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")


def _terms(axes: Axes, rows: list[Row]) -> None:
    """Stacked arrays: textbook and here, for both layouts at the largest tp."""
    bars = [
        (f"{who}\n{'tp + sp' if row.case.sequence else 'tp'}", [(t.array, getattr(t, field)) for t in row.terms])
        for row in rows
        for who, field in (("textbook", "textbook"), ("here", "here"))
    ]
    places, bottom = list(range(len(bars))), np.zeros(len(bars))
    split = {term.array: term.split for term in rows[0].terms}
    shades = {"stream": iter(_shades("Reds", split, "stream")), "tp": iter(_shades("Blues", split, "tp"))}
    for index, array in enumerate(split):
        heights = np.array([values[index][1] for _, values in bars])
        axes.bar(places, heights, bottom=bottom, color=next(shades[split[array]]), ec="white", lw=0.5, label=array)
        bottom += heights
    for place, height in zip(places, bottom, strict=True):
        axes.text(place, height, f"{height:.2f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(places, [name for name, _ in bars])
    axes.set_ylabel("bytes for each element of s b h")
    axes.set_title(f"Array by array on tp {rows[0].case.tp}; red: not split by tp alone")
    axes.margins(y=0.08)
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper right")


def _shades(name: str, split: dict[str, str], kind: str) -> np.ndarray:
    return colormaps[name](np.linspace(0.35, 0.95, sum(value == kind for value in split.values())))
