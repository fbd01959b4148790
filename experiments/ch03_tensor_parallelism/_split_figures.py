"""The figures of `split_a_layer`: one product cut three ways, and a pair of them in four orders."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ch03_tensor_parallelism import _one_product as one
from experiments.ch03_tensor_parallelism import _pairs as pairs
from experiments.ch03_tensor_parallelism._larger import LARGER, T, seconds
from experiments.training import wire_total

MB = 1e6
PASSES = {"forward": "#1f4e9c", "backward": "#d9622b"}
HELD = {"W": "#4292c6", "X": "#9ecae1", "Y": "#d9a441"}
ORDERS = {
    "columns, rows": ("#2a9d5c", "o"),
    "columns, columns": ("#1f4e9c", "s"),
    "rows, columns": ("#d9622b", "^"),
    "rows, rows": ("#8c6bb1", "v"),
}
"""Colour and marker of each order."""
DEVICES = (4, 8, 16, 32, 64)
"""Numbers of devices in the panel of formulae."""
ROW_PIECES = (2, 4, 8, 16, 32)
"""Pieces of the rows that a 2-D cut may have there; the columns' are the rest."""


def product_figure(rows: list[one.Row]) -> Figure:
    """What a device holds and sends by cut, measured; and by formula on more devices."""
    figure = Figure(figsize=(15, 5.6), layout="constrained")
    held, sent, formula = figure.subplots(1, 3, width_ratios=(1, 1, 0.75))
    places, labels = np.arange(len(rows)), [f"{row.way.name}\nn={row.n}" for row in rows]
    bottom, theory = np.zeros(len(rows)), np.zeros(len(rows))
    for name, colour in HELD.items():
        height = np.array([max(row.held[name]) for row in rows]) / MB
        held.bar(places, height, 0.7, bottom=bottom, color=colour, label=name)
        bottom += height
        theory += np.array([row.way.held(row.shape)[name] for row in rows]) / MB
        held.hlines(theory, places - 0.4, places + 0.4, color="black", label="theory" if name == "Y" else "")
    held.set(ylabel="MB on a device", title="Held: arrays of the devices")
    for i, (name, colour) in enumerate(PASSES.items()):
        shift = 0.4 * i - 0.2
        measured = [wire_total((row.forward, row.backward)[i]) / MB for row in rows]
        sent.bar(places + shift, measured, 0.38, color=colour, label=name)
        expected = np.array([wire_total(row.way.sums(row.shape)[i]) for row in rows]) / MB
        label = "theory" if i else ""
        sent.hlines(expected, places + shift - 0.22, places + shift + 0.22, color="black", label=label)
    sent.set(ylabel="MB that a device sends", title="Sent: all-reduces of the program")
    for axes in (held, sent):
        axes.set_xticks(places, labels, fontsize=8, rotation=60)
        axes.set_ylim(top=1.18 * axes.get_ylim()[1])
        axes.legend(ncols=4, loc="upper center", fontsize=9)
        _grid(axes)
    _square(formula)
    n, d, f = rows[0].shape
    figure.suptitle(f"One product Y = X W on n devices: [{n}, {d}] x [{d}, {f}], float32")
    return figure


def _square(axes: Axes) -> None:
    """Elements sent in both passes by W's cut, over those of X; W is square or four times as wide as high."""
    for wide, style in ((1, "-"), (4, "--")):
        name = "W square" if wide == 1 else "W 4 times as wide"
        best = [float(min(_both(r, n // r, wide) for r in ROW_PIECES if r < n)) for n in DEVICES]
        axes.plot(DEVICES, best, style, color="#2a9d5c", marker="s", label=f"the best 2-D cut, {name}")
    columns = [2 * (n - 1) / n for n in DEVICES]
    axes.plot(DEVICES, columns, ":", color="black", marker="o", label="columns (any W), rows (square W)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEVICES, [str(n) for n in DEVICES])
    axes.set(xlabel="devices n", ylabel="sent in both passes, over the bytes of X", title="By formula, more devices")
    axes.set_ylim(0, 3.6)
    axes.legend(fontsize=9, loc="upper right")
    _grid(axes)


def _both(r: int, c: int, wide: int) -> Fraction:
    """Y / c is summed over r, dX / r over c."""
    return 2 * Fraction(r - 1, r) * Fraction(wide, c) + 2 * Fraction(c - 1, c) * Fraction(1, r)


def pairs_figure(rows: list[pairs.Row], wrong: dict[int, float], theory: dict[int, float]) -> Figure:
    """Four orders: what they send and keep; GeLU of partial sums; and times by formula."""
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    (sent, kept), (gelu, times) = figure.subplots(2, 2)
    for name, (colour, marker) in ORDERS.items():
        order = [row for row in rows if row.pair.name == name]
        t = [row.t for row in order]
        style = {"color": colour, "marker": marker, "linestyle": "none", "markersize": 11 if marker == "s" else 7}
        sent.plot(t, [(wire_total(r.forward) + wire_total(r.backward)) / MB for r in order], **style, label=name)
        by_theory = [sum(wire_total(r.theory(backward=b)) for b in (False, True)) / MB for r in order]
        sent.plot(t, by_theory, color=colour)
        kept.plot(t, [r.kept / MB for r in order], **style, label=name)
        kept.plot(t, [r.pair.kept(r.widths, r.t) / MB for r in order], color=colour)
    sent.set(ylabel="MB that a device sends, forward and backward", title="On the wire (lines: theory)")
    kept.set(ylabel="MB on a device", title="Kept for the backward pass, weights included (lines: theory)", ylim=0)
    gelu.plot([*wrong], [100 * x for x in wrong.values()], "o", color="#d9622b", label="measured", markersize=8)
    gelu.plot([*theory], [100 * x for x in theory.values()], color="#d9622b", label="normal values, by integration")
    gelu.set(
        ylabel="% of the values' root mean square",
        title="Error of GeLU(a) + GeLU(b) + ... for GeLU(a + b + ...): W1 by rows",
    )
    for axes in (sent, kept, gelu):
        axes.set_xscale("log", base=2)
        axes.set_xticks([*wrong], [str(t) for t in wrong])
        axes.set_xlabel("devices t")
        axes.legend()
        _grid(axes)
    _times(times)
    n, d, h, _ = rows[0].widths
    figure.suptitle(
        f"An MLP GeLU(X W1 + b1) W2 + b2 by the orders of cuts of W1, W2: {n} tokens, widths {d} and {h}, float32"
    )
    return figure


def _times(axes: Axes) -> None:
    """Milliseconds on the wire by width and order, beside those of the products."""
    places = np.arange(len(LARGER))
    for i, (name, (colour, _)) in enumerate(ORDERS.items()):
        first, second = name.split(", ")
        order = pairs.streamed(first, second)  # pyright: ignore[reportArgumentType]
        wire = [1e3 * seconds(order, n, d)["wire"] for n, d in LARGER]
        axes.bar(places + 0.2 * i - 0.3, wire, 0.19, color=colour, label=name)
    products = [1e3 * seconds(pairs.streamed("columns", "rows"), n, d)["products"] for n, d in LARGER]
    axes.hlines(products, places - 0.42, places + 0.42, color="black", linewidth=2, label="the products at the peak")
    axes.set_xticks(places, [f"width {d}\n{n} tokens" for n, d in LARGER])
    axes.set(ylabel="ms, forward and backward", title=f"By formula: {T} H100s of a host, bfloat16, d_ff = 4 d_model")
    axes.legend()
    _grid(axes)


def _grid(axes: Axes) -> None:
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
