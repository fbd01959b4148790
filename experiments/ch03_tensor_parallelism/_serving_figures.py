"""Figures of tp_vs_zero_inference: tokens a second, bytes on the wire, memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ch03_tensor_parallelism._serving import WAYS, Serving
from experiments.ch03_tensor_parallelism._serving_compiled import Compiled
from experiments.ch03_tensor_parallelism._written import Row
from jax5d.costs.inference import Pass

COLOURS = {"tp": "#1f4e9c", "zero": "#d9622b"}
SHORT = {"tp": "tp", "zero": "ZeRO-3"}
GB = 1e9


def speed_figure(serving: Serving, batches: Sequence[int], firsts: dict[str, int]) -> Figure:
    """Tokens a second of decode steps and prefills, and bytes sent for a token."""
    figure = Figure(figsize=(17, 5.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    lengths = prompt_lengths(serving)
    decodes = {way: [serving.decode(way, b) for b in batches] for way in WAYS}
    prefills = {way: [serving.prefill(way, s) for s in lengths] for way in WAYS}
    at_once = [serving.n * s for s in lengths]
    _band(left, serving, batches, decodes, batches)
    full = serving.most("zero")
    left.axvline(full, color="0.4", linestyle=":", label=f"memory is full: {full} sequences")
    left.set(title="Decode: one token for each sequence", xlabel="sequences at once", ylabel="new tokens a second")
    _band(middle, serving, at_once, prefills, at_once)
    middle.set(title=f"Prefill: {serving.n} prompts, one a GPU under ZeRO-3")
    middle.set(xlabel="tokens at once", ylabel="tokens of prompts a second")
    _wire(right, serving, batches, firsts["bytes on the wire"])
    right.axvspan(1, full, color="0.9", zorder=0, label=f"decode steps that fit: up to {full}")
    _crossings(middle, serving, firsts)
    for axes in (left, middle, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{serving.model.name} in bfloat16 on {serving.n} GPUs ({serving.chip.name}), {serving.model.context} tokens a "
        "sequence, by formula. Solid: all hidden but the longest of products, reads and sends; dashed: nothing hidden"
    )
    return figure


def prompt_lengths(serving: Serving) -> list[int]:
    """Powers of two up to the context."""
    return [s for s in (2**k for k in range(20)) if s <= serving.model.context]


def _band(
    axes: Axes, serving: Serving, places: Sequence[int], passes: dict[str, list[Pass]], tokens: Sequence[int]
) -> None:
    """From nothing hidden to everything."""
    for way, name in WAYS.items():
        times = [step.seconds(serving.chip) for step in passes[way]]
        high = [count / time.bound for count, time in zip(tokens, times, strict=True)]
        low = [count / time.in_turn for count, time in zip(tokens, times, strict=True)]
        axes.plot(places, high, "-", color=COLOURS[way], label=f"{name}, at most")
        axes.plot(places, low, "--", color=COLOURS[way], label=f"{name}, nothing hidden")
        axes.fill_between(places, low, high, color=COLOURS[way], alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


def _crossings(axes: Axes, serving: Serving, firsts: dict[str, int]) -> None:
    """Where gathering is no slower."""
    styles = {"seconds, all hidden but the longest": "-", "seconds, nothing hidden": "--"}
    for name, style in styles.items():
        if firsts[name] <= serving.model.context:
            tokens = firsts[name] * serving.n
            axes.axvline(tokens, color="0.4", linestyle=style, linewidth=1, label=f"they cross at {tokens} tokens")


def _wire(axes: Axes, serving: Serving, batches: Sequence[int], first: int) -> None:
    """Of decode steps, and beyond them of prefills."""
    lengths = [s for s in prompt_lengths(serving) if s * serving.n > batches[-1]]
    tokens = [*batches, *(s * serving.n for s in lengths)]
    for way, name in WAYS.items():
        passes = [*(serving.decode(way, b) for b in batches), *(serving.prefill(way, s) for s in lengths)]
        sent = [step.wire_bytes / count / 1e6 for step, count in zip(passes, tokens, strict=True)]
        axes.plot(tokens, sent, "o-", markersize=3, color=COLOURS[way], label=name)
    if first <= serving.model.context:
        crossing = serving.n * first
        axes.axvline(crossing, color="0.4", linewidth=1, label=f"alike at {crossing} tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title="On the wire", xlabel="tokens at once", ylabel="MB that a GPU sends for each token")


def memory_figure(serving: Serving, batches: Sequence[int], rows: list[Row], compiled: list[Compiled]) -> Figure:
    """By formula, with what the compiler reserves; and measured on fake devices."""
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _formula_bars(left, serving, batches, compiled)
    _measured_bars(right, rows)
    return figure


def _formula_bars(axes: Axes, serving: Serving, batches: Sequence[int], compiled: list[Compiled]) -> None:
    cases = [(batch, way) for batch in batches for way in WAYS]
    places = np.array([3 * i + j for i in range(len(batches)) for j in range(2)])
    bottom = np.zeros(len(cases))
    parts = {"weights": "C0", "gathered": "C1", "cache": "C2"}
    for part, colour in parts.items():
        height = np.array([getattr(serving.held(way, batch), part) for batch, way in cases]) / GB
        axes.bar(places, height, 0.85, bottom=bottom, color=colour, label=f"{part}, formula")
        bottom += height
    known = {(row.batch, row.way): row.memory.peak / GB for row in compiled}
    found = [(place, known[case]) for place, case in zip(places.tolist(), cases, strict=True) if case in known]
    axes.plot(*zip(*found, strict=True), "kD", mfc="none", label="all, compiled")
    limit = serving.chip.visible / GB
    axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"a GPU's {limit:.0f} GB")
    pairs = [3 * i + 0.5 for i in range(len(batches))]
    axes.set_xticks(pairs, [f"tp  ZeRO-3\n{batch}" for batch in batches], fontsize=8)
    axes.set(xlabel="sequences at once", ylabel="GB on a GPU", ylim=(0, 1.35 * limit))
    axes.set_title(f"Decode: {serving.model.name}, {serving.model.context} tokens a sequence, {serving.n} GPUs")
    axes.legend(fontsize=8, ncols=3, loc="upper left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _measured_bars(axes: Axes, rows: list[Row]) -> None:
    places, bottom = np.arange(len(rows)), np.zeros(len(rows))
    for part, colour in {"weights": "C0", "cache": "C2"}.items():
        height = np.array([getattr(row, part) for row in rows]) / 1e3
        axes.bar(places, height, 0.7, bottom=bottom, color=colour, label=f"{part}, arrays")
        bottom += height
    axes.plot(places, [row.held_by_hand / 1e3 for row in rows], "k_", markersize=18, label="both, by hand")
    axes.set_xticks(places, [f"{SHORT[row.way]}\n{row.n} devices" for row in rows], fontsize=8)
    axes.set(ylabel="kB on a device", ylim=(0, 1.35 * max(bottom)))
    axes.set_title("Fake devices: arrays of a small Llama with 4 kv heads")
    axes.legend(fontsize=8, ncols=3, loc="upper right")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
