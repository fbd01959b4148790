"""The policies that `recompute` compares, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax

from jax5d.config import RunConfig
from jax5d.mesh import make_mesh
from jax5d.train.step import Trainer

Policy = Literal[
    "plain", "plain-selective", "plain-full",
    "flash", "flash-selective", "flash-full", "flash-bare", "flash-qkv", "flash-mlp", "flash-rich",
]  # fmt: skip
"""Attention, and what is made again. Under full recomputation "full" keeps a layer's input and attention's sum, bare
the input alone; qkv and mlp keep one value more than full, rich both."""

SAVES = {
    "full": ("attention_sum",),
    "bare": (),
    "qkv": ("attention_sum", "qkv"),
    "mlp": ("attention_sum", "mlp_in"),
    "rich": ("attention_sum", "qkv", "mlp_in"),
}
"""parallel.save of the policies that recompute in full."""


def under(name: Policy, config: RunConfig) -> RunConfig:
    """A configuration with a policy's attention and recomputation."""
    attention, _, remat = name.partition("-")
    parallel: dict[str, Any] = {"remat": "full", "save": SAVES[remat]} if remat in SAVES else {"remat": remat or "none"}
    return replace(
        config,
        model=replace(config.model, attention=attention),
        parallel=replace(config.parallel, **parallel),
    )


def on_first_devices(config: RunConfig) -> Trainer:
    """A trainer on as many devices as the mesh has."""
    return Trainer.create(config, mesh=make_mesh(config.mesh, jax.devices()[: config.mesh.size]))
