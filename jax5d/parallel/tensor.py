"""Tensor parallelism: the boundary of a region whose weights are split over tp, and the split vocabulary.

A tensor-parallel region begins with weights that are split by columns (`boundary.columns`) and ends with one that is
split by rows (`boundary.rows`): nothing is sent in between, and what leaves are partial sums. Megatron-LM,
arXiv:1909.08053, section 3. A boundary also says how the residual stream between regions is laid out (`split`, `axes`).

Shapes: b batch, s sequence, d d_model, n tokens, v vocabulary; all of them local.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.agree import zero_once
from jax5d.parallel.data import varying, varying_axes

VOCAB_AXES = ("pp", "tp")
"""Axes that split the vocabulary."""


Tree = Any
Product = Callable[[Any, Tree], Tree]
"""(arrays [b, s, ...], weights) -> arrays [b, s, ...]: what a linear layer makes of each token by itself."""


class Boundary(Protocol):
    """How activations pass between the residual stream and a tensor-parallel region."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes beyond dp, ep, cp over which the residual stream's tokens are split."""
        ...

    def enter(self, x: jax.Array) -> jax.Array:
        """Residual stream [b, s_stream, ...] to the region's input [b, s, ...], varying over tp."""
        ...

    def leave(self, x: jax.Array) -> jax.Array:
        """The region's partial sums [b, s, d] to the residual stream [b, s_stream, d]."""
        ...

    def columns(self, product: Product, x: jax.Array, weights: Tree) -> Tree:
        """A column-parallel layer: product(enter(x), weights), arrays [b, s, ...]. `product` is affine in x."""
        ...

    def rows(self, product: Product, x: Tree, weights: Tree) -> jax.Array:
        """A row-parallel layer: leave(product(x, weights)), [b, s_stream, d]. A bias is for the caller to add."""
        ...

    def split(self, x: jax.Array) -> jax.Array:
        """A value known on all tp devices [s, ...] to the residual stream's part of it [s_stream, ...]."""
        ...


class TensorBoundary:
    """The residual stream is replicated over tp: Megatron-LM's f and g."""

    axes: tuple[str, ...] = ()

    @jax.named_scope("tp_enter")
    def enter(self, x: jax.Array) -> jax.Array:
        """f: identity. Transpose: psum over tp, 2 (t-1)/t K bytes."""
        return lax.pcast(x, "tp", to="varying")

    @jax.named_scope("tp_sum")
    def leave(self, x: jax.Array) -> jax.Array:
        """g: psum over tp, 2 (t-1)/t K bytes. Transpose: identity."""
        return lax.psum(x, "tp")

    def columns(self, product: Product, x: jax.Array, weights: Tree) -> Tree:
        """Bytes: those of `enter`."""
        return product(self.enter(x), weights)

    def rows(self, product: Product, x: Tree, weights: Tree) -> jax.Array:
        """Bytes: those of `leave`."""
        return self.leave(product(x, weights))

    def split(self, x: jax.Array) -> jax.Array:
        """Identity: the stream holds every token. Bytes: 0."""
        return x


