"""ZeRO: replicas share out what each of them would hold alike.

Rajbhandari et al., arXiv:1910.02054, section 5. Stage 1 cuts the optimizer's state and the parameters that it updates,
stage 2 also the sums of gradients, stage 3 also the parameters that the model computes with (FSDP; Zhao et al.,
arXiv:2304.11277). How a leaf is cut, and its pieces travel, is in `jax5d.parallel.cuts`.

At stage 3 a layer is gathered while the layer before it is at work (`Gathered`). Sharding over some of the data axes
only (`parallel.zero_axes`) is hybrid sharding: pieces are then alike along the others, and gradients summed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import jax

from jax5d.config import AXES, RunConfig
from jax5d.parallel.cuts import Cut, cut_of, gather, is_cut, padded, stored_spec
from jax5d.parallel.data import is_spec
from jax5d.parallel.stack import Hand, Resident, Weights, get

Tree = Any


@dataclass(frozen=True)
class Gathered:
    """Layers that lie in pieces: each is gathered while the one before it is at work, and then forgotten.

    Without `ahead` the gather would be waited for: all that a layer does needs it.
    """

    blocks: Tree
    """Pieces, with a leading layers dim."""
    cuts: Tree
    dtype: Any
    """Of the gathered parameters, and so of what is sent."""
    ahead: ClassVar[int] = 1

    def fetch(self, at: Any) -> Hand:
        """The whole layer."""
        return gather(get(self.blocks, at), self.cuts, self.dtype)

    def layer(self, hand: Hand, at: Any, kept: list[jax.Array]) -> Tree:
        """What was fetched."""
        return hand


@dataclass(frozen=True)
class Kept:
    """Layers that the forward pass gathered and kept: more memory, and one gather less."""

    tree: Any
    """Structure of a layer's parameters."""
    ahead: ClassVar[int] = 0

    def fetch(self, at: Any) -> Hand:
        """Nothing to do."""
        return ()

    def layer(self, hand: Hand, at: Any, kept: list[jax.Array]) -> Tree:
        """What was kept."""
        return jax.tree.unflatten(self.tree, kept)


@dataclass(frozen=True)
class Zero:
    """A stage, laid out for a model: what is stored where, and what the model computes with."""

    stage: int
    cuts: Tree
    stored: Tree
    """Specs of the parameters as they are stored, of their gradients and of the optimizer's state."""
    sizes: dict[str, int]
    """Of the mesh's axes."""
    dtype: Any
    """Of the computation."""
    regather: bool

    @property
    def replicates(self) -> bool:
        """Whether the model computes with a whole copy that is kept from step to step: stages 1 and 2."""
        return self.stage in (1, 2)

    def padded(self, params: Tree) -> Tree:
        """Whole global parameters at the shapes that are stored: zeros behind the cut dim."""

        def one(cut: Cut, x: jax.Array) -> jax.Array:
            return padded(x, cut, prod(self.sizes[a] for a in cut.axes))

        return jax.tree.map(one, self.cuts, params, is_leaf=is_cut)

    def replica(self, params: Tree) -> Tree:
        """The copy to compute with, the same on all replicas, from this device's pieces."""
        return gather(params, self.cuts, self.dtype, alike=True)

    def computed(self, params: Tree) -> dict[str, Any]:
        """{"outer": whole leaves, "blocks": `Weights`}: what the executor takes.

        Args:
            params: whole leaves of this device, or at stage 3 its pieces, of which the outer ones are gathered here.
        """
        if self.stage < 3:
            supply = Resident(params["blocks"])
            return {"outer": params["outer"], "blocks": Weights(_layers(params["blocks"]), supply, supply)}
        outer = gather(params["outer"], self.cuts["outer"], self.dtype)
        return {"outer": outer, "blocks": self._gathered(params["blocks"])}

    def opened(self, params: Tree) -> dict[str, Any]:
        """The same from stored parameters at any stage, for evaluation."""
        return self.computed(self.replica(params) if self.replicates else params)

    def _gathered(self, blocks: Tree) -> Weights:
        supply = Gathered(blocks, self.cuts["blocks"], self.dtype)
        if self.regather:
            return Weights(_layers(blocks), supply, supply)
        return Weights(_layers(blocks), supply, Kept(jax.tree.structure(blocks)), keeps=True)


def _layers(blocks: Tree) -> int:
    return jax.tree.leaves(blocks)[0].shape[0]


def make_zero(config: RunConfig, shapes: Tree, specs: Tree) -> Zero:
    """The configured stage for parameters of global `shapes` and `specs`; stage 0 where there is one replica."""
    parallel, sizes = config.parallel, {axis: getattr(config.mesh, axis) for axis in AXES}
    stage = parallel.zero if prod(sizes[a] for a in parallel.zero_axes) > 1 else 0
    axes = tuple(a for a in AXES if a in parallel.zero_axes and stage)
    cuts = jax.tree.map(lambda spec, x: cut_of(x.shape, spec, axes, sizes), specs, shapes, is_leaf=is_spec)
    stored = jax.tree.map(
        lambda spec, cut, x: stored_spec(spec, cut, len(x.shape)), specs, cuts, shapes, is_leaf=is_spec
    )
    return Zero(stage, cuts, stored, sizes, config.model.dtype, parallel.regather)
