"""The split vocabulary where text is written: logits of one position, which of them may be drawn, and which one is.

Logits stay where they are. What travels is what devices need to agree on a row's cut: 8 times 16 numbers, whatever the
size of the vocabulary.

Shapes: b batch, s sequence, d d_model, v vocabulary; all of them local. The vocabulary is split over (pp, tp).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.data import varying, varying_axes
from jax5d.parallel.tensor import VOCAB_AXES, vocab_start

BITS = 4
"""Bits of the cut that a round of `keep_likeliest` finds."""


def vocabulary_logits(y: jax.Array, table: jax.Array, vocab: int) -> jax.Array:
    """y [b, s, d] times table [v, d]: float32 [b, s, v]. Rows at or beyond `vocab` are padding: minus infinity."""
    logits = jnp.einsum("bsd,vd->bsv", y, table.astype(y.dtype), preferred_element_type=jnp.float32)
    return jnp.where((_ids(logits) < vocab)[None, None], logits, -jnp.inf)


def _ids(logits: jax.Array) -> jax.Array:
    """Vocabulary ids int32 [v] of this device's rows."""
    return vocab_start(logits.shape[-1]) + jnp.arange(logits.shape[-1])


@jax.named_scope("vocab_max")
def likeliest(logits: jax.Array) -> jax.Array:
    """The id of each row's largest logit, of equals the first: float32 [b, v] -> int32 [b], the same over (pp, tp).

    Two pmax over (pp, tp), 8 b bytes together.
    """
    best = lax.pmax(jnp.max(logits, axis=1), VOCAB_AXES)
    last = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(logits == best[:, None], _ids(logits)[None], last), axis=1)
    return -lax.pmax(-first, VOCAB_AXES)


@jax.named_scope("vocab_softmax")
def probabilities(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """softmax(logits / temperature) over the whole vocabulary: float32 [b, v], [] -> float32 [b, v].

    A pmax and a psum over (pp, tp) of 4 b bytes each.
    """
    top = lax.pmax(jnp.max(logits, axis=1), VOCAB_AXES)
    exps = jnp.exp((logits - top[:, None]) / temperature)
    return exps / lax.psum(jnp.sum(exps, axis=1), VOCAB_AXES)[:, None]


@jax.named_scope("vocab_cut")
def keep_likeliest(logits: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The fewest largest logits of each row whose weights add up to `target`; the others minus infinity.

    Weights of 1 keep the `target` largest (top-k), probabilities keep the nucleus of Holtzman et al., arXiv:1904.09751,
    section 3.1 (top-p). Logits that equal the smallest one kept are kept as well.

    Args:
        logits: float32 [b, v].
        weights: float32 [b, v], not below 0; 0 where the logit is minus infinity.
        target: float32 []. Everything is kept where all weights together are less.

    The smallest one kept is found by its bits, 4 in each of 8 rounds: one psum over (pp, tp) of 64 b bytes a round.
    """
    order = _order(logits)
    digits = jnp.arange(2**BITS, dtype=jnp.uint32)

    def narrow(low: jax.Array, shift: jax.Array) -> tuple[jax.Array, None]:
        cuts = low[:, None] + (digits << shift)[None]
        above = order[:, None, :] >= cuts[..., None]
        total = lax.psum(jnp.sum(jnp.where(above, weights[:, None, :], 0), axis=-1), VOCAB_AXES)
        digit = jnp.maximum(jnp.sum(total >= target, axis=1) - 1, 0)
        return low + (digit.astype(jnp.uint32) << shift), None

    axes = tuple(a for a in varying_axes(logits) if a not in VOCAB_AXES)
    zeros = varying(jnp.zeros(logits.shape[0], jnp.uint32), axes)
    low, _ = lax.scan(narrow, zeros, jnp.arange(32 - BITS, -1, -BITS, dtype=jnp.uint32))
    return jnp.where(order >= low[:, None], logits, -jnp.inf)


def _order(x: jax.Array) -> jax.Array:
    """uint32 numbers that are ordered as the float32 numbers are: their bits, with the negative ones turned round."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 equals 0
    return jnp.where(bits >> 31 == 0, bits | jnp.uint32(1 << 31), ~bits)
