"""What tensor parallelism costs on H100s, by formula: how many devices pay on which links.

A step of one sequence on t devices takes its products at a share of the peak, and what it waits for its collectives: a
layer has four gathers and four reduce-scatters of K bytes, K one [s, d], and two gathers again (sequence parallelism).
Overlapped, each goes in t - 1 hops under the product beside it, and only what is longer than that is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from rich.table import Table

from jax5d.config import PRESETS, ModelConfig
from jax5d.costs.cluster import HOST_ALPHA, host_link, network_link
from jax5d.costs.flops import flops_per_token
from jax5d.costs.gpus import gpu
from jax5d.costs.hiding import tensor_parallel
from jax5d.costs.links import Link, all_gather

H100 = gpu("h100")
BFLOAT16 = 2
COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers of devices t."""
EFFICIENCY = 0.5
"""Share of its peak that a GPU reaches in products: assumed."""
PUBLISHED = {2: 13923, 4: 12421, 8: 10903, 16: 6246, 32: 2146}
"""Tokens a second and GPU of a 3B by t, sequences of 4096: the Ultra-Scale Playbook, on hosts of eight H100s."""


@dataclass(frozen=True)
class Cluster:
    """Hosts of GPUs."""

    per_host: int
    inner: Link
    outer: Link

    def gather(self, t: int, whole: float) -> float:
        """Seconds of an all-gather to `whole` bytes: each GPU's part over hosts, then inside. A scatter is as long."""
        inside = min(t, self.per_host)
        hosts, part = t // inside, whole / t
        return all_gather(hosts, part, self.outer) + all_gather(inside, hosts * part, self.inner)

    def ring(self, t: int, whole: float) -> float:
        """Seconds of t - 1 hops of 1/t each, over the slowest link."""
        return all_gather(t, whole / t, self.inner if t <= self.per_host else self.outer)


PCIE = Link(HOST_ALPHA, 64e9)
"""PCI Express 5 x16, one direction; the latency is taken as NVLink's."""
CLUSTERS = {
    "NVLink for all": Cluster(max(COUNTS), host_link(H100), network_link(H100)),
    "NVLink, hosts of 8, InfiniBand": Cluster(H100.per_host, host_link(H100), network_link(H100)),
    "PCIe 5, hosts of 8, InfiniBand": Cluster(H100.per_host, PCIE, network_link(H100)),
    "InfiniBand alone": Cluster(1, network_link(H100), network_link(H100)),
}
COLOURS = ("#2a9d5c", "#1f4e9c", "#d9622b", "#8b2fa0")


@dataclass(frozen=True)
class Step:
    """One sequence of a model's context, forward and backward, on t devices."""

    model: ModelConfig
    t: int
    cluster: Cluster
    overlap: bool = False
    efficiency: float = EFFICIENCY

    @property
    def rate(self) -> float:
        """FLOP/s of a GPU."""
        return self.efficiency * H100.peak("bfloat16")

    @property
    def products(self) -> float:
        """Seconds of a GPU's products."""
        length = self.model.context
        return length * flops_per_token(self.model, length) / self.t / self.rate

    @property
    def waited(self) -> float:
        """Seconds that the collectives add."""
        m = self.model
        whole = m.context * m.d_model * BFLOAT16
        plain, ring = (way(self.t, whole) for way in (self.cluster.gather, self.cluster.ring))
        if not self.overlap:
            return (4 + 10 * m.layers) * plain
        swiglu = 2 if m.architecture == "llama" else 1
        columns = m.d_model * (m.d_model + 2 * m.groups * m.head_dim), swiglu * m.d_model * m.d_ff
        rows = m.d_model**2, m.d_model * m.d_ff
        # a product of the forward pass or of a gradient by its input; its last piece has no hop beside it
        covers = [2 * m.context * size / self.t / self.rate * (self.t - 1) / self.t for size in (*columns, *rows)]
        late = sum(2 * max(0.0, ring - cover) for cover in covers) + sum(max(0.0, plain - c) for c in covers[:2])
        return 4 * plain + m.layers * late

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.products + self.waited

    @property
    def tokens(self) -> float:
        """A second and GPU."""
        return self.model.context / self.seconds / self.t


