"""One transformer block on t devices: its program, what that sends, and what it makes.

Letters: b rows, s tokens, d d_model, t devices of tp. K is the bytes of one [b, s, d].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.training import apart, less, on_first_devices
from jax5d.config import MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.activations import Activations
from jax5d.costs.collectives import Collective, merge, wire_bytes
from jax5d.costs.parameters import BYTES
from jax5d.measure.ledger import ledger
from jax5d.measure.memory import kept_by_layer
from jax5d.mesh import make_mesh
from jax5d.models.build import Model
from jax5d.parallel.data import is_axes, is_spec, varying

Tree = Any

WAYS = {
    "TP": ParallelConfig(),
    "TP + SP": ParallelConfig(sequence=True),
    "overlapped": ParallelConfig(sequence=True, overlap=True),
}
"""Tensor parallelism; with sequence parallelism; that piece by piece under the products."""

REGIONS = 2
"""Tensor-parallel regions of a block: attention and MLP."""


def run_of(model: ModelConfig, way: str, t: int, *, rows: int, remat: Any = "none") -> RunConfig:
    """The configuration of which a block is taken: one microbatch of `rows` whole contexts."""
    train = TrainConfig(global_batch=rows, seq_len=model.context)
    return RunConfig(MeshConfig(tp=t), model, replace(WAYS[way], remat=remat), train)


@dataclass(frozen=True)
class Block:
    """The first block of a model on the first t devices."""

    config: RunConfig

    @cached_property
    def model(self) -> Model:
        """The model on CPU devices."""
        return Model(self.config.model, self.config.mesh, self.config.parallel)

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The first t devices."""
        return make_mesh(self.config.mesh, jax.devices()[: self.config.mesh.size])

    @cached_property
    def weights(self) -> Tree:
        """Spec of each weight: the model's without its layers dim."""
        return jax.tree.map(lambda spec: P(*spec[1:]), self.model.specs["blocks"], is_leaf=is_spec)

    @cached_property
    def parts(self) -> Tree:
        """Whether a weight's gradient comes in parts, one on each device, that are summed once a step."""
        return jax.tree.map(lambda axes: "tp" in axes, self.model.summed["blocks"], is_leaf=is_axes)

    @property
    def stream(self) -> P:
        """Spec of the residual stream [b, s, d]; dp, ep and cp have one device."""
        return P(("dp", "ep"), ("cp", *self.model.boundary.axes))

    @property
    def specs(self) -> tuple:
        """Of weights, x, tokens int32 [1, b, s] that only count, and the derivative by y."""
        return self.weights, self.stream, P(), self.stream

    def forward(self, weights: Tree, x: jax.Array, ids: jax.Array) -> jax.Array:
        """Local shards to y."""
        work = self.model.work({"inputs": ids}, jax.random.key(0), ids.shape[1])
        (y, _), _ = work.layer(weights, x, (jnp.int32(0), jnp.int32(0)))
        return y

    def step(self, weights: Tree, x: jax.Array, ids: jax.Array, d_y: jax.Array) -> tuple[jax.Array, jax.Array, Tree]:
        """y, the derivative by x, and by the weights: those that come in parts [1, ...]."""
        own = jax.tree.map(lambda w, part: varying(w, ("tp",)) if part else w, weights, self.parts)
        y, back = jax.vjp(lambda weights, x: self.forward(weights, x, ids), own, x)
        d_weights, d_x = back(d_y)
        return y, d_x, jax.tree.map(lambda g, part: g[None] if part else g, d_weights, self.parts)

    @property
    def both(self) -> Any:
        """`step` over the mesh."""
        grads = jax.tree.map(lambda part, spec: P("tp", *spec) if part else spec, self.parts, self.weights)
        return jax.shard_map(
            self.step, mesh=self.mesh, in_specs=self.specs, out_specs=(self.stream, self.stream, grads)
        )

    def sent(self) -> tuple[list[Collective], list[Collective]]:
        """What the program sends forward and backward, by its ledger; nothing is computed."""
        m, rows = self.config.model, self.config.train.global_batch
        stream = jax.ShapeDtypeStruct((rows, self.config.train.seq_len, m.d_model), jnp.dtype(m.dtype))
        ids = jax.ShapeDtypeStruct((1, *stream.shape[:2]), jnp.int32)
        kind = lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype)  # noqa: E731
        weights = jax.tree.map(kind, self.model.shapes["blocks"])
        forward = jax.shard_map(self.forward, mesh=self.mesh, in_specs=self.specs[:3], out_specs=self.stream)
        there = ledger(forward, weights, stream, ids)
        return there, less(ledger(self.both, weights, stream, ids, stream), there)

    def kept(self) -> tuple[int, int]:
        """Bytes that a device keeps for the backward pass: of the program's types, and by formula."""
        kinds = kept_by_layer(on_first_devices(self.config))
        return sum(kind.size * kind.dtype.itemsize for kind in kinds), Activations(self.config).layer

    def run(self, arrays: tuple) -> tuple:
        """y, the derivative by x, and by the weights, on the mesh, from whole host arrays."""
        place = lambda a, spec: jax.device_put(a, NamedSharding(self.mesh, spec))  # noqa: E731
        specs = jax.tree.map(lambda spec, tree: jax.tree.map(lambda _: spec, tree), self.specs, arrays, is_leaf=is_spec)
        return jax.jit(self.both)(*jax.tree.map(place, arrays, specs))

    def error(self, arrays: tuple, want: tuple) -> dict[str, float]:
        """How far any device's part of each result is from `want`, over the largest entry there."""
        *streams, grads = self.run(arrays)
        whole = jax.tree.map(lambda g, part: np.asarray(g).sum(axis=0) if part else g, grads, self.parts)
        names = ("outputs", "gradients of the input", "gradients of weights")
        return {
            name: max(jax.tree.leaves(jax.tree.map(apart, got, right)))
            for name, got, right in zip(names, (*streams, whole), want, strict=True)
        }


