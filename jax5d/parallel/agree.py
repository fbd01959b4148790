"""A statement about values that the types cannot see.

An array is *varying* over an axis where JAX must assume that the devices along it hold different values. `psum` and
`all_gather` make a value the same everywhere and say so; a ring of `ppermute` does too, step by step, and no type can
follow it. Whoever has sent every value everywhere says it here. The tests compare every shard of what was declared so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_agreed = Primitive("agreed")


def agreed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Declare that every device along `axes` holds the same `x`. Bytes: 0. Not differentiable."""
    return _agreed.bind(x, axes=axes)


def known_together(tree: Any) -> Any:
    """The same arrays, of which XLA computes none later than the others: an optimization barrier.

    JAX takes results of a barrier to vary wherever any of them does; each leaves here as it came.
    """

    def restored(after: jax.Array, before: jax.Array) -> jax.Array:
        gained = _varying(after) - _varying(before)
        return agreed(after, tuple(gained)) if gained else after

    return jax.tree.map(restored, lax.optimization_barrier(tree), tree)


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def zero_once(arrays: Sequence[jax.Array]) -> jax.Array:
    """int32 [] 0, but known only once all of `arrays` are: by comparisons that XLA does not see through.

    What is added to it waits for them. One element of each is read.
    """
    done = jnp.stack([array.ravel()[0].astype(jnp.float32) for array in arrays]).sum()
    never = (done != done) & (done == done)
    return agreed(never.astype(jnp.int32), tuple(_varying(never)))


@_agreed.def_abstract_eval
def _kind(x: Any, *, axes: tuple[str, ...]) -> Any:
    kind = x.manual_axis_type
    return x.update(manual_axis_type=kind.update(varying=frozenset(kind.varying) - set(axes)))


def _lower(context: mlir.LoweringRuleContext, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    del context, axes
    return [x]


mlir.register_lowering(_agreed, _lower)
