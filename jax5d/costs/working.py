"""The working set: what comes and goes within a step, at the moment when there is most of it.

Beside state, gradients and waiting activations some moments compete: inside the head, at its end, before a layer's
backward pass, inside it, where the table's gradient is added up, and by ZeRO where a copy of the parameters is
gathered. A compiler that packs buffers well needs room for the largest only. With more than one tick a step is a loop,
and what the loop carries, sums and the ring of activations, is there at every moment. What is said here of XLA was read
from its buffer assignments for an H100; another version may do better.

Letters as in `jax5d.costs.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from jax5d.config import RunConfig
from jax5d.costs.activations import Activations
from jax5d.costs.parameters import BYTES, FLOAT32, leaves
from jax5d.costs.zero import Shares

PIECE = 512
"""Most keys for which our own attention has scores at a time."""


@dataclass(frozen=True)
class Working:
    """Bytes on one device, beyond the buckets, at each of the moments."""

    config: RunConfig

    @property
    def total(self) -> int:
        """At the largest of the moments."""
        return max(self.layer, self.transposing, self.head, self.scaling, self.embedding, self.copy)

    @cached_property
    def layer(self) -> int:
        """Inside a layer's backward pass.

        At attention: q, k, v, its output and three derivatives [b, s, a / t, d / a]; what norms and products read, and
        the derivative on its way down [b, s, d]. At a norm: four of the stream in float32, and four that products read
        and make. At either: derivatives of the MLP's products, the activation function's result [b, s, f / t], and the
        layer's gradients, before they are added up or on their way to the replicas.
        """
        a = self._kept
        hidden = (a.products + 1) * a.hidden // a.products
        attention = 3 * a.heads + 4 * a.keys + 7 * a.whole + 2 * a.stream + self._scores
        norm = 4 * a.stream // a.width * FLOAT32 + 4 * a.whole
        moment = hidden + max(attention, norm) + self._layer * FLOAT32 + self._beside + self._tables
        return moment + self._outer + self._coming

    @property
    def transposing(self) -> int:
        """Before the layers' backward pass: arrays that are transposed for it, and what the first layer reads.

        By ZeRO also the head's gradient of the table. By ZeRO-3, where the last layer stands before its loop, nothing
        is transposed. Where SwiGLU's two factors have the shape of the gathered arrays, one kernel reads the last
        layer's part of all four beforehand: then the second is transposed to where the first was.
        """
        a, stage = self._kept, self._shares.stage
        if stage == 3:
            return 0
        alike = a.products == 2 and a.hidden == 2 * a.whole
        transposed = a.layers * self._gathered // (2 if alike else 1)
        values = transposed + 3 * a.whole + (a.products + 1) * a.hidden // a.products
        return values + (self._waiting if stage else 0)

    @property
    def head(self) -> int:
        """Inside the head: a chunk's logits in float32 and their derivative, the table's cast, inputs and derivatives,
        and the table's gradient in float32, which a single chunk has only when its logits have been read.

        Or, where rows are no multiple of 8, of which tensor cores want them: padded copies of derivative and cast.
        Without loop and ZeRO the buffers of the layers' gradients come only afterwards, if they are smaller than what
        the layers keep: they are taken off. By ZeRO-3 the forward pass ends outside its loop, and what its
        last layer keeps is not in its place yet.
        """
        a, parallel, stage = self._kept, self.config.parallel, self._shares.stage
        derivative = ceil(a.tokens / parallel.loss_chunks) * self._rows * a.width
        cast = self._table * a.width if a.width < FLOAT32 and not stage else 0
        padded = derivative + self._table * a.width if self._rows % 8 else 0
        logits = derivative // a.width * FLOAT32
        gradient = self._table * FLOAT32 if parallel.loss_chunks > 1 else 0
        return derivative + max(logits, padded) + cast + self._after + gradient

    @property
    def scaling(self) -> int:
        """At the head's end, where the table's gradient becomes that of the objective: both of them.

        By ZeRO without a loop a layer's gradients are on their way from the last layer to after the embedding. Where
        the tables there find no room in place of what layers kept, they lie where the two are now, and that layer's
        gradients beyond.
        """
        tables = self._table * FLOAT32 + self._waiting
        apart = self._shares.stage and not self._loop and self._kept.total < tables
        return self._after + tables + (self._leaving if apart else 0)

    @property
    def embedding(self) -> int:
        """Where the table's gradient is added up: the head's, the embedding's in float32, and by ZeRO their sum, which
        is to be scattered, with the first layer's gradients on their way. Without a loop what layers kept has been
        read by then, and so has the table.
        """
        values = self._behind + self._waiting + self._table * FLOAT32 - self._empty
        if self._shares.stage > 1 or (self._shares.stage and not self._loop):
            values += self._waiting + self._leaving
        return values + self._outer + self._transposed if self._loop else values - self._kept.total

    @property
    def copy(self) -> int:
        """By ZeRO-1 and 2, where the largest array of parameters is gathered anew, the first of all: that array and its
        piece, cast; of the others updated pieces, as they are stored and transposed for their gather. What layers kept
        has been read, and sums of gradients are pieces.
        """
        if not self._shares.copies:
            return 0
        width, model, parallel = self._kept.width, self.config.model, self.config.parallel
        whole, piece = max((leaf.local_size(self.config.mesh), p.size) for leaf, p in self._shares.pieces())
        updated = 2 * (self._shares.owned - piece) * BYTES[model.param_dtype]
        sums = self._shares.whole - self._shares.owned if self._shares.stage == 1 and self._loop else 0
        return (whole + piece) * width + updated - self._kept.total - sums * BYTES[parallel.accumulate]

    @property
    def _after(self) -> int:
        """Inside the head and at its end alike."""
        a = self._kept
        last = a.layer if self._shares.stage == 3 else 0
        values = 3 * a.whole + a.stream + last + self._outer + self._transposed + self._behind - self._empty
        accumulators = a.layers * self._leaving
        if self._loop or self._shares.stage or a.total < accumulators:
            return values
        return values - accumulators

    @property
    def _waiting(self) -> int:
        """The head's gradient of the table, from there to the embedding's."""
        return self._table * BYTES[self.config.parallel.accumulate]

    @property
    def _leaving(self) -> int:
        """A layer's gradients on their way to the replicas."""
        return self._layer * BYTES[self.config.parallel.accumulate]

    @property
    def _empty(self) -> int:
        """Without ZeRO and a loop nothing is added up before the embedding's gradient: so long the table's bucket is
        free."""
        return 0 if self._loop or self._shares.stage else self._waiting

    @property
    def _behind(self) -> int:
        """Zeros that the head's gradient of the table starts from in the last tick, behind a loop: XLA makes zeros of
        one kind together. Before the loop, with those of the sums; where one tick is no loop, with those of its own
        head, and the sums' have no place before its end. In a pipeline the last tick has no head, and a single chunk
        adds to no zeros.
        """
        parallel, table = self.config.parallel, self._table * FLOAT32
        if not self._loop or self.config.mesh.pp > 1 or parallel.loss_chunks == 1:
            return 0
        if parallel.microbatches == 2:
            return table - (self._waiting if self._shares.stage < 2 else 0)
        return table if self._shares.stage < 2 and parallel.accumulate == "float32" else 0

    @property
    def _tables(self) -> int:
        """Gradients of the table while layers are at work; by ZeRO-1 also the pieces, which in a loop's last tick need
        room beside the sums."""
        tables = self._behind + self._waiting - self._empty
        if self._shares.stage != 1 or not self._loop:
            return tables
        pieces = self._shares.owned * BYTES[self.config.parallel.accumulate]
        return max(tables, (self._waiting if self.config.mesh.pp == 1 else 0) + pieces)

    @property
    def _outer(self) -> int:
        """By ZeRO-3: the table, gathered for the whole step."""
        return self._table * self._kept.width if self._shares.stage == 3 else 0

    @property
    def _transposed(self) -> int:
        """The same as it came, beside it in a loop where it is cut along d: where rows do not divide."""
        _, piece = next(pair for pair in self._shares.pieces() if pair[0].name == "wte")
        n = prod(getattr(self.config.mesh, axis) for axis in piece.axes)
        return self._outer if self._loop and self._rows % n else 0

    @property
    def _coming(self) -> int:
        """By ZeRO-3: the layer on its way. That at work stands where casts of its weights would."""
        again = self._shares.stage == 3 and self.config.parallel.regather
        return self._layer * self._kept.width if again else 0

    @property
    def _scores(self) -> int:
        """Attention's own: nothing for cuDNN's kernel, which keeps its tiles on chip.

        Plain: the layer's weights and their derivative, and when recomputed float32 scores. Our own: scores of one
        piece of keys and their derivative, in float32 and as matrix multiplies read them; round a ring also blocks of
        keys and values under way, and float32 sums of the derivatives by q, k and v.
        """
        a, m, mesh = self._kept, self.config.model, self.config.mesh
        queries = a.rows * m.heads // mesh.tp * a.length
        if m.attention == "plain":
            again = FLOAT32 if self.config.parallel.remat != "none" else 0
            return queries * a.length * (2 * a.width + again)
        if not self._own_attention:
            return 0
        piece = next(a.length // n for n in range(1, a.length + 1) if a.length % n == 0 and a.length // n <= PIECE)
        scores = 2 * queries * piece * (FLOAT32 + (a.width if a.width < FLOAT32 else 0))
        ring = 2 * (a.heads + 3 * a.keys) // a.width * FLOAT32 + 4 * a.keys
        return scores + (ring if mesh.cp > 1 else 0)

    @property
    def _own_attention(self) -> bool:
        """Round a ring, with dropout and in float32, where cuDNN's kernel does not do."""
        m = self.config.model
        return m.attention == "flash" and (self.config.mesh.cp > 1 or m.dropout > 0 or self._kept.width == FLOAT32)

    @property
    def _beside(self) -> int:
        """What a loop adds to a layer's backward pass.

        Arrays of the ring transposed, while the ring itself is needed later; and casts of a layer's weights for the
        last tick, which stands behind the loop. The table's gradient of one microbatch, which waits for the
        embedding's, is in `_tables`.
        """
        a = self._kept
        if not self._loop:
            return 0
        cast = self._layer * a.width if a.width < FLOAT32 and not self._shares.stage else 0
        return a.slots * a.layers * (self._gathered + self._heads) + cast

    @property
    def _gathered(self) -> int:
        """Of a layer and microbatch: XLA keeps some arrays as they were made and transposes them, all layers and slots
        at once, for what reads them. For one row that is the product of GPT-2's MLP."""
        a = self._kept
        if self.config.parallel.remat == "full" or a.rows > 1:
            return 0
        return a.hidden if a.products == 1 else 0

    @property
    def _heads(self) -> int:
        """The same of our own attention: queries. Without a loop they take their own place."""
        return self._kept.heads if self._own_attention and self.config.parallel.remat != "full" else 0

    @property
    def _loop(self) -> bool:
        """Whether there is more than one tick."""
        return self.config.parallel.microbatches + self.config.mesh.pp > 2

    @cached_property
    def _kept(self) -> Activations:
        return Activations(self.config)

    @cached_property
    def _shares(self) -> Shares:
        return Shares(self.config)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {leaf.name: leaf.local_size(self.config.mesh) for leaf in leaves(self.config.model, self.config.mesh)}

    @property
    def _layer(self) -> int:
        """Parameters of one layer on this device."""
        return sum(size for name, size in self._sizes.items() if name.startswith("blocks.")) // self._kept.layers

    @property
    def _table(self) -> int:
        """Parameters of the head's table on this device."""
        return self._sizes["wte"]

    @property
    def _rows(self) -> int:
        """Vocabulary rows of this device, padding included."""
        return self._table // self.config.model.d_model
