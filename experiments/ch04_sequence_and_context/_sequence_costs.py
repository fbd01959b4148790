"""What `sequence_parallel` counts: bytes on the wire, and of activations that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from experiments.ch04_sequence_and_context._sequence_runs import LENGTH, ROWS, Architecture, configure, trainer_of
from experiments.harness import Check
from experiments.training import Traffic
from jax5d.config import RunConfig
from jax5d.costs.activations import Activations
from jax5d.costs.parameters import FLOAT32
from jax5d.measure.memory import kept_by_layer


@dataclass(frozen=True)
class Cost:
    """What a layout sends in a step and keeps of a layer, on one device."""

    architecture: Architecture
    t: int
    layout: str
    traffic: Traffic
    layer: float
    """Bytes sent for one more layer."""
    kept: int
    """Bytes of one layer's activations, by the program's types."""

    @classmethod
    def of(cls, architecture: Architecture, t: int, layout: str) -> Cost:
        """Trace it with 2 layers and with 3."""
        trainer = trainer_of(configure(architecture, t, layout))
        kept = sum(prod(kind.shape) * kind.dtype.itemsize for kind in kept_by_layer(trainer))
        traffic, more = Traffic.of(trainer), Traffic.of(trainer_of(configure(architecture, t, layout, layers=3)))
        return cls(architecture, t, layout, traffic, more.bytes - traffic.bytes, kept)

    @property
    def config(self) -> RunConfig:
        """Of the 2 layers."""
        return configure(self.architecture, self.t, self.layout)

    def checks(self) -> list[Check]:
        """Against theory, and by hand."""
        name = f"{self.architecture}, tp {self.t}{self.layout.removeprefix('tp')}"
        return [
            *self.traffic.checks(name),
            Check.equal(f"{name}: bytes a device sends for a layer, by hand", self.layer, sent_by_hand(self.config)),
            Check.equal(f"{name}: bytes kept of a layer", self.kept, Activations(self.config).layer),
        ]


def stream_bytes() -> int:
    """K: the whole residual stream [b, s, d] in float32."""
    return ROWS * LENGTH * configure("gpt2").model.d_model * FLOAT32


def sent_by_hand(config: RunConfig) -> float:
    """Bytes that a device sends for one layer, forward and backward, and for the sums of its gradients.

    Tensor parallelism: 4 all-reduces of 2 (t-1)/t K. Sequence parallelism: 4 gathers, 4 scatters and 2 gathers again,
    (t-1)/t K each; and sums over tp of the gradients of two norms (d each, GPT-2 2 d) and of GPT-2's biases after
    attention and MLP. Weights of keys and values that devices share are summed either way.
    """
    m, t, sequence = config.model, config.mesh.tp, config.parallel.sequence
    gpt2 = m.architecture == "gpt2"
    alone = (6 if gpt2 else 2) * m.d_model if sequence else 0
    shared = 2 * m.groups * m.head_dim * (m.d_model + (1 if gpt2 else 0)) if m.groups % t else 0
    return (t - 1) / t * ((10 if sequence else 8) * stream_bytes() + 2 * (alone + shared) * FLOAT32)
