"""Which token comes next: the likeliest, or a draw at a temperature from the top k, the top p, or all of them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.config import ConfigError
from jax5d.parallel.sampling import keep_likeliest, likeliest, probabilities
from jax5d.parallel.tensor import vocab_start

ROWS = P(("dp", "ep"))
"""Spec of arrays with an entry for each row [b, ...]."""
HOTTEST = float(jnp.finfo(jnp.float32).max)
"""The largest temperature that a program can take."""
Numbers = dict[str, jax.Array]
"""A sampling's values as a program takes them. Which names there are chooses the program, values do not."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. A draw is a function of the seed, the prompt's row and the token's position alone."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Then from the fewest likeliest of those that have this share of their probability; 1 from all of them."""
    seed: int = 0
    """Of the draws."""

    def check(self, vocab: int) -> None:
        """Raise `ConfigError` where no such sampling is."""
        if not 0 <= self.temperature <= HOTTEST:
            raise ConfigError(f"temperature={self.temperature} is no number from 0 up; give 0 for the likeliest token")
        if not 0 <= self.top_k <= vocab:
            raise ConfigError(f"top_k={self.top_k} is outside 0..{vocab} (model.vocab); give 0 to draw from all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is outside (0, 1]; give 1 to draw from all tokens")

    @property
    def numbers(self) -> Numbers:
        """What is needed of it: nothing where no token is drawn."""
        if not self.temperature:
            return {}
        drawn = {"key": jax.random.key(self.seed), "temperature": jnp.float32(self.temperature)}
        if self.top_k:
            drawn["top_k"] = jnp.float32(self.top_k)
        if self.top_p < 1:
            drawn["top_p"] = jnp.float32(self.top_p)
        return drawn


def choose(logits: jax.Array, position: jax.Array, numbers: Numbers) -> jax.Array:
    """The next token of each row, the same over (pp, tp), from logits in their places. Runs inside shard_map.

    Args:
        logits: float32 [b, v], of this device's rows of the batch and of the vocabulary.
        position: int32 [b], of the token that is chosen.
        numbers: of a `Sampling`.

    Returns:
        int32 [b]. A draw is the largest of logits / T + Gumbel noise (Gumbel 1954); here the noise is multiplied, which
        has the same maximum.
    """
    if not numbers:
        return likeliest(logits)
    temperature = numbers["temperature"]
    if "top_k" in numbers:
        logits = keep_likeliest(logits, jnp.isfinite(logits).astype(jnp.float32), numbers["top_k"])
    if "top_p" in numbers:
        logits = keep_likeliest(logits, probabilities(logits, temperature), numbers["top_p"])
    return likeliest(logits + temperature * _gumbel(numbers["key"], position, logits.shape[1]))


def _gumbel(key: jax.Array, position: jax.Array, vocab_rows: int) -> jax.Array:
    """Gumbel noise float32 [b, vocab_rows] of this device's rows of the batch and of the vocabulary."""
    rows = position.shape[0]
    row = lax.axis_index(("dp", "ep")) * rows + jnp.arange(rows)
    ids = vocab_start(vocab_rows) + jnp.arange(vocab_rows)
    fold = jax.random.fold_in
    one = lambda p, r, i: jax.random.gumbel(fold(fold(fold(key, p), r), i))  # noqa: E731
    return jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))(position, row, ids)
