"""Writing without a cache: every token is a pass over the last tokens of the text, on any mesh that trains.

Plain, and with all axes at work, so a run's samples need no other mesh; a text may go on beyond the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.config import ConfigError
from jax5d.config.errors import divides
from jax5d.inference.sample import ROWS, Numbers, Sampling, choose
from jax5d.inference.weights import inference_weights, weight_specs
from jax5d.mesh import placed
from jax5d.models.build import BATCH_SPEC
from jax5d.parallel import pipeline
from jax5d.parallel.context import from_owner
from jax5d.parallel.schedules import forward_only
from jax5d.train.step import Trainer

Tree = Any


@dataclass(frozen=True)
class Window:
    """A trainer's model, which sees the last `size` tokens of a text, at positions from 0 on."""

    trainer: Trainer
    size: int

    @staticmethod
    def create(trainer: Trainer, size: int) -> Window:
        """Raises `ConfigError` for a window beyond the context, or one that cp or groups of experts do not divide.

        Attention takes keys in equal pieces of at most 512: a size above that which has no such divisor is slow.
        """
        model, mesh = trainer.config.model, trainer.config.mesh
        if not 1 <= size <= model.context:
            raise ConfigError(f"window={size} is outside 1..{model.context} (model.context)")
        divides("mesh.cp", mesh.cp, "window", size, f"use window={trainer.config.train.seq_len}, which was trained")
        if model.experts and model.capacity_factor:
            divides("model.group", model.group, "window / mesh.cp", size // mesh.cp, "use whole groups")
        return Window(trainer, size)

    def check(self, longest: int, count: int) -> None:
        """Any text fits."""

    def weights(self, params: Tree) -> Tree:
        """What the program computes with; see `inference_weights`."""
        return inference_weights(self.trainer, params)

    def tokens(self, weights: Tree, prompts: list[np.ndarray], sampling: Sampling) -> Iterator[np.ndarray]:
        """The next token of every prompt int32 [b], and the one after it, without end. Arguments: see `Decoder.tokens`.

        An expert's capacity, where there is one, is shared with the padding of a text shorter than the window.
        """
        texts, numbers = [list(prompt) for prompt in prompts], sampling.numbers
        while True:
            ids = np.zeros((1, len(texts), self.size), np.int32)
            for row, text in zip(ids[0], texts, strict=True):
                recent = text[-self.size :]
                row[: len(recent)] = recent
            lengths = np.array([len(text) for text in texts], np.int32)
            mesh = self.trainer.mesh
            arrays = jax.device_put((ids, lengths), (placed(mesh, BATCH_SPEC), placed(mesh, ROWS)))
            new = np.asarray(self.next_token(weights, *arrays, numbers))
            for text, token in zip(texts, new, strict=True):
                text.append(token)
            yield new

    @cached_property
    def next_token(self) -> jax.stages.Wrapped:
        """Compiled (weights, ids int32 [1, b, window], lengths int32 [b], numbers) -> int32 [b].

        Lengths are those of the texts, of which `ids` has the last tokens.
        """
        specs = weight_specs(self.trainer), BATCH_SPEC, ROWS, P()
        body = jax.shard_map(self._next, mesh=self.trainer.mesh, in_specs=specs, out_specs=ROWS, check_vma=True)
        return jax.jit(body)

    def _next(self, weights: Tree, ids: jax.Array, lengths: jax.Array, numbers: Numbers) -> jax.Array:
        """Local: this device's rows and its part of the window."""
        model, mesh = self.trainer.model.for_inference(), self.trainer.config.mesh
        _, rows, local = ids.shape
        at = jnp.minimum(lengths, self.size) - 1

        def head(outer: Tree, y: jax.Array, m: jax.Array) -> jax.Array:
            own = jnp.clip(at - lax.axis_index("cp") * local, 0, local - 1)
            y = jnp.take_along_axis(y, own[:, None, None], axis=1)
            return from_owner(choose(model.logits(outer, y)[:, 0], lengths, numbers), at // local)

        work = replace(model.work({"inputs": ids}, jax.random.key(0), rows * mesh.batch_shards), head=head)
        parts = self.trainer.zero.computed(weights)
        return pipeline.evaluate(forward_only(mesh.pp, 1), work, parts, model.stream_zeros({"inputs": ids})).head
