"""The figure of `sequence_parallel`: gradients with and without their sum, bytes sent and bytes kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ch04_sequence_and_context._sequence_compared import LeftOut, Run
from experiments.ch04_sequence_and_context._sequence_costs import Cost

STYLES = {
    "tp": ("o-", "tab:red"),
    "tp + sp": ("s-", "tab:blue"),
    "tp + sp, overlapped": ("x--", "tab:green"),
}


def figure(left: Mapping[str, Sequence[LeftOut]], runs: Sequence[Run], costs: Sequence[Cost], stream: int) -> Figure:
    """`left` are gradients taken apart, by model; `stream` is K in bytes."""
    figure = Figure(figsize=(17, 5.6), layout="constrained")
    gradients, sent, kept = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    _gradients(gradients, left, runs)
    mine = [cost for cost in costs if cost.architecture == "gpt2"]
    _by_size(sent, mine, [cost.layer / stream for cost in mine])
    _theory(sent, max(cost.t for cost in mine))
    sent.set(ylabel="bytes sent over K, the whole stream's", title="A layer on the wire, forward and backward")
    _by_size(kept, mine, [cost.kept / stream for cost in mine])
    kept.set(ylabel="bytes kept over K", title="A layer's activations")
    figure.suptitle("Sequence parallelism on fake devices: tiny GPT-2 and Llama with dropout (middle and right: GPT-2)")
    return figure


def _gradients(axes: Axes, left: Mapping[str, Sequence[LeftOut]], runs: Sequence[Run]) -> None:
    """One line a leaf: a device's own part, and what the trainers made of the sum."""
    found = [(architecture, leaf) for architecture, leaves in left.items() for leaf in leaves]
    places = np.arange(len(found))
    axes.plot([leaf.least for _, leaf in found], places, "^", color="tab:orange", label="sum left out, best device")
    axes.plot([leaf.worst for _, leaf in found], places, "s", color="tab:red", label="sum left out, worst device")
    summed = [max(run.gradients[leaf.leaf] for run in runs if run.architecture == a) for a, leaf in found]
    axes.plot(np.maximum(summed, 1e-8), places, "D", color="tab:blue", label="summed, worst run")
    axes.set_yticks(places, [f"{a}: {leaf.leaf.removeprefix('blocks.').removeprefix('outer.')}" for a, leaf in found])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(1e-8, 10)
    axes.set(xlabel="off from one device's gradient, relative (log)", title="Gradients that tp devices have parts of")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center")


def _theory(axes: Axes, largest: int) -> None:
    """Activations alone; the markers have a layer's sums of gradients over tp too."""
    t = np.geomspace(2, largest, 50)
    for factor, style in ((8, "k:"), (10, "k-.")):
        axes.plot(t, factor * (t - 1) / t, style, lw=1, label=f"activations, {factor} (t - 1) / t")
    axes.legend(fontsize=8, loc="lower right")


def _by_size(axes: Axes, costs: Sequence[Cost], values: Sequence[float]) -> None:
    for layout, (style, colour) in STYLES.items():
        some = [(cost.t, value) for cost, value in zip(costs, values, strict=True) if cost.layout == layout]
        axes.plot(*zip(*some, strict=True), style, color=colour, ms=8, label=layout)
    ticks = sorted({cost.t for cost in costs})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_ylim(0, 1.1 * max(values))
    axes.set_xlabel("tensor-parallel devices t")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
