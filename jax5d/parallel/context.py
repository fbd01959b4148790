"""Context parallelism: the sequence is split over cp, and keys and values go round a ring.

Each device keeps its queries and meets every block of keys and values once, merging partial results by the online
softmax in float32. The backward pass sends the blocks round again, and with them the gradient of each block, which
ends at its owner. Liu et al., Ring Attention, arXiv:2310.01889; the backward pass is FlashAttention's, 2205.14135.

Shapes: b batch, s local queries, t local keys of one piece, n local heads, m of them of keys and values, h head dim.
Blocks are contiguous: device r of cp holds the global positions r s .. (r+1) s - 1. A ring of one is plain blockwise
attention.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from jax5d.parallel.data import varying, varying_axes
from jax5d.parallel.heads import products, weighted_queries, weighted_values
from jax5d.parallel.random import keep

PIECE = 512
"""Most keys that one device's scores are computed for at a time."""


class Mask(NamedTuple):
    """What masks a score: causality and dropout."""

    causal: bool
    rate: float


class Draw(NamedTuple):
    """Where dropout on attention weights draws from: key uint32 [2], query ids uint32 [b, n, s] (global)."""

    key: jax.Array
    query_ids: jax.Array


@jax.named_scope("cp_share")
def from_owner(x: jax.Array, owner: jax.Array) -> jax.Array:
    """The value of the cp device `owner` on all of them: psum of a masked value over cp, 2 (c-1)/c K bytes."""
    return lax.psum(jnp.where(owner == lax.axis_index("cp"), x, 0), "cp")


def ring_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, draw: Draw, *, causal: bool = True, rate: float = 0.0
) -> jax.Array:
    """Exact attention over the whole sequence.

    Args:
        q: [b, s, n, h], this device's block, float32, bfloat16 or float16.
        k, v: [b, s, m, h]; m divides n.
        draw: source of the dropout mask; unused at rate 0.
        causal: whether a query sees later keys.
        rate: dropout rate on the attention weights.

    Returns:
        [b, s, n, h] in q's dtype. Scores, softmax and accumulators are float32.

    Bytes per device, K = bytes of k: forward (c-1) 2K by ppermute over cp; backward (c-1) 2K, and as many float32
    elements of their gradients.
    """
    return _attend(q, (k, v), draw, Mask(causal, rate))


