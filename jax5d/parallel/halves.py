"""A function's forward and backward half, apart in time, with the least kept in between.

`jax.vjp` hands over its saved values as a pytree. Those that do not depend on the activations (weights, casts of
weights, dropout masks) are not worth a buffer: the backward half computes them again from the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval as pe

Tree = Any


class Halves(NamedTuple):
    """forward(params, x, m) -> (out, stats, saved); backward(params, m, saved, d_out) -> (d_params, d_x)."""

    forward: Callable[[Tree, jax.Array, Tree], tuple[Tree, Tree, list[jax.Array]]]
    backward: Callable[[Tree, Tree, list[jax.Array], Tree], tuple[Tree, jax.Array]]
    out: Tree
    """Types of `out`, with their varying axes."""
    stats: Tree
    """Types of `stats`."""
    saved: list[Any]
    """Types of the values that must be kept between the halves."""


def halve(function: Callable[..., tuple[Tree, Tree]], params: Tree, x: jax.Array, m: Tree) -> Halves:
    """Split `function(params, x, m) -> (out, stats)` at its saved values.

    Args:
        function: differentiable in params and x; `stats` is carried along, not differentiated.
        params, x, m: example values inside the surrounding trace; only their types matter.
    """
    trees: dict[str, Any] = {}

    def whole(params: Tree, x: jax.Array, m: Tree) -> list[jax.Array]:
        out, vjp, stats = jax.vjp(lambda p, x: function(p, x, m), params, x, has_aux=True)
        leaves, trees["vjp"] = jax.tree.flatten(vjp)
        results, trees["results"] = jax.tree.flatten((out, stats))
        trees["count"] = len(results)
        return [*results, *leaves]

    closed = jax.make_jaxpr(whole)(params, x, m)
    count, total = trees["count"], len(closed.out_avals)
    x_at = len(jax.tree.leaves(params))
    kept = [i for i in range(count, total) if _needs_input(closed, i, x_at)]
    again = [i for i in range(count, total) if i not in kept]
    run_forward = _outputs(closed, [*range(count), *kept])
    run_again = _outputs(closed, again)

    def forward(params: Tree, x: jax.Array, m: Tree) -> tuple[Tree, Tree, list[jax.Array]]:
        values = run_forward(*jax.tree.leaves((params, x, m)))
        out, stats = jax.tree.unflatten(trees["results"], values[:count])
        return out, stats, values[count:]

    def backward(params: Tree, m: Tree, saved: list[jax.Array], d_out: Tree) -> tuple[Tree, jax.Array]:
        fresh = run_again(*jax.tree.leaves((params, x, m)))  # reads no x: every output that does is in `saved`
        leaves = dict(zip([*kept, *again], [*saved, *fresh], strict=True))
        vjp = jax.tree.unflatten(trees["vjp"], [leaves[i] for i in range(count, total)])
        return vjp(d_out)

    out, stats = jax.tree.unflatten(trees["results"], closed.out_avals[:count])
    return Halves(forward, backward, out, stats, [closed.out_avals[i] for i in kept])


def _needs_input(closed: Any, output: int, position: int) -> bool:
    """Whether the output at `output` depends on the input at `position`."""
    wanted = [i == output for i in range(len(closed.out_avals))]
    return pe.dce_jaxpr(closed.jaxpr, wanted)[1][position]


def _outputs(closed: Any, indices: list[int]) -> Callable[..., list[jax.Array]]:
    """The part of a jaxpr that makes the outputs at `indices`, in ascending order."""
    wanted = [i in indices for i in range(len(closed.out_avals))]
    jaxpr, used = pe.dce_jaxpr(closed.jaxpr, wanted)
    run = jaxpr_as_fun(closed.replace(jaxpr=jaxpr))
    return lambda *args: run(*[a for a, u in zip(args, used, strict=True) if u])
