"""Memory read from the arrays themselves, and from the types of those that a program would make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax5d.mesh import HOST
from jax5d.parallel.data import diverge, varying
from jax5d.parallel.schedules import SCHEDULES
from jax5d.parallel.stack import Stack
from jax5d.train.step import Trainer, TrainState


@dataclass(frozen=True)
class Buckets:
    """Bytes on one device; by definition those of `jax5d.costs.memory.Memory`."""

    parameters: int
    """What the model computes with."""
    gradients: int
    """The sums over microbatches, or of a single one what is left of it for the update."""
    optimizer: int
    """All else of the state: moments and counters, and where the model computes with a copy, what is updated."""


def bytes_on_device(tree: Any, device: jax.Device) -> int:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes that a tree of arrays holds on one device; those in the host's memory for it do not count."""
    there = (leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST)
    shards = (shard for leaf in there for shard in leaf.addressable_shards)
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
        params = trainer.zero.opened(diverge(params, model.summed))
        work = model.work(batch, jax.random.key(0), trainer.config.train.global_batch)
        stack = Stack(work.layer, params["blocks"], model.stream_zeros(batch), varying(jnp.int32(0), ("pp",)))
        found.extend(jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in stack.halves.saved)
        return jnp.int32(0)

    state, batch = trainer.arguments
    specs = trainer.specs.params, trainer.batch_sharding.spec
    jax.eval_shape(jax.shard_map(body, mesh=trainer.mesh, in_specs=specs, out_specs=P()), state.params, batch)
    return found


def buckets(trainer: Trainer, state: TrainState) -> Buckets:
    """What the first device holds: parameters and optimizer from the arrays of a state, gradients from their types."""
    device = trainer.mesh.devices.flat[0]
    total = bytes_on_device(state, device)
    computed = bytes_on_device(state.replica if trainer.zero.replicates else state.params, device)
    return Buckets(computed, _summed_bytes(trainer), total - computed)


def _summed_bytes(trainer: Trainer) -> int:
    """Bytes on one device of the gradients added up over microbatches: types of a traced program, not compiled."""
    found: list[int] = []

    parallel, stage = trainer.config.parallel, trainer.zero.stage
    table = SCHEDULES[parallel.schedule](trainer.config.mesh.pp, parallel.microbatches)
    several = sum(tick.backward is not None for tick in table.ticks) > 1

    def body(state: TrainState) -> jax.Array:
        sums = trainer.reduction.zeros(state.replica if stage == 1 and several else state.params)
        found.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(sums)))
        return jnp.int32(0)

    mapped = jax.shard_map(body, mesh=trainer.mesh, in_specs=(trainer.specs,), out_specs=P())
    jax.eval_shape(mapped, trainer.arguments[0])
    return found[0]
