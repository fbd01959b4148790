"""What `sequence_parallel` compares with one device: training, and gradients before their sum over tp."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from experiments.ch04_sequence_and_context._sequence_runs import (
    Architecture,
    Trained,
    apart,
    configure,
    draw,
    summed_over_tp,
    trained,
    trainer_of,
)
from experiments.harness import Check

LIMIT = 5e-6
"""Largest difference of a leaf, over its largest entry: float32 sums in another order."""


@dataclass(frozen=True)
class Run:
    """A mesh's training beside one device's."""

    architecture: Architecture
    t: int
    layout: str
    loss: float
    """Largest difference of a step's loss, relative."""
    gradients: dict[str, float]
    """Of each leaf, over its largest entry."""
    params: dict[str, float]
    summed: list[str]
    """Leaves whose gradients are summed over tp."""

    @property
    def name(self) -> str:
        """For checks."""
        return f"{self.architecture}, tp {self.t}{self.layout.removeprefix('tp')}"

    @classmethod
    def of(cls, architecture: Architecture, t: int, layout: str, seed: int, want: Trained) -> Run:
        """Train it."""
        trainer = trainer_of(replace(configure(architecture, t, layout), seed=seed))
        got = trained(trainer, draw(seed))
        loss = max(abs(a / b - 1) for a, b in zip(got.losses, want.losses, strict=True))
        gradients, params = apart(got.gradients, want.gradients), apart(got.params, want.params)
        return cls(architecture, t, layout, loss, gradients, params, summed_over_tp(trainer))

    def checks(self) -> list[Check]:
        """Everything within rounding."""
        return [
            Check.below(f"{self.name}: loss of 3 steps, off from one device", self.loss, 2e-6),
            Check.below(f"{self.name}: gradients, off over the leaf's largest", max(self.gradients.values()), LIMIT),
            Check.below(f"{self.name}: parameters after 3 steps, alike", max(self.params.values()), LIMIT),
        ]


@dataclass(frozen=True)
class LeftOut:
    """A leaf's gradient on the devices of tp, before their sum; norms relative to one device's."""

    leaf: str
    least: float
    """What a device's own part is off at least."""
    worst: float
    missing: float
    """Largest norm of the others' parts beside `worst`: what the same device lacks."""
    summed: float
    """The sum of all parts, off over the largest entry."""

    @classmethod
    def of(cls, leaf: str, found: np.ndarray, want: np.ndarray) -> LeftOut:
        """From the parts [t, ...] and one device's gradient."""
        whole = found.sum(axis=0)
        off = [_norm(part - want) / _norm(want) for part in found]
        missing = [_norm(whole - part) / _norm(want) for part in found]
        at = int(np.argmax(off))
        return cls(leaf, min(off), off[at], missing[at], apart({leaf: whole}, {leaf: want})[leaf])

    def check(self, where: str) -> Check:
        """Off by what is missing."""
        return Check.equal(f"{where}, {self.leaf} not summed: off by the others' parts", self.worst, self.missing, 1e-5)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.ravel()))
