"""Inference with a cache, from theory: what a device holds, and what one pass of the model computes, reads and sends.

Written from the algorithms, not from the program (`jax5d.inference.decoder`): the tests hold it against the ledger and
the arrays of one. Devices share out the weights by tensor parallelism, or as ZeRO-3 does, which gathers each layer for
every pass. Weights are of the computation's dtype, as `jax5d.inference.weights` casts them.

Letters: b sequences of one device; t size of tp; L layers, d d_model, m heads of keys and values, h head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from jax5d.config import AXES, ConfigError, RunConfig
from jax5d.costs.cluster import host_link, network_link
from jax5d.costs.collectives import Collective, merge, sent
from jax5d.costs.gpus import Gpu
from jax5d.costs.links import Link, all_gather, ring_all_reduce
from jax5d.costs.parameter_traffic import messages
from jax5d.costs.parameters import BYTES, FLOAT32, INT32, Leaf, leaves, own_kv_heads
from jax5d.costs.zero import Shares

ROUNDS, DIGITS = 8, 16
"""Sums by which devices agree on a row's cut (top-k, top-p), and numbers in each."""


class Held(NamedTuple):
    """Bytes on one device while text is written. Logits and values between layers are not counted."""

    weights: int
    """As they are stored: whole leaves, of tp this device's part, or by ZeRO-3 pieces."""
    gathered: int
    """By ZeRO-3 whole leaves, for a while: two layers, that at work and the one fetched ahead; before them the
    embedding, after them the head. A tied table stays from the one to the other."""
    cache: int
    """Keys and values."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def held(config: RunConfig, rows: int, capacity: int) -> Held:
    """What a device holds for `rows` sequences, over all devices, of at most `capacity` tokens.

    Raises:
        ConfigError: pp, cp or a mixture of experts.
    """
    _check(config)
    shares, width = Shares(config), BYTES[config.model.dtype]
    stored = shares.owned if shares.stage == 3 else shares.whole
    return Held(stored * width, _gathered(shares) * width, cache_bytes(config, rows, capacity))


def _gathered(shares: Shares) -> int:
    """Most elements at a time, zeros behind them included."""
    if shares.stage < 3:
        return 0
    model, sizes = shares.config.model, vars(shares.config.mesh)
    pieces = {leaf.name: piece for leaf, piece in shares.pieces() if piece.axes}
    whole = {name: piece.size * prod(sizes[a] for a in piece.axes) for name, piece in pieces.items()}
    layer = sum(size for name, size in whole.items() if name.startswith("blocks.")) // shares.layers
    norm = sum(size for name, size in whole.items() if name.startswith("norm_f."))
    table = whole.get("wte", 0)
    before = table + whole.get("wpe", 0) + layer
    between = (table if model.tied else 0) + min(2, shares.layers) * layer
    after = whole.get("wte" if model.tied else "head", 0) + norm + layer
    return max(before, between, after)


def cache_bytes(config: RunConfig, rows: int, tokens: int) -> int:
    """Keys and values of `tokens` tokens of each of `rows` sequences, on one device: 2 L b tokens max(m / t, 1) h."""
    model, mesh = config.model, config.mesh
    heads = model.layers * (rows // mesh.batch_shards) * tokens * own_kv_heads(model, mesh)
    return 2 * heads * model.head_dim * _width(config)


def _width(config: RunConfig) -> int:
    """Bytes of one computed element."""
    return BYTES[config.model.dtype]


def _check(config: RunConfig) -> None:
    for axis in ("pp", "cp"):
        if (size := getattr(config.mesh, axis)) > 1:
            raise ConfigError(f"mesh.{axis}={size}: one new token is not shared out by {axis}; write --mesh.{axis} 1")
    if config.model.experts:
        raise ConfigError(
            f"model.experts={config.model.experts}: inference of experts is not known here; write --model.experts 0"
        )


class Seconds(NamedTuple):
    """Of one pass, each part by itself, at the data sheet's rates."""

    compute: float
    """Products at the GPU's peak."""
    memory: float
    """What is read, at the memory's bandwidth."""
    wire: float
    """What is sent, at the link's bandwidth."""
    latency: float
    """What the messages of all collectives take beyond their content, each collective by itself."""

    @property
    def bound(self) -> float:
        """No pass takes less: the longest of compute, memory and wire, the others hidden behind it, and no latency."""
        return max(self.compute, self.memory, self.wire)

    @property
    def in_turn(self) -> float:
        """Nothing is sent while anything is computed: products by their roofline, then wire and latency."""
        return max(self.compute, self.memory) + self.wire + self.latency


