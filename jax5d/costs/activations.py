"""Activations: what a layer keeps of one microbatch for its backward pass, and how many microbatches wait.

Only what the backward pass reads is kept. A norm keeps its input alone, so does a product with a weight, GELU keeps
what it is applied to and SwiGLU its two factors; sums, biases, rotations and casts are linear and keep nothing; a mask
of dropout is drawn again. That makes 8 arrays of [tokens, d] and one (Llama: two) of [tokens, d_ff]: 12 of [tokens, d]
in GPT-2, and less with fewer heads of keys and values. Korthikanti et al., arXiv:2205.05198, section 4.1, count 17 at
16 bits, 34 bytes: GELU's result (4) and the masks (1) too, which we compute again. What sequence parallelism splits is
kept split and gathered again, as theirs is (section 4.2.2).

Letters: b rows and s tokens of a microbatch on one device, d d_model, f d_ff, a heads, m heads of keys and values, t
size of tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jax5d.config import ConfigError, RunConfig
from jax5d.costs.parameters import BYTES, FLOAT32, own_kv_heads
from jax5d.costs.zero import Shares


@dataclass(frozen=True)
class Activations:
    """Sizes on one device, in bytes, for the microbatches of a configuration.

    Raises:
        ConfigError: a mixture of experts, whose slots these formulas do not know.
    """

    config: RunConfig

    def __post_init__(self) -> None:
        if self.config.model.experts:
            raise ConfigError(
                f"model.experts={self.config.model.experts}: what a layer keeps is known for dense models; use "
                "--model.experts 0"
            )

    @cached_property
    def rows(self) -> int:
        """b."""
        return self.config.train.global_batch // (self.config.mesh.batch_shards * self.config.parallel.microbatches)

    @cached_property
    def length(self) -> int:
        """s: a context shard's part of the sequence."""
        return self.config.train.seq_len // self.config.mesh.cp

    @property
    def tokens(self) -> int:
        """b s."""
        return self.rows * self.length

    @property
    def width(self) -> int:
        """Bytes of one computed element."""
        return BYTES[self.config.model.dtype]

    @property
    def whole(self) -> int:
        """One [b, s, d] in a tensor-parallel region: what enters it is whole on every tp device."""
        return self.tokens * self.config.model.d_model * self.width

    @property
    def stream(self) -> int:
        """One [b, s, d] of the residual stream: sequence parallelism splits its tokens over tp."""
        return self.whole // (self.config.mesh.tp if self.config.parallel.sequence else 1)

    @property
    def heads(self) -> int:
        """Queries or attention's output [b, s, a / t, d / a]."""
        return self.whole // self.config.mesh.tp

    @property
    def keys(self) -> int:
        """Keys or values [b, s, m / t, d / a], of one head at least."""
        m = self.config.model
        return self.tokens * own_kv_heads(m, self.config.mesh) * m.head_dim * self.width

    @property
    def hidden(self) -> int:
        """The MLP's product, or the two of SwiGLU, [b, s, f / t] before the activation function."""
        m = self.config.model
        return self.products * self.tokens * m.d_ff // self.config.mesh.tp * self.width

    @property
    def products(self) -> int:
        """First products of the MLP."""
        return 2 if self.config.model.architecture == "llama" else 1

    @property
    def statistics(self) -> int:
        """The softmax's log-sum-exp, float32 [b, a / t, s]: fused attention keeps it instead of the weights."""
        return self.rows * self.config.model.heads // self.config.mesh.tp * self.length * FLOAT32

    @property
    def weights(self) -> int:
        """Attention weights [b, a / t, s, s] that plain attention keeps: before dropout and, if there is any, after."""
        m = self.config.model
        one = self.rows * m.heads // self.config.mesh.tp * self.length * self.length * self.width
        return one * (2 if m.dropout else 1)

    @property
    def layer(self) -> int:
        """What one layer keeps of one microbatch."""
        parallel = self.config.parallel
        if parallel.remat == "full":
            kept = {"attention_sum": self.stream, "qkv": self.heads + 2 * self.keys, "mlp_in": self.hidden}
            return self.stream + sum(kept[name] for name in parallel.save)
        stream = 4 * self.stream  # inputs of the two norms, and of the two column-parallel layers behind them
        return stream + 2 * (self.heads + self.keys) + self.attention + self.hidden

    @property
    def attention(self) -> int:
        """What attention keeps beside q, k, v and its output; its recomputation keeps nothing."""
        if self.config.parallel.remat == "selective":
            return 0
        return self.weights if self.config.model.attention == "plain" else self.statistics

    @property
    def slots(self) -> int:
        """Microbatches whose activations a stage keeps room for: M+p-1, and by 1F1B no more than 2p-1."""
        ticks = self.config.parallel.microbatches + self.config.mesh.pp - 1
        return ticks if self.config.parallel.schedule == "afab" else min(2 * self.config.mesh.pp - 1, ticks)

    @property
    def waiting(self) -> int:
        """Outputs of the last stage that wait for the head: all M, or by 1F1B one."""
        return self.config.parallel.microbatches if self.config.parallel.schedule == "afab" else 1

    @property
    def layers(self) -> int:
        """Layers of a stage."""
        return self.config.model.layers // self.config.mesh.pp

    @cached_property
    def parameters(self) -> int:
        """Gathered layers of the stage that ZeRO-3 keeps for the backward pass, if it does not gather them again."""
        shares = Shares(self.config)
        if shares.stage < 3 or self.config.parallel.regather:
            return 0
        return self.width * sum(leaf.local_size(self.config.mesh) for leaf, _ in shares.pieces() if leaf.stacked)

    @property
    def total(self) -> int:
        """The rings of the pipeline: what every layer keeps of every microbatch in flight, and the waiting outputs."""
        return self.slots * self.layers * self.layer + self.parameters + self.waiting * self.stream
