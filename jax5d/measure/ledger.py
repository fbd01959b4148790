"""The ledger: every collective of a program, read from its jaxpr.

A jaxpr is what JAX hands to the compiler: one line for each operation, with loops and their lengths. Dead code is
removed first, loops count as often as they run, and axes of size 1 are left out, as they move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jax5d.config import AXES
from jax5d.costs.collectives import Collective, merge, wire_bytes
from jax5d.program import inner_jaxprs, live_jaxpr

OPS = {
    "psum": "psum",
    "psum_invariant": "psum",
    "pmax": "pmax",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "psum_scatter",
    "ppermute": "ppermute",
    "all_to_all": "all_to_all",
}
"""Names of JAX's primitives to the field's."""


def ledger(function: Callable[..., Any], *args: Any) -> list[Collective]:
    """The collectives of one call of `function`, added up by op and axes.

    Args:
        function: contains a shard_map; may be jitted.
        args: arrays or ShapeDtypeStructs; nothing is computed.

    Raises:
        NotImplementedError: a collective inside a while loop of unknown length, or in branches that differ.
    """
    return merge(_walk(live_jaxpr(function, *args), 1, {}))


def _walk(jaxpr: Jaxpr, times: int, sizes: dict[str, int]) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in OPS:
            yield from _entry(eqn, times, sizes)
            continue
        inner = sizes | dict(eqn.params["mesh"].shape) if name == "shard_map" else sizes
        repeat = times * eqn.params["length"] if name == "scan" else times
        bodies = [list(_walk(body, repeat, inner)) for body in inner_jaxprs(eqn)]
        if name == "cond" and any(merge(b) != merge(bodies[0]) for b in bodies):
            raise NotImplementedError(f"branches with different collectives: {eqn}")
        if name == "while" and any(bodies):
            raise NotImplementedError(f"a collective in a loop of unknown length: {eqn}")
        for body in bodies[:1] if name == "cond" else bodies:
            yield from body


def _entry(eqn: JaxprEqn, times: int, sizes: dict[str, int]) -> Iterator[Collective]:
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = names if isinstance(names, tuple) else (names,)
    axes = tuple(a for a in AXES if a in names and sizes[a] > 1)
    n = math.prod(sizes[a] for a in axes)
    pairs = len(eqn.params["perm"]) if "perm" in eqn.params else None
    for operand in eqn.invars if axes and times else ():
        kind: Any = operand.aval
        payload = math.prod(kind.shape) * np.dtype(kind.dtype).itemsize
        op = OPS[eqn.primitive.name]
        yield Collective(op, axes, times, payload * times, Fraction(times) * wire_bytes(op, payload, n, pairs))
