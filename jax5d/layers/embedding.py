"""Token and position embedding, and the head, which shares the token table or has its own.

Both belong to every pipeline stage: the vocabulary is split over (pp, tp), padded to a multiple of their product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax5d.config import ModelConfig
from jax5d.layers.dropout import Place, dropout
from jax5d.layers.init import normal
from jax5d.layers.linear import add_bias
from jax5d.parallel.data import varying
from jax5d.parallel.sampling import vocabulary_logits
from jax5d.parallel.tensor import VOCAB_AXES, Boundary, cross_entropy, embed_tokens


class Vocabulary(nnx.Module):
    """Token table, final norm and head, which has a table of its own unless the model is tied.

    `rows` is the padded vocabulary size, `norm` the final norm.
    """

    def __init__(self, config: ModelConfig, rows: int, norm: nnx.Module, boundary: Boundary, rngs: nnx.Rngs):
        self.wte = nnx.Param(_table(config, rows, rngs), spec=P(VOCAB_AXES, None))
        if not config.tied:
            self.head = nnx.Param(_table(config, rows, rngs), spec=P(VOCAB_AXES, None))
        self.head_name = "wte" if config.tied else "head"
        self.norm_f = norm
        self.vocab, self.dropout, self.boundary = config.vocab, config.dropout, boundary

    def embed(self, ids: jax.Array, place: Place, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """int32 [b, s] -> the residual stream [b, s_stream, d]; `key` uint32 [2] is dropout's. Linear in the tables."""
        tokens = embed_tokens(self.wte[...], ids, self.boundary, dtype)
        return dropout(self._placed(tokens, place), self.dropout, key, place, self.boundary)

    def _placed(self, tokens: jax.Array, place: Place) -> jax.Array:
        """What positions add to the stream [b, s_stream, d]: nothing, where attention knows them."""
        del place
        return tokens

    @property
    def _head(self) -> jax.Array:
        return getattr(self, self.head_name)[...]

    def loss(self, y: jax.Array, labels: jax.Array, chunks: int) -> jax.Array:
        """Summed cross-entropy of [b, s_stream, d] against int32 labels [b, s] (negative: ignored). float32 []."""
        y = varying(self.boundary.enter(self.norm_f(y)), VOCAB_AXES)
        flat = y.reshape(-1, y.shape[-1])
        return cross_entropy(flat, self._head, labels.reshape(-1), vocab=self.vocab, chunks=chunks)

    def logits(self, y: jax.Array) -> jax.Array:
        """float32 [b, s, v] of this device's rows of the vocabulary, minus infinity for padding; y [b, s_stream, d]."""
        return vocabulary_logits(self.boundary.enter(self.norm_f(y)), self._head, self.vocab)


class PlacedVocabulary(Vocabulary):
    """GPT-2's: each position adds a learned vector to the embedding."""

    def __init__(self, config: ModelConfig, rows: int, norm: nnx.Module, boundary: Boundary, rngs: nnx.Rngs):
        super().__init__(config, rows, norm, boundary, rngs)
        self.wpe = nnx.Param(normal(rngs, config.context, config.d_model), spec=P(None, None))

    def _placed(self, tokens: jax.Array, place: Place) -> jax.Array:
        positions = jnp.atleast_2d(self.boundary.split(place.positions))
        return add_bias(tokens, jnp.take(self.wpe[...], positions, axis=0))


def _table(config: ModelConfig, rows: int, rngs: nnx.Rngs) -> jax.Array:
    """One vector a token, and zeros behind the last."""
    return jnp.pad(normal(rngs, config.vocab, config.d_model), ((0, rows - config.vocab), (0, 0)))
