"""The policies that `recompute` compares, by name, and what is found of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from jax5d.config import RunConfig
from jax5d.costs.flops import forward, recomputation
from jax5d.costs.textbook import layer_bytes

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


@dataclass(frozen=True)
class Row:
    """One policy."""

    name: Policy
    config: RunConfig
    kept: dict[str, int]
    """Bytes that the program keeps of a layer, by kind."""
    flops: int
    """FLOPs of the products of a step, counted in the program."""
    compiled: float | None
    """Bytes that the compiler's memory grows by for each layer, less the layer's gradients; None if not compiled."""

    @property
    def bytes(self) -> int:
        """All that the program keeps of a layer."""
        return sum(self.kept.values())

    @cached_property
    def useful(self) -> int:
        """FLOPs of forward and backward pass without anything made again."""
        return 3 * self.config.train.global_batch * sum(_forward(self.config).values())

    @property
    def added(self) -> float:
        """FLOPs made again, as a share of the others."""
        return self.flops / self.useful - 1

    @property
    def literature(self) -> float:
        """The same as the literature counts: attention's forward pass, or the layers', once more."""
        again = recomputation(self.config.model, self.config.train.seq_len, self.config.parallel.remat)
        return self.config.train.global_batch * sum(again.values()) / self.useful

    @property
    def textbook(self) -> float:
        """Bytes that Megatron's layer keeps under the policy; it has plain attention and dropout."""
        return layer_bytes(self.config)


def _forward(config: RunConfig) -> dict[str, int]:
    return forward(config.model, config.train.seq_len)
