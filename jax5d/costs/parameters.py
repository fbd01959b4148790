"""Parameters of a model: every leaf with its shape and the mesh axes that split it.

GPT-2: N = h v + h s + L (12 h^2 + 13 h) + 2 h for hidden h, vocabulary v, context s and L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax5d.config import MeshConfig, ModelConfig

Axes = tuple[str, ...]

BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""

FLOAT32, INT32 = BYTES["float32"], BYTES["int32"]


@dataclass(frozen=True)
class Leaf:
    """One parameter array: global shape (vocabulary padded), and the axes that split each dim."""

    name: str
    shape: tuple[int, ...]
    split: tuple[Axes, ...]

    @property
    def axes(self) -> Axes:
        """Every axis that splits the leaf."""
        return tuple(a for axes in self.split for a in axes)

    def local_size(self, mesh: MeshConfig) -> int:
        """Elements on one device."""
        return math.prod(self.shape) // math.prod(getattr(mesh, a) for a in self.axes)


def leaves(model: ModelConfig, mesh: MeshConfig) -> list[Leaf]:
    """Every parameter of the model, laid out for the mesh."""
    d, f, n, h = model.d_model, model.d_ff, model.heads, model.head_dim
    rows = -(-model.vocab // mesh.vocab_shards) * mesh.vocab_shards
    outer = [
        Leaf("wte", (rows, d), (("pp", "tp"), ())),
        Leaf("wpe", (model.context, d), ((), ())),
        Leaf("norm_f.scale", (d,), ((),)),
        Leaf("norm_f.bias", (d,), ((),)),
    ]
    block = [
        *(Leaf(f"{norm}.{part}", (d,), ((),)) for norm in ("norm_1", "norm_2") for part in ("scale", "bias")),
        Leaf("attention.w_qkv", (d, 3, n, h), ((), (), ("tp",), ())),
        Leaf("attention.b_qkv", (3, n, h), ((), ("tp",), ())),
        Leaf("attention.w_out", (n, h, d), (("tp",), (), ())),
        Leaf("attention.b_out", (d,), ((),)),
    ]
    if model.experts:
        e = model.experts
        block += [
            Leaf("mlp.router", (d, e), ((), ())),
            Leaf("mlp.w_in", (e, d, f), (("ep",), (), ("tp",))),
            Leaf("mlp.w_out", (e, f, d), (("ep",), ("tp",), ())),
        ]
    else:
        block += [
            Leaf("mlp.w_in", (d, f), ((), ("tp",))),
            Leaf("mlp.b_in", (f,), (("tp",),)),
            Leaf("mlp.w_out", (f, d), (("tp",), ())),
            Leaf("mlp.b_out", (d,), ((),)),
        ]
    stacked = [Leaf(f"blocks.{x.name}", (model.layers, *x.shape), (("pp",), *x.split)) for x in block]
    return outer + stacked


def count(model: ModelConfig) -> int:
    """Parameters of the model, without padding."""
    return sum(math.prod(x.shape) for x in leaves(model, MeshConfig()))
