"""Products with weights, and sums of biases, in the computation's dtype, whatever dtype the weights are stored in.

What the backward pass keeps is chosen here: the weight itself instead of its cast, one array instead of GELU's six.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax5d.parallel.data import varying, varying_axes


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(2,))
def times(x: jax.Array, weight: jax.Array, product: str) -> jax.Array:
    """einsum(product, x, weight) in x's dtype. Keeps x and the weight for the backward pass, not the weight's cast."""
    return jnp.einsum(product, x, weight.astype(x.dtype))


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(2,))
def gelu_times(hidden: jax.Array, weight: jax.Array, product: str) -> jax.Array:
    """einsum(product, gelu(hidden), weight) in hidden's dtype, with tanh GELU.

    Keeps `hidden` alone for the backward pass, where autodiff would keep six arrays of its size; the product itself is
    not computed again.
    """
    with jax.named_scope("gelu"):
        hidden = jax.nn.gelu(hidden, approximate=True)
    return jnp.einsum(product, hidden, weight.astype(hidden.dtype))


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(3,))
def silu_times(gate: jax.Array, up: jax.Array, weight: jax.Array, product: str) -> jax.Array:
    """einsum(product, silu(gate) up, weight) in gate's dtype: SwiGLU's second half. Keeps `gate` and `up` alone."""
    with jax.named_scope("silu"):
        hidden = jax.nn.silu(gate) * up
    return jnp.einsum(product, hidden, weight.astype(gate.dtype))


@jax.named_scope("bias")
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias in x's dtype; `bias` has x's rank, with size 1 where it is the same for all.

    The sum is float32, and so is its transpose, the sum of the bias's gradient over tokens: in bfloat16 it would
    stop growing after a few hundred of them. `x` varies as `bias` does before it is widened, so that the transpose of
    that cast, a psum, moves x's dtype.
    """
    x = varying(x, varying_axes(bias))
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
