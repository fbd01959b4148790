"""A statement about values that the types cannot see.

An array is *varying* over an axis where JAX must assume that the devices along it hold different values. `psum` and
`all_gather` make a value the same everywhere and say so; a ring of `ppermute` does too, step by step, and no type can
follow it. Whoever has sent every value everywhere says it here. The tests compare every shard of what was declared so.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_agreed = Primitive("agreed")


def agreed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Declare that every device along `axes` holds the same `x`. Bytes: 0. Not differentiable."""
    return _agreed.bind(x, axes=axes)


@_agreed.def_abstract_eval
def _kind(x: Any, *, axes: tuple[str, ...]) -> Any:
    kind = x.manual_axis_type
    return x.update(manual_axis_type=kind.update(varying=frozenset(kind.varying) - set(axes)))


def _lower(context: mlir.LoweringRuleContext, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    del context, axes
    return [x]


mlir.register_lowering(_agreed, _lower)
