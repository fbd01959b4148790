"""Random bits as a function of global position, so that a dropout mask is the same on every mesh.

A key drawn on each device would give all data shards one mask, or the copies of one tensor different masks. Here each
element has a pair of global counters, hashed with the key by Threefry: where an element lives does not matter.
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32


def keep(key: jax.Array, rate: float, high: jax.Array, low: jax.Array) -> jax.Array:
    """Which elements survive dropout at `rate`.

    Args:
        key: uint32 [2], the same on every device.
        rate: probability of dropping, in [0, 1).
        high: uint32, first global counter of each element.
        low: uint32, second one; broadcasts against `high`.

    Returns:
        bool, of the broadcast shape; True with probability 1 - rate. Bytes on the wire: 0.
    """
    high, low = jnp.broadcast_arrays(high, low)
    bits = threefry_2x32(key, jnp.stack([high.ravel(), low.ravel()]).ravel())[: high.size]
    return bits.reshape(high.shape) >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