def own_heads(weight: jax.Array, heads: int) -> jax.Array:
    """The key and value heads that this device's query heads attend to: [..., own, h] of a weight [..., stored, h].

    Grouped-query attention (Ainslie et al., arXiv:2305.13245) has `heads` of them. Where tp divides those, the weight
    is split and all that is stored is this device's own; where tp is a multiple of them, every device stores all and
    uses one, which t / heads devices share. Bytes: 0; gradients of what is stored whole are parts of a sum over tp.
    """
    t = lax.axis_size("tp")
    own = max(heads // t, 1)
    if own == weight.shape[-2]:
        return weight
    return lax.dynamic_slice_in_dim(weight, lax.axis_index("tp") * heads // t, own, axis=weight.ndim - 2)


def vocab_start(rows: int) -> jax.Array:
    """First vocabulary id of this device's `rows` rows. int32 []."""
    return lax.axis_index(VOCAB_AXES) * rows


@jax.named_scope("vocab_sum")
def embed_tokens(table: jax.Array, ids: jax.Array, boundary: Boundary, dtype: jnp.dtype) -> jax.Array:
    """Look tokens up in a table whose rows are split over (pp, tp).

    Args:
        table: [v, d], this device's rows. Read as float32, so that gradients of a token's rows are added up in it.
        ids: int32 [b, s].
        boundary: gives the output the residual stream's layout.
        dtype: of the output; the sum has one addend that is not zero, so it is exact in any dtype.

    Returns:
        dtype [b, s_stream, d], the same on every pp device. Each device adds the rows it owns and zeros elsewhere:
        `boundary.leave` over tp, then psum over pp, 2 (p-1)/p K bytes. Transpose: that of `leave` (nothing, or an
        all_gather over tp), and nothing over pp.
    """
    rows = table.shape[0]
    local = ids - vocab_start(rows)
    owned = (local >= 0) & (local < rows)
    found = _rows(table.astype(jnp.float32), jnp.where(owned, local, 0)).astype(dtype)
    return lax.psum(boundary.leave(jnp.where(owned[..., None], found, 0)), "pp")


@jax.custom_vjp
def _rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table [v, d] by their places int32 [b, s], all of them there: [b, s, d]."""
    return table.at[ids].get(mode="promise_in_bounds")


def _rows_fwd(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple]:
    return _rows(table, ids), (jnp.zeros((table.shape[0], 0)), ids)


def _rows_bwd(saved: tuple, d_found: jax.Array) -> tuple[jax.Array, None]:
    shape, ids = saved
    # zeros that wait for the gradient: others XLA would write before the layers' backward pass, and keep all the time
    zero = zero_once([d_found]).astype(d_found.dtype)
    zeros = varying(jnp.broadcast_to(zero, (shape.shape[0], d_found.shape[-1])), varying_axes(d_found))
    return zeros.at[ids].add(d_found, mode="promise_in_bounds"), None


_rows.defvjp(_rows_fwd, _rows_bwd)


def cross_entropy(y: jax.Array, table: jax.Array, labels: jax.Array, *, vocab: int, chunks: int = 1) -> jax.Array:
    """Sum of next-token cross-entropies; logits exist for one chunk of tokens and this device's vocabulary only.

    Args:
        y: [n, d], the head's input, varying over (pp, tp).
        table: [v, d], this device's rows of the output embedding; rows at or beyond `vocab` are padding. Its gradient
            is added up over chunks in float32.
        labels: int32 [n]; a negative label is ignored.
        vocab: true global vocabulary size.
        chunks: number of pieces that the tokens are processed in; need not divide n.

    Returns:
        float32 [], the same over (pp, tp). Per chunk of c tokens: pmax of 4c bytes and psum of 8c bytes over (pp, tp).
        The gradient is made in the forward pass, chunk by chunk, so no logits are kept and none recomputed; its
        bytes are those of the caller's boundary.
    """
    n = labels.shape[0]
    size = -(-n // chunks)
    pad = chunks * size - n
    y_chunks = jnp.pad(y, ((0, pad), (0, 0))).reshape(chunks, size, y.shape[1])
    label_chunks = jnp.pad(labels, (0, pad), constant_values=-1).reshape(chunks, size)
    return _summed_loss(y_chunks, table.astype(jnp.float32), label_chunks, vocab)


@jax.named_scope("vocab_loss")
def _chunk_loss(y: jax.Array, table: jax.Array, labels: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Loss of one chunk and its derivative with respect to the local logits: float32 [], float32 [n, v]."""
    rows = table.shape[0]
    logits = jnp.einsum("nd,vd->nv", y, table, preferred_element_type=jnp.float32)
    column = vocab_start(rows) + jnp.arange(rows)
    if rows * lax.axis_size(VOCAB_AXES) > vocab:  # else there is no padding, and a pass over the logits is saved
        logits = jnp.where((column < vocab)[None], logits, -jnp.inf)
    top = lax.pmax(jnp.max(logits, axis=1), VOCAB_AXES)
    exps = jnp.exp(logits - top[:, None])
    hit = column[None] == labels[:, None]
    own = jnp.stack([jnp.sum(exps, axis=1), jnp.sum(jnp.where(hit, logits, 0.0), axis=1)])
    total, target = lax.psum(own, VOCAB_AXES)
    valid = labels >= 0
    loss = jnp.sum(jnp.where(valid, jnp.log(total) + top - target, 0.0))
    d_logits = jnp.where(valid[:, None], exps / total[:, None] - hit.astype(jnp.float32), 0.0)
    return loss, d_logits


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed_loss(y: jax.Array, table: jax.Array, labels: jax.Array, vocab: int) -> jax.Array:
    """Sum over chunks: y [c, n, d], table [v, d], labels [c, n] -> float32 []."""
    cast = table.astype(y.dtype)
    losses = lax.map(lambda chunk: _chunk_loss(chunk[0], cast, chunk[1], vocab)[0], (y, labels))
    return jnp.sum(losses)


def _summed_loss_fwd(y: jax.Array, table: jax.Array, labels: jax.Array, vocab: int) -> tuple:
    cast = table.astype(y.dtype)  # once, not in every chunk

    def chunk(d_table: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple:
        y_piece, label_piece = piece
        loss, d_logits = _chunk_loss(y_piece, cast, label_piece, vocab)
        d_logits = d_logits.astype(y.dtype)
        d_y = jnp.einsum("nv,vd->nd", d_logits, cast)
        d_table += jnp.einsum("nv,nd->vd", d_logits, y_piece, preferred_element_type=jnp.float32)
        return d_table, (loss, d_y)

    zeros = varying(jnp.zeros(table.shape, jnp.float32), varying_axes(table))
    zeros = varying(zeros, varying_axes(y))
    d_table, (losses, d_y) = lax.scan(chunk, zeros, (y, labels))
    return jnp.sum(losses), (d_y, d_table)


def _summed_loss_bwd(vocab: int, saved: tuple, g: jax.Array) -> tuple:
    d_y, d_table = saved
    # in float32: g rounded to bfloat16 would scale every gradient below the head alike, up to 0.4 % wrong
    return (d_y.astype(jnp.float32) * g).astype(d_y.dtype), (d_table * g).astype(d_table.dtype), None


_summed_loss.defvjp(_summed_loss_fwd, _summed_loss_bwd)
