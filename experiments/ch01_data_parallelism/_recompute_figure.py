"""The figure of `recompute`: work made again over bytes kept, and what those bytes are."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ch01_data_parallelism._recompute_policies import Row
from jax5d.config import RunConfig

KINDS = {
    "residual stream, norms' results [b, s, d]": "tab:blue",
    "q, k, v, attention's output [b, s, n, h]": "tab:orange",
    "MLP's first product [b, s, f]": "tab:green",
    "attention's weights [b, n, s, s]": "tab:red",
    "softmax's statistics [b, n, s]": "tab:purple",
}
"""What a layer keeps, and its colour. b rows, s tokens, d hidden, n heads of h dims, f of the MLP."""

STREAM, HEADS, HIDDEN, WEIGHTS, STATISTICS = KINDS

COLOURS = {"plain": "tab:red", "flash": "tab:blue"}


def kind_of(shape: tuple[int, ...], config: RunConfig) -> str:
    """The kind of a kept array, from its shape on one device."""
    s = config.train.seq_len
    *others, tokens, last = shape
    if len(others) > 1:
        return WEIGHTS if (tokens, last) == (s, s) else HEADS
    if tokens != s:
        return STATISTICS
    return HIDDEN if last == config.model.d_ff else STREAM


def figure(rows: list[Row], of: str) -> Figure:
    """Both panels; `of` names the model and its work."""
    figure = Figure(figsize=(14, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _trade(left, rows)
    _bars(right, rows)
    figure.suptitle(f"Recomputation in {of}: memory against work")
    return figure


def _trade(axes: Axes, rows: list[Row]) -> None:
    for attention, colour in COLOURS.items():
        mine = [row for row in rows if row.config.model.attention == attention]
        places = [(row.bytes / 1e6, 100 * row.added) for row in mine]
        size = 9 if attention == "plain" else 5  # one policy of each lies at the same place
        axes.plot(*zip(*places, strict=True), "o", color=colour, ms=size, label=f"here, {attention} attention")
        for row, place in zip(mine, places, strict=True):
            right = attention == "plain" or row.config.parallel.remat == "selective"
            offset, side = ((7, 4), "left") if right else ((-6, -10), "right")
            axes.annotate(row.name, place, offset, textcoords="offset points", ha=side, fontsize=8, color=colour)
    megatron = [row for row in rows if row.name in ("plain", "plain-selective", "plain-full")]
    places = [(row.textbook / 1e6, 100 * row.literature) for row in megatron]
    label = "Megatron with dropout, as the literature counts"
    axes.plot(*zip(*places, strict=True), "s", mfc="none", color="black", label=label)
    for row, place in zip(megatron, places, strict=True):
        name = row.config.parallel.remat
        axes.annotate(name, place, (7, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set(
        xlabel="MB that a layer keeps for its backward pass (log)",
        ylabel="FLOPs made again, % of forward and backward pass",
        title="Each policy: towards the lower left is better",
    )
    axes.margins(x=0.15, y=0.12)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="upper right")


def _bars(axes: Axes, rows: list[Row]) -> None:
    places, left = np.arange(len(rows)), np.zeros(len(rows))
    for kind, colour in KINDS.items():
        width = np.array([row.kept.get(kind, 0) for row in rows]) / 1e6
        axes.barh(places, width, left=left, color=colour, label=kind)
        left += width
    for place, row in enumerate(rows):
        axes.text(row.bytes / 1e6, place, f" {row.bytes / 1e6:.0f}", va="center", fontsize=9)
    compiled = [(row.compiled / 1e6, place) for place, row in enumerate(rows) if row.compiled is not None]
    if compiled:
        axes.plot(*zip(*compiled, strict=True), "k|", markersize=18, label="by the compiler's temporaries")
    axes.set_yticks(places, [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(right=1.1 * left.max())
    axes.set(xlabel="MB that a layer keeps for its backward pass", title="What is kept, by the program's types")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
