"""Layer normalisation (Ba et al., arXiv:1607.06450), and RMS normalisation (Zhang, Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

EPS = 1e-5


class LayerNorm(nnx.Module):
    """Mean 0 and variance 1 over the last dim, then scale and bias; in float32, result in x's dtype."""

    def __init__(self, d_model: int):
        self.scale = nnx.Param(jnp.ones(d_model), spec=P(None))
        self.bias = nnx.Param(jnp.zeros(d_model), spec=P(None))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., d] -> [..., d]."""
        return _normalise(x, self.scale[...], self.bias[...])


@partial(jax.checkpoint, prevent_cse=False)
@jax.named_scope("norm")
def _normalise(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Keeps x alone for the backward pass, where autodiff would keep four arrays of its size."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(variance + EPS)
    shape = (1,) * (x.ndim - 1) + (-1,)
    scale, bias = (p.astype(jnp.float32).reshape(shape) for p in (scale, bias))
    return (normed * scale + bias).astype(x.dtype)


class RmsNorm(nnx.Module):
    """Mean square 1 over the last dim, then scale; in float32, result in x's dtype."""

    def __init__(self, d_model: int):
        self.scale = nnx.Param(jnp.ones(d_model), spec=P(None))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., d] -> [..., d]."""
        return _divide_by_rms(x, self.scale[...])


@partial(jax.checkpoint, prevent_cse=False)
@jax.named_scope("norm")
def _divide_by_rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Keeps x alone for the backward pass, as `_normalise` does."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + EPS)
    return (normed * scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
