"""Memory read from the arrays themselves."""

from __future__ import annotations

from typing import Any

import jax


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
