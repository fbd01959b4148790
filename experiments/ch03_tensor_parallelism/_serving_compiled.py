"""The library's decode step and prefill of a real model, compiled for GPUs that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from experiments.ch03_tensor_parallelism._serving import WAYS, Serving
from experiments.harness import Check
from jax5d.costs.inference import Pass
from jax5d.costs.parameters import INT32
from jax5d.inference.decoder import Decoder
from jax5d.inference.sample import Sampling
from jax5d.measure import aot
from jax5d.measure.ledger import ledger
from jax5d.measure.timeline import Scheduled, timeline
from jax5d.mesh import gpu_options, make_mesh
from jax5d.train.step import Trainer

LIMIT = 0.05
"""Largest difference between formula and compiler of all bytes on a GPU."""
PLAN = 0.75
"""Share of a GPU's memory that a compiled step may need: with more XLA gives up speed for memory."""


@dataclass(frozen=True)
class Compiled:
    """A pass of one way, by compiler and by formula."""

    serving: Serving
    way: str
    batch: int | None
    """Sequences of a decode step; None is a prefill of the longest prompts, one for each GPU."""
    memory: aot.Memory
    schedule: list[Scheduled]
    differing: int
    """Entries of its ledger that are not theory's."""

    @classmethod
    def of(cls, serving: Serving, way: str, batch: int | None) -> Compiled:
        """Compile it."""
        config = serving.config(way)
        mesh = make_mesh(config.mesh, aot.absent_gpus(serving.chip.name, serving.n))
        decoder = Decoder.create(Trainer.create(config, mesh=mesh))
        rows = serving.n if batch is None else serving.rows(way, batch)
        program, arguments = decoder.step, decoder.arguments(rows, Sampling(temperature=0))
        if batch is None:
            weights, _, row, _, numbers = arguments
            ids = jax.ShapeDtypeStruct((rows, serving.model.context), jnp.int32, sharding=row.sharding)
            program, arguments = decoder.prefill, (weights, ids, row, numbers)
        flags: dict[str, Any] = {**gpu_options(config.parallel.reduction)}
        compiled = program.lower(*arguments).compile(compiler_options=flags)
        theory = _theory(serving, way, batch).table()
        differing = len(set(ledger(program, *arguments)) ^ set(theory))
        schedule = timeline(compiled.as_text() or "", config.mesh)
        return cls(serving, way, batch, aot.Memory.of(compiled), schedule, differing)

    @property
    def name(self) -> str:
        """Of its checks."""
        what = f"prefill of {self.serving.n} prompts" if self.batch is None else f"a token for {self.batch}"
        return f"{WAYS[self.way]}, {what}"

    @property
    def hidden(self) -> float:
        """Share of all bytes sent that travel while a matrix product or attention runs."""
        total = sum((e.wire_bytes for e in self.schedule), Fraction(0))
        return float(sum((e.wire_bytes for e in self.schedule if e.hidden), Fraction(0)) / total)

    @property
    def arguments(self) -> int:
        """By formula: weights, and of a step the cache, a token and a position a row; of a prefill ids and lengths."""
        step = _theory(self.serving, self.way, self.batch)
        if self.batch is None:
            return self.serving.held(self.way, self.serving.n).weights + step.own_rows * (step.tokens + 1) * INT32
        found = self.serving.held(self.way, self.batch)
        return found.weights + found.cache + 2 * step.own_rows * INT32

    def checks(self) -> list[Check]:
        """Arguments to the byte, of a step all bytes; every collective; of a prefill that tp's sums hide nowhere."""
        found = [
            Check.equal(f"bytes of arguments, compiled, {self.name}", self.memory.arguments, self.arguments),
            Check.equal(f"collectives that differ from theory, {self.name}", self.differing, 0),
        ]
        if self.batch is not None:
            total = self.serving.held(self.way, self.batch).total
            name, peak = f"bytes on a GPU by formula, compiled, {self.name}", self.memory.peak
            return [*found, Check.equal(name, total, peak, LIMIT * peak)]
        if self.way == "tp":
            return [*found, Check.equal(f"share of bytes under products, {self.name}", self.hidden, 0)]
        return found

    def metrics(self) -> dict[str, Any]:
        """For result.json."""
        memory = {"arguments": self.memory.arguments, "peak": self.memory.peak}
        return memory | {"way": self.way, "batch": self.batch, "hidden_share": self.hidden}


def _theory(serving: Serving, way: str, batch: int | None) -> Pass:
    return serving.prefill(way, serving.model.context) if batch is None else serving.decode(way, batch)


def compiled_batch(serving: Serving, batches: tuple[int, ...]) -> int:
    """The largest batch that leaves the compiler room, in whole n's; n where none does."""
    room = PLAN * serving.chip.visible
    fitting = [b for b in batches if max(serving.held(way, b).total for way in WAYS) <= room]
    return serving.rows("zero", max(fitting, default=1))
