"""A layer's activations by tensor-parallel size: by textbook, formula, program and compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, get_args

from experiments.ch04_sequence_and_context._megatron_layer import MegatronLayer
from experiments.ch04_sequence_and_context._memory_terms import Term, terms
from experiments.training import on_first_devices
from jax5d.config import PRESETS, MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig, check
from jax5d.costs.activations import Activations
from jax5d.costs.parameters import FLOAT32, leaves
from jax5d.costs.textbook import layer_bytes
from jax5d.measure.aot import compile_step
from jax5d.measure.memory import kept_by_layer

Name = Literal["gpt3-7b", "gpt3-7b-plain", "gpt2-medium", "llama3-8b"]
NAMES: tuple[Name, ...] = get_args(Name)

ROOM = 2**40
"""Bytes of memory that the compiler is told a GPU has: nothing is made to fit."""

GPT3 = replace(PRESETS["gpt2"], layers=32, d_model=4096, heads=32, d_ff=4 * 4096, context=2048, dtype="bfloat16")
"""GPT-3 6.7B (Brown et al., arXiv:2005.14165, table 2.1)."""

MODELS: dict[Name, ModelConfig] = {
    "gpt3-7b": GPT3,
    "gpt3-7b-plain": replace(GPT3, attention="plain", dropout=0.1),
    "gpt2-medium": replace(PRESETS["gpt2-medium"], dtype="bfloat16"),
    "llama3-8b": replace(PRESETS["llama-9b"], kv_heads=8, dtype="bfloat16"),
}
"""One sequence of the model's context each: 2048, 2048, 1024 and 4096 tokens."""


@dataclass(frozen=True)
class Case:
    """A model on tp devices, with or without sequence parallelism."""

    model: Name
    tp: int
    sequence: bool

    @property
    def name(self) -> str:
        """For checks."""
        return f"{self.model}, tp {self.tp}{' + sp' if self.sequence else ''}"

    @property
    def config(self) -> RunConfig:
        """One microbatch of one sequence."""
        model = MODELS[self.model]
        config = RunConfig(
            mesh=MeshConfig(tp=self.tp),
            model=model,
            parallel=ParallelConfig(sequence=self.sequence, loss_chunks=8),
            train=TrainConfig(global_batch=1, seq_len=model.context),
        )
        check(config)
        return config

    @property
    def selective(self) -> RunConfig:
        """With attention recomputed."""
        config = self.config
        return replace(config, parallel=replace(config.parallel, remat="selective"))

    @property
    def elements(self) -> int:
        """s b h."""
        return self.config.train.seq_len * self.config.model.d_model


@dataclass(frozen=True)
class Row:
    """What is found of a case, in bytes of a layer on one device."""

    case: Case
    traced: int
    """By the types of what the program saves."""
    compiled: float | None
    """By the compiler's temporaries; None if not compiled."""

    @classmethod
    def of(cls, case: Case, gpu: str, depths: tuple[int, int] | None) -> Row:
        """Trace it, and with `depths` compile it."""
        kept = kept_by_layer(on_first_devices(case.config))
        found = _growth(case.config, gpu, depths) if depths else None
        return cls(case, sum(prod(kind.shape) * kind.dtype.itemsize for kind in kept), found)

    @property
    def terms(self) -> list[Term]:
        """Array by array."""
        return terms(self.case.config)

    @property
    def formula(self) -> int:
        """The library's."""
        return Activations(self.case.config).layer

    @property
    def here(self) -> float:
        """The textbook less what the terms name."""
        return self.textbook - self.case.elements * sum(term.saved for term in self.terms)

    @property
    def textbook(self) -> float:
        """The paper's formula for such attention: flash keeps no [s, s], as if it were recomputed."""
        return layer_bytes(self.case.config if self.case.config.model.attention == "plain" else self.case.selective)

    def metrics(self) -> dict[str, Any]:
        """In units of s b h."""
        found = {"textbook": self.textbook, "formula": self.formula, "traced": self.traced, "compiled": self.compiled}
        return {name: None if value is None else value / self.case.elements for name, value in found.items()}


@dataclass(frozen=True)
class Megatron:
    """The textbook's layer, compiled."""

    case: Case
    selective: bool
    """Attention recomputed: nothing is kept of its weights."""
    compiled: float

    @classmethod
    def of(cls, case: Case, gpu: str, depths: tuple[int, int], *, selective: bool) -> Megatron:
        """Compile it; the case is one of plain attention with dropout."""
        layer = MegatronLayer(case.selective if selective else case.config)
        low, high = (layer.memory(gpu, n).temporaries for n in depths)
        return cls(case, selective, (high - low) / (depths[1] - depths[0]))

    @property
    def textbook(self) -> float:
        """s b h (10 + 24 / t + 5 a s / (h t)), with sequence parallelism all over t; selective: without the square."""
        return layer_bytes(self.case.selective if self.selective else self.case.config)

    @property
    def name(self) -> str:
        """For checks."""
        where = f"tp {self.case.tp}{' + sp' if self.case.sequence else ''}"
        return f"Megatron's layer, {where}{', attention recomputed' if self.selective else ''}"


def _growth(config: RunConfig, gpu: str, depths: tuple[int, int]) -> float:
    """What one more layer adds to the compiler's temporaries, less the layer's float32 gradients."""
    deep = [replace(config, model=replace(config.model, layers=n)) for n in depths]
    low, high = (compile_step(each, gpu, memory=ROOM).memory.temporaries for each in deep)
    blocks = sum(leaf.local_size(config.mesh) for leaf in leaves(config.model, config.mesh) if leaf.stacked)
    return (high - low) / (depths[1] - depths[0]) - blocks // config.model.layers * FLOAT32
