"""Text from a model's own weights, on the mesh that it was trained on.

Every new token is a forward pass over the whole window, without a cache: plain, and the same on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax5d.config import ConfigError
from jax5d.models.build import BATCH_SPEC
from jax5d.parallel import pipeline
from jax5d.parallel.context import from_owner
from jax5d.parallel.schedules import forward_only
from jax5d.parallel.tensor import vocab_start
from jax5d.train.step import Trainer

Tree = Any


def generate(
    trainer: Trainer, params: Tree, prompt: list[int], count: int, *, temperature: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Continue a prompt, once for each data shard of the mesh.

    Args:
        trainer: the model and mesh that `params` belong to.
        prompt: token ids, at least one.
        count: tokens to add. Beyond the model's training window the last tokens of the text are the context.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is drawn.
        seed: of the draws.

    Returns:
        int32 [dp x ep, len(prompt) + count]; ids are always below the vocabulary size.

    Raises:
        ConfigError: an empty prompt, an id beyond the vocabulary, or a negative temperature.
    """
    vocab, rows, window = trainer.config.model.vocab, trainer.config.mesh.batch_shards, trainer.config.train.seq_len
    if not prompt or not all(0 <= i < vocab for i in prompt):
        raise ConfigError(f"the prompt {prompt} must be one or more ids below model.vocab={vocab}")
    if temperature < 0:
        raise ConfigError(f"temperature={temperature} is below 0; give 0 for the likeliest token, or more")
    step = _next_token(trainer)
    sharding = NamedSharding(trainer.mesh, BATCH_SPEC)
    text = np.tile(np.asarray(prompt, np.int32), (rows, 1))
    for _ in range(count):
        recent = text[:, -window:]
        inputs = np.zeros((1, rows, window), np.int32)
        inputs[0, :, : recent.shape[1]] = recent
        key = jax.random.fold_in(jax.random.key(seed), text.shape[1])
        at, heat = np.int32(recent.shape[1] - 1), np.float32(temperature)
        token = step(params, jax.device_put(inputs, sharding), at, heat, key)
        text = np.concatenate([text, np.asarray(token)[:, None]], axis=1)
    return text


def _next_token(trainer: Trainer) -> Callable[..., jax.Array]:
    """Compiled (params, inputs [1, rows, s], position [], temperature [], key) -> int32 [rows]."""
    model = trainer.model.without_dropout()

    def body(params: Tree, inputs: jax.Array, at: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
        batch = {"inputs": inputs}
        rows, local = inputs.shape[1:]

        def head(outer: Tree, y: jax.Array, m: jax.Array) -> jax.Array:
            noise = temperature * _gumbel(key, rows, outer["wte"].shape[0])
            token = model.next_token(outer, y, jnp.clip(at - lax.axis_index("cp") * local, 0, local - 1), noise)
            return from_owner(token, at // local)

        work = model.work(batch, jax.random.key(0), rows * trainer.config.mesh.batch_shards)
        table = forward_only(trainer.config.mesh.pp, 1)
        opened = trainer.zero.opened(params)
        return pipeline.evaluate(table, replace(work, head=head), opened, model.stream_zeros(batch)).head

    specs = (trainer.specs.params, BATCH_SPEC, P(), P(), P())
    mapped = jax.shard_map(body, mesh=trainer.mesh, in_specs=specs, out_specs=P(("dp", "ep")), check_vma=True)
    return jax.jit(mapped)


def _gumbel(key: jax.Array, rows: int, vocab_rows: int) -> jax.Array:
    """Gumbel noise float32 [rows, vocab_rows] of this device's rows of the batch and of the vocabulary.

    Adding it to logits / T and taking the largest draws from their softmax at temperature T; here logits stay and the
    noise is scaled, which has the same maximum.
    """
    row = lax.axis_index(("dp", "ep")) * rows + jnp.arange(rows)
    ids = vocab_start(vocab_rows) + jnp.arange(vocab_rows)
    one = lambda r, i: jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, r), i))  # noqa: E731
    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(row, ids)
