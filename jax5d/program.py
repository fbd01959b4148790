"""A function as a program: what JAX would hand to the compiler, without dead code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import partial_eval as pe


def live_jaxpr(function: Callable[..., Any], *args: Any) -> Jaxpr:
    """The jaxpr of one call of `function` on arrays or ShapeDtypeStructs; nothing is computed."""
    closed = jax.make_jaxpr(function)(*args)
    return pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[0]


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs inside an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item
