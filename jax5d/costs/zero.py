"""What ZeRO shares out among replicas, and what is left on one device.

Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5. A leaf is cut along one dim over those of `parallel.zero_axes`
that do not split it already, with zeros behind it where the pieces would not be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from jax5d.config import RunConfig
from jax5d.costs.parameters import Axes, Leaf, Piece, leaves


@dataclass(frozen=True)
class Shares:
    """The configured stage of ZeRO, leaf by leaf."""

    config: RunConfig

    @cached_property
    def stage(self) -> int:
        """0 where there is one replica along `parallel.zero_axes`: nothing can be shared out."""
        parallel, mesh = self.config.parallel, self.config.mesh
        return parallel.zero if prod(getattr(mesh, a) for a in parallel.zero_axes) > 1 else 0

    @cached_property
    def axes(self) -> Axes:
        """Over which leaves are cut."""
        return self.config.parallel.zero_axes if self.stage else ()

    @property
    def copies(self) -> bool:
        """Whether a whole copy to compute with stands beside the pieces that are updated: stages 1 and 2."""
        return self.stage in (1, 2)

    @cached_property
    def layers(self) -> int:
        """Layers of a stage of the pipeline."""
        return self.config.model.layers // self.config.mesh.pp

    def pieces(self) -> Iterator[tuple[Leaf, Piece]]:
        """Every leaf of the model with a device's piece of it."""
        for leaf in leaves(self.config.model, self.config.mesh):
            yield leaf, leaf.piece(self.config.mesh, self.axes)

    @cached_property
    def owned(self) -> int:
        """Elements of the pieces on one device, zeros behind them included."""
        return sum(piece.size for _, piece in self.pieces())

    @cached_property
    def whole(self) -> int:
        """Elements of the whole leaves on one device: what they would be without ZeRO."""
        return sum(leaf.local_size(self.config.mesh) for leaf, _ in self.pieces())
