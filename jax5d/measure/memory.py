"""Memory read from the arrays themselves, and from the types of those that a program would make."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax5d.parallel.data import diverge, varying
from jax5d.parallel.stack import Stack
from jax5d.train.step import Trainer


def bytes_on_device(tree: Any, device: jax.Device) -> int:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes that a tree of arrays holds on one device."""
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def split_leaves(tree: Any) -> list[str]:
    """Names of the leaves of which a device holds only a part."""
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.addressable_shards[0].data.shape != leaf.shape
    ]


def kept_by_layer(trainer: Trainer) -> list[jax.ShapeDtypeStruct]:
    """What one device keeps of one layer and microbatch for the backward pass: types of a traced program, not compiled.

    The order is the program's own.
    """
    found: list[jax.ShapeDtypeStruct] = []

    def body(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        model = trainer.model
        params = trainer.zero.opened(diverge(params, model.specs, model.boundary.axes))
        work = model.work(batch, jax.random.key(0), trainer.config.train.global_batch)
        stack = Stack(work.layer, params["blocks"], model.stream_zeros(batch), varying(jnp.int32(0), ("pp",)))
        found.extend(jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in stack.halves.saved)
        return jnp.int32(0)

    state, batch = trainer.arguments
    specs = trainer.specs.params, trainer.batch_sharding.spec
    jax.eval_shape(jax.shard_map(body, mesh=trainer.mesh, in_specs=specs, out_specs=P()), state.params, batch)
    return found
