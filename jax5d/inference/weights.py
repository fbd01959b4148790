"""What inference computes with: a trainer's parameters in the computation's dtype, whole or, at ZeRO-3, in pieces."""

from __future__ import annotations

from typing import Any

import jax

from jax5d.mesh import placed
from jax5d.parallel.data import cast, is_spec
from jax5d.train.step import Trainer

Tree = Any


def weight_specs(trainer: Trainer) -> Tree:
    """PartitionSpec of every weight."""
    return trainer.model.specs if trainer.zero.replicates else trainer.specs.params


def weight_shapes(trainer: Trainer) -> Tree:
    """ShapeDtypeStruct of every weight, global, laid out on the mesh."""
    shapes = trainer.model.shapes if trainer.zero.replicates else trainer.shapes.params
    kind = lambda spec, x: jax.ShapeDtypeStruct(  # noqa: E731
        x.shape, trainer.config.model.dtype, sharding=placed(trainer.mesh, spec)
    )
    return jax.tree.map(kind, weight_specs(trainer), shapes, is_leaf=is_spec)


def inference_weights(trainer: Trainer, params: Tree) -> Tree:
    """Weights from a state's parameters: cast, and at ZeRO-1 and 2 gathered, once.

    Matrices would be cast wherever they are used, and a new token uses all of them: in 16 bits they are half as much to
    read. Norms' scales, biases, positions and routers are rounded too, as ZeRO does, which training without it does
    not. They are the parameters themselves, not a copy, where they have the dtype and are not gathered.
    """
    return trainer.replica(params) if trainer.zero.replicates else cast(params, trainer.config.model.dtype)
