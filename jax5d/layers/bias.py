"""Weights that are added to every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax5d.parallel.data import varying


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias in x's dtype; `bias` is float32, of x's rank, with size 1 where it is the same for all.

    The sum is float32, and so is its transpose, the sum of the bias's gradient over tokens: in bfloat16 it would
    stop growing after a few hundred of them. `x` varies as `bias` does before it is widened, so that the transpose of
    that cast, a psum, moves x's dtype.
    """
    x = varying(x, tuple(jax.typeof(bias).manual_axis_type.varying))
    return (x.astype(jnp.float32) + bias).astype(x.dtype)
