"""Token and position embedding, and the head that shares the token table.

Both belong to every pipeline stage: the vocabulary is split over (pp, tp), padded to a multiple of their product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.layers.dropout import Place, dropout
from jax5d.layers.init import normal
from jax5d.layers.linear import add_bias
from jax5d.layers.norm import LayerNorm
from jax5d.parallel.data import varying
from jax5d.parallel.tensor import VOCAB_AXES, Boundary, cross_entropy, embed_tokens, likeliest


class Vocabulary(nnx.Module):
    """Embedding, final norm and tied head. `rows` is the padded vocabulary size."""

    def __init__(
        self, vocab: int, rows: int, context: int, d_model: int, dropout: float, boundary: Boundary, rngs: nnx.Rngs
    ):
        table = jnp.pad(normal(rngs, vocab, d_model), ((0, rows - vocab), (0, 0)))
        self.wte = nnx.Param(table, spec=P(VOCAB_AXES, None))
        self.wpe = nnx.Param(normal(rngs, context, d_model), spec=P(None, None))
        self.norm_f = LayerNorm(d_model)
        self.vocab, self.dropout, self.boundary = vocab, dropout, boundary

    def embed(self, ids: jax.Array, place: Place, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """int32 [b, s] -> the residual stream [b, s_stream, d]; `key` uint32 [2] is dropout's. Linear in the tables."""
        tokens = embed_tokens(self.wte[...], ids, self.boundary, dtype)
        positions = jnp.take(self.wpe[...], self.boundary.split(place.positions), axis=0)
        return dropout(add_bias(tokens, positions[None]), self.dropout, key, place, self.boundary)

    def loss(self, y: jax.Array, labels: jax.Array, chunks: int) -> jax.Array:
        """Summed cross-entropy of [b, s_stream, d] against int32 labels [b, s] (negative: ignored). float32 []."""
        y = varying(self.boundary.enter(self.norm_f(y)), VOCAB_AXES)
        flat = y.reshape(-1, y.shape[-1])
        return cross_entropy(flat, self.wte[...], labels.reshape(-1), vocab=self.vocab, chunks=chunks)

    def next_token(self, y: jax.Array, at: jax.Array, noise: jax.Array) -> jax.Array:
        """The id that maximises logits + noise at local position `at`: [b, s_stream, d], int32 [] -> int32 [b].

        Args:
            noise: float32 [b, rows of this device], added to the logits; 0 is greedy, Gumbel noise samples.
        """
        y = self.boundary.enter(self.norm_f(y))
        y = lax.dynamic_index_in_dim(y, at, axis=1, keepdims=False)
        return likeliest(y, self.wte[...], noise, self.vocab)
