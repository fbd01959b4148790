"""GPT-2, and the MoE of the same skeleton, in flax.nnx.

Radford et al. 2019: learned positions, pre-norm, tanh GELU, biases, tied head, residual projections initialised
with 0.02 / sqrt(2 layers). The blocks are stacked along a leading layers dim, which pp splits and a scan walks.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jax5d.config import ModelConfig
from jax5d.layers.attention import Attend, Attention
from jax5d.layers.dropout import Place, dropout, site
from jax5d.layers.embedding import Vocabulary
from jax5d.layers.init import STD
from jax5d.layers.mlp import Mlp
from jax5d.layers.moe import Moe
from jax5d.layers.norm import LayerNorm
from jax5d.parallel.tensor import Boundary


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches."""

    def __init__(self, config: ModelConfig, boundary: Boundary, attend: Attend, rngs: nnx.Rngs):
        out_std = STD / (2 * config.layers) ** 0.5
        self.norm_1 = LayerNorm(config.d_model)
        self.attention = Attention(
            config.d_model,
            config.heads,
            out_std=out_std,
            dropout=config.dropout,
            boundary=boundary,
            attend=attend,
            rngs=rngs,
        )
        self.norm_2 = LayerNorm(config.d_model)
        self.mlp = _mlp(config, out_std, boundary, rngs)
        self.dropout, self.boundary = config.dropout, boundary

    def __call__(self, x: jax.Array, place: Place, key: jax.Array) -> tuple[jax.Array, dict[str, Any], dict[str, Any]]:
        """Residual stream [b, s_stream, d] -> the same, the MLP's losses and its statistics; `key` is the layer's."""
        y = self.attention(self.norm_1(x), place, site(key, 0))
        x = x + dropout(y, self.dropout, site(key, 1), place, self.boundary)
        y, losses, stats = self.mlp(self.norm_2(x))
        return x + dropout(y, self.dropout, site(key, 2), place, self.boundary), losses, stats


def _mlp(config: ModelConfig, out_std: float, boundary: Boundary, rngs: nnx.Rngs) -> Mlp | Moe:
    if not config.experts:
        return Mlp(config.d_model, config.d_ff, out_std=out_std, boundary=boundary, rngs=rngs)
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
        self.outer = Vocabulary(config.vocab, rows, config.context, config.d_model, config.dropout, boundary, rngs)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, boundary, attend, rngs)

        self.blocks = stack(rngs)
