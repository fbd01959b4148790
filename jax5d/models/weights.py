"""A model's parameters as whole arrays on the host, and their way to a mesh and back.

On the host nothing is padded. On a mesh zeros stand behind what its shards do not divide: rows of the vocabulary, and
under ZeRO the dim that a leaf is cut along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax5d.config import ConfigError, MeshConfig, ModelConfig, ParallelConfig
from jax5d.models.build import Model

Tree = Any


def host_shapes(model: ModelConfig) -> Tree:
    """ShapeDtypeStruct of every parameter, without padding, in `model.param_dtype`."""
    return Model(model, MeshConfig(), ParallelConfig()).shapes


def on_mesh(params: Tree, shapes: Tree, shardings: Tree) -> Tree:
    """Host parameters as global arrays. No device is sent more than its shard.

    Args:
        params: NumPy arrays at the shapes of `host_shapes`.
        shapes: of the result, padding and dtypes included: `trainer.shapes.params`, with which `trainer.begin` begins.
        shardings: of the result: `trainer.shardings.params`.

    Raises:
        ConfigError: a leaf is missing or unknown, or differs from its shape by more than padding.
    """

    def leaf(name: str, x: np.ndarray, like: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        local = sharding.shard_shape(like.shape)
        if x.ndim != len(local) or _padded(name, x.shape, like.shape, local) != like.shape:
            raise _of_another_model(name, x.shape, like.shape)

        def shard(index: Any) -> np.ndarray:
            data, piece = x[index], np.zeros(local, like.dtype)
            piece[tuple(slice(n) for n in data.shape)] = data
            return piece

        return jax.make_array_from_callback(like.shape, sharding, shard)

    return _map(leaf, params, shapes, shardings)


def _padded(name: str, shape: tuple[int, ...], whole: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    """A shape padded as the shards of `whole` need it; layers never are."""
    parts = [m // max(n, 1) for m, n in zip(whole, local, strict=True)]
    if name.startswith("blocks."):
        parts[0] = 1
    return tuple(-(-n // p) * p for n, p in zip(shape, parts, strict=True))


def on_host(params: Tree, model: ModelConfig) -> Tree:
    """Contiguous NumPy arrays at the shapes of `host_shapes`, from parameters as they lie on any mesh, or on the host.

    Their dtypes stay. What stands behind the vocabulary is dropped whatever it is. This process must be able to address
    all shards.

    Raises:
        ConfigError: a leaf is missing or unknown, is too small, or would lose more than zeros.
    """

    def leaf(name: str, x: Any, true: jax.ShapeDtypeStruct) -> np.ndarray:
        whole, cut = np.ascontiguousarray(x), tuple(slice(n) for n in true.shape)
        if whole.shape == true.shape:
            return whole
        if whole.ndim != len(cut) or any(m < n for m, n in zip(whole.shape, true.shape, strict=True)):
            raise _of_another_model(name, whole.shape, true.shape)
        tokens = whole[: model.vocab] if name in ("outer.wte", "outer.head") else whole
        if np.count_nonzero(tokens) != np.count_nonzero(tokens[cut]):
            raise _of_another_model(name, whole.shape, true.shape)
        return np.ascontiguousarray(whole[cut])

    return _map(leaf, params, host_shapes(model))


def _of_another_model(name: str, here: tuple[int, ...], there: tuple[int, ...]) -> ConfigError:
    return ConfigError(f"{name} has shape {here}, the model's is {there}; give the model that the parameters belong to")


def _map(leaf: Callable[..., Any], params: Tree, *others: Tree) -> Tree:
    """`leaf(name, ...)` of trees with the same names."""
    found, wanted = (
        {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)}
        for tree in (params, others[0])
    )
    if found != wanted:
        raise ConfigError(
            f"the parameters lack {sorted(wanted - found)} and have {sorted(found - wanted)} besides; give the model "
            "that they belong to"
        )
    named = lambda path, *leaves: leaf(jax.tree_util.keystr(path, simple=True, separator="."), *leaves)  # noqa: E731
    return jax.tree.map_with_path(named, params, *others)
