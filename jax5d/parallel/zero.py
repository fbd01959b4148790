"""ZeRO: replicas share out what each of them would hold alike.

Rajbhandari et al., arXiv:1910.02054, section 5. Stage 1 cuts the optimizer's state and the parameters that it updates,
stage 2 also the sums of gradients, stage 3 also the parameters that the model computes with (FSDP; Zhao et al.,
arXiv:2304.11277). A leaf is cut along one dim, over every data axis that its spec does not name, and each device owns
one piece: `scatter` brings it the piece's summed gradient, `gather` gives all devices the whole leaf again.

At stage 3 a layer is gathered while the layer before it is at work (`Gathered`). Sharding over some of the data axes
only (`parallel.zero_axes`) is hybrid sharding: pieces are then alike along the others, and gradients summed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.config import AXES, RunConfig
from jax5d.parallel.data import is_spec, spec_axes, zeros_of
from jax5d.parallel.stack import Hand, Resident, Weights, get

Tree = Any


class Cut(NamedTuple):
    """Where a leaf is cut."""

    axes: tuple[str, ...]
    """Mesh axes over which its pieces lie; none leaves it whole."""
    dim: int
    """Counted from the end, so that it is the same for a stack of layers and for one of them."""
    size: int
    """Of that dim before it is cut, on one device."""


def _is_cut(x: object) -> bool:
    return isinstance(x, Cut)


def cut_of(shape: tuple[int, ...], spec: P, axes: tuple[str, ...], sizes: dict[str, int]) -> Cut:
    """The cut of a leaf over those of `axes` that its spec does not name: along the dim that needs least padding.

    Of equals the first. A dim that is split already is cut only where no padding is needed, since padding would move
    the split. Layers are never cut: a spec that begins with "pp" is a stack's.
    """
    axes = tuple(a for a in axes if a not in spec_axes(spec))
    n, parts = prod(sizes[a] for a in axes), _parts(spec, len(shape))
    found = []
    for i in range(1 if spec and spec[0] == "pp" else 0, len(shape)):
        split = prod(sizes[a] for a in parts[i])
        local = shape[i] // split
        if split == 1 or local % n == 0:
            found.append((ceil(local / n) * n / local, i, local))
    if not axes or not found:
        return Cut((), -1, 0)
    _, i, local = min(found)
    return Cut(axes, i - len(shape), local)


def _parts(spec: P, rank: int) -> list[tuple[str, ...]]:
    """The axes that a spec names for each dim."""
    named = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in spec]
    return named + [()] * (rank - len(named))


def stored_spec(spec: P, cut: Cut, rank: int) -> P:
    """The spec of a cut leaf: the cut's axes behind those that split its dim already."""
    if not cut.axes:
        return spec
    parts = _parts(spec, rank)
    parts[cut.dim] += cut.axes
    return P(*(p if len(p) > 1 else p[0] if p else None for p in parts))


def padded(x: jax.Array, cut: Cut, n: int) -> jax.Array:
    """Zeros behind the cut dim of a whole leaf, up to the next multiple of `n`."""
    if not cut.axes:
        return x
    dim = cut.dim % x.ndim
    return jnp.pad(x, [(0, -x.shape[i] % n if i == dim else 0) for i in range(x.ndim)])


@jax.named_scope("zero_gather")
def gather(tree: Tree, cuts: Tree, dtype: Any, *, alike: bool = False) -> Tree:
    """The whole leaves of pieces, cast to `dtype` first: all_gather over each cut's axes.

    Bytes over n devices: (n-1)/n of the padded leaf in `dtype`. Transpose: `scatter`.

    Args:
        alike: type the result as the same on every device of a cut's axes, as a state needs it.
    """

    def one(cut: Cut, x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        if not cut.axes:
            return x
        dim = cut.dim % x.ndim
        whole = lax.all_gather(x, cut.axes, axis=dim, tiled=True, **({"to": "invarying"} if alike else {}))
        return lax.slice_in_dim(whole, 0, cut.size, axis=dim)

    return jax.tree.map(one, cuts, tree, is_leaf=_is_cut)


@jax.named_scope("zero_scatter")
def scatter(tree: Tree, cuts: Tree) -> Tree:
    """Sums of whole leaves over each cut's axes, of which a device keeps its piece: psum_scatter.

    Bytes over n devices: (n-1)/n of the padded leaf. Transpose: `gather`.
    """

    def one(cut: Cut, x: jax.Array) -> jax.Array:
        if not cut.axes:
            return x
        x = padded(x, cut, lax.axis_size(cut.axes))
        return lax.psum_scatter(x, cut.axes, scatter_dimension=cut.dim % x.ndim, tiled=True)

    return jax.tree.map(one, cuts, tree, is_leaf=_is_cut)


def any_cut(cuts: Tree) -> bool:
    """Whether any leaf is cut."""
    return any(cut.axes for cut in jax.tree.leaves(cuts, is_leaf=_is_cut))


def zero_pieces(tree: Tree, cuts: Tree) -> Tree:
    """Zeros in the shapes of the pieces of whole leaves."""

    def one(cut: Cut, x: jax.Array) -> jax.Array:
        kind, shape = jax.typeof(x), list(x.shape)
        if cut.axes:
            shape[cut.dim] = ceil(cut.size / lax.axis_size(cut.axes))
        return zeros_of(kind.update(shape=tuple(shape)))

    return jax.tree.map(one, cuts, tree, is_leaf=_is_cut)


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

        return jax.tree.map(one, self.cuts, params, is_leaf=_is_cut)

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
