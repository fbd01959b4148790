"""One block of GPT-2, forward and backward, in bfloat16: as a program, taken apart into groups of operations, and
compiled into kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax5d.config import PRESETS, MeshConfig, ModelConfig
from jax5d.costs.gpus import Gpu
from jax5d.costs.rooflines import Roofline
from jax5d.layers.attention import choose_attention
from jax5d.layers.dropout import Place
from jax5d.measure.aot import Memory
from jax5d.measure.kernels import Kernel, kernels
from jax5d.measure.ledger import OPS as COLLECTIVES
from jax5d.measure.operations import Operation
from jax5d.mesh import make_mesh
from jax5d.models.transformer import Block
from jax5d.parallel.tensor import TensorBoundary

PRODUCTS = {
    "bsd,dnh->bsnh": "qkv",
    "bsd,dmh->bsmh": "qkv",
    "bsnh,btnh->bnst": "scores",
    "bnst,bsnh->btnh": "scores",
    "bnst,btnh->bsnh": "values",
    "bsnh,nhd->bsd": "output",
    "bsd,df->bsf": "mlp_in",
    "bsf,fd->bsd": "mlp_out",
}
"""Products of a block by their einsums, named as in `jax5d.costs.flops`."""

FLASH, COPIES = "flash attention", "copies"
SCOPES = ("scores", "softmax", "norm", "bias", "gelu", "residual")
"""Named scopes of the layers that make a group; of scores only the backward products, spelled like others."""
ORDER = (
    *("norm", "qkv", "bias", "scores", "softmax", "values", FLASH, "output", "residual", "mlp_in", "gelu", "mlp_out"),
    COPIES,
)
"""Groups in the order of a block. A residual add backward sums gradients; copies are transposes, slices, pads."""

FREE = {*COLLECTIVES, "expand_dims", "name", "pbroadcast", "pcast", "pvary", "reshape", "squeeze", "stop_gradient"}
"""Primitives that move nothing: marks, other shapes for the same bytes, collectives of one device."""


@dataclass(frozen=True)
class Group:
    """Operations of one kind in one pass."""

    name: str
    backward: bool
    flops: int
    bytes: int
    """Operands and results of each operation, as if each were a kernel."""
    seconds: float
    """By the roofline, one operation after the other."""

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def product(self) -> bool:
        """Whether it runs on tensor cores."""
        return self.name == FLASH or self.name in PRODUCTS.values()

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.name}, {'backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Build:
    """A block compiled for a GPU."""

    attention: str
    seq_len: int
    memory: Memory
    kernels: list[Kernel]

    @property
    def flops(self) -> int:
        """Of its products."""
        return sum(kernel.count * kernel.flops for kernel in self.kernels)


@dataclass(frozen=True)
class Moved:
    """Bytes that a block reads and writes, forward and backward."""

    label: str
    products: int
    """By products and attention kernels."""
    other: int
    """By everything else."""
    seconds: float
    """By the roofline, one operation or kernel after the other."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.products + self.other

    @classmethod
    def one_by_one(cls, label: str, parts: list[Group]) -> Moved:
        """Every operation a kernel of its own."""
        products, total = (sum(p.bytes for p in parts if p.product or every) for every in (False, True))
        return cls(label, products, total - products, sum(p.seconds for p in parts))

    @classmethod
    def fused(cls, label: str, build: Build, gpu: Gpu) -> Moved:
        """By the kernels that the compiler makes."""
        products, total = (sum(k.traffic for k in build.kernels if k.products or every) for every in (False, True))
        roofs = {product: roofline(gpu, product=product) for product in (False, True)}
        seconds = sum(roofs[k.products > 0].time(k.count * k.flops, k.traffic) for k in build.kernels)
        return cls(label, products, total - products, seconds)


def block_model(preset: str, seq_len: int, attention: str) -> ModelConfig:
    """One layer of a preset, weights and computation in bfloat16."""
    model = replace(PRESETS[preset], layers=1, context=seq_len, dtype="bfloat16", param_dtype="bfloat16")
    return replace(model, attention=attention)


def block_step(model: ModelConfig, batch: int, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """A block's passes on one device, jitted: (weights, x, dy) -> (y, d_weights, dx); and their types.

    x, dy are bfloat16 [batch, context, d_model], the weights bfloat16; flash attention is cuDNN's on a GPU.
    """
    mesh = make_mesh(MeshConfig(), [device])
    attend = choose_attention(model, device.platform, 1)
    block = nnx.eval_shape(lambda: Block(model, TensorBoundary(), attend, nnx.Rngs(params=jax.random.key(0))))
    graph, state = nnx.split(block)

    def array(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def forward(weights: Any, x: jax.Array) -> jax.Array:
        place = Place(jnp.arange(batch), jnp.arange(model.context), model.context)
        return nnx.merge(graph, nnx.State(weights))(x, place, jax.random.key(0))[0]

    def both(weights: Any, x: jax.Array, dy: jax.Array) -> tuple[Any, ...]:
        y, back = jax.vjp(forward, weights, x)
        return y, *back(dy)

    weights = jax.tree.map(lambda leaf: array(leaf.shape), nnx.to_pure_dict(state))
    stream = array((batch, model.context, model.d_model))
    step = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P()))
    return step, (weights, stream, stream)


def build(model: ModelConfig, batch: int, device: Any) -> Build:
    """Compile a block for a device, which may be absent."""
    step, args = block_step(model, batch, device)
    compiled = step.lower(*args).compile()
    return Build(model.attention, model.context, Memory.of(compiled), kernels(compiled.as_text() or ""))


def moves(op: Operation) -> bool:
    """Whether it moves bytes; to spread or add up over dims of size 1 does not."""
    return op.name not in FREE and not (op.name in ("broadcast_in_dim", "reduce_sum") and op.bytes_in == op.bytes_out)


def groups(operations: Iterable[Operation], gpu: Gpu) -> list[Group]:
    """The groups of a block's operations, in order."""
    found: dict[tuple[str, bool], list[Operation]] = defaultdict(list)
    for op in operations:
        if moves(op):
            found[_group(op), "transpose(" in op.where].append(op)
    return in_order(_sum(*key, operations, gpu) for key, operations in found.items())


def in_order(parts: Iterable[Group]) -> list[Group]:
    """Sorted by `ORDER`, forward before backward."""
    return sorted(parts, key=lambda part: (ORDER.index(part.name), part.backward))


def roofline(gpu: Gpu, *, product: bool) -> Roofline:
    """Products run on tensor cores in bfloat16, all else in float32 beside them."""
    return Roofline(gpu.peak("bfloat16" if product else "float32"), gpu.bandwidth)


def _group(op: Operation) -> str:
    if op.name.startswith("dot_product_attention"):
        return FLASH
    scope = next((scope for scope in SCOPES if scope in op.where), None)
    if op.name == "dot_general":
        return scope or next(name for einsum, name in PRODUCTS.items() if einsum in op.where)
    if scope and scope != "scores":
        return scope
    return "residual" if op.name == "add_any" and op.dtype == "bfloat16" else COPIES


def _sum(name: str, backward: bool, operations: list[Operation], gpu: Gpu) -> Group:
    flops = sum(op.flops * op.count for op in operations)
    roof = roofline(gpu, product=name == FLASH or name in PRODUCTS.values())
    bytes_ = [op.count * (op.bytes_in + op.bytes_out) for op in operations]
    seconds = sum(roof.time(op.flops * op.count, size) for op, size in zip(operations, bytes_, strict=True))
    return Group(name, backward, flops, sum(bytes_), seconds)
