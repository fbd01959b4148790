"""Writing with a cache: one pass over the prompts fills it, and then each token is one pass of one token a row.

Prompts of different lengths lie in one array, with padding behind: causal attention never looks there, and each row's
new tokens take the places of its padding. The residual stream is whole on every tp device, whatever
`parallel.sequence` says, since one token cannot be split.

Shapes: b rows, s tokens of a prompt with its padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax5d.config import ConfigError
from jax5d.inference.cache import SPEC, Cache, append, attend, cache_shape, empty, fill
from jax5d.inference.sample import ROWS, Numbers, Sampling, choose
from jax5d.inference.weights import inference_weights, weight_shapes, weight_specs
from jax5d.layers.dropout import Place
from jax5d.mesh import DATA_AXES, memories, placed
from jax5d.parallel.context import Draw, from_owner
from jax5d.parallel.data import varying
from jax5d.parallel.stack import ascend
from jax5d.train.step import Trainer

Tree = Any
LENGTHS = 64
"""Prompts are padded to a power of two from here up, so that few programs are compiled."""

Meeting = Callable[[Cache, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Cache]]
"""(cache, layer, q, k, v) -> (attention's result, the cache with k and v in it)."""


@dataclass(frozen=True)
class Decoder:
    """A trainer's model with a cache of `capacity` tokens a row, prompt and continuation together."""

    trainer: Trainer
    capacity: int

    @staticmethod
    def create(trainer: Trainer, capacity: int | None = None) -> Decoder:
        """A decoder; `capacity` is the model's context unless a smaller one is given.

        Raises `ConfigError` for pp or cp, for experts with a capacity, and for a cache beyond the context.
        """
        model, mesh = trainer.config.model, trainer.config.mesh
        capacity = model.context if capacity is None else capacity
        other = f"or recompute with window={trainer.config.train.seq_len}"
        for axis in ("pp", "cp"):
            if (size := getattr(mesh, axis)) > 1:
                raise ConfigError(
                    f"mesh.{axis}={size}: {axis} cannot share out one new token; open the checkpoint on a mesh of dp, "
                    f"ep and tp, {other}"
                )
        if model.experts and model.capacity_factor:
            raise ConfigError(
                f"model.capacity_factor={model.capacity_factor}: whether a token finds a slot depends on the others of "
                f"its group, which a cache does not have; use --model.capacity_factor 0 {other}"
            )
        if not 1 <= capacity <= model.context:
            raise ConfigError(f"a cache of {capacity} tokens is outside 1..{model.context} (model.context)")
        return Decoder(trainer, capacity)

    def check(self, longest: int, count: int) -> None:
        """Raise `ConfigError` where `count` tokens behind a prompt of `longest` do not fit."""
        if longest + count > self.capacity:
            fewer = f"ask for {self.capacity - longest} or fewer"
            shorter = f"shorten the prompt to {self.capacity - 1}"
            raise ConfigError(
                f"a prompt of {longest} tokens and count={count} more are {longest + count}, beyond the cache of "
                f"{self.capacity} (model.context={self.trainer.config.model.context}); "
                f"{fewer if longest < self.capacity else shorter}, or recompute with window={self.capacity}"
            )

    def weights(self, params: Tree) -> Tree:
        """What the programs compute with; see `inference_weights`."""
        return inference_weights(self.trainer, params)

    def tokens(self, weights: Tree, prompts: list[np.ndarray], sampling: Sampling) -> Iterator[np.ndarray]:
        """The next token of every prompt int32 [b], and the one after it, until the cache is full.

        Args:
            weights: as `weights` gives them.
            prompts: int32, checked; as many as a multiple of dp x ep.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        ids = np.zeros((len(prompts), padded_length(max(lengths), self.capacity)), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        put, numbers = partial(jax.device_put, device=placed(self.trainer.mesh, ROWS)), sampling.numbers
        token, cache = self.prefill(weights, put(ids), put(lengths), numbers)
        yield np.asarray(token)
        for ahead in range(self.capacity - max(lengths)):
            token, cache = self.step(weights, cache, token, put(lengths + ahead), numbers)
            yield np.asarray(token)

    @cached_property
    def prefill(self) -> jax.stages.Wrapped:
        """Compiled (weights, ids int32 [b, s], lengths int32 [b], numbers) -> (next token int32 [b], `Cache`).

        Once for each shape; s is at most the capacity, and what is at or behind a row's length does not matter.
        """
        return self._program(self._prefill, (ROWS, ROWS, P()))

    @cached_property
    def step(self) -> jax.stages.Wrapped:
        """Compiled (weights, cache, token int32 [b], position int32 [b], numbers) -> (next token int32 [b], `Cache`).

        `position` is the token's, below the capacity. The old cache is donated.
        """
        return self._program(self._step, (SPEC, ROWS, ROWS, P()), donate_argnums=1)

    def arguments(self, rows: int, sampling: Sampling) -> tuple[Tree, Any, Any, Any, Numbers]:
        """Those of `step` for `rows` rows as ShapeDtypeStructs, to trace or compile it with."""
        model, mesh = self.trainer.config.model, self.trainer.config.mesh
        kept, each = placed(self.trainer.mesh, SPEC), placed(self.trainer.mesh, ROWS)
        array: Any = jax.ShapeDtypeStruct(cache_shape(model, mesh, rows, self.capacity), model.dtype, sharding=kept)
        row = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=each)
        return weight_shapes(self.trainer), Cache(array, array), row, row, sampling.numbers

    def _program(self, body: Callable, specs: tuple, **options: Any) -> jax.stages.Wrapped:
        mesh, results = self.trainer.mesh, (ROWS, SPEC)
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(weight_specs(self.trainer), *specs), out_specs=results, check_vma=True
        )
        # respelt by JAX, the cache that a step gives would make the next step a program of its own
        shardings = tuple(placed(mesh, spec) for spec in results) if memories(mesh) else None
        return jax.jit(mapped, out_shardings=shardings, **options)

    def _prefill(self, weights: Tree, ids: jax.Array, lengths: jax.Array, numbers: Numbers) -> tuple[jax.Array, Cache]:
        """Local: this device's rows."""
        model = self.trainer.model.for_inference()
        cache = empty(model.config, model.mesh, ids.shape[0], self.capacity)
        undrawn = Draw(jnp.zeros(2, jnp.uint32), jnp.zeros((1, 1, 1), jnp.uint32))

        def meet(cache: Cache, at: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Cache]:
            return model.attend(q, k, v, undrawn, rate=0.0), fill(cache, at, k, v)

        return self._pass(weights, ids, jnp.arange(ids.shape[1]), cache, meet, lengths, numbers)

    def _step(
        self, weights: Tree, cache: Cache, token: jax.Array, position: jax.Array, numbers: Numbers
    ) -> tuple[jax.Array, Cache]:
        """Local: this device's rows."""

        def meet(cache: Cache, at: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Cache]:
            cache = append(cache, at, position, k, v)
            return attend(q, cache, at, position), cache

        return self._pass(weights, token[:, None], position[:, None], cache, meet, jnp.ones_like(position), numbers)

    def _pass(
        self,
        weights: Tree,
        ids: jax.Array,
        positions: jax.Array,
        cache: Cache,
        meet: Meeting,
        lengths: jax.Array,
        numbers: Numbers,
    ) -> tuple[jax.Array, Cache]:
        """Through the model, and the token that follows the last of each row's `lengths` ids."""
        model, parts = self.trainer.model.for_inference(), self.trainer.zero.computed(weights)
        place = Place(jnp.arange(ids.shape[0]), positions, model.config.context)
        x = model.embed(parts["outer"], ids, place, jnp.zeros(2, jnp.uint32))
        x = varying(x, ("pp", *DATA_AXES))

        def layer(carry: tuple[jax.Array, Cache], params: Tree, at: jax.Array) -> tuple[tuple[jax.Array, Cache], Tree]:
            x, cache = carry
            return model.remembering(params, x, place, partial(meet, cache, at)), ()

        (y, cache), *_ = ascend(parts["blocks"], layer, (x, cache))
        last = jnp.take_along_axis(y, lengths[:, None, None] - 1, axis=1)
        following = jnp.take_along_axis(jnp.broadcast_to(positions, ids.shape), lengths[:, None] - 1, axis=1)[:, 0] + 1
        token = choose(model.logits(parts["outer"], last)[:, 0], following, numbers)
        return from_owner(token, jnp.int32(0)), cache


def padded_length(length: int, limit: int) -> int:
    """The next power of two, from `LENGTHS` up, and at most `limit`."""
    return min(max(LENGTHS, 1 << (int(length) - 1).bit_length()), limit)
