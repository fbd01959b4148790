"""Every collective of a training step, from theory.

Written from the algorithms, not from the program: the tests hold it against the ledger that `jax5d.measure.ledger`
reads from the program, op by op, count by count, byte by byte.

Letters: M microbatches; p, c, t sizes of pp, cp, tp; b rows and s tokens of a microbatch on one device; d d_model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from jax5d.config import AXES, RunConfig
from jax5d.costs.collectives import Collective, merge, sent
from jax5d.costs.parameter_traffic import ParameterTraffic
from jax5d.costs.parameters import BYTES, FLOAT32, INT32, own_kv_heads


@dataclass(frozen=True)
class StepTraffic:
    """The collectives of one training step of a configuration."""

    config: RunConfig

    @cached_property
    def _stream_axes(self) -> tuple[str, ...]:
        return ("tp",) if self.config.parallel.sequence else ()

    @cached_property
    def _token_axes(self) -> tuple[str, ...]:
        """Axes whose devices hold different tokens of the residual stream."""
        return ("dp", "ep", "cp", *self._stream_axes)

    @cached_property
    def tokens(self) -> int:
        """Tokens b s of a microbatch on one device, in a tensor-parallel region."""
        c = self.config
        rows = c.train.global_batch // (c.mesh.batch_shards * c.parallel.microbatches)
        return rows * c.train.seq_len // c.mesh.cp

    @cached_property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on one device: b s, or b s / t under sequence parallelism."""
        return self.tokens // (self.config.mesh.tp if self.config.parallel.sequence else 1)

    @cached_property
    def width(self) -> int:
        """Bytes of one computed element."""
        return BYTES[self.config.model.dtype]

    @cached_property
    def ticks(self) -> int:
        """Ticks with a forward pass, and as many with a backward pass: M + p - 1."""
        return self.config.parallel.microbatches + self.config.mesh.pp - 1

    def table(self) -> list[Collective]:
        """All collectives of the step, added up by op and axes; axes of size 1 are left out."""
        return merge([*self._forward(), *self._head(), *self._backward(), *self._once()])

    def _of(self, op: str, axes: tuple[str, ...], payload: int, count: int, pairs: int | None = None) -> Iterator:
        return sent(self.config.mesh, op, axes, payload, count, pairs)

    def _enter(self, features: int, count: int) -> Iterator[Collective]:
        """Into a tensor-parallel region, `features` bytes a token: only sequence parallelism has anything to gather."""
        if self.config.parallel.sequence:
            yield from self._of("all_gather", ("tp",), self.stream_tokens * features, count)

    def _columns(self, count: int) -> Iterator[Collective]:
        """Into a column-parallel layer: a gather of the stream, or as many bytes piece by piece."""
        yield from self._pieces(count) if self.config.parallel.overlap else self._enter(self._features, count)

    def _rows(self, count: int) -> Iterator[Collective]:
        """Out of a row-parallel layer, and the transpose of `_columns`: a sum, or one that goes round in pieces."""
        yield from self._pieces(count) if self.config.parallel.overlap else self._sum(self._features, count)

    def _pieces(self, count: int) -> Iterator[Collective]:
        """t - 1 hops of the stream's tokens on one device."""
        yield from self._of("ppermute", ("tp",), self.stream_tokens * self._features, count * (self.config.mesh.tp - 1))

    @property
    def _features(self) -> int:
        """Bytes of one token of the stream."""
        return self.config.model.d_model * self.width

    def _sum(self, features: int, count: int) -> Iterator[Collective]:
        """Partial sums over tp to the stream: `leave`, and the transpose of `enter`."""
        op = "psum_scatter" if self.config.parallel.sequence else "psum"
        yield from self._of(op, ("tp",), self.tokens * features, count)

    def _send(self, count: int) -> Iterator[Collective]:
        yield from self._of("ppermute", ("pp",), self.stream_tokens * self._features, count, self.config.mesh.pp - 1)

    def _share(self, count: int) -> Iterator[Collective]:
        """One stage's stream summed into all stages' or all stages' into one's: a masked psum over pp."""
        yield from self._of("psum", ("pp",), self.stream_tokens * self._features, count)

    def _ring(self, width: int, count: int) -> Iterator[Collective]:
        """Keys and values once round the ring, c - 1 hops: of this device's heads, at least one."""
        mesh, m = self.config.mesh, self.config.model
        payload = 2 * self.tokens * own_kv_heads(m, mesh) * m.head_dim * width
        yield from self._of("ppermute", ("cp",), payload, count * (mesh.cp - 1))

    def _exchange(self, count: int) -> Iterator[Collective]:
        """Expert slots over ep."""
        m = self.config.model
        sequence = self.config.train.seq_len // self.config.mesh.cp
        group = m.group or sequence
        slots = min(group, ceil(m.capacity_factor * group * m.top_k / m.experts)) if m.capacity_factor else group
        payload = self.tokens // group * m.experts * slots * m.d_model * self.width
        yield from self._of("all_to_all", ("ep",), payload, count)

    def _forward(self) -> Iterator[Collective]:
        layers = self.config.model.layers // self.config.mesh.pp
        yield from self._sum(self._features, self.ticks)  # embedding
        yield from self._share(self.ticks)
        yield from self._send(self.ticks)
        yield from self._layers_forward(self.ticks * layers)
        yield from self._rows(self.ticks * layers)
        yield from self._mlp_sum(self.ticks * layers)
        if self.config.model.experts:  # probabilities and z-loss; nothing in the backward pass needs the sums
            payload = (self.config.model.experts + 1) * FLOAT32
            yield from self._of("psum", self._token_axes, payload, self.ticks * layers)

    def _layers_forward(self, count: int) -> Iterator[Collective]:
        """What a layer sends on the way to what its backward pass needs: repeated when the layer is recomputed."""
        m = self.config.model
        yield from self._columns(count)
        yield from self._mlp_enter(count)
        yield from self._ring(self.width, count)
        if m.experts:
            yield from self._enter(m.top_k * FLOAT32, count)  # gates
            yield from self._enter(m.top_k * INT32, count)  # chosen experts
            yield from self._exchange(2 * count)
            yield from self._of("psum", self._token_axes, m.experts * INT32, count)  # load

    def _mlp_enter(self, count: int) -> Iterator[Collective]:
        """A dense MLP begins with a column-parallel layer; experts choose among whole sequences."""
        yield from self._enter(self._features, count) if self.config.model.experts else self._columns(count)

    def _mlp_sum(self, count: int) -> Iterator[Collective]:
        """A dense MLP ends with a row-parallel layer; experts' results are combined before they are summed."""
        yield from self._sum(self._features, count) if self.config.model.experts else self._rows(count)

    def _head(self) -> Iterator[Collective]:
        parallel = self.config.parallel
        chunk = ceil(self.tokens / parallel.loss_chunks)
        chunks = parallel.microbatches * parallel.loss_chunks
        yield from self._share(2 * parallel.microbatches)  # the last stage's output to all; its gradient back
        yield from self._enter(self._features, parallel.microbatches)
        yield from self._of("pmax", ("pp", "tp"), chunk * FLOAT32, chunks)
        yield from self._of("psum", ("pp", "tp"), 2 * chunk * FLOAT32, chunks)
        yield from self._sum(self._features, parallel.microbatches)

    def _backward(self) -> Iterator[Collective]:
        m = self.config.model
        count = self.ticks * m.layers // self.config.mesh.pp
        yield from self._enter(self._features, self.ticks)  # embedding: the transpose of its sum
        yield from self._share(self.ticks)
        yield from self._send(self.ticks - 1)  # what the last tick hands on, nobody waits for
        yield from self._columns(count)  # the transpose of `leave`
        yield from self._mlp_enter(count)
        yield from self._rows(count)  # the transpose of `enter`
        yield from self._mlp_sum(count)
        yield from self._ring(self.width, count)
        yield from self._ring(FLOAT32, count)  # gradients of keys and values
        if m.experts:
            yield from self._exchange(2 * count)
            yield from self._sum(m.top_k * FLOAT32, count)  # gradient of the gates
        yield from self._recomputed(count)

    def _recomputed(self, count: int) -> Iterator[Collective]:
        """What is sent again because the value that it made was not kept."""
        parallel = self.config.parallel
        if parallel.remat != "full":  # inputs of column-parallel layers, kept split; experts keep what they choose from
            yield from self._enter(self._features, count * (1 if self.config.model.experts else 2))
        if parallel.remat == "selective":
            yield from self._ring(self.width, count)
        if parallel.remat == "full":
            yield from self._layers_forward(count)
            if "attention_sum" not in parallel.save:
                yield from self._rows(count)

    def _once(self) -> Iterator[Collective]:
        """The gradients reduced, ZeRO's parameters gathered, and scalars once a step."""
        m = self.config.model
        yield from ParameterTraffic(self.config).entries()
        yield from self._of("psum", ("dp", "ep", "cp"), INT32, 1)  # valid tokens
        yield from self._of("psum", ("dp", "ep", "cp"), FLOAT32, 1)  # loss
        if m.experts:
            yield from self._of("psum", ("pp",), FLOAT32, 2)  # auxiliary and z loss
            yield from self._of("psum", ("pp",), m.experts * INT32, 1)  # load
            yield from self._of("psum", AXES, INT32, 1)  # dropped tokens
