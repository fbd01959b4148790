"""The MLPs of GPT-2 and of Llama: first weights split by columns over tp, last one by rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jax5d.layers.init import normal
from jax5d.layers.linear import add_bias, gelu_times, silu_times, times
from jax5d.layers.names import MLP_IN
from jax5d.parallel.tensor import Boundary


class Mlp(nnx.Module):
    """d -> d_ff -> d with tanh GELU. The second bias is added after the sum over tp, so it counts once."""

    def __init__(self, d_model: int, d_ff: int, *, out_std: float, boundary: Boundary, rngs: nnx.Rngs):
        self.w_in = nnx.Param(normal(rngs, d_model, d_ff), spec=P(None, "tp"))
        self.b_in = nnx.Param(jnp.zeros(d_ff), spec=P("tp"))
        self.w_out = nnx.Param(normal(rngs, d_ff, d_model, std=out_std), spec=P("tp", None))
        self.b_out = nnx.Param(jnp.zeros(d_model), spec=P(None))
        self.boundary = boundary

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, Any], dict[str, Any]]:
        """Residual stream [b, s_stream, d] -> the same, no losses, no statistics."""
        hidden = self.boundary.columns(_up, x, (self.w_in[...], self.b_in[...]))
        y = self.boundary.rows(_gelu_down, checkpoint_name(hidden, MLP_IN), self.w_out[...])
        return add_bias(y, self.b_out[...][None, None]), {}, {}


def _up(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    weight, bias = weights
    return add_bias(times(x, weight, "bsd,df->bsf"), bias[None, None])


def _gelu_down(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    return gelu_times(hidden, weight, "bsf,fd->bsd")


class SwiGlu(nnx.Module):
    """d -> d_ff -> d, silu(gate) up, without biases. Shazeer, arXiv:2002.05202, eq. 6."""

    def __init__(self, d_model: int, d_ff: int, *, out_std: float, boundary: Boundary, rngs: nnx.Rngs):
        self.w_gate = nnx.Param(normal(rngs, d_model, d_ff), spec=P(None, "tp"))
        self.w_up = nnx.Param(normal(rngs, d_model, d_ff), spec=P(None, "tp"))
        self.w_out = nnx.Param(normal(rngs, d_ff, d_model, std=out_std), spec=P("tp", None))
        self.boundary = boundary

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, Any], dict[str, Any]]:
        """Residual stream [b, s_stream, d] -> the same, no losses, no statistics."""
        hidden = self.boundary.columns(_gate_and_up, x, (self.w_gate[...], self.w_up[...]))
        return self.boundary.rows(_silu_down, checkpoint_name(hidden, MLP_IN), self.w_out[...]), {}, {}


def _gate_and_up(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
    return [times(x, weight, "bsd,df->bsf") for weight in weights]


def _silu_down(hidden: list[jax.Array], weight: jax.Array) -> jax.Array:
    return silu_times(*hidden, weight, "bsf,fd->bsd")
