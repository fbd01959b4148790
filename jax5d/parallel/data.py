"""Data parallelism: diverge once, reduce once.

Before differentiating, every parameter is cast to *varying* over the axes whose devices hold different tokens or
different layers. Each device then has a copy of its own, and the derivative of a copy needs no communication.
Afterwards each gradient leaf is summed over those axes that its spec does not name: once per optimizer step, in the
pieces that `jax5d.parallel.reduction` makes. Tied weights, norms under sequence parallelism and routers need no rule of
their own.

Without the cast, JAX would place the sum where the parameter is used, inside the loop over microbatches.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.config import AXES
from jax5d.mesh import DATA_AXES

Tree = Any


def is_spec(x: object) -> bool:
    """Whether a leaf of a spec tree."""
    return isinstance(x, P)


def spec_axes(spec: P) -> tuple[str, ...]:
    """Mesh axes that a spec names, in its order."""
    return tuple(a for part in spec if part is not None for a in ((part,) if isinstance(part, str) else part))


def split_axes(specs: Tree) -> set[str]:
    """Mesh axes that any spec of a tree names."""
    return {axis for spec in jax.tree.leaves(specs, is_leaf=is_spec) for axis in spec_axes(spec)}


def reduction_axes(spec: P, token_axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes over which a gradient must be summed: pp, dp, ep, cp and `token_axes`, less those that its spec names.

    `token_axes` is ("tp",) where tp devices have gradients of different tokens (sequence parallelism) or of different
    heads that share the parameter, otherwise ().
    """
    return tuple(a for a in ("pp", *DATA_AXES, *token_axes) if a not in spec_axes(spec))


def varying_axes(x: jax.Array) -> tuple[str, ...]:
    """Axes along which JAX takes the devices' values of `x` to differ."""
    return tuple(jax.typeof(x).manual_axis_type.varying)


def varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Cast `x` to varying over `axes` as well. Transpose: psum over those axes. Bytes: 0."""
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def zeros_of(kind: Any, dims: tuple[int, ...] = ()) -> jax.Array:
    """Zeros of a value's type, its varying axes included, behind `dims` further dims. Bytes: 0."""
    return varying(jnp.zeros((*dims, *kind.shape), kind.dtype), tuple(kind.manual_axis_type.varying))


def is_axes(x: object) -> bool:
    """Whether a leaf of a tree that has axes for each parameter."""
    return isinstance(x, tuple)


def diverge(params: Tree, summed: Tree) -> Tree:
    """Give every device along the axes `summed` its own copy of each parameter, to differentiate. Bytes: 0."""
    return jax.tree.map(lambda axes, p: varying(p, axes), summed, params, is_leaf=is_axes)


def cast(tree: Tree, dtype: Any) -> Tree:
    """Every leaf in `dtype`. Bytes: 0."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def squares(tree: Tree) -> Tree:
    """Each leaf's sum of squares, float32 []. Bytes: 0."""
    return jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree)


@jax.named_scope("sum_over_shards")
def sum_over_shards(x: jax.Array) -> jax.Array:
    """Sum over the devices that hold different tokens: psum over dp, ep, cp, 2 (n-1)/n K bytes. Transpose: identity."""
    return lax.psum(x, DATA_AXES)


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum over axes: psum, 2 (n-1)/n K bytes. Transpose: identity."""
    return lax.psum(x, axes)


@jax.named_scope("sum_over_varying")
def sum_over_varying(x: jax.Array) -> jax.Array:
    """Sum over every axis along which `x` varies: psum over those, 2 (n-1)/n K bytes. Transpose: identity."""
    return lax.psum(x, varying_axes(x))


@jax.named_scope("global_norm")
def global_norm(tree: Tree, specs: Tree) -> jax.Array:
    """The 2-norm of a tree of local shards, in which every parameter of the global tree counts once. float32 [].

    Leaves that are split over the same axes are summed together: one psum of 4 bytes for each such set of axes.
    """
    sums: dict[tuple[str, ...], jax.Array] = {}
    leaves = zip(jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(tree), strict=True)
    for spec, leaf in leaves:
        axes = tuple(a for a in AXES if a in spec_axes(spec))
        sums[axes] = sums.get(axes, jnp.zeros(())) + squares(leaf)
    total = jnp.zeros(())
    for axes, square in sums.items():
        total = total + (lax.psum(square, axes) if axes else square)
    return jnp.sqrt(total)


def clip_by_norm(tree: Tree, norm: jax.Array, limit: float) -> Tree:
    """Scale a tree whose global norm is `norm` so that it is at most `limit`; 0 leaves it alone."""
    if not limit:
        return tree
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), tree)
