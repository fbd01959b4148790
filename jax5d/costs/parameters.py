"""Parameters of a model: every leaf with its shape and the mesh axes that split it.

GPT-2: N = h v + h s + L (12 h^2 + 13 h) + 2 h for hidden h, vocabulary v, context s and L layers. Llama of MLP width f:
N = h v + L (4 h^2 + 3 h f + 2 h) + h. An untied head adds h v to either. With m key and value heads for a query heads,
2 h^2 m / a takes the place of two of the h^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from jax5d.config import AXES, MeshConfig, ModelConfig

Axes = tuple[str, ...]

BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""

FLOAT32, INT32 = BYTES["float32"], BYTES["int32"]


class Piece(NamedTuple):
    """What one device owns of a leaf that replicas share out."""

    axes: Axes
    """Over which the pieces lie; none where the leaf stays whole."""
    size: int
    """Elements, zeros behind the cut dim included."""
    split: Axes
    """Every axis that splits the leaf then, dim by dim."""


@dataclass(frozen=True)
class Leaf:
    """One parameter array: global shape (vocabulary padded), and the axes that split each dim."""

    name: str
    shape: tuple[int, ...]
    split: tuple[Axes, ...]
    shared: bool = False
    """Whether devices along tp use one copy each where tp cannot split it, and so have parts of its gradient."""

    @property
    def axes(self) -> Axes:
        """Every axis that splits the leaf."""
        return tuple(a for axes in self.split for a in axes)

    def local_size(self, mesh: MeshConfig) -> int:
        """Elements on one device."""
        return math.prod(self.shape) // math.prod(getattr(mesh, a) for a in self.axes)

    @property
    def stacked(self) -> bool:
        """Whether the first dim counts layers."""
        return self.name.startswith("blocks.")

    def piece(self, mesh: MeshConfig, axes: Axes) -> Piece:
        """The leaf cut over those of `axes` that do not split it: along the dim with the smallest piece, of equals the
        first.

        Not along layers, and along a dim that is split already only where no zeros are needed.
        """
        over = tuple(a for a in AXES if a in axes and a not in self.axes)
        n, whole = math.prod(getattr(mesh, a) for a in over), self.local_size(mesh)
        found = []
        for i in range(int(self.stacked), len(self.shape)):
            parts = math.prod(getattr(mesh, a) for a in self.split[i])
            local = self.shape[i] // parts
            if parts == 1 or local % n == 0:
                found.append((whole // local * -(-local // n), i))
        if not over or not found:
            return Piece((), whole, self.axes)
        size, dim = min(found)
        split = tuple(a for i, named in enumerate(self.split) for a in (*named, *(over if i == dim else ())))
        return Piece(over, size, split)


def leaves(model: ModelConfig, mesh: MeshConfig) -> list[Leaf]:
    """Every parameter of the model, laid out for the mesh."""
    d, llama = model.d_model, model.architecture == "llama"
    rows = -(-model.vocab // mesh.vocab_shards) * mesh.vocab_shards
    table = ((rows, d), (("pp", "tp"), ()))
    outer = [Leaf("wte", *table), *_norm("norm_f", model)]
    if not model.tied:
        outer.append(Leaf("head", *table))
    if not llama:
        outer.append(Leaf("wpe", (model.context, d), ((), ())))
    mlp = _experts(model) if model.experts else _swiglu(model) if llama else _gelu(model)
    block = [*_norm("norm_1", model), *_norm("norm_2", model), *_attention(model, mesh.tp), *mlp]
    stacked = [Leaf(f"blocks.{x.name}", (model.layers, *x.shape), (("pp",), *x.split), x.shared) for x in block]
    return outer + stacked


def _norm(name: str, model: ModelConfig) -> list[Leaf]:
    parts = ("scale",) if model.architecture == "llama" else ("scale", "bias")
    return [Leaf(f"{name}.{part}", (model.d_model,), ((),)) for part in parts]


def _attention(model: ModelConfig, tp: int) -> list[Leaf]:
    """Of keys and values every tp device has its own heads or, where those are fewer, all of them."""
    d, n, m, h = model.d_model, model.heads, model.groups, model.head_dim
    kv: Axes = () if m % tp else ("tp",)
    weights = [
        Leaf("attention.w_q", (d, n, h), ((), ("tp",), ())),
        Leaf("attention.w_kv", (2, d, m, h), ((), (), kv, ()), shared=True),
        Leaf("attention.w_out", (n, h, d), (("tp",), (), ())),
    ]
    biases = [
        Leaf("attention.b_q", (n, h), (("tp",), ())),
        Leaf("attention.b_kv", (2, m, h), ((), kv, ()), shared=True),
        Leaf("attention.b_out", (d,), ((),)),
    ]
    return weights if model.architecture == "llama" else weights + biases


def _gelu(model: ModelConfig) -> list[Leaf]:
    d, f = model.d_model, model.d_ff
    return [
        Leaf("mlp.w_in", (d, f), ((), ("tp",))),
        Leaf("mlp.b_in", (f,), (("tp",),)),
        Leaf("mlp.w_out", (f, d), (("tp",), ())),
        Leaf("mlp.b_out", (d,), ((),)),
    ]


def _swiglu(model: ModelConfig) -> list[Leaf]:
    d, f = model.d_model, model.d_ff
    columns = [Leaf(f"mlp.{name}", (d, f), ((), ("tp",))) for name in ("w_gate", "w_up")]
    return [*columns, Leaf("mlp.w_out", (f, d), (("tp",), ()))]


def _experts(model: ModelConfig) -> list[Leaf]:
    d, f, e = model.d_model, model.d_ff, model.experts
    return [
        Leaf("mlp.router", (d, e), ((), ())),
        Leaf("mlp.w_in", (e, d, f), (("ep",), (), ("tp",))),
        Leaf("mlp.w_out", (e, f, d), (("ep",), ("tp",), ())),
    ]


def own_kv_heads(model: ModelConfig, mesh: MeshConfig) -> int:
    """Heads of keys and values that one device computes and keeps: m / t, or one that t / m devices keep alike."""
    return max(model.groups // mesh.tp, 1)


def count(model: ModelConfig) -> int:
    """Parameters of the model, without padding."""
    return sum(math.prod(x.shape) for x in leaves(model, MeshConfig()))
