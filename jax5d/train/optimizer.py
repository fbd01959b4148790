"""The optimizer: optax, elementwise, so that each device updates the shards it owns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jax5d.config import TrainConfig

Tree = Any

MATRICES = ("wte", "wpe", "w_q", "w_kv", "w_out", "w_in", "w_gate", "w_up", "router", "head")
"""Leaves that weight decay applies to; norms and biases are left alone."""


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up to the peak, then cosine decay to final_lr of it at the last step.

    The first update (count 0) uses peak / warmup, so no step is a no-op.
    """
    warmup = min(config.warmup, config.steps)

    def rate(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((step - warmup) / max(config.steps - warmup - 1, 1), 0, 1)
        cosine = config.final_lr + (1 - config.final_lr) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return config.learning_rate * jnp.where(step < warmup, (step + 1) / max(warmup, 1), cosine)

    return rate


def decay_mask(params: Tree) -> Tree:
    """True at the leaves that weight decay applies to."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in MATRICES, params)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) or plain SGD. Clipping is the step's."""
    schedule = learning_rate(config)
    if config.optimizer == "sgd":
        return optax.sgd(schedule)
    return optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=config.weight_decay, mask=decay_mask)
