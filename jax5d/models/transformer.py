"""GPT-2, the MoE of the same skeleton, and Llama, in flax.nnx.

GPT-2 (Radford et al. 2019): learned positions, pre-norm, tanh GELU, biases, tied head. Llama (Touvron et al.,
arXiv:2302.13971): RMS norm, rotary positions, SwiGLU, no biases. In both, residual projections are initialised with
0.02 / sqrt(2 layers). The blocks are stacked along a leading layers dim, which pp splits and a scan walks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import nnx

from jax5d.config import ModelConfig
from jax5d.layers.attention import Attend, Attention, BiasedAttention, Meet, RotaryAttention
from jax5d.layers.dropout import Place, dropout, site
from jax5d.layers.embedding import PlacedVocabulary, Vocabulary
from jax5d.layers.init import STD
from jax5d.layers.mlp import Mlp, SwiGlu
from jax5d.layers.moe import Moe
from jax5d.layers.norm import LayerNorm, RmsNorm
from jax5d.parallel.tensor import Boundary


class Architecture(NamedTuple):
    """The layers that a model is made of."""

    norm: type[LayerNorm | RmsNorm]
    attention: type[Attention]
    mlp: type[Mlp | SwiGlu]
    vocabulary: type[Vocabulary]


ARCHITECTURES = {
    "gpt2": Architecture(LayerNorm, BiasedAttention, Mlp, PlacedVocabulary),
    "llama": Architecture(RmsNorm, RotaryAttention, SwiGlu, Vocabulary),
}
"""By their names in the configuration."""


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches."""

    def __init__(self, config: ModelConfig, boundary: Boundary, attend: Attend, rngs: nnx.Rngs):
        parts, out_std = ARCHITECTURES[config.architecture], STD / (2 * config.layers) ** 0.5
        self.norm_1 = parts.norm(config.d_model)
        self.attention = parts.attention(config, out_std=out_std, boundary=boundary, attend=attend, rngs=rngs)
        self.norm_2 = parts.norm(config.d_model)
        self.mlp = _mlp(config, out_std, boundary, rngs)
        self.dropout, self.boundary = config.dropout, boundary

    def __call__(self, x: jax.Array, place: Place, key: jax.Array) -> tuple[jax.Array, dict[str, Any], dict[str, Any]]:
        """Residual stream [b, s_stream, d] -> the same, the MLP's losses and its statistics; `key` is the layer's."""
        y = self.attention(self.norm_1(x), place, site(key, 0))
        x = _add(x, dropout(y, self.dropout, site(key, 1), place, self.boundary))
        y, losses, stats = self.mlp(self.norm_2(x))
        return _add(x, dropout(y, self.dropout, site(key, 2), place, self.boundary)), losses, stats

    def remembering(self, x: jax.Array, place: Place, meet: Meet) -> tuple[jax.Array, Any]:
        """The residual stream [b, s_stream, d] without dropout, and what `meet` remembers of keys and values."""
        y, memory = self.attention.remembering(self.norm_1(x), place, meet)
        x = _add(x, y)
        y, _, _ = self.mlp(self.norm_2(x))
        return _add(x, y), memory


@jax.named_scope("residual")
def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    """A branch's result onto the residual stream."""
    return x + y


def _mlp(config: ModelConfig, out_std: float, boundary: Boundary, rngs: nnx.Rngs) -> Mlp | SwiGlu | Moe:
    if not config.experts:
        dense = ARCHITECTURES[config.architecture].mlp
        return dense(config.d_model, config.d_ff, out_std=out_std, boundary=boundary, rngs=rngs)
    return Moe(
        config.d_model,
        config.d_ff,
        config.experts,
        top_k=config.top_k,
        factor=config.capacity_factor,
        group=config.group,
        out_std=out_std,
        boundary=boundary,
        rngs=rngs,
    )


class Transformer(nnx.Module):
    """The whole model: `outer` belongs to every pipeline stage, `blocks` is stacked [layers, ...]."""

    def __init__(self, config: ModelConfig, rows: int, boundary: Boundary, attend: Attend, rngs: nnx.Rngs):
        parts = ARCHITECTURES[config.architecture]
        self.outer = parts.vocabulary(config, rows, parts.norm(config.d_model), boundary, rngs)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, boundary, attend, rngs)

        self.blocks = stack(rngs)
