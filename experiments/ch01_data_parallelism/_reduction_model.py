"""What the sum of gradients costs on H100s, by formula, and the figures of `data_parallel`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.ch01_data_parallelism._ring_figures import modelled, slowest
from jax5d.config import PRESETS, MeshConfig, ModelConfig
from jax5d.costs import hiding
from jax5d.costs.gpus import gpu
from jax5d.costs.links import Link, ring_all_reduce
from jax5d.costs.parameters import FLOAT32, Leaf, count, leaves

MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
SIZES = (8, 64, 512)
"""Numbers of H100s, in hosts of eight."""
TOKENS = 16 * 1024
"""Of one GPU in a step."""
MFU = 0.4
"""Share of its peak that a GPU reaches in the backward pass."""
BUCKET = 25e6
"""Bytes, PyTorch's default."""

REDUCTIONS = {"leaf": "#9ecae1", "bucket": "#4292c6", "single": "#08519c", "overlap": "#d9622b"}
"""Ways to cut the gradients, each with its colour."""


@dataclass(frozen=True)
class Cost:
    """The reduction of a model's float32 gradients on n H100s. Seconds."""

    model: str
    n: int
    reduction: str
    sums: int
    seconds: float
    """Of all sums, one after another."""
    exposed: float
    """Of them after the backward pass, or beyond it."""
    backward: float
    """The backward pass."""


