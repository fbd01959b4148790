"""The small models whose weights the tests bring in and out under Hugging Face's names."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
from tiny import config

State = dict[str, np.ndarray]

D, LAYERS, VOCAB, CONTEXT, HEADS, KV_HEADS = 32, 2, 97, 32, 4, 2
TIED = {"layers": LAYERS, "vocab": VOCAB}
UNTIED = TIED | {"tied": False}
LLAMA = UNTIED | {"architecture": "llama", "kv_heads": KV_HEADS, "rope_theta": 500.0}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": TIED,
    "gpt2-untied": UNTIED,
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tied": True, "kv_heads": 0},
}


def normal(shapes: dict[str, tuple[int, ...]]) -> State:
    """Matrices of std 0.15, vectors of 0.5, both float32, and scales of norms around 1."""
    rng = np.random.default_rng(0)
    std = lambda shape: 0.15 if len(shape) > 1 else 0.5  # noqa: E731
    scale = lambda name: "norm" in name or ("ln_" in name and name.endswith("weight"))  # noqa: E731
    return {name: (rng.normal(0, std(shape), shape) + scale(name)).astype(np.float32) for name, shape in shapes.items()}


@cache
def state(name: str) -> State:
    """A model's weights as its class saves them: with prefix, without buffers, a head only where it is not tied."""
    model = config(**MODELS[name]).model
    head = {} if model.tied else {"lm_head.weight": (VOCAB, D)}
    if model.architecture == "gpt2":
        block = {"ln_1": (D,), "ln_2": (D,), "attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D)}
        block |= {"mlp.c_fc": (D, 4 * D), "mlp.c_proj": (4 * D, D)}
        pairs = {f"h.{i}.{key}": shape for i in range(LAYERS) for key, shape in block.items()} | {"ln_f": (D,)}
        bare = {"wte.weight": (VOCAB, D), "wpe.weight": (CONTEXT, D)}
        bare |= {f"{key}.weight": shape for key, shape in pairs.items()}
        bare |= {f"{key}.bias": shape[-1:] for key, shape in pairs.items()}
        return normal({f"transformer.{key}": shape for key, shape in bare.items()} | head)
    few = D // HEADS * model.groups
    block = {"input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (D, D)}
    block |= {"self_attn.k_proj": (few, D), "self_attn.v_proj": (few, D), "self_attn.o_proj": (D, D)}
    block |= {"mlp.gate_proj": (4 * D, D), "mlp.up_proj": (4 * D, D), "mlp.down_proj": (D, 4 * D)}
    bare = {f"layers.{i}.{key}.weight": shape for i in range(LAYERS) for key, shape in block.items()}
    bare |= {"embed_tokens.weight": (VOCAB, D), "norm.weight": (D,)}
    return normal({f"model.{key}": shape for key, shape in bare.items()} | head)


def same(a: Any, b: Any) -> bool:
    """To the bit, dtypes and shapes and names included."""
    equal = lambda x, y: x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()  # noqa: E731
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(jax.tree.map(equal, a, b)))
