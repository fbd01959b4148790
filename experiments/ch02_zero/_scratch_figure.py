"""The figure of `zero_from_scratch`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Curves = dict[str, list[float]]

COLOURS = {"one device": "0.75"} | {f"stage {stage}": f"C{stage}" for stage in range(4)}


def figure(alone: list[float], rows: list[Any], library: list[list[float]]) -> Figure:
    """Curves on top of each other, how far they are apart, and what a device holds and sends."""
    scratch = {"one device": alone} | {f"stage {row.stage}": row.losses for row in rows}
    trainer = {f"stage {stage}": losses for stage, losses in enumerate(library)}
    figure = Figure(figsize=(13, 9), layout="constrained")
    (top_left, top_right), (low_left, low_right) = figure.subplots(2, 2)
    _curves(top_left, scratch, "The four steps: a network learns from another")
    top_left.set_ylabel("mean squared error")
    _curves(top_right, trainer, "The library's trainer: a tiny GPT-2 learns to count")
    top_right.set_ylabel("loss, nats per token")
    _apart(low_left, scratch, trainer)
    _held(low_right, rows)
    figure.suptitle(
        f"From plain data parallelism to ZeRO-3 on {rows[0].n} devices: one loss curve, less on each device"
    )
    return figure


def _curves(axes: Axes, curves: Curves, title: str) -> None:
    """The first the widest, so that each can be seen below those over it."""
    for i, (name, losses) in enumerate(curves.items()):
        width = 2.2 * (len(curves) - i) - 1
        axes.plot(range(1, len(losses) + 1), losses, linewidth=width, label=name, color=COLOURS[name])
    axes.set(title=title, xlabel="step")
    axes.legend()
    axes.grid(alpha=0.3)


def _apart(axes: Axes, scratch: Curves, trainer: Curves) -> None:
    """Absolute differences; those that are 0 lie on the axis."""
    for kind, curves, markers in (("steps", scratch, "ovs^"), ("trainer", trainer, "vs^")):
        (name, first), *others = curves.items()
        for (other, losses), marker in zip(others, markers, strict=True):
            difference = np.abs(np.subtract(losses, first))
            style = {"fillstyle": "none" if kind == "steps" else "full", "color": COLOURS[other], "markersize": 5}
            label = f"{kind}: {other} from {name}"
            axes.plot(range(1, len(losses) + 1), difference, marker, clip_on=False, label=label, **style)
    axes.axhline(1e-6, color="black", linestyle="--", label="1e-6")
    axes.set_yscale("symlog", linthresh=1e-9)
    axes.set(title="How far apart: float32 sums in another order", xlabel="step", ylabel="difference of losses")
    axes.set_ylim(0, 1e-3)
    axes.set_yticks([0, *(10.0**k for k in range(-9, -4))])
    axes.legend(fontsize=8, ncols=2, loc="upper center")
    axes.grid(alpha=0.3)


def _held(axes: Axes, rows: list[Any]) -> None:
    """Bars of kB with theory's lines, and what is sent."""
    stages, bottom, theory = np.arange(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
    for bucket, colour in zip(rows[0].held, ("#4292c6", "#9ecae1", "#d9a441"), strict=True):
        height = np.array([row.held[bucket] for row in rows]) / 1e3
        axes.bar(stages, height, 0.6, bottom=bottom, label=bucket, color=colour)
        bottom += height
        theory += np.array([row.held_theory[bucket] for row in rows]) / 1e3
        label = "theory" if bucket == "optimizer" else ""
        axes.hlines(theory, stages - 0.35, stages + 0.35, color="black", linewidth=1.5, label=label)
    for stage, (row, top) in enumerate(zip(rows, bottom, strict=True)):
        sent = "\n".join(f"sends {size / 1e3:.0f} kB, M = {m}" for m, size in row.sent.items())
        axes.text(stage, top + 0.02 * max(bottom), sent, ha="center", va="bottom", fontsize=8)
    axes.set(title="The four steps: what a device holds, and sends of M microbatches", ylabel="kB on a device")
    axes.set_xticks(stages, [f"stage {row.stage}" for row in rows])
    axes.set_ylim(top=1.3 * max(bottom))
    axes.legend(ncols=4, loc="upper center", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