def pieces(model: ModelConfig, reduction: str, bucket: float = BUCKET) -> list[int]:
    """Payloads of the sums over replicas, in bytes, in float32.

    leaf: one for each array, a block's over all layers. overlap: one for each of a layer's. single: one for each set of
    axes that may split a leaf, so that these need not be told apart on a mesh that has none. bucket: the same, cut.
    """
    every = leaves(model, MeshConfig())
    sizes = {leaf.name: FLOAT32 * leaf.local_size(MeshConfig()) for leaf in every}
    if reduction == "leaf":
        return [*sizes.values()]
    if reduction == "overlap":
        times = {name: model.layers if name.startswith("blocks.") else 1 for name in sizes}
        return [size // times[name] for name, size in sizes.items() for _ in range(times[name])]
    groups = Counter[tuple[str, ...]]()
    for leaf in every:
        groups[leaf.axes] += sizes[leaf.name]
    if reduction == "single":
        return [*groups.values()]
    whole = int(bucket / FLOAT32) * FLOAT32
    return [min(whole, size - start) for size in groups.values() for start in range(0, size, whole)]


def seconds(n: int, payload: float) -> float:
    """Of one all-reduce: the fastest of a ring, a double tree and, across hosts, rings on two levels."""
    ways = {name: way for name, way in modelled(n).items() if not name.startswith("two rings")}
    return min(way(payload) for way in ways.values())


def cost(name: str, n: int, reduction: str) -> Cost:
    """Sums one after another. Layer by layer, they run under the backward pass of the layer before.

    The first layer's and the embedding's have nothing left to hide under.
    """
    model = PRESETS[name]
    times = [seconds(n, piece) for piece in pieces(model, reduction)]
    backward = 4 * TOKENS * count(model) / (MFU * gpu("h100").half)
    exposed = sum(times)
    if reduction == "overlap":
        outer = sum(seconds(n, FLOAT32 * x.local_size(MeshConfig())) for x in leaves(model, MeshConfig()) if _outer(x))
        layer = (sum(times) - outer) / model.layers
        work = backward * (1 - _outer_share(model)) / model.layers
        exposed = outer + layer + (model.layers - 1) * max(0.0, layer - work)
    return Cost(name, n, reduction, len(times), sum(times), exposed, backward)


def _outer(leaf: Leaf) -> bool:
    return not leaf.name.startswith("blocks.")


def _outer_share(model: ModelConfig) -> float:
    """Of the parameters, those of embedding and head."""
    every = leaves(model, MeshConfig())
    return sum(x.local_size(MeshConfig()) for x in every if _outer(x)) / count(model)


def hidden_ratio(n: int, tokens: int) -> float:
    """Time of the sum of float32 gradients, without latency, over that of the backward pass at peak FLOP/s."""
    return hiding.data_parallel(n, tokens, gpu("h100").half, slowest(n).beta, FLOAT32)


def ratio_by_links(name: str, n: int, tokens: int) -> float:
    """The same from the times of a model: a ring without latency, and 4 FLOPs for each token and parameter."""
    parameters = count(PRESETS[name])
    ring = ring_all_reduce(n, FLOAT32 * parameters, Link(0.0, slowest(n).beta))
    return ring / (4 * tokens * parameters / gpu("h100").half)


def updates_figure(off: dict[str, list[float]], sent: list[tuple[int, float]], n: int) -> Figure:
    """Distances from one device after each step; bytes over those of the gradients."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way, steps in off.items():
        wrong = way in ("mean of means", "not summed")
        name = f"{way}, N = {n}" if wrong else way
        style = {"marker": "s" if wrong else "o", "linestyle": "--" if wrong else "-"}
        left.semilogy(range(1, len(steps) + 1), steps, label=name, **style)
    left.set(
        title="Distance of the worst replica from one device",
        xlabel="steps of SGD",
        ylabel="largest difference of a parameter\nover the largest one of its leaf",
        xticks=range(1, len(next(iter(off.values()))) + 1),
        ylim=(1e-8, 100),
    )
    left.legend(fontsize=8, loc="center right")
    sizes = range(2, max(size for size, _ in sent) + 1)
    right.plot(sizes, [2 * (k - 1) / k for k in sizes], color="black", label="2(N-1)/N")
    right.plot(*zip(*sent, strict=True), "o", color="#d9622b", label="read from the trainer's program")
    right.axhline(2, color="0.5", linestyle=":", label="2: what it never reaches")
    right.set(
        title="Gradients that a device sends in a step",
        xlabel="replicas N",
        ylabel="bytes sent over bytes of the gradients",
        ylim=(0, 2.2),
        xticks=sizes,
    )
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle("Data parallelism: the updates of one device, for less than twice the gradients' bytes")
    return figure


def times_figure() -> Figure:
    """Modelled times of a step's reduction, for each model and number of GPUs."""
    figure = Figure(figsize=(15, 6), layout="constrained")
    panels = figure.subplots(1, len(SIZES), sharey=True)
    for axes, n in zip(panels, SIZES, strict=True):
        _bars(axes, n)
        link = slowest(n)
        where = "one host, NVLink" if n <= gpu("h100").per_host else f"{n // gpu('h100').per_host} hosts, network"
        axes.set_title(f"{n} H100s: {where}\nalpha {link.alpha * 1e6:.3g} µs, beta {link.beta / 1e9:.0f} GB/s")
    panels[0].set_ylabel("time that a step waits for its gradients, ms\n(numbers: how many sums)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"Sum of float32 gradients on H100s by the alpha-beta model, {TOKENS} tokens a GPU: the fastest of ring, tree "
        "and two levels\nleaf, bucket, single: after the backward pass; overlap: layer by layer under it; what does "
        "not fit is waited for"
    )
    return figure


def _bars(axes: Axes, n: int) -> None:
    width = 0.8 / len(REDUCTIONS)
    for i, (reduction, colour) in enumerate(REDUCTIONS.items()):
        costs = [cost(model, n, reduction) for model in MODELS]
        places = [place + (i - 1.5) * width for place in range(len(MODELS))]
        axes.bar(places, [c.exposed * 1e3 for c in costs], width, color=colour, label=reduction)
        if reduction == "overlap":
            whole, names = [c.seconds * 1e3 for c in costs], "overlap, hidden part included"
            axes.bar(places, whole, width, fill=False, edgecolor=colour, linestyle=":", label=names)
        for place, c in zip(places, costs, strict=True):
            axes.annotate(str(c.sums), (place, c.exposed * 1e3), ha="center", va="bottom", fontsize=7)
    backward = [cost(model, n, "overlap").backward * 1e3 for model in MODELS]
    ends = [(place - 0.45, place + 0.45) for place in range(len(MODELS))]
    axes.hlines(backward, *zip(*ends, strict=True), color="black", label=f"backward pass, {100 * MFU:.0f} % of peak")
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(range(len(MODELS)), MODELS)
    axes.grid(axis="y", alpha=0.3)