def calibrated() -> dict[int, float]:
    """Tokens a second and GPU of llama-3b by t, from the published figure of the smallest t alone."""
    first, model = min(PUBLISHED), PRESETS["llama-3b"]
    cluster = CLUSTERS["NVLink, hosts of 8, InfiniBand"]
    at_one = Step(model, first, cluster, efficiency=1.0)
    wanted = model.context / PUBLISHED[first] / first
    efficiency = at_one.products / (wanted - at_one.waited)
    return {t: Step(model, t, cluster, efficiency=efficiency).tokens for t in PUBLISHED}


def ratio_by_links(t: int) -> float:
    """An all-gather of [s, d] without latency over a product with d x d weights, at the peak, of llama-9b."""
    model = PRESETS["llama-9b"]
    cluster = Cluster(t, Link(0.0, H100.link), Link(0.0, H100.network))
    product = 2 * model.context * model.d_model**2 / t / H100.peak("bfloat16")
    return cluster.gather(t, model.context * model.d_model * BFLOAT16) / product


def hidden_ratio(t: int) -> float:
    """The same by the textbook's formula."""
    return tensor_parallel(t, PRESETS["llama-9b"].d_model, H100.peak("bfloat16"), H100.link, BFLOAT16)


def pays_up_to(model: ModelConfig, cluster: Cluster, *, overlap: bool) -> int:
    """The largest t up to which each doubling makes a sequence at least 1.5 times as fast."""
    times = [Step(model, t, cluster, overlap).seconds for t in COUNTS]
    pays = 1
    for t, before, now in zip(COUNTS[1:], times, times[1:], strict=False):
        if before / now < 1.5:
            break
        pays = t
    return pays


def model_table(model: ModelConfig) -> Table:
    """Tokens by cluster, way and t."""
    columns = ("links", "way", *map(str, COUNTS), "pays to")
    work = f"{model.name}, a sequence of {model.context} tokens, products at {EFFICIENCY:.0%} of the peak"
    title = f"Modelled tokens a second and H100 by tp: {work}"
    title += "\nhops: overlapped; pays to: up to there each doubling makes a sequence 1.5 times as fast"
    table = Table(*columns, title=title)
    for name, cluster in CLUSTERS.items():
        for overlap in (False, True):
            cells = (f"{Step(model, t, cluster, overlap).tokens:.0f}" for t in COUNTS)
            last = str(pays_up_to(model, cluster, overlap=overlap))
            table.add_row(name, "hops" if overlap else "SP", *cells, last)
    return table


def model_panel(axes: Axes, model: ModelConfig) -> None:
    """Tokens a second and GPU over t; dashed: overlapped."""
    for (name, cluster), colour in zip(CLUSTERS.items(), COLOURS, strict=True):
        for overlap in (False, True):
            tokens = [Step(model, t, cluster, overlap).tokens / 1e3 for t in COUNTS]
            style = {"linestyle": "--" if overlap else "-", "marker": "o", "markersize": 4, "color": colour}
            axes.plot(COUNTS, tokens, label=None if overlap else name, **style)
    axes.plot([], [], "k-", label="TP + SP")
    axes.plot([], [], "k--", label="overlapped")
    axes.set(title=f"Modelled: {model.name}, products at {EFFICIENCY:.0%} of the peak")
    _finish(axes, COUNTS)


def published_panel(axes: Axes) -> None:
    """The model with one of the published figures known."""
    axes.plot(list(PUBLISHED), [v / 1e3 for v in PUBLISHED.values()], "ko", label="published, of a 3B")
    found = calibrated()
    label = f"model of llama-3b, set to t = {min(PUBLISHED)}"
    axes.plot(list(found), [v / 1e3 for v in found.values()], color=COLOURS[1], label=label)
    axes.set(title="Against the Ultra-Scale Playbook's measurements")
    _finish(axes, list(PUBLISHED))


def _finish(axes: Axes, counts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(t) for t in counts])
    axes.set(xlabel="devices t of tp", ylabel="thousand tokens a second and H100")
    axes.set_ylim(0, 1.45 * axes.get_ylim()[1])
    axes.legend(fontsize=8, ncols=2, loc="upper center")
    axes.grid(alpha=0.3)
