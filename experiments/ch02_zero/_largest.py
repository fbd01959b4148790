"""The largest model of a family that a cluster trains under each stage of ZeRO.

The family has GPT-3's aspect (Brown et al., arXiv:2005.14165, table 2.1): L layers of L heads of 128 dims, width
128 L, so about 196,608 L^3 parameters; 50257 words, 2048 tokens. It grows by layers and width together: L by L.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from experiments.ch00_foundations._compared import GB, Compared
from experiments.ch02_zero._figures import finish
from experiments.harness import Check
from jax5d.config import MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.gpus import Gpu
from jax5d.costs.memory import memory
from jax5d.costs.parameters import count
from jax5d.costs.textbook import zero_bytes_per_parameter

HEAD, LENGTH, CHUNKS, MICROBATCHES = 128, 2048, 16, 2
"""Two microbatches, so that there are sums of gradients; CHUNKS pieces of one for which logits exist at one time."""

MARGIN = 0.1
"""Share of what the driver shows that is left to the CUDA context, NCCL's buffers and fragments."""

MOST = 256
"""Layers at which a search ends."""


def family(layers: int) -> ModelConfig:
    """The member of so many layers, in bfloat16."""
    d = HEAD * layers
    return ModelConfig(
        name="gpt2", layers=layers, d_model=d, heads=layers, d_ff=4 * d, vocab=50257, context=LENGTH, dtype="bfloat16"
    )


@dataclass(frozen=True)
class Largest:
    """A stage on a cluster: one sequence a GPU and microbatch, layers recomputed."""

    chip: Gpu
    n: int
    stage: Any

    def config(self, layers: int) -> RunConfig:
        """The run of a member."""
        return RunConfig(
            mesh=MeshConfig(dp=self.n),
            model=family(layers),
            parallel=ParallelConfig(remat="full", loss_chunks=CHUNKS, zero=self.stage, microbatches=MICROBATCHES),
            train=TrainConfig(global_batch=self.n * MICROBATCHES, seq_len=LENGTH),
        )

    @property
    def name(self) -> str:
        """Of its row."""
        return f"stage {self.stage}, {self.n} GPUs"

    @property
    def room(self) -> float:
        """Bytes that a step may take."""
        return (1 - MARGIN) * self.chip.visible

    @property
    def layers(self) -> int:
        """Of the largest member that fits, by formula."""
        return bisect_left(range(1, MOST), True, key=lambda n: memory(self.config(n)).total > self.room)

    @property
    def by_states(self) -> float:
        """Parameters whose states alone would fill the room, by the paper's bytes."""
        return self.room / zero_bytes_per_parameter(self.stage, self.n)


@dataclass(frozen=True)
class Found:
    """The largest member, by formula, and what the compiler says of it."""

    of: Largest
    layers: int
    compared: Compared | None
    """None where it was not compiled."""

    @classmethod
    def search(cls, of: Largest, *, compiled: bool) -> Found:
        """Find it, and compile it for a GPU that is told to have room."""
        layers = of.layers
        config = of.config(layers)
        room = max(of.chip.visible, 2 * memory(config).total)
        return cls(of, layers, Compared.of(config, of.chip.name, room) if compiled else None)

    @property
    def parameters(self) -> int:
        """Of the largest member."""
        return count(family(self.layers))

    def checks(self) -> list[Check]:
        """The formula is right where it says so much, the GPU holds it, and by formula no larger one."""
        more = memory(self.of.config(self.layers + 1)).total
        found = [Check.below(f"room over the bytes of one layer more, {self.of.name}", self.of.room / more, 1)]
        if self.compared:
            name = f"{self.layers} layers, {self.of.name}"
            found += self.compared.checks(name)
            found.append(
                Check.below(
                    f"bytes on a device against the driver's, {name}", self.compared.compiler.peak, self.of.chip.visible
                )
            )
        return found

    def metrics(self) -> dict[str, Any]:
        """For result.json."""
        found: dict[str, Any] = {"layers": self.layers, "parameters": self.parameters, "by_states": self.of.by_states}
        return found | (self.compared.metrics() if self.compared else {})


def largest_table(rows: Sequence[Found]) -> Table:
    """Layers, parameters and bytes."""
    chip = rows[0].of.chip
    room = f"{1 - MARGIN:.0%} of {chip.visible / GB:.1f} GB"
    title = f"Largest model by formula, 10^9 parameters, in {room}, {MICROBATCHES} x {LENGTH} tokens a GPU"
    heads = ("layers", "10^9", "GB", "compiler", "%", "states alone, 10^9")
    table = Table("stage", "GPUs", *heads, title=title)
    for row in rows:
        formula = memory(row.of.config(row.layers)).total / GB
        found = row.compared
        cells = (f"{found.compiler.peak / GB:.1f}", f"{100 * found.error:+.1f}") if found else ("-", "-")
        sizes = (str(row.layers), f"{row.parameters / 1e9:.1f}", f"{formula:.1f}")
        table.add_row(str(row.of.stage), str(row.of.n), *sizes, *cells, f"{row.of.by_states / 1e9:.1f}")
    return table


def largest_panel(axes: Axes, rows: Sequence[Found]) -> None:
    """Bars by stage, one colour a cluster."""
    clusters = list(dict.fromkeys(row.of.n for row in rows))
    width = 0.8 / len(clusters)
    for i, n in enumerate(clusters):
        mine = [row for row in rows if row.of.n == n]
        places = [row.of.stage + width * (i - (len(clusters) - 1) / 2) for row in mine]
        heights = [row.parameters / 1e9 for row in mine]
        axes.bar(places, heights, 0.95 * width, color=f"C{i}", label=f"{n} GPUs")
        for place, row, height in zip(places, mine, heights, strict=True):
            text = f"{height:.1f} B\n{row.layers} layers"
            axes.text(place, 1.25 * max(height, row.of.by_states / 1e9), text, ha="center", va="bottom", fontsize=8)
        states = [row.of.by_states / 1e9 for row in mine]
        label = "states alone, by the paper" if not i else None
        axes.plot(places, states, "kD", mfc="none", markersize=6, linestyle="none", label=label)
    top = max(row.of.by_states for row in rows) / 1e9
    axes.set(yscale="log", ylim=(1, 5 * top), ylabel="billions of parameters (log)", xlabel="stage of ZeRO")
    axes.set_xticks(sorted({row.of.stage for row in rows}))
    chip = rows[0].of.chip
    axes.set_title(f"Largest model that fits {1 - MARGIN:.0%} of each {chip.name}'s {chip.visible / GB:.1f} GB")
    finish(axes, 3)
