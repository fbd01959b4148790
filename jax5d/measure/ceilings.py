"""What a device reaches: the speed of its matrix products, and of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax5d.costs.rooflines import Roofline

BATCH = 20
"""Calls that are enqueued at once: enough that the device never waits, few enough that their results fit."""


@dataclass(frozen=True)
class Ceilings:
    """Measured speeds by size."""

    products: dict[int, float]
    """FLOP/s of an n x n by n x n product, by n."""
    copies: dict[int, float]
    """Bytes/s, read and written together, of a kernel that negates an array, by the array's bytes."""

    @property
    def roofline(self) -> Roofline:
        """The best of each."""
        return Roofline(max(self.products.values()), max(self.copies.values()))


def measure_ceilings(
    sides: Sequence[int],
    copies: Sequence[int],
    *,
    dtype: str = "bfloat16",
    device: Any = None,
    seconds: float = 0.2,
) -> Ceilings:
    """Measure one device.

    Args:
        sides: n of square products.
        copies: bytes of arrays to copy, multiples of an element's; caches serve those that fit in them.
        dtype: of both.
        device: default: JAX's first.
        seconds: that each measurement takes, roughly.
    """
    device = device or jax.devices()[0]
    product, negate = jax.jit(jnp.matmul), jax.jit(jnp.negative)

    def draw(*shape: int) -> jax.Array:
        """Noise: a chip that multiplies ones draws less power, and runs faster than it ever does."""
        return jax.device_put(jax.random.normal(jax.random.key(0), shape, dtype), device)

    speeds = {n: 2 * n**3 / _time(product, draw(n, n), draw(n, n), seconds=seconds) for n in sides}
    width = jnp.dtype(dtype).itemsize
    moved = {size: 2 * size / _time(negate, draw(size // width), seconds=seconds) for size in copies}
    return Ceilings(speeds, moved)


def _time(function: Callable[..., jax.Array], *args: jax.Array, seconds: float) -> float:
    """Seconds of one call, of `BATCH` that are enqueued back to back; the first, which compiles, is not timed."""
    function(*args).block_until_ready()
    spent, batches = 0.0, 0
    while spent < seconds:
        start = time.perf_counter()
        for _ in range(BATCH - 1):
            function(*args)
        function(*args).block_until_ready()  # a device runs them in order
        spent, batches = spent + time.perf_counter() - start, batches + 1
    return spent / (batches * BATCH)
