"""Tiny models trained on t devices and on one: losses, gradients, parameters, and bytes on the wire."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from experiments.ch03_tensor_parallelism._block_program import WAYS
from experiments.training import Traffic, on_first_devices, remembering_sgd
from jax5d.config import PRESETS, MeshConfig, ModelConfig, RunConfig, TrainConfig

Tree = Any

STEPS, ROWS, LENGTH, RATE = 4, 4, 32, 0.1

_TINY = {"layers": 2, "d_model": 64, "heads": 8, "d_ff": 192, "vocab": 97, "context": LENGTH}
MODELS: dict[str, ModelConfig] = {
    "GPT-2": replace(PRESETS["gpt2-tiny"], **_TINY),
    **{f"Llama, kv {m}": replace(PRESETS["llama-tiny"], **_TINY, kv_heads=m) for m in (8, 2, 1)},
}
"""A vocabulary that no t divides; heads of keys and values that t divides, and fewer."""

QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Options of the compilation: it takes longer than the steps do."""


@dataclass(frozen=True)
class Trained:
    """A few steps of SGD."""

    losses: list[float]
    gradients: Tree
    """Of the first step."""
    params: Tree
    """After the last."""
    traffic: Traffic
    seconds: float
    """The fastest step."""

    @classmethod
    def of(cls, model: ModelConfig, way: str, t: int, seed: int) -> Trained:
        """Train on the first t devices."""
        train = TrainConfig(global_batch=ROWS, seq_len=LENGTH, clip=0)
        config = RunConfig(MeshConfig(tp=t), model, WAYS[way], train, seed=seed)
        trainer = on_first_devices(config, remembering_sgd(RATE))
        step = trainer.step.lower(*trainer.arguments).compile(compiler_options=QUICKLY)
        state, losses, times, gradients = trainer.init(), [], [], None
        for batch in _batches(model, seed):
            on_mesh = jax.device_put(batch, trainer.batch_sharding)
            start = time.perf_counter()
            state, metrics = step(state, on_mesh)
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - start)
            gradients = gradients or jax.tree.map(_shards, state.opt_state[0].trace)
        return cls(losses, gradients, jax.tree.map(_shards, state.params), Traffic.of(trainer), min(times))

    def errors(self, want: Trained) -> dict[str, float]:
        """Distances from one device's: of losses, relative; of any device's shards, over a leaf's largest entry."""
        pairs = zip(self.losses, want.losses, strict=True)
        return {
            "losses": max(abs(a / b - 1) for a, b in pairs),
            "gradients of the first step": _worst(self.gradients, want.gradients),
            "parameters after the last step": _worst(self.params, want.params),
        }


def _batches(model: ModelConfig, seed: int) -> list[dict[str, np.ndarray]]:
    """Random tokens, the same on every mesh."""
    tokens = np.random.default_rng(seed).integers(0, model.vocab, (STEPS, 1, ROWS, LENGTH + 1), np.int32)
    return [{"inputs": step[..., :-1], "labels": step[..., 1:]} for step in tokens]


class Shards(list):
    """What each device has of an array, with its place."""


def _shards(array: jax.Array) -> Shards:
    return Shards((shard.index, np.asarray(shard.data)) for shard in array.addressable_shards)


def _worst(got: Tree, want: Tree) -> float:
    is_shards = lambda x: isinstance(x, Shards)  # noqa: E731
    return max(jax.tree.leaves(jax.tree.map(_off, got, want, is_leaf=is_shards)))


def _off(got: Shards, want: Shards) -> float:
    """Of every shard of an array from one device's whole one; rows of padding must be 0."""
    ((_, whole),) = want
    worst = 0.0
    for index, data in got:
        part = np.zeros_like(data)
        true = whole[index]
        part[tuple(slice(n) for n in true.shape)] = true
        worst = max(worst, float(np.max(np.abs(data - part))))
    return worst / float(np.max(np.abs(whole)))