def draw(model: ModelConfig, rows: int, seed: int) -> tuple:
    """Weights, x, tokens and a derivative by y of a block, whole, float32: every bias and scale is noise too."""
    random = np.random.default_rng(seed)
    noise = lambda *shape: random.standard_normal(shape, np.float32)  # noqa: E731
    weights = jax.jit(Model(model, MeshConfig(), ParallelConfig()).init)(jax.random.key(seed))["blocks"]
    weights = jax.tree.map(lambda w: np.asarray(w[0]) + 0.1 * noise(*w.shape[1:]), weights)
    stream = rows, model.context, model.d_model
    return weights, noise(*stream), np.zeros((1, *stream[:2]), np.int32), noise(*stream)


@dataclass(frozen=True)
class Case:
    """A block laid out in one way: what a device sends forward and backward, and keeps, measured and by theory."""

    model: str
    config: RunConfig
    way: str
    sent: tuple[list[Collective], list[Collective]]
    theory: tuple[list[Collective], list[Collective]]
    kept: tuple[int, int]
    """Bytes of the program's types, and by formula."""

    @classmethod
    def of(cls, model: str, config: RunConfig, way: str) -> Case:
        """Trace it."""
        block = Block(config)
        return cls(model, config, way, block.sent(), theory(config), block.kept())

    @property
    def t(self) -> int:
        """Devices."""
        return self.config.mesh.tp

    @property
    def remat(self) -> str:
        """What is recomputed."""
        return self.config.parallel.remat

    @property
    def whole(self) -> int:
        """K."""
        return whole_bytes(self.config)

    @property
    def name(self) -> str:
        """For checks."""
        return f"{self.model}, {self.way}, t={self.t}{', recomputed' if self.remat == 'full' else ''}"

    def metrics(self) -> dict[str, Any]:
        """For result.json."""
        sent = {
            way: [vars(e) | {"wire_bytes": float(e.wire_bytes)} for e in entries]
            for way, entries in zip(("forward", "backward"), self.sent, strict=True)
        }
        return {"block": self.name, "whole_bytes": self.whole, "kept_bytes": self.kept[0]} | sent


# Theory ---------------------------------------------------------------------------------------------------------------


def theory(config: RunConfig) -> tuple[list[Collective], list[Collective]]:
    """What a block sends forward and backward, by the papers.

    TP: an all-reduce of K behind each region, and in the backward pass one before it: two and two (Shoeybi et al.,
    arXiv:1909.08053, figure 4). SP: a gather before and a reduce-scatter behind, and the other way round; the input is
    kept split, so it is gathered once more (Korthikanti et al., arXiv:2205.05198, section 4.2.2). Overlapped: each of
    these in t - 1 hops of K / t; what is gathered once more is gathered at once, but by a layer that is computed again.
    """
    t, whole = config.mesh.tp, whole_bytes(config)

    def entry(op: str, payload: int, count: int) -> Collective:
        return Collective(op, ("tp",), count, payload * count, wire_bytes(op, payload, t) * count)

    if not config.parallel.sequence:
        sums = [entry("psum", whole, REGIONS)]
        return sums, sums
    gathers, scatters = entry("all_gather", whole // t, REGIONS), entry("psum_scatter", whole, REGIONS)
    hops = entry("ppermute", whole // t, REGIONS * (t - 1))
    one_way = [hops, hops] if config.parallel.overlap else [gathers, scatters]
    in_hops = config.parallel.overlap and config.parallel.remat == "full"
    return merge(one_way), merge([*one_way, hops if in_hops else gathers])


def whole_bytes(config: RunConfig) -> int:
    """K."""
    return config.train.global_batch * config.train.seq_len * config.model.d_model * BYTES[config.model.dtype]


def units(entries: list[Collective], config: RunConfig) -> Fraction:
    """Bytes sent over (t-1)/t K: an all-reduce is 2, a gather or a scatter 1."""
    t = config.mesh.tp
    return sum((e.wire_bytes for e in entries), Fraction(0)) / (Fraction(t - 1, t) * whole_bytes(config))
