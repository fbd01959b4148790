"""Panels of the figures of zero_1 and zero_2_3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from experiments.ch00_foundations._compared import GB
from experiments.ch02_zero._compiled import Row
from experiments.ch02_zero._sizes import COUNTERS, PARAMETERS, PARTS, Held, Sent

OPS = {"psum": "all-reduce", "psum_scatter": "reduce-scatter", "all_gather": "all-gather"}
COLOURS = {"psum": "tab:red", "psum_scatter": "tab:cyan", "all_gather": "tab:olive"}


def held_panel(axes: Axes, rows: Sequence[Held]) -> None:
    """Bytes a parameter by stage and dp: measured stacks, by hand, by the paper."""
    places, labels, bottom = np.arange(len(rows)), [f"Z{r.stage}\ndp {r.n}" for r in rows], np.zeros(len(rows))
    for i, part in enumerate(PARTS[:3]):
        extra = COUNTERS if part == "optimizer" else 0
        height = np.array([(row.measured[part] - extra) / PARAMETERS for row in rows])
        axes.bar(places, height, 0.7, bottom=bottom, label=part, color=f"C{i}")
        bottom += height
    for place, top in zip(places.tolist(), bottom, strict=True):
        axes.text(place, top + 0.45, f"{top:.3g}", ha="center", va="bottom", fontsize=8)
    by_hand = [float(sum(row.by_hand[part] for part in PARTS[:3]) - COUNTERS) / PARAMETERS for row in rows]
    axes.plot(places, by_hand, "k_", markersize=16, markeredgewidth=2, label="by hand")
    axes.plot(places, [row.book for row in rows], "kD", mfc="none", markersize=6, label="the paper's 2 + 2 + 12")
    axes.set_xticks(places, labels, fontsize=8)
    axes.set(ylabel="bytes a parameter on a device", title="Fake devices: arrays of a tiny GPT-2", ylim=(0, 22))
    finish(axes, 2)


def compiled_panel(axes: Axes, rows: Sequence[Row], title: str) -> None:
    """GB by the compiler, state and temporaries, beside the formula and the paper's states."""
    places = np.arange(len(rows))
    state, rest = (np.array(x) / GB for x in zip(*((r.compiled.memory.arguments, _rest(r)) for r in rows), strict=True))
    axes.bar(places, state, 0.7, label="state", color="C4")
    axes.bar(places, rest, 0.7, bottom=state, label="temporaries: gradients, activations, work", color="C7")
    for place, top in zip(places.tolist(), state + rest, strict=True):
        axes.text(place, 1.02 * top + 0.3, f"{top:.1f}", ha="center", va="bottom", fontsize=8)
    formula = [row.compared.formula.total / GB for row in rows]
    axes.plot(places, formula, "k_", markersize=16, markeredgewidth=2, label="all, by formula")
    axes.plot(places, [r.book / GB for r in rows], "kD", mfc="none", markersize=6, label="states, by the paper")
    axes.set_xticks(places, [_label(row) for row in rows], fontsize=8)
    axes.set(ylabel="GB on a GPU", title=title, xlim=(-0.8, len(rows) - 0.2))
    axes.set_ylim(0, 1.4 * max(state + rest))
    finish(axes, 2)


def _rest(row: Row) -> int:
    return row.compiled.memory.peak - row.compiled.memory.arguments


def _label(row: Row) -> str:
    case = row.case
    return f"Z{case.stage}{'' if case.regather else ' kept'}\n{case.n} GPUs\nM = {case.microbatches}"


def sent_panel(axes: Axes, rows: Sequence[Sent], labels: Sequence[str]) -> None:
    """Elements a parameter by op: measured stacks, by hand, by the paper."""
    places, bottom = np.arange(len(rows)), np.zeros(len(rows))
    for op, name in OPS.items():
        height = np.array([row.elements[op] for row in rows])
        axes.bar(places, height, 0.7, bottom=bottom, label=name, color=COLOURS[op])
        bottom += height
    by_hand = [sum(row.by_hand.values()) for row in rows]
    axes.plot(places, by_hand, "k_", markersize=16, markeredgewidth=2, label="by hand")
    axes.plot(places, [row.book for row in rows], "kD", mfc="none", markersize=6, label="by the paper")
    for place, top, row in zip(places.tolist(), bottom, rows, strict=True):
        axes.text(place, max(top, row.book) + 0.04 * max(bottom), f"{top:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(places, list(labels), fontsize=8)
    axes.set(ylabel="elements a parameter, times n / (n-1)", ylim=(0, 1.45 * max(bottom)))
    finish(axes, 2)


def hidden_panel(axes: Axes, rows: Sequence[Row], limit: float) -> None:
    """Shares of gathered and scattered bytes that have matrix products to hide behind."""
    places = np.arange(len(rows))
    for offset, op in ((-0.2, "all_gather"), (0.2, "psum_scatter")):
        share = [100 * row.hidden(op) for row in rows]
        axes.bar(places + offset, share, 0.38, color=COLOURS[op], label=OPS[op])
        for place, value in zip((places + offset).tolist(), share, strict=True):
            axes.text(place, value + 1, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
    axes.axhline(100 * limit, color="black", linestyle="--", linewidth=1, label=f"{limit:.0%}")
    axes.set_xticks(places, [_label(row) for row in rows], fontsize=8)
    axes.set(ylabel="% of the bytes that a GPU sends", ylim=(0, 130), yticks=range(0, 101, 20))
    axes.set_xlim(-0.8, len(rows) - 0.2)
    finish(axes, 3)


def finish(axes: Axes, columns: int) -> None:
    """Grid and legend."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, ncols=columns, loc="upper left" if columns > 2 else "upper right")