Block = tuple[jax.Array, jax.Array]
"""Keys and values [b, s, m, h] of one device."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q: jax.Array, kv: Block, draw: Draw, mask: Mask) -> jax.Array:
    return _forward(q, kv, draw, mask)[0]


@jax.named_scope("cp_ring")
def _rotate(block: Block) -> Block:
    """Send both in one message to the next device of the ring. Transpose: send to the previous. Bytes: K of both."""
    size = lax.axis_size("cp")
    k, v = lax.ppermute(jnp.stack(block), "cp", [(i, (i + 1) % size) for i in range(size)])
    return k, v


def _pieces(block: Block, source: jax.Array) -> tuple[Block, jax.Array]:
    """Cut a block into pieces [c, b, t, m, h] with the global position of each one's first key."""
    size = block[0].shape[1]
    count = next(c for c in range(1, size + 1) if size % c == 0 and size // c <= PIECE)
    k, v = (rearrange(x, "b (c t) m h -> c b t m h", c=count) for x in block)
    return (k, v), source * size + jnp.arange(count) * (size // count)


def _scores(q: jax.Array, k: jax.Array, start: jax.Array, causal: bool) -> jax.Array:
    """float32 [b, n, s, t], minus infinity where a query may not look; `start` is the first key's position."""
    s, t = q.shape[1], k.shape[1]
    scores = products(q, k, jnp.float32) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    query = lax.axis_index("cp") * s + jnp.arange(s)
    return jnp.where((query[:, None] >= start + jnp.arange(t)[None])[None, None], scores, -jnp.inf)


def _dropped(weights: jax.Array, start: jax.Array, draw: Draw, rate: float) -> jax.Array:
    """Dropout of attention weights [b, n, s, t] by global (query, key)."""
    if not rate:
        return weights
    key_ids = (start + jnp.arange(weights.shape[-1])).astype(jnp.uint32)
    return jnp.where(
        keep(draw.key, rate, draw.query_ids[..., None], key_ids[None, None, None]), weights / (1 - rate), 0.0
    )


def _seen(source: jax.Array, causal: bool) -> jax.Array:
    """Whether this device's queries see any key of the block that `source` owns."""
    return source <= lax.axis_index("cp") if causal else source >= 0


def _merge(q: jax.Array, kv: Block, source: jax.Array, draw: Draw, mask: Mask, state: tuple) -> tuple:
    """Meet one block: update the running maximum, sum [b, n, s] and output [b, s, n, h], all float32."""

    def piece(state: tuple, part: tuple) -> tuple:
        top, total, out = state
        (k, v), start = part
        scores = _scores(q, k, start, mask.causal)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        used = _dropped(weights, start, draw, mask.rate).astype(v.dtype)
        out = out * jnp.swapaxes(shrink, 1, 2)[..., None] + weighted_values(used, v, jnp.float32)
        return (new_top, total * shrink + jnp.sum(weights, axis=-1), out), None

    def met() -> tuple:
        return lax.scan(piece, state, _pieces(kv, source))[0]

    return lax.cond(_seen(source, mask.causal), met, lambda: state)


def _forward(q: jax.Array, kv: Block, draw: Draw, mask: Mask) -> tuple[jax.Array, jax.Array]:
    """Output [b, s, n, h] and log-sum-exp float32 [b, n, s]."""
    b, s, n, h = q.shape
    axes = varying_axes(q)
    size, rank = lax.axis_size("cp"), lax.axis_index("cp")
    low = jnp.full((b, n, s), -1e30, jnp.float32)  # finite, so that low - low is 0 and not nan
    state = (low, jnp.zeros((b, n, s), jnp.float32), jnp.zeros((b, s, n, h), jnp.float32))
    state = tuple(varying(x, axes) for x in state)

    def step(carry: tuple, i: jax.Array) -> tuple:
        block, state = carry
        following = _rotate(block)  # does not depend on the merge: travels while this block is met
        return (following, _merge(q, block, (rank - i) % size, draw, mask, state)), None

    (last, state), _ = lax.scan(step, (kv, state), jnp.arange(size - 1))
    top, total, out = _merge(q, last, (rank + 1) % size, draw, mask, state)
    out = out / jnp.swapaxes(total, 1, 2)[..., None]
    return out.astype(q.dtype), top + jnp.log(total)


def _attend_fwd(q: jax.Array, kv: Block, draw: Draw, mask: Mask) -> tuple[jax.Array, tuple]:
    out, log_sum = _forward(q, kv, draw, mask)
    return out, (q, kv, draw, out, log_sum)


def _gradients(saved: tuple, d_out: jax.Array, kv: Block, source: jax.Array, mask: Mask) -> tuple[jax.Array, Block]:
    """What one block contributes: d_q float32 [b, s, n, h]; float32 [b, s, m, h] for keys and for values."""
    q, _, draw, out, log_sum = saved
    axes = varying_axes(q)
    inner = jnp.einsum("bsnh,bsnh->bns", d_out.astype(jnp.float32), out.astype(jnp.float32))

    def piece(d_q: jax.Array, part: tuple) -> tuple:
        (k, v), start = part
        weights = jnp.exp(_scores(q, k, start, mask.causal) - log_sum[..., None])
        d_used = products(d_out, v, jnp.float32)
        d_scores = weights * (_dropped(d_used, start, draw, mask.rate) - inner[..., None])
        d_scores = (d_scores * q.shape[-1] ** -0.5).astype(q.dtype)
        used = _dropped(weights, start, draw, mask.rate).astype(q.dtype)
        d_v = weighted_queries(used, d_out, v.shape[2], jnp.float32)
        d_k = weighted_queries(d_scores, q, k.shape[2], jnp.float32)
        return d_q + weighted_values(d_scores, k, jnp.float32), (d_k, d_v)

    zeros = [varying(jnp.zeros(x.shape, jnp.float32), axes) for x in (q, *kv)]

    def met() -> tuple[jax.Array, Block]:
        d_q, slopes = lax.scan(piece, zeros[0], _pieces(kv, source))
        d_k, d_v = (rearrange(x, "c b t m h -> b (c t) m h") for x in slopes)
        return d_q, (d_k, d_v)

    return lax.cond(_seen(source, mask.causal), met, lambda: (zeros[0], (zeros[1], zeros[2])))


def _attend_bwd(mask: Mask, saved: tuple, d_out: jax.Array) -> tuple:
    """The own block's gradient stays; every other block's travels with its keys and values, and one hop more."""
    q, kv, *_ = saved
    size, rank = lax.axis_size("cp"), lax.axis_index("cp")
    d_q, own = _gradients(saved, d_out, kv, rank, mask)

    def step(carry: tuple, i: jax.Array) -> tuple:
        block, d_block, d_q = carry
        block = _rotate(block)
        more_q, more = _gradients(saved, d_out, block, (rank - i) % size, mask)
        return (block, _rotate(_both(d_block, more)), d_q + more_q), None

    nothing = jnp.zeros_like(own[0]), jnp.zeros_like(own[1])
    (_, travelled, d_q), _ = lax.scan(step, (kv, nothing, d_q), jnp.arange(1, size))
    d_k, d_v = _both(own, travelled)
    return d_q.astype(q.dtype), (d_k.astype(q.dtype), d_v.astype(q.dtype)), None


def _both(one: Block, other: Block) -> Block:
    """Sums of keys' and of values' gradients."""
    return one[0] + other[0], one[1] + other[1]


_attend.defvjp(_attend_fwd, _attend_bwd)