@dataclass(frozen=True)
class Pass:
    """New tokens of every sequence through a dense model. `ConfigError` for pp, cp and experts."""

    config: RunConfig
    """Of it the mesh, the model and `parallel.zero` count."""
    rows: int
    """Sequences, over all devices: a multiple of dp x ep."""
    tokens: int
    """New tokens of each: 1 where one is written, a prompt's where the cache is filled."""
    seen: int
    """Tokens that each attends to, masked or not: the cache's capacity, or a prompt's."""
    top_k: bool = False
    """Whether tokens are drawn from the likeliest k."""
    top_p: bool = False
    """Whether they are drawn from the nucleus."""

    def __post_init__(self) -> None:
        _check(self.config)
        if self.rows < 1 or self.rows % self.config.mesh.batch_shards:
            shards = self.config.mesh.batch_shards
            near = max(1, round(self.rows / shards)) * shards
            raise ConfigError(f"rows={self.rows} is no multiple of dp x ep = {shards}; use {near}")

    @cached_property
    def own_rows(self) -> int:
        """Sequences of one device."""
        return self.rows // self.config.mesh.batch_shards

    @cached_property
    def flops(self) -> int:
        """Products on one device, 2 for each multiply-add: 2 for each weight that a token meets, scores and values of
        all tokens that it attends to, and logits of each sequence's last token."""
        model, mesh = self.config.model, self.config.mesh
        weights = sum(self._used(leaf) for leaf in self._leaves if leaf.stacked and ".w_" in leaf.name)
        attention = 2 * model.layers * self.seen * model.d_model // mesh.tp
        (head,) = (leaf for leaf in self._leaves if leaf.name == self._head)
        return 2 * self.own_rows * (self.tokens * (weights + attention) + head.local_size(mesh))

    @cached_property
    def read_bytes(self) -> int:
        """Bytes from one device's memory, at least: every weight that it multiplies by once, keys and values once.

        Not counted are rows of looked-up tables, values between layers, and the writing of what ZeRO-3 gathers.
        """
        looked_up = {"wte", "wpe"} - {self._head}
        weights = sum(self._used(leaf) for leaf in self._leaves if leaf.name not in looked_up)
        return weights * _width(self.config) + cache_bytes(self.config, self.rows, self.seen)

    @cached_property
    def _leaves(self) -> list[Leaf]:
        return leaves(self.config.model, self.config.mesh)

    @property
    def _head(self) -> str:
        return "wte" if self.config.model.tied else "head"

    def _used(self, leaf: Leaf) -> int:
        """Elements of a leaf that a device computes with: of heads that all devices store its own ones."""
        model, mesh = self.config.model, self.config.mesh
        local = leaf.local_size(mesh)
        return local * own_kv_heads(model, mesh) // model.groups if leaf.shared and "tp" not in leaf.axes else local

    def table(self) -> list[Collective]:
        """All collectives of the pass, added up by op and axes; axes of size 1 are left out."""
        return merge([*self._sums(), *self._choice(), *self._gathers()])

    def _of(self, op: str, axes: tuple[str, ...], payload: int, count: int) -> Iterator[Collective]:
        return sent(self.config.mesh, op, axes, payload, count)

    def _sums(self) -> Iterator[Collective]:
        """Tensor parallelism: the stream of the new tokens, after the embedding and twice a layer."""
        model = self.config.model
        stream = self.own_rows * self.tokens * model.d_model * _width(self.config)
        yield from self._of("psum", ("tp",), stream, 1 + 2 * model.layers)

    def _choice(self) -> Iterator[Collective]:
        """The next token of each sequence: the largest logit and its id; before them what a cut needs."""
        cuts = self.top_k + self.top_p
        yield from self._of("psum", ("tp",), self.own_rows * DIGITS * FLOAT32, ROUNDS * cuts)
        if self.top_p:  # its probabilities
            yield from self._of("pmax", ("tp",), self.own_rows * FLOAT32, 1)
            yield from self._of("psum", ("tp",), self.own_rows * FLOAT32, 1)
        yield from self._of("pmax", ("tp",), self.own_rows * FLOAT32, 1)
        yield from self._of("pmax", ("tp",), self.own_rows * INT32, 1)

    def _gathers(self) -> Iterator[Collective]:
        """ZeRO-3: every leaf once, of the layers each by itself; small ones travel together."""
        shares = Shares(self.config)
        pieces = list(shares.pieces()) if shares.stage == 3 else []
        for stacked, layers in ((True, shares.layers), (False, 1)):
            for message in messages([x for x in pieces if x[0].stacked == stacked], lambda _, piece: piece.size):
                size = sum(piece.size for _, piece in message) // layers
                yield from self._of("all_gather", message[0][1].axes, size * _width(self.config), layers)

    @cached_property
    def wire_bytes(self) -> float:
        """Bytes that one device sends."""
        return float(sum(entry.wire_bytes for entry in self.table()))

    def seconds(self, chip: Gpu) -> Seconds:
        """On GPUs of a kind. Collectives are rings: over NVLink where their devices are of one host."""
        alone = sum(self._ring(entry, replace(self._link(entry, chip), alpha=0.0)) for entry in self.table())
        whole = sum(self._ring(entry, self._link(entry, chip)) for entry in self.table())
        compute = self.flops / chip.peak(self.config.model.dtype)
        return Seconds(compute, self.read_bytes / chip.bandwidth, alone, whole - alone)

    def _ring(self, entry: Collective, link: Link) -> float:
        n = prod(getattr(self.config.mesh, a) for a in entry.axes)
        time = all_gather if entry.op == "all_gather" else ring_all_reduce
        return entry.count * time(n, entry.payload_bytes / entry.count, link)

    def _link(self, entry: Collective, chip: Gpu) -> Link:
        """The network's, unless all devices from the group's outermost axis inwards are of one host."""
        inner = AXES[AXES.index(entry.axes[0]) :]
        one_host = prod(getattr(self.config.mesh, a) for a in inner) <= chip.per_host
        return (host_link if one_host else network_link)(chip)
