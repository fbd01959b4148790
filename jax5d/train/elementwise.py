"""Whether an optimizer is elementwise, so that each device may update the shards it owns by itself.

An optimizer is elementwise where element i of an update, and of the new state, follows from element i of the gradient,
the parameter and the state, and from numbers that all elements share, such as the count of steps. AdamW, Lion and SGD
are; Adafactor's factors, Muon's matrices, LAMB's and LARS's norms are not: on a shard they would be those of the shard.

The proof is read from the jaxpr of the optimizer's update, for the parameters' own shapes, as some optimizers are
elementwise for small arrays only. Each value there is followed from the inputs on, by where its elements come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jax5d.config import ConfigError
from jax5d.program import inner_jaxprs

Tree = Any

ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip
"""Primitives whose result's element i follows from the operands' elements i."""

CALLS = frozenset({"jit", "pjit", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call"})
"""Primitives that do what their one jaxpr does."""

MEND = (
    "use an elementwise one, such as adamw, lion or sgd with momentum, leave clipping by norm to train.clip, or keep "
    "parameters whole by parallel.zero=0 on dp and cp alone, without parallel.offload"
)


@dataclass(frozen=True)
class Uniform:
    """The same number for every element of every leaf."""


@dataclass(frozen=True)
class Table:
    """An array that no leaf enters, and whose elements differ: a random key, a schedule's boundaries, noise."""


@dataclass(frozen=True)
class Own:
    """Element i follows from elements i of one parameter, its gradient and its state."""

    leaf: str


@dataclass(frozen=True)
class Mixed:
    """An element follows from several."""

    reason: str


Origin = Uniform | Table | Own | Mixed


def check_elementwise(optimizer: optax.GradientTransformation, params: Tree) -> None:
    """Refuse an optimizer whose update of a shard is not the shard of its update.

    Proved for all values of gradients, parameters and state; nothing is computed.

    Args:
        optimizer: called as a step calls it, with gradients, state and parameters.
        params: ShapeDtypeStructs of the whole parameters, nested as a step's are.

    Raises:
        ConfigError: what mixes elements, or is not of its parameter's shape, and the leaf.
    """
    if _rule(optimizer, params) != _rule(optimizer, jax.tree.map(_half, params)):
        raise _refused("its update depends on the parameters' shapes, which those of shards are not")


def by_parameter(optimizer: optax.GradientTransformation, state: Tree, values: Tree, other: Any) -> Tree:
    """The optimizer's `state` with every leaf replaced by its parameter's in `values`, or by `other` if it has none."""
    masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731  where a parameter has no such state
    own = lambda x, value: x if masked(x) else value  # noqa: E731
    return optax.tree.map_params(
        optimizer, own, state, values, transform_non_params=lambda _: other, is_leaf=masked
    )  # fmt: skip


