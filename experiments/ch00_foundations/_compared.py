"""A step's memory by formula and by compiler, for the experiments that hold one against the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.harness import Check
from experiments.options import Options
from experiments.training import mesh_name
from jax5d.config import ConfigError, RunConfig
from jax5d.costs import memory as costs
from jax5d.measure import aot

LIMIT = 0.05
"""Largest difference between formula and compiler, relative to the compiler."""

GB = 1e9

PARTS = ("parameters", "gradients", "optimizer", "activations", "working")
"""The buckets and the room to work in; the batch is too small to be seen."""


@dataclass(frozen=True)
class Compared:
    """One configuration by formula and by compiler."""

    config: RunConfig
    formula: costs.Memory
    compiler: aot.Memory

    @classmethod
    def of(cls, config: RunConfig, gpu: str, memory: int | None = None) -> Compared:
        """Compile it; `memory` as for `aot.compile_step`."""
        return cls(config, costs.memory(config), aot.compile_step(config, gpu, memory=memory).memory)

    @property
    def error(self) -> float:
        """Of the formula's total, relative."""
        return self.formula.total / self.compiler.peak - 1

    def checks(self, name: str) -> list[Check]:
        """State and batch to the byte, everything within `LIMIT`."""
        known, total = self.formula.state + self.formula.batch, self.formula.total
        return [
            Check.equal(f"bytes of state and batch, {name}", self.compiler.arguments, known),
            Check.equal(f"bytes on a device, {name}", total, self.compiler.peak, LIMIT * self.compiler.peak),
        ]

    def metrics(self) -> dict[str, Any]:
        """Both accounts."""
        return {
            "error": self.error,
            "formula": vars(self.formula) | {"total": self.formula.total},
            "compiler": vars(self.compiler) | {"reserved": self.compiler.peak},
        }


def refuse_mesh(options: Options, name: str) -> None:
    """Refuse a mesh where the meshes are the experiment's own."""
    if options.mesh.size > 1:
        raise ConfigError(
            f"{name} compiles for meshes of its own, but the mesh is {mesh_name(options.mesh)}; leave out --mesh and "
            "--devices"
        )


def stacked(axes: Axes, names: Sequence[str], memories: Sequence[costs.Memory], **style: Any) -> None:
    """A bar of GB for each, one colour a part."""
    bottom = np.zeros(len(names))
    for i, part in enumerate(PARTS):
        height = np.array([getattr(memory, part) for memory in memories]) / GB
        axes.bar(list(names), height, 0.6, bottom=bottom, label=part, color=f"C{i}", **style)
        bottom += height
    axes.set_axisbelow(True)
