"""A real model's step under tensor parallelism, compiled for eight GPUs that are not there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from experiments.ch03_tensor_parallelism._block_program import WAYS
from experiments.harness import Check
from experiments.training import wire_total
from jax5d.config import PRESETS, MeshConfig, RunConfig, TrainConfig
from jax5d.costs.cluster import all_reduce_seconds, host_link
from jax5d.costs.communication import StepTraffic
from jax5d.costs.gpus import Gpu
from jax5d.costs.gpus import gpu as find_gpu
from jax5d.costs.links import all_gather, reduce_scatter
from jax5d.measure.aot import Compiled, compile_step
from jax5d.measure.timeline import Scheduled

T = 8
HIDDEN = 0.9
"""Share of the bytes that the overlapped way must hide."""
SCALAR = 2**16
"""Bytes; a collective of less is no activation: a norm, a loss, or the gradients of norms."""


@dataclass(frozen=True)
class Row:
    """One way, compiled."""

    way: str
    config: RunConfig
    gpu: Gpu
    compiled: Compiled

    @classmethod
    def of(cls, way: str, preset: str, gpu: str) -> Row:
        """Compile the step of one sequence, nothing recomputed, logits in eight pieces."""
        model = replace(PRESETS[preset], dtype="bfloat16")
        parallel = replace(WAYS[way], loss_chunks=8)
        train = TrainConfig(global_batch=1, seq_len=model.context)
        config = RunConfig(MeshConfig(tp=T), model, parallel, train)
        return cls(way, config, find_gpu(gpu), compile_step(config, gpu, gpus_per_host=T))

    @property
    def activations(self) -> list[Scheduled]:
        """What tensor parallelism sends."""
        return [e for e in self.compiled.timeline if e.axes == ("tp",) and e.payload_bytes // e.count >= SCALAR]

    def sent(self, *, hidden: bool | None = None) -> float:
        """Bytes that a GPU sends of them: all, or those with or without products to hide behind."""
        wanted = (e.wire_bytes for e in self.activations if hidden in (None, e.hidden))
        return float(sum(wanted, Fraction(0)))

    @property
    def hidden(self) -> float:
        """Share of the bytes with products or attention to hide behind."""
        return self.sent(hidden=True) / self.sent()

    @property
    def outer(self) -> float:
        """Share of embedding and head, by theory: an all-reduce each way at either, or half of it."""
        layers, ways = self.config.model.layers, 8 if self.way == "TP" else 10
        return 4 / (4 + ways * layers)

    def seconds(self) -> tuple[float, float]:
        """Modelled: the collectives' own time, and how much of it is waited for where kernels run at the peak."""
        total, waited = 0.0, 0.0
        for entry in self.activations:
            one = self._time(entry.op, entry.payload_bytes / entry.count)
            cover = entry.cover_flops / entry.count / self.gpu.peak("bfloat16")
            total, waited = total + entry.count * one, waited + entry.count * max(0.0, one - cover)
        return total, waited

    def _time(self, op: str, payload: float) -> float:
        link = host_link(self.gpu)
        times = {
            "psum": lambda: all_reduce_seconds(self.gpu, T, payload),
            "all_gather": lambda: all_gather(T, payload, link),
            "psum_scatter": lambda: reduce_scatter(T, payload, link),
            "ppermute": lambda: link.send(payload),
        }
        return times[op]()

    def checks(self) -> list[Check]:
        """The program's collectives are theory's; overlapped, they are hidden."""
        differing = len(set(self.compiled.ledger) ^ set(StepTraffic(self.config).table()))
        found = [Check.equal(f"{self.way}, compiled: collectives that differ from theory", differing, 0)]
        theory = [e for e in StepTraffic(self.config).table() if e.payload_bytes // e.count >= SCALAR]
        wire = wire_total(theory)
        found.append(Check.equal(f"{self.way}, compiled: bytes of activations", self.sent(), wire, 1e-3 * wire))
        if self.config.parallel.overlap:
            found.append(Check.below(f"{self.way}, compiled: share of bytes exposed", 1 - self.hidden, 1 - HIDDEN))
        return found

    def metrics(self) -> dict[str, Any]:
        """For result.json."""
        total, waited = self.seconds()
        return {
            "sent_bytes": self.sent(),
            "hidden_share": self.hidden,
            "modelled_seconds": total,
            "modelled_seconds_waited": waited,
            "peak_bytes": self.compiled.memory.peak,
            "compile_seconds": self.compiled.compile_seconds,
        }


def compiled_table(rows: list[Row], preset: str) -> Table:
    """Bytes and modelled times."""
    columns = ("way", "GB sent", "hidden", "exposed by theory*", "ms, model", "ms waited", "peak, GB")
    first = rows[0]
    work = f"one sequence of {first.config.train.seq_len} tokens"
    title = f"{preset} on {T} {first.gpu.name.upper()}s, {work}; per GPU and step"
    table = Table(*columns, title=f"{title}\n* embedding and head alone")
    for row in rows:
        total, waited = row.seconds()
        numbers = (f"{row.sent() / 1e9:.2f}", f"{row.hidden:.1%}", f"{row.outer:.1%}", f"{1e3 * total:.1f}")
        table.add_row(row.way, *numbers, f"{1e3 * waited:.1f}", f"{row.compiled.memory.peak / 1e9:.1f}")
    return table


def compiled_panel(axes: Axes, rows: list[Row], preset: str) -> None:
    """Bytes with and without products to hide behind."""
    hidden, exposed = ([row.sent(hidden=h) / 1e9 for row in rows] for h in (True, False))
    names = [row.way for row in rows]
    axes.bar(names, hidden, 0.6, color="tab:green", label="while products or attention run")
    axes.bar(names, exposed, 0.6, bottom=hidden, color="tab:red", label="exposed")
    for i, row in enumerate(rows):
        axes.text(i, row.sent() / 1e9, f"{1 - row.hidden:.1%}\nexposed", ha="center", va="bottom", fontsize=9)
    axes.set(
        title=f"As scheduled by the compiler: {preset} on {T} {rows[0].gpu.name.upper()}s",
        ylabel="GB that a GPU sends in a step",
        ylim=(0, 1.45 * max(row.sent() for row in rows) / 1e9),
    )
    axes.legend(fontsize=9, loc="upper left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