def _half(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Half of every dim, as of a shard."""
    return jax.ShapeDtypeStruct(tuple((n + 1) // 2 for n in x.shape), x.dtype)


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"the optimizer is not elementwise, as one must be that updates parts of parameters: {reason}; {MEND}"
    )


@contextmanager
def _refusing(reason: str) -> Iterator[None]:
    """Refuse an optimizer for what it makes of arguments it is not meant for, whatever that is."""
    try:
        yield
    except Exception as error:
        raise _refused(f"{reason} ({(str(error).splitlines() or [''])[0]})") from error


def _rule(optimizer: optax.GradientTransformation, params: Tree) -> list[tuple[str, ...]]:
    """Check one update of `params`. Its operations and the constants in them, without shapes."""
    names = jax.tree.map_with_path(lambda path, _: _spelled(path), params)
    with _refusing("its state does not lie as the parameters do"):
        state = jax.eval_shape(optimizer.init, params)
        owners = by_parameter(optimizer, state, names, "")
    with _refusing("its update fails on gradients, state and parameters alone"):
        closed, results = jax.make_jaxpr(optimizer.update, return_shape=True)(params, state, params)
    shapes = dict(zip(jax.tree.leaves(names), (x.shape for x in jax.tree.leaves(params)), strict=True))
    for (path, leaf), owner in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(owners), strict=True):
        if owner and leaf.shape != shapes[owner]:
            raise _refused(f"its state {_spelled(path)} is {[*leaf.shape]} for a parameter of {[*shapes[owner]]}")
    ins = zip(jax.tree.leaves((names, owners, names)), closed.jaxpr.invars, strict=True)
    walk = _Walk()
    outs = walk(closed.jaxpr, [Own(name) if name else _of_no_leaf(v.aval) for name, v in ins])
    wanted = jax.tree.leaves((names, owners))
    for (path, _), origin, owner in zip(jax.tree.leaves_with_path(results), outs, wanted, strict=True):
        _check_result(f"its {('update', 'state')[path[0].idx]} {_spelled(path[1:])}", origin, owner)
    return walk.rule


def _check_result(what: str, origin: Origin, owner: str) -> None:
    """Refuse a result that is not its parameter's, or if it belongs to no parameter, depends on one."""
    match origin:
        case Mixed(reason):
            raise _refused(f"{what} comes of {reason}")
        case Own(leaf) if leaf != owner:
            raise _refused(f"{what} comes of {leaf}")
        case Table() if owner:
            raise _refused(f"{what} depends on where an element lies")


def _spelled(path: tuple[Any, ...]) -> str:
    """A leaf's path with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _of_no_leaf(aval: Any) -> Origin:
    return Uniform() if aval.size == 1 else Table()


@dataclass
class _Walk:
    """Follows origins through a jaxpr."""

    rule: list[tuple[str, ...]] = field(default_factory=list)
    """Primitives in their order, each with its constant operands."""

    def __call__(self, jaxpr: Jaxpr, ins: list[Origin], place: str = "") -> list[Origin]:
        """Origins of the outputs, from those of the inputs; `place` is that of the call, if any."""
        origins = dict(zip(jaxpr.invars, ins, strict=True)) | {v: _of_no_leaf(v.aval) for v in jaxpr.constvars}
        read = lambda v: Uniform() if isinstance(v, Literal) else origins[v]  # noqa: E731
        for eqn in jaxpr.eqns:
            constants = (str(v.val) for v in eqn.invars if isinstance(v, Literal))
            self.rule.append((eqn.primitive.name, *constants))
            outs = self._equation(eqn, [read(v) for v in eqn.invars], place or _place(eqn))
            origins.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Origin], place: str) -> list[Origin]:
        name, inside = eqn.primitive.name, list(inner_jaxprs(eqn))
        if name in CALLS:
            return self(inside[0], ins, place)
        if name == "cond" and isinstance(ins[0], Uniform):
            branches = [self(branch, ins[1:], place) for branch in inside]
            return [_join(list(origins), f"cond{place}") for origins in zip(*branches, strict=True)]
        origin = _join(ins, f"{name}{place}")
        return [_result(eqn, ins, origin, v.aval, place) for v in eqn.outvars]


def _result(eqn: JaxprEqn, ins: list[Origin], origin: Origin, out: Any, place: str) -> Origin:
    """The origin of one result of a primitive, if `origin` is that of its operands together."""
    name = eqn.primitive.name
    match origin:
        case Mixed():
            return origin
        case Own(leaf):
            operands: list[Any] = [
                v.aval for v, operand in zip(eqn.invars, ins, strict=True) if isinstance(operand, Own)
            ]
            shapes = {x.shape for x in operands}
            return origin if name in ELEMENTWISE and shapes == {out.shape} else Mixed(f"{name}{place} of {leaf}")
        case Uniform() if name in (*ELEMENTWISE, "broadcast_in_dim"):
            return origin
        case _:
            return _of_no_leaf(out)


def _join(origins: list[Origin], what: str) -> Origin:
    """The origin of elements that follow, by `what`, from elements of several arrays at their own place."""
    leaves = sorted({o.leaf for o in origins if isinstance(o, Own)})
    for origin in origins:
        if isinstance(origin, Mixed):
            return origin
    if len(leaves) > 1:
        return Mixed(f"{what} of {leaves[0]} and {leaves[1]}")
    if Table() in origins:
        return Mixed(f"{what} of {leaves[0]} and what differs from place to place") if leaves else Table()
    return Own(leaves[0]) if leaves else Uniform()


def _place(eqn: JaxprEqn) -> str:
    """The function that made the optimizer an equation is in: " in clip_by_global_norm"."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else []
    functions = [f.function_name for f in frames if "/jax/" not in f.file_name]
    makers = [name.split(".<locals>")[0] for name in functions if ".<locals>" in name]
    return f" in {makers[0]}" if makers else ""
