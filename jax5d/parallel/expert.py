"""Expert parallelism: each token goes to its top-k experts, which live on the devices of ep.

Tokens are put into slots, a fixed number per expert and group of tokens, so that every shape is static; one all_to_all
over ep carries the slots to the experts, a second one carries them back. Lepikhin et al., GShard, arXiv:2006.16668;
Fedus et al., Switch Transformer, arXiv:2101.03961.

A group is a run of tokens of one sequence on one device, so which token is dropped does not depend on the mesh.

Shapes: g groups, t tokens of a group, k choices (top-k), e experts, c slots per expert and group, d d_model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from jax5d.mesh import DATA_AXES


class Route(NamedTuple):
    """Where each token goes: gates float32 [..., k], experts int32 [..., k]."""

    gates: jax.Array
    experts: jax.Array


def choose(logits: jax.Array, top_k: int) -> Route:
    """The top-k experts of each token, and their softmax probabilities as gates. logits float32 [..., e]."""
    gates, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    return Route(gates, experts.astype(jnp.int32))


class Balance(NamedTuple):
    """Router statistics over the tokens of one microbatch on the whole mesh."""

    aux_loss: jax.Array
    """float32 []: e sum_e f_e P_e, 1 when even (Switch Transformer, eq. 4; f counts all k choices)."""
    z_loss: jax.Array
    """float32 []: mean squared log-sum-exp of the logits (ST-MoE, arXiv:2202.08906, eq. 5)."""
    load: jax.Array
    """int32 [e]: tokens sent to each expert."""


@jax.named_scope("router_sums")
def balance(logits: jax.Array, route: Route, token_axes: tuple[str, ...]) -> Balance:
    """Statistics over the global microbatch.

    Args:
        logits: float32 [b, s, e], of this device's tokens.
        route: the choices made from them.
        token_axes: ("tp",) where tp splits tokens too, otherwise ().

    Two psums over dp, ep, cp (and tp): float32 [e+1] and int32 [e]. Transpose: identity.
    """
    axes = (*DATA_AXES, *token_axes)
    experts = logits.shape[-1]
    tokens = math.prod(logits.shape[:-1]) * math.prod(lax.axis_size(a) for a in axes)
    probabilities = jnp.sum(jax.nn.softmax(logits, axis=-1), axis=(0, 1))
    square = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    sums = lax.psum(jnp.concatenate([probabilities, square[None]]), axes) / tokens
    counts = jnp.sum(jax.nn.one_hot(route.experts, experts, dtype=jnp.int32), axis=(0, 1, 2))
    load = lax.psum(counts, axes)
    share = load.astype(jnp.float32) / (tokens * route.experts.shape[-1])
    return Balance(experts * jnp.sum(share * sums[:-1]), sums[-1], load)


def capacity(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Slots per expert for a group of `tokens`: the even share times `factor`, or one per token at factor 0."""
    return min(tokens, math.ceil(factor * tokens * top_k / experts)) if factor else tokens


def assign(experts: jax.Array, count: int) -> jax.Array:
    """The slot of each choice in its expert's queue: int32 [g, t, k]; a slot at or beyond the capacity is dropped.

    First choices queue before second ones, earlier tokens before later ones. Integers throughout: a sum of ones in
    bfloat16 stops at 256.
    """
    queue = rearrange(experts, "g t k -> g (k t)")
    mine = jax.nn.one_hot(queue, count, dtype=jnp.int32)
    before = jnp.cumsum(mine, axis=1) - mine
    return rearrange(jnp.sum(before * mine, axis=-1), "g (k t) -> g t k", k=experts.shape[-1])


@jax.named_scope("ep_dispatch")
def dispatch(x: jax.Array, experts: jax.Array, slots: jax.Array, count: int, size: int) -> jax.Array:
    """Send tokens to their experts: [g, t, d] -> [ep g, e/ep, c, d].

    all_to_all over ep, (n-1)/n of the slots' bytes. Transpose: the all_to_all back. `count` is e, `size` is c.
    """
    g, _, d = x.shape
    group = jnp.arange(g)[:, None, None]
    filled = jnp.zeros((g, count, size, d), x.dtype).at[group, experts, slots].add(x[:, :, None], mode="drop")
    return lax.all_to_all(filled, "ep", split_axis=1, concat_axis=0, tiled=True)


@jax.named_scope("ep_combine")
def combine(y: jax.Array, route: Route, slots: jax.Array) -> jax.Array:
    """Bring results back and add a token's up by its gates: [ep g, e/ep, c, d] -> [g, t, d].

    all_to_all over ep, as in `dispatch`. A dropped choice adds nothing. `route` and `slots` are [g, t, k].
    """
    back = lax.all_to_all(y, "ep", split_axis=0, concat_axis=1, tiled=True)
    group = jnp.arange(back.shape[0])[:, None, None]
    found = back.at[group, route.experts, slots].get(mode="fill", fill_value=0)
    return jnp.einsum("gtkd,gtk->gtd", found, route.gates.astype(y.dtype))
