"""The figures of `mixed_precision`."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from jax5d.costs.formats import FORMATS
from jax5d.train.loop import Run

COLORS = ("black", "tab:blue", "tab:green", "tab:red")


def formats_figure() -> Figure:
    """Range and precision of each format, in powers of two."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    formats = list(FORMATS.values())[::-1]
    for place, f in enumerate(formats):
        low, normal, high = (math.log2(x) for x in (f.smallest_subnormal, f.smallest_normal, f.largest))
        first = place == 0
        left.barh(place, high - normal, left=normal, color="tab:blue", label="all digits" if first else None)
        left.barh(
            place, normal - low, left=low, color="lightsteelblue", label="fewer and fewer digits" if first else None
        )
        left.text(high + 3, place, f"{f.largest:.3g}", va="center", fontsize=9)
        left.text(low - 3, place, f"{f.smallest_subnormal:.2g}", va="center", ha="right", fontsize=9)
        right.barh(place, f.mantissa, color="tab:orange")
        right.text(f.mantissa + 0.4, place, f"{f.epsilon:.2g}", va="center", fontsize=9)
    left.axvline(0, color="gray", linewidth=1, linestyle=":")
    left.set_yticks(range(len(formats)), [f.name for f in formats])
    left.set(xlabel="log2 of positive numbers", title="Range: smallest to largest number", xlim=(-190, 175))
    left.legend(loc="lower right", fontsize=9)
    right.set(xlabel="bits of the mantissa", title="Precision, and epsilon", xlim=(0, 30))
    return figure


def losses_figure(counts: dict[str, np.ndarray], errors: dict[int, float], lost: dict[float, float]) -> Figure:
    """What 16 bits lose: ones that are counted, gradient sums, small gradients."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for (name, sums), style in zip(counts.items(), ("-", "--", "-"), strict=True):
        left.plot(sums, style, linewidth=2, label=name)
    left.set(xlabel="ones added", ylabel="the sum", title="Counting ones: bfloat16 stops at 256")
    left.legend()
    middle.plot(list(errors), [100 * e for e in errors.values()], "o-", color="tab:red", label="measured")
    middle.set(xlabel="microbatches", ylabel="off float32's sum, % of the norm", title="Gradients summed in bfloat16")
    middle.axhline(50 * FORMATS["bfloat16"].epsilon, color="gray", linestyle=":", label="largest error of one rounding")
    middle.set_xscale("log", base=2)
    middle.set_xlim(0.8, 40)
    middle.set_ylim(bottom=0)
    middle.legend()
    right.plot(list(lost), [100 * share for share in lost.values()], "o-", color="tab:green", label="measured")
    right.axvline(1, color="gray", linestyle=":", label="no scaling; to its left, larger batches")
    right.set_xscale("log", base=2)
    right.set(xlabel="loss scale", ylabel="% of gradients that become 0", title="Gradients that float16 loses")
    right.legend()
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    return figure


def curves_figure(runs: dict[str, Run]) -> Figure:
    """Validation losses, and how far each is above float32's."""
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    styles = ({"linewidth": 5, "alpha": 0.3}, {}, {"linestyle": "--"}, {})
    plain = np.empty(0)
    for (name, run), color, style in zip(runs.items(), COLORS, styles, strict=True):
        points = [(r["step"], r["validation_loss"]) for r in run.records if "validation_loss" in r]
        steps, losses = np.array(points).T
        top.plot(steps, losses, color=color, label=f"{name}: {losses[-1]:.3f}", **style)
        plain = plain if plain.size else losses
        bottom.plot(steps, losses - plain, color=color, label=name, **style)
    top.set(ylabel="validation loss, nats per token", title="The same training in four precisions")
    bottom.set(xlabel="optimizer step", ylabel="above float32's, nats")
    top.legend(title="at the end")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return figure
