"""ZeRO (Rajbhandari et al., arXiv:1910.02054) for the automatic partitioner, by sharding annotations alone.

Each stage is asked for in the way that suits the partitioner best: state lies sharded over dp, a layer's weights are
constrained to be whole inside the recomputed layer (stage 3: FSDP), gradients to be sharded where they are made.

Shapes: k replicas, b batch, s sequence, d d_model, v vocabulary; all of them global.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.automatic import At, Program, cross_entropy
from jax5d.parallel.data import is_spec
from jax5d.train.step import Trainer

Tree = Any


def lay_out(base: Program, trainer: Trainer, stage: int) -> tuple[Program, tuple[Tree, Tree]]:
    """A program and the shardings of params and opt_state that make a stage of ZeRO over dp.

    Args:
        base: the choices that are not ZeRO's.
        trainer: has the layout without ZeRO.
        stage: 0, nothing; 1, the optimizer's state is sharded; 2, gradients too; 3, parameters too.
    """
    whole, opt_state = named(trainer)
    if stage == 0:
        return base, (whole, opt_state)
    shards = _sharded(trainer, whole)
    opt_state = optax.tree.map_params(
        trainer.optimizer, lambda _, shard: shard, opt_state, shards, transform_non_params=lambda sharding: sharding
    )
    if stage == 1:
        return base, (whole, opt_state)
    program = replace(base, gradients=lambda grads: lax.with_sharding_constraint(grads, shards))
    if stage == 2:
        return program, (whole, opt_state)
    layer, layer_shards = (jax.tree.map(_of_layer, tree["blocks"]) for tree in (whole, shards))
    program = replace(
        program,
        layer_weights=lambda weights: jax.tree.map(_gather, weights, layer_shards, layer),
        outer_weights=lambda weights: jax.tree.map(_gather, weights, shards["outer"], whole["outer"]),
    )
    return program, (shards, opt_state)


def named(trainer: Trainer) -> tuple[Tree, Tree]:
    """NamedShardings of the trainer's parameters and optimizer state, with no word on memories."""
    specs = trainer.specs.params, trainer.specs.opt_state
    return jax.tree.map(lambda spec: NamedSharding(trainer.mesh, spec), specs, is_leaf=is_spec)


def _sharded(trainer: Trainer, whole: Tree) -> Tree:
    """NamedShardings of the parameters, of each one dim over dp as well: the first behind the layers' that it divides.

    A parameter without such a dim stays whole. On fake CPU devices so do the final norm's two vectors: their gathers
    depend on nothing, and the devices deadlock where one of them meets a loop's gather in another order.
    """
    unordered = trainer.mesh.devices.flat[0].platform == "cpu"

    def shard(path: tuple, x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        if unordered and x.ndim == 1:
            return sharding
        return NamedSharding(sharding.mesh, _spec(x.shape, sharding, int(path[0].key == "blocks")))

    return jax.tree.map_with_path(shard, trainer.shapes.params, whole)


def _spec(shape: tuple[int, ...], sharding: NamedSharding, first: int) -> P:
    mesh, dims = sharding.mesh, [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    for dim in range(first, len(shape)):
        axes = dims[dim] if isinstance(dims[dim], tuple) else (dims[dim],) if dims[dim] else ()
        if shape[dim] % math.prod(mesh.shape[axis] for axis in (*axes, "dp")) == 0:
            return P(*dims[:dim], (*axes, "dp"), *dims[dim + 1 :])
    return P(*dims)


def _of_layer(sharding: NamedSharding) -> NamedSharding:
    """Of one layer's part of a stacked parameter."""
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(weight: jax.Array, shard: NamedSharding, whole: NamedSharding) -> jax.Array:
    """From a shard to the whole: all-gather over dp. Transpose: the gradient is constrained to the shard."""
    return lax.with_sharding_constraint(lax.with_sharding_constraint(weight, shard), whole)


def _gather_fwd(weight: jax.Array, shard: NamedSharding, whole: NamedSharding) -> tuple[jax.Array, None]:
    return _gather(weight, shard, whole), None


def _gather_bwd(shard: NamedSharding, whole: NamedSharding, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    del whole
    return (lax.with_sharding_constraint(gradient, shard),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """cuDNN's fused causal attention, all [b, s, n, h]."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def cross_entropy_in_chunks(chunks: int, replicas: int) -> Callable[[jax.Array, jax.Array, jax.Array, At], jax.Array]:
    """A head that makes float32 logits for one of `chunks` pieces of every sequence at a time.

    The table is given a dim of replicas, so that its gradient is added up over chunks on each device, in the table's
    dtype, and summed over devices once. Without that dim the partitioner sums it over devices in every chunk.
    """

    def head(y: jax.Array, table: jax.Array, labels: jax.Array, at: At) -> jax.Array:
        tables = at(jnp.broadcast_to(table, (replicas, *table.shape)), "dp", None, None)

        each = jax.vmap(lambda y, table, labels: cross_entropy(y, table, labels, _anywhere))

        @partial(jax.checkpoint, prevent_cse=False)
        def chunk(total: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            y, labels = piece  # [k, b / k, s / chunks, d], [k, b / k, s / chunks]
            return total + jnp.mean(each(y, tables, labels)), None

        pieces = tuple(at(_cut(x, chunks, replicas), None, "dp") for x in (y, labels))
        total, _ = lax.scan(chunk, jnp.float32(0), pieces)
        return total / chunks

    return head


def _anywhere(x: jax.Array, *spec: str | None) -> jax.Array:
    """An `At` that constrains nothing: along the dim of replicas everything already lies as it should."""
    del spec
    return x


def _cut(x: jax.Array, chunks: int, replicas: int) -> jax.Array:
    """[b, s, ...] -> [chunks, k, b / k, s / chunks, ...]."""
    b, s, *rest = x.shape
    return jnp.moveaxis(x.reshape(replicas, b // replicas, chunks, s // chunks, *rest), 2, 0)
