"""Tiny models under tensor and sequence parallelism: training steps, and gradients whose sum over tp is left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.training import on_first_devices, remembering_sgd
from jax5d.config import PRESETS, MeshConfig, ParallelConfig, RunConfig, TrainConfig, check
from jax5d.models.build import BATCH_SPEC
from jax5d.parallel.data import diverge, is_axes, sum_over, sum_over_shards, varying, varying_axes
from jax5d.train.step import Trainer

Tree = Any
Batch = dict[str, np.ndarray]
Leaves = dict[str, np.ndarray]
"""Whole arrays by the names of their parameters, such as blocks.norm_1.scale."""

Architecture = Literal["gpt2", "llama"]
LAYOUTS = {"tp": (False, False), "tp + sp": (True, False), "tp + sp, overlapped": (True, True)}
"""parallel.sequence and parallel.overlap by the name of what they make."""

ROWS, LENGTH, RATE, STEPS = 4, 32, 0.1, 3

MODEL = replace(PRESETS["gpt2-tiny"], layers=2, d_model=64, heads=8, d_ff=128, vocab=96, context=LENGTH, dropout=0.1)
"""Llama has it with 2 heads of keys and values: on tp 4 and 8 devices share them."""


def configure(architecture: Architecture, t: int = 1, layout: str = "tp", **model: Any) -> RunConfig:
    """A checked run of SGD; `model` are fields of the model to replace."""
    sequence, overlap = LAYOUTS[layout]
    config = RunConfig(
        mesh=MeshConfig(tp=t),
        model=replace(MODEL, architecture=architecture, kv_heads=2 if architecture == "llama" else 0, **model),
        parallel=ParallelConfig(sequence=sequence, overlap=overlap),
        train=TrainConfig(
            optimizer="sgd", learning_rate=RATE, warmup=0, final_lr=1.0, clip=0, global_batch=ROWS, seq_len=LENGTH
        ),
    )
    check(config)
    return config


def draw(seed: int) -> Batch:
    """A microbatch of random tokens; of row r's labels a growing part counts, so that tp devices have unequal ones."""
    tokens = np.random.default_rng(seed).integers(0, MODEL.vocab, (1, ROWS, LENGTH + 1), np.int32)
    lengths = LENGTH * np.arange(1, ROWS + 1) // ROWS
    labels = np.where(np.arange(LENGTH) < lengths[:, None], tokens[..., 1:], -1)
    return {"inputs": tokens[..., :-1], "labels": labels}


@dataclass(frozen=True)
class Trained:
    """A few steps."""

    losses: list[float]
    gradients: Leaves
    """Of the first step."""
    params: Leaves
    """After the last step."""


def trainer_of(config: RunConfig) -> Trainer:
    """A trainer on the first devices whose optimizer's state holds the gradient that it saw last."""
    return on_first_devices(config, remembering_sgd(RATE))


def trained(trainer: Trainer, batch: Batch) -> Trained:
    """The same batch `STEPS` times; dropout's masks differ from step to step."""
    state, losses, first = trainer.init(), [], {}
    on_mesh = jax.device_put(batch, trainer.batch_sharding)
    for _ in range(STEPS):
        state, metrics = trainer.step(state, on_mesh)
        losses.append(float(metrics["loss"]))
        first = first or named(state.opt_state[0].trace)
    return Trained(losses, first, named(state.params))


def named(tree: Tree) -> Leaves:
    """Host copies by name."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def apart(got: Leaves, want: Leaves) -> dict[str, float]:
    """Each leaf's largest difference, over its largest wanted entry."""
    return {name: float(np.max(np.abs(got[name] - right)) / np.max(np.abs(right))) for name, right in want.items()}


def summed_over_tp(trainer: Trainer) -> list[str]:
    """Parameters of whose gradients tp devices have parts: of their own tokens, or their own heads."""
    paths = jax.tree.leaves_with_path(trainer.model.summed, is_leaf=is_axes)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, axes in paths if "tp" in axes]


def parts(trainer: Trainer, batch: Batch) -> Leaves:
    """Each tp device's own part [t, ...] of the first step's gradients that need a sum over tp, before that sum."""
    model, config = trainer.model, trainer.config

    def body(params: Tree, batch: dict[str, jax.Array]) -> Tree:
        tokens = sum_over_shards(jnp.sum(batch["labels"] >= 0, dtype=jnp.int32))
        key = jax.random.fold_in(jax.random.key(config.seed), 0)
        work = model.work(batch, key, config.train.global_batch)

        def loss(params: Tree) -> jax.Array:
            x = varying(work.embed(params["outer"], jnp.int32(0)), varying_axes(model.stream_zeros(batch)))

            def layer(x: jax.Array, at: tuple[Tree, jax.Array]) -> tuple[jax.Array, None]:
                ((y, _), _) = work.layer(at[0], x, (jnp.int32(0), at[1]))
                return y, None

            x, _ = lax.scan(layer, x, (params["blocks"], jnp.arange(config.model.layers)))
            return sum_over_shards(work.head(params["outer"], x, jnp.int32(0))) / tokens.astype(jnp.float32)

        grads = jax.grad(loss)(diverge(params, model.summed))
        return jax.tree.map(own_part, model.summed, grads, is_leaf=is_axes)

    def own_part(axes: tuple[str, ...], grad: jax.Array) -> jax.Array:
        """Summed over all axes but tp, behind a dim for that."""
        grad = sum_over(grad, tuple(a for a in axes if a != "tp"))
        return grad[None] if "tp" in axes else grad

    def spec(axes: tuple[str, ...], own: P) -> P:
        return P("tp", *own) if "tp" in axes else own

    out = jax.tree.map(spec, model.summed, model.specs, is_leaf=is_axes)
    mapped = jax.shard_map(body, mesh=trainer.mesh, in_specs=(model.specs, BATCH_SPEC), out_specs=out)
    found = named(jax.jit(mapped)(trainer.init().params, jax.device_put(batch, trainer.batch_sharding)))
    return {name: found[name] for name in summed_over_tp(trainer)}
