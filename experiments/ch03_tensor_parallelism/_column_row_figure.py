"""The figure of `column_row`: what each pairing sends and where, and how often a bias counts."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ch03_tensor_parallelism._pairs import Row
from experiments.training import wire_total

STAGES = {"start": "#9ecae1", "between": "#d9622b", "end": "#1f4e9c"}
SHORT = {"columns": "col", "rows": "row"}


def figure(bare: list[Row], whole: list[Row], biases: dict[int, dict[str, float]]) -> Figure:
    """Bars by stage from theory with the ledgers' totals on them, for the most devices; biases against t."""
    figure = Figure(figsize=(15, 5.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    top = 1.4 * max(max(wire_total(row.forward), wire_total(row.backward)) for row in (*bare, *whole)) / 1e3
    for axes, rows, name in (
        (left, bare, "X and Y as the cuts have them"),
        (middle, whole, "X and Y whole, as a residual stream is"),
    ):
        _sent(axes, rows)
        axes.set(title=name, ylabel="kB that a device sends", ylim=(0, top))
    _biases(right, biases)
    n, d, h, f = bare[0].widths
    figure.suptitle(f"Two linear layers on {bare[0].t} devices: {n} tokens, widths {d}, {h}, {f}, float32")
    return figure


def _sent(axes: Axes, rows: list[Row]) -> None:
    """Two bars a pairing: forward, backward."""
    places = np.array([i + shift for i in range(len(rows)) for shift in (-0.2, 0.2)])
    passes = [(row, backward) for row in rows for backward in (False, True)]
    bottom = np.zeros(len(places))
    for stage, colour in STAGES.items():
        hops = [[h for h in row.pair.hops(row.widths) if (h.stage, h.backward) == (stage, b)] for row, b in passes]
        height = np.array(
            [float(sum(h.sent(row.t) for h in found)) for (row, _), found in zip(passes, hops, strict=True)]
        )
        axes.bar(places, height / 1e3, 0.36, bottom=bottom, color=colour, label=f"{stage}, theory")
        bottom += height / 1e3
    measured = [wire_total(row.backward if b else row.forward) / 1e3 for row, b in passes]
    axes.plot(places, measured, "kD", mfc="none", markersize=6, label="the program's ledger")
    for place, (_, b) in zip(places.tolist(), passes, strict=True):
        axes.text(
            place,
            -0.01,
            "backward" if b else "forward",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=7,
        )
    names = [f"\n{SHORT[row.pair.first]}, {SHORT[row.pair.second]}" for row in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.tick_params(axis="x", length=0)
    axes.legend(ncols=2, loc="upper center", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _biases(axes: Axes, biases: dict[int, dict[str, float]]) -> None:
    """Measured counts, and the lines t and 1."""
    counts = list(biases)
    styles = {
        "after the sum": ("o", "#2a9d5c", 11),
        "after, gradient": ("x", "black", 7),
        "before the sum": ("o", "#d9622b", 11),
        "before, gradient": ("+", "black", 9),
    }
    for place, (marker, colour, size) in styles.items():
        times = [found[place] for found in biases.values()]
        axes.plot(counts, times, marker, color=colour, markersize=size, label=f"added {place}")
    axes.plot(counts, counts, ":", color="0.5", label="t")
    axes.plot(counts, [1] * len(counts), "--", color="0.5", label="1")
    axes.set(title="A bias of a layer by rows", xlabel="devices t", ylabel="times that it counts", xticks=counts)
    axes.set_ylim(0, 1.15 * counts[-1])
    axes.legend(fontsize=9)
    axes.grid(alpha=0.3)
