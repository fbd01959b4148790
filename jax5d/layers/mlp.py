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
        x = self.boundary.enter(x)
        hidden = times(x, self.w_in[...], "bsd,df->bsf")
        hidden = checkpoint_name(add_bias(hidden, self.b_in[...][None, None]), MLP_IN)
        y = self.boundary.leave(gelu_times(hidden, self.w_out[...], "bsf,fd->bsd"))
        return add_bias(y, self.b_out[...][None, None]), {}, {}


class SwiGlu(nnx.Module):
    """d -> d_ff -> d, silu(gate) up, without biases. Shazeer, arXiv:2002.05202, eq. 6."""

    def __init__(self, d_model: int, d_ff: int, *, out_std: float, boundary: Boundary, rngs: nnx.Rngs):
        self.w_gate = nnx.Param(normal(rngs, d_model, d_ff), spec=P(None, "tp"))
        self.w_up = nnx.Param(normal(rngs, d_model, d_ff), spec=P(None, "tp"))
        self.w_out = nnx.Param(normal(rngs, d_ff, d_model, std=out_std), spec=P("tp", None))
        self.boundary = boundary

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, Any], dict[str, Any]]:
        """Residual stream [b, s_stream, d] -> the same, no losses, no statistics."""
        x = self.boundary.enter(x)
        gate, up = (checkpoint_name(times(x, w[...], "bsd,df->bsf"), MLP_IN) for w in (self.w_gate, self.w_up))
        return self.boundary.leave(silu_times(gate, up, self.w_out[...], "bsf,fd->bsd")), {}, {}
