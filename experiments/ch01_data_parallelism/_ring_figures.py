"""The figures of `ring_all_reduce`: who holds what after each step, and modelled times over the payload."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator

from jax5d.costs.cluster import all_reduce_seconds, host_link, network_link
from jax5d.costs.gpus import gpu
from jax5d.costs.links import Link, crossover, ring_all_reduce, tree_all_reduce

TREE_SLOWDOWN = 1 / 0.9
"""Of a tree's bandwidth: NCCL's tuning model takes 0.9 of the ring's."""
MODELLED = (8, 64, 512)
"""Numbers of H100s."""

STYLES = {
    "ring": ("#1f4e9c", "-"),
    "two rings, each way over links of its own": ("#4aa3df", "--"),
    "two levels: rings in and across hosts of 8": ("#2a9d5c", "-"),
    "double binary tree": ("#d9622b", "-"),
}
"""Colour and line of each way to sum."""


def modelled(n: int) -> dict[str, Callable[[float], float]]:
    """Seconds for payloads in bytes, on N H100s in hosts of eight, by the alpha-beta model.

    A ring or tree across hosts waits in each step for the network, of which each GPU has one adapter.
    """
    h100, link = gpu("h100"), slowest(n)
    ways: dict[str, Callable[[float], float]] = {
        "ring": lambda k: ring_all_reduce(n, k, link),
        "two rings, each way over links of its own": lambda k: ring_all_reduce(n, k / 2, link),
        "double binary tree": lambda k: tree_all_reduce(n, k, link, slowdown=TREE_SLOWDOWN),
    }
    if n > h100.per_host:
        ways["two levels: rings in and across hosts of 8"] = lambda k: all_reduce_seconds(h100, n, k)
    return ways


def slowest(n: int) -> Link:
    """The link that a step of N H100s waits for."""
    h100 = gpu("h100")
    return host_link(h100) if n <= h100.per_host else network_link(h100)


def tree_limit(n: int) -> float:
    """Bytes below which the tree is faster than the ring, on N H100s."""
    link = slowest(n)
    return crossover(n, link.alpha, link.beta, slowdown=TREE_SLOWDOWN)


def steps_figure(trace: np.ndarray) -> Figure:
    """Small multiples of a trace [2n - 1, device, chunk]: the start, the reduce-scatter, the all-gather below it."""
    n = trace.shape[1]
    figure = Figure(figsize=(2.7 * n, 6.6))
    grid = figure.subplots(2, n, squeeze=False)
    colours = _blues(n)
    for t, held in enumerate(trace):
        row, column = (0, t) if t < n else (1, t - n + 1)
        phase = "start" if t == 0 else f"reduce-scatter, step {t}" if t < n else f"all-gather, step {t - n + 1}"
        _grid(grid[row, column], held, trace[t - 1] if t else held, colours, phase)
    _legend(grid[1, 0], colours)
    for axes in (grid[0, 0], grid[1, 1]):
        axes.set_ylabel("device")
    figure.suptitle(
        f"Ring all-reduce on {n} devices, read from them: the contributions that each chunk holds\n"
        f"2(N-1) = {2 * (n - 1)} steps; in each, every device sends one chunk to the next",
        y=0.99,
    )
    figure.tight_layout(h_pad=2)
    return figure


def _blues(n: int) -> ListedColormap:
    """One colour for each number of contributions 1 .. n; the whole sum is not blue."""
    shades = matplotlib.colormaps["Blues"](np.linspace(0.1, 0.6, n - 1))
    return ListedColormap([*(shade[:3] for shade in shades), to_rgb("#2a9d5c")])


