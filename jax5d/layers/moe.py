"""A mixture of experts in the MLP's place: experts split over ep, each expert's width over tp.

The router reads the residual stream, before the tensor-parallel region, so its gradient is that of any weight of the
stream and needs no rule of its own.

Shapes: b batch, s sequence, d d_model, e experts (all or local), f d_ff (local), g groups, t tokens of a group,
k choices, c slots.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jax5d.layers.init import normal
from jax5d.layers.linear import gelu_times, times
from jax5d.layers.names import MLP_IN
from jax5d.parallel.expert import Route, assign, balance, capacity, choose, combine, dispatch
from jax5d.parallel.tensor import Boundary


@partial(jax.checkpoint, prevent_cse=False)
def _logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """float32 [b, s, e], keeping x and the router in their own dtypes for the backward pass."""
    return jnp.einsum("bsd,de->bse", x.astype(jnp.float32), router.astype(jnp.float32))


class Moe(nnx.Module):
    """Top-k experts d -> d_ff -> d with tanh GELU, without biases; router in float32, without bias."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        experts: int,
        *,
        top_k: int,
        factor: float,
        group: int,
        out_std: float,
        boundary: Boundary,
        rngs: nnx.Rngs,
    ):
        self.router = nnx.Param(normal(rngs, d_model, experts), spec=P(None, None))
        self.w_in = nnx.Param(normal(rngs, experts, d_model, d_ff), spec=P("ep", None, "tp"))
        self.w_out = nnx.Param(normal(rngs, experts, d_ff, d_model, std=out_std), spec=P("ep", "tp", None))
        self.top_k, self.factor, self.group, self.boundary = top_k, factor, group, boundary

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """Residual stream [b, s_stream, d] -> the same, the router's losses, and its counts."""
        logits = _logits(x, self.router[...])
        route = choose(logits, self.top_k)
        balanced = balance(logits, route, self.boundary.axes)
        y, dropped = self._experts(self.boundary.enter(x), jax.tree.map(self.boundary.enter, route))
        losses = {"aux_loss": balanced.aux_loss, "router_z_loss": balanced.z_loss}
        return self.boundary.leave(y), losses, {"expert_load": balanced.load, "dropped_tokens": dropped}

    def _experts(self, x: jax.Array, route: Route) -> tuple[jax.Array, jax.Array]:
        """Partial sums [b, s, d] of the chosen experts, and how many choices found no slot (int32 [])."""
        b, s, _ = x.shape
        t = self.group or s
        x, route = jax.tree.map(lambda a: rearrange(a, "b (n t) z -> (b n) t z", t=t), (x, route))
        experts = self.router.shape[1]
        size = capacity(t, experts, self.top_k, self.factor)
        slots = assign(route.experts, experts)
        filled = dispatch(x, route.experts, slots, experts, size)
        hidden = checkpoint_name(times(filled, self.w_in[...], "gecd,edf->gecf"), MLP_IN)
        y = gelu_times(hidden, self.w_out[...], "gecf,efd->gecd")
        dropped = jnp.sum(slots >= size, dtype=jnp.int32)
        once = jnp.where(lax.axis_index("tp") == 0, dropped, 0)  # every tp device counts the same tokens
        return rearrange(combine(y, route, slots), "(b n) t d -> b (n t) d", b=b), once
