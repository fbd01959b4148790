"""Serving a model by tensor parallelism or by gathered weights: passes by the library's theory, and by hand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from jax5d.config import MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.cluster import HOST_ALPHA
from jax5d.costs.gpus import Gpu
from jax5d.costs.inference import Held, Pass, Seconds, held

WAYS = {"tp": "tensor parallelism", "zero": "gathered by ZeRO-3"}


def layout(way: str, model: ModelConfig, n: int) -> RunConfig:
    """n devices that share out a model one way."""
    mesh, stage = {"tp": (MeshConfig(tp=n), 0), "zero": (MeshConfig(dp=n), 3)}[way]
    length = min(model.context, 64)  # of a training step, which is never run
    zero: Any = stage
    return RunConfig(mesh, model, ParallelConfig(zero=zero), TrainConfig(global_batch=n, seq_len=length))


@dataclass(frozen=True)
class Serving:
    """A model on n GPUs of one host. Every sequence has room for the model's context, and a new token attends to it."""

    model: ModelConfig
    n: int
    chip: Gpu

    def config(self, way: str) -> RunConfig:
        """Of a way."""
        return layout(way, self.model, self.n)

    def rows(self, way: str, batch: int) -> int:
        """Sequences that are computed: by ZeRO-3 as many on each GPU."""
        shards = self.config(way).mesh.batch_shards
        return ceil(batch / shards) * shards

    def decode(self, way: str, batch: int) -> Pass:
        """A new token for each of `batch` sequences."""
        return Pass(self.config(way), self.rows(way, batch), 1, self.model.context)

    def prefill(self, way: str, length: int) -> Pass:
        """n prompts of `length` tokens, which is one for each GPU."""
        return Pass(self.config(way), self.n, length, length)

    def held(self, way: str, batch: int) -> Held:
        """Bytes on a GPU."""
        return held(self.config(way), self.rows(way, batch), self.model.context)

    def most(self, way: str) -> int:
        """Most sequences that fit, in whole n's."""
        few, more = (self.held(way, k * self.n).total for k in (1, 2))
        return max(0, 1 + int((self.chip.visible - few) // (more - few))) * self.n

    def first(self, cost: Callable[[Pass], float]) -> int:
        """The shortest of n prompts for which gathering costs no more than tensor parallelism; one token beyond the
        context where none is."""
        wins = lambda s: cost(self.prefill("zero", s)) <= cost(self.prefill("tp", s))  # noqa: E731
        return 1 + bisect_left(range(1, self.model.context + 1), True, key=wins)

    @cached_property
    def by_hand(self) -> ByHand:
        """The same, derived apart."""
        return ByHand(self.model, self.n, 2, self.chip)


COSTS: dict[str, Callable[[Pass, Gpu], float]] = {
    "bytes on the wire": lambda step, chip: step.wire_bytes,
    "seconds, all hidden but the longest": lambda step, chip: step.seconds(chip).bound,
    "seconds, nothing hidden": lambda step, chip: step.seconds(chip).in_turn,
}
"""What a crossing is of."""


@dataclass(frozen=True)
class ByHand:
    """From the numbers of a model alone: d, L, f, V, m heads of keys and values of h; n divides them, but for V and m.

    GPT-2's layer: 2 d^2 of queries and results, 2 d m h of keys and values, 2 d f, and 9 d + f + 2 m h - d of biases
    and norms, of which 6 d are on every device. Llama's: three matrices d f, no biases, 2 d.
    """

    model: ModelConfig
    n: int
    width: int
    chip: Gpu

    @cached_property
    def table(self) -> int:
        """A table V d."""
        return self.model.vocab * self.model.d_model

    def layer(self, t: int, heads: float) -> float:
        """Elements of a layer on one of t devices that has `heads` of keys and values."""
        c = self.model
        d, llama = c.d_model, c.architecture == "llama"
        split = 2 * d * d + (3 if llama else 2) * d * c.d_ff + (0 if llama else d + c.d_ff)
        return split / t + 2 * (d + (0 if llama else 1)) * heads * c.head_dim + (2 if llama else 6) * d

    @property
    def norms(self) -> int:
        """The last norm."""
        return self.model.d_model * (1 if self.model.architecture == "llama" else 2)

    @cached_property
    def parameters(self) -> int:
        """N."""
        c = self.model
        positions = 0 if c.architecture == "llama" else c.context * c.d_model
        tables = self.table * (1 if c.tied else 2)
        return int(c.layers * self.layer(1, c.groups)) + tables + positions + self.norms

    def own(self, t: int) -> int:
        """Heads of keys and values that one of t devices keeps."""
        return max(self.model.groups // t, 1)

    def stored(self, way: str) -> int:
        """Bytes of weights on a device: of tp all heads of keys and values where they do not divide."""
        if way == "zero":
            return self.parameters * self.width // self.n
        c, n = self.model, self.n
        heads = c.groups if c.groups % n else c.groups / n
        positions = 0 if c.architecture == "llama" else c.context * c.d_model
        tables = ceil(c.vocab / n) * c.d_model * (1 if c.tied else 2)
        return int((c.layers * self.layer(n, heads) + tables + positions + self.norms) * self.width)

    def cache(self, way: str, rows: int, tokens: int) -> int:
        """Bytes of keys and values on a device."""
        c = self.model
        rows, heads = (rows, self.own(self.n)) if way == "tp" else (rows // self.n, c.groups)
        return 2 * c.layers * rows * tokens * heads * c.head_dim * self.width

    def wire(self, way: str, rows: int, tokens: int) -> float:
        """Bytes that a device sends: 2 L + 1 sums of the new tokens and 8 bytes a row, or all weights once."""
        c, share = self.model, (self.n - 1) / self.n
        if way == "zero":
            return share * self.parameters * self.width
        return 2 * share * rows * ((2 * c.layers + 1) * tokens * c.d_model * self.width + 8)

    def crossing(self) -> float:
        """New tokens at once, one a sequence, for which both ways send alike: about N / (4 L d)."""
        each = (2 * self.model.layers + 1) * self.model.d_model * self.width + 8
        return self.parameters * self.width / (2 * each)

    def first(self) -> int:
        """The shortest of n prompts that are more to send than all weights, in whole tokens."""
        c = self.model
        whole = self.parameters * self.width / (2 * self.n) - 8
        return ceil(whole / ((2 * c.layers + 1) * c.d_model * self.width))

    def messages(self, way: str) -> int:
        """Steps of all rings: each matrix and table gathered alone and all else of a layer together, or the last norm,
        with positions; or sums, which go round twice."""
        c = self.model
        gathers = c.layers * (7 if c.architecture == "llama" else 6) + (2 if c.tied else 3)
        return (gathers if way == "zero" else 2 * (2 * c.layers + 3)) * (self.n - 1)

    def seconds(self, way: str, rows: int, tokens: int, seen: int) -> Seconds:
        """Of one pass: every weight's product, and scores and values of `seen` tokens."""
        c, t = self.model, self.n if way == "tp" else 1
        own_rows = rows * t // self.n
        f = c.d_ff * (3 if c.architecture == "llama" else 2)
        matrices = (2 * c.d_model**2 + c.d_model * f) / t + 2 * c.d_model * self.own(t) * c.head_dim
        head = ceil(c.vocab / t) * c.d_model
        products = c.layers * (matrices + 2 * seen * c.d_model / t)
        flops = 2 * own_rows * (tokens * products + head)
        read = (c.layers * self.layer(t, self.own(t)) + head + self.norms) * self.width + self.cache(way, rows, seen)
        return Seconds(
            flops / self.chip.peak(c.dtype),
            read / self.chip.bandwidth,
            self.wire(way, rows, tokens) / self.chip.link,
            self.messages(way) * HOST_ALPHA,
        )
