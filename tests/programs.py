"""Reading a jaxpr: its equations, and what its loops carry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs inside an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item.jaxpr if isinstance(item, ClosedJaxpr) else item


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a program, also of the programs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from equations(body)


def carried(jaxpr: Jaxpr) -> list[Any]:
    """Types of all that the scans of a program carry. A stacked output has one dim more than the body's."""
    kept = []
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "scan":
            results = zip(next(bodies(eqn)).outvars, eqn.outvars, strict=True)
            kept += [inner.aval for inner, outer in results if inner.aval.shape == outer.aval.shape]
    return kept
