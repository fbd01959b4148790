"""What the experiments that train have in common."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import jax
import numpy as np
import optax
from rich.table import Table

from experiments.harness import Check
from experiments.options import TrainingOptions
from jax5d.config import MeshConfig, RunConfig
from jax5d.costs.collectives import Collective, merge
from jax5d.costs.communication import StepTraffic
from jax5d.data.tokens import TokenFile, cache_folder, prepare
from jax5d.measure.ledger import ledger
from jax5d.mesh import make_mesh
from jax5d.train.step import Trainer


def open_tokens(options: TrainingOptions) -> TokenFile:
    """The token file of the run's data, made at first use and kept in the user's cache folder."""
    return prepare(options.data, cache_folder())


@dataclass(frozen=True)
class Traffic:
    """The collectives of one step, read from the program and derived from theory."""

    measured: list[Collective]
    theory: list[Collective]

    @staticmethod
    def of(trainer: Trainer) -> Traffic:
        """Trace the trainer's step; nothing is computed."""
        return Traffic(ledger(trainer.step, *trainer.arguments), StepTraffic(trainer.config).table())

    @property
    def bytes(self) -> float:
        """Bytes that one device sends in a step."""
        return wire_total(self.measured)

    def checks(self, where: str = "the step") -> list[Check]:
        """The ledger against theory: every entry, and the bytes."""
        differing = len(set(self.measured) ^ set(self.theory))
        return [
            Check.equal(f"collectives of {where} that differ from theory in op, axes, count or bytes", differing, 0),
            Check.equal(f"bytes a device sends in {where}", self.bytes, wire_total(self.theory)),
        ]

    def table(self) -> Table:
        """One row for each kind of collective."""
        table = Table(
            "op", "axes", "times", "MB sent", "theory: times", "MB", title="Collectives of a step, per device"
        )
        theory = {(e.op, e.axes): e for e in self.theory}
        for entry in self.measured:
            other = theory.get((entry.op, entry.axes))
            expected = (str(other.count), f"{float(other.wire_bytes) / 1e6:.3f}") if other else ("-", "-")
            row = (entry.op, " ".join(entry.axes), str(entry.count), f"{float(entry.wire_bytes) / 1e6:.3f}")
            table.add_row(*row, *expected)
        return table


def on_first_devices(config: RunConfig, optimizer: optax.GradientTransformation | None = None) -> Trainer:
    """A trainer on as many of the devices as the configuration's mesh has; by default with its own optimizer."""
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.size])
    return Trainer.create(config, mesh=mesh, optimizer=optimizer)


def remembering_sgd(rate: float) -> optax.GradientTransformation:
    """SGD whose state has the gradient that it saw last: `state.opt_state[0].trace`."""
    return optax.chain(optax.trace(decay=0.0), optax.scale(-rate))


def apart(found: jax.Array | np.ndarray, want: np.ndarray) -> float:
    """The largest difference of any device's shard, or of a host array, from its part of `want`, over the largest value
    of that."""
    parts = [(s.data, s.index) for s in found.addressable_shards] if isinstance(found, jax.Array) else [(found, ...)]
    worst = max(float(np.max(np.abs(np.asarray(data) - want[index]))) for data, index in parts)
    return worst / float(np.max(np.abs(want)))


def less(entries: list[Collective], part: list[Collective]) -> list[Collective]:
    """What a program sends beyond one that is a part of it."""
    gone = [Collective(e.op, e.axes, -e.count, -e.payload_bytes, -e.wire_bytes) for e in part]
    return [e for e in merge([*entries, *gone]) if e.count or e.payload_bytes or e.wire_bytes]


def wire_total(entries: list[Collective]) -> float:
    """Bytes that one device sends."""
    return float(sum((e.wire_bytes for e in entries), Fraction(0)))


def mesh_name(mesh: MeshConfig) -> str:
    """The axes above 1, for titles: pp2 dp2 tp2, or one device."""
    return " ".join(f"{a}{n}" for a, n in vars(mesh).items() if n > 1) or "one device"