def _grid(axes: Axes, held: np.ndarray, before: np.ndarray, colours: ListedColormap, title: str) -> None:
    """One step: devices down, chunks across; what came in this step is framed."""
    n = len(held)
    counts = np.vectorize(int.bit_count)(held.astype(object)).astype(int)
    axes.imshow(counts, cmap=colours, vmin=0.5, vmax=n + 0.5)
    for d, j in np.ndindex(held.shape):
        members = [device for device in range(n) if int(held[d, j]) >> device & 1]
        # in the order in which they were added: from the device after j on
        members.sort(key=lambda device: (device - j - 1) % n)
        text = "sum" if len(members) == n else "+".join(map(str, members))
        axes.text(j, d, text, ha="center", va="center", color="white" if len(members) == n else "black", fontsize=8)
        if held[d, j] != before[d, j]:
            axes.add_patch(Rectangle((j - 0.46, d - 0.46), 0.92, 0.92, fill=False, edgecolor="black", linewidth=2))
    axes.set(title=title, xlabel="chunk", xticks=range(n), yticks=range(n))
    axes.title.set_fontsize(11)
    axes.tick_params(length=0)
    for line in np.arange(-0.5, n):
        axes.axhline(line, color="white", linewidth=2)
        axes.axvline(line, color="white", linewidth=2)
    axes.spines[:].set_visible(False)


def _legend(axes: Axes, colours: ListedColormap) -> None:
    n = colours.N
    names = ["1 contribution", *(f"{count} contributions" for count in range(2, n)), f"all {n}: the sum"]
    handles: list[Rectangle] = [Rectangle((0, 0), 1, 1, color=colours(i)) for i in range(n)]
    framed = Rectangle((0, 0), 1, 1, fill=False, edgecolor="black", linewidth=2)
    axes.legend([*handles, framed], [*names, "came in this step"], loc="center", frameon=False, fontsize=10)
    axes.axis("off")


def times_figure() -> Figure:
    """Modelled time and bandwidth over the payload, for N of `MODELLED`."""
    figure = Figure(figsize=(14, 8))
    panels = figure.subplots(2, len(MODELLED), sharex=True, sharey="row")
    payload = np.geomspace(1e4, 2e10, 300)
    for n, above, below in zip(MODELLED, *panels, strict=True):
        for name, model in modelled(n).items():
            seconds = np.array([model(k) for k in payload])
            colour, line = STYLES[name]
            above.loglog(payload, 1e3 * seconds, color=colour, linestyle=line, linewidth=2, label=name)
            below.loglog(payload, payload / seconds / 1e9, color=colour, linestyle=line, linewidth=2)
        _mark(above, below, n)
        link, hosts = slowest(n), n // gpu("h100").per_host
        where = "one host, NVLink" if hosts == 1 else f"{hosts} hosts, network"
        above.set_title(f"N = {n}: {where}\nalpha {link.alpha * 1e6:.3g} µs, beta {link.beta / 1e9:.0f} GB/s")
        below.set_xlabel("payload K")
    panels[0, 0].set_ylabel("time of an all-reduce, ms")
    panels[1, 0].set_ylabel("K / time, GB/s")
    for axes in panels.flat:
        axes.grid(alpha=0.25)
        axes.set_xlim(payload[0], payload[-1])
        axes.xaxis.set_major_locator(FixedLocator([1e4, 1e6, 1e8, 1e10]))
        axes.xaxis.set_major_formatter(lambda k, _: {1e4: "10 KB", 1e6: "1 MB", 1e8: "100 MB", 1e10: "10 GB"}.get(k))
        axes.minorticks_off()
    handles, labels = panels[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, bbox_to_anchor=(0.5, -0.01))
    figure.suptitle(
        "All-reduce on H100s by the alpha-beta model: few bytes want few steps, many bytes want small ones\n"
        "alpha: NCCL's tuning model; beta: data sheets, of which a tree uses 0.9"
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure


def _mark(above: Axes, below: Axes, n: int) -> None:
    """Where tree and ring take as long."""
    limit = tree_limit(n)
    seconds = float(ring_all_reduce(n, limit, slowest(n)))
    for axes, y in ((above, 1e3 * seconds), (below, limit / seconds / 1e9)):
        axes.axvline(limit, color="0.5", linewidth=1, linestyle=":")
        axes.plot(limit, y, "o", color="black", markersize=7, zorder=5)
    above.annotate(
        f"tree faster below {_size(limit)}",
        (limit, 1e3 * seconds),
        xytext=(-12, 14),
        textcoords="offset points",
        ha="right",
    )


def _size(count: float) -> str:
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.2g} {name}" if count < 10 * unit else f"{count / unit:.0f} {name}"
