"""The operations of a program, read from its jaxpr: what each computes, and the bytes that it reads and writes.

A jaxpr comes before the compiler, which fuses elementwise operations: their bytes are those of unfused ones. FLOPs of

- products (dot_general, convolutions): exact, 2 for each multiply-add;
- fused attention (cuDNN's): its products for the full square of queries and keys, whatever is masked, as
  `jax5d.costs.flops` counts: two forward, five backward;
- reductions, cumulative and scattered sums: 1 for each element that is added;
- other arithmetic on floats: 1 for each element of the result, be it an addition or an exponential;
- moving, choosing places, casting, integers, collectives: 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from jax5d.measure.ledger import OPS as COLLECTIVES
from jax5d.program import inner_jaxprs, live_jaxpr

MOVES = {
    "axis_index", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type",
    "copy", "copy_p", "device_put", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "iota", "name",
    "optimization_barrier", "pad", "pbroadcast", "pcast", "pvary", "reduce_precision", "reshape", "reshard", "rev",
    "scatter", "sharding_constraint", "slice", "split", "squeeze", "stack", "stop_gradient", "transpose", "unstack",
}  # fmt: skip
"""Primitives that compute nothing."""

SUMS = ("reduce", "arg", "cum", "scatter")
"""Beginnings of primitives that work on each element of their largest operand (scatter-add: of its updates)."""

UNKNOWN = ("ffi_call", "pallas_call", "ragged_dot", "reduce_window", "select_and_scatter")
"""Beginnings of primitives that are refused: kernels that a jaxpr does not show, and what no model here uses."""


@dataclass(frozen=True)
class Operation:
    """One operation of a program; FLOPs and bytes are those of one execution, on one device inside a shard_map."""

    name: str
    """JAX's primitive."""
    where: str
    """Path of named scopes and transformations; a product ends in its einsum, where it has one."""
    dtype: str
    """Of its first result."""
    flops: int
    bytes_in: int
    bytes_out: int
    count: int
    """Executions in one call of the program."""


def operations(function: Callable[..., Any], *args: Any) -> list[Operation]:
    """The operations of one call of `function`, in the program's order, dead code left out.

    Args:
        function: may be jitted, differentiated, contain shard_maps and loops.
        args: arrays or ShapeDtypeStructs; nothing is computed.

    Of a cond the branch with the most FLOPs counts.

    Raises:
        NotImplementedError: arithmetic in a while loop of unknown length, or a primitive of `UNKNOWN`.
    """
    return list(_walk(live_jaxpr(function, *args), 1, ""))


def total_flops(function: Callable[..., Any], *args: Any) -> int:
    """FLOPs of one call of `function`, on each device inside a shard_map; see `operations`."""
    return _total(operations(function, *args))


def _total(found: list[Operation]) -> int:
    return sum(op.flops * op.count for op in found)


def _walk(jaxpr: Jaxpr, times: int, path: str) -> Iterator[Operation]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        where = "/".join(filter(None, (path, str(eqn.source_info.name_stack))))
        if name.startswith(UNKNOWN):
            raise NotImplementedError(f"the work of {name} at {where!r} cannot be counted")
        inside = [] if name.startswith(SUMS) else list(inner_jaxprs(eqn))  # a sum's jaxpr says only how to add
        if not inside:
            yield _operation(eqn, times, where)
            continue
        repeat = times * eqn.params["length"] if name == "scan" else times
        found = [list(_walk(body, repeat, where)) for body in inside]
        if name == "while" and any(map(_total, found)):
            raise NotImplementedError(f"arithmetic in a loop of unknown length at {where!r}")
        for body in [max(found, key=_total)] if name == "cond" else found:
            yield from body


def _operation(eqn: JaxprEqn, times: int, where: str) -> Operation:
    ins, outs = _kinds(eqn.invars), _kinds(eqn.outvars)
    bytes_in, bytes_out = (sum(kind.size * kind.dtype.itemsize for kind in side) for side in (ins, outs))
    dtype = str(outs[0].dtype) if outs else ""
    return Operation(eqn.primitive.name, where, dtype, _flops(eqn, ins, outs), bytes_in, bytes_out, times)


def _kinds(values: Sequence[Any]) -> list[Any]:
    """Shapes and dtypes."""
    return [value.aval for value in values]


def _flops(eqn: JaxprEqn, ins: list[Any], outs: list[Any]) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * outs[0].size * math.prod(ins[0].shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = ins[1].shape
        return 2 * outs[0].size * math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    if name.startswith("dot_product_attention"):
        return _fused_attention(eqn, ins[0].shape, ins[1].shape)
    if name in MOVES or name in COLLECTIVES or not any(_is_float(kind) for kind in ins):
        return 0
    if name.startswith("scatter"):
        return ins[2].size
    return max(kind.size for kind in ins) if name.startswith(SUMS) else outs[0].size


def _is_float(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.inexact)


def _fused_attention(eqn: JaxprEqn, queries: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """Two products forward, five backward (FlashAttention, arXiv:2205.14135), 2 b s t n h each.

    Queries are [b, s, n, h] and keys [b, t, n, h], or with heads before tokens at layout 1.
    """
    products = 5 if "bwd" in eqn.primitive.name else 2
    return products * 2 * math.prod(queries) * keys[2 if eqn.params["layout"] else 1]
