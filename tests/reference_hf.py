"""GPT-2 and Llama from Hugging Face's state dicts, in NumPy and float64: no code and no layout of the library's.

Written from the papers and from how the two classes store their weights: Conv1D computes x w + b with w (in, out),
Linear x w^T with w (out, in). The rotary pairs are dims i and i + h/2.
"""

from __future__ import annotations

import math

import numpy as np


def normalised(x, eps, centred):
    """Over the last dim: mean square 1, and with `centred` mean 0 before."""
    x = x - centred * x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def attend(q, k, v):
    """q [b, s, n, h], k and v [b, s, m, h]: query head i reads head i m / n. [b, s, n h]."""
    (b, s, n, h), m = q.shape, k.shape[2]
    k, v = (np.repeat(x, n // m, axis=2) for x in (k, v))
    scores = np.where(np.tril(np.ones((s, s), bool)), np.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(h), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnst,btnh->bsnh", weights, v).reshape(b, s, n * h)


def gpt2(state, ids, heads, eps=1e-5):
    """Logits [b, s, vocab]; names with their prefix, an untied head where there is one."""
    w = {key.removeprefix("transformer."): np.asarray(x, np.float64) for key, x in state.items()}
    (b, s), d = ids.shape, w["wte.weight"].shape[1]

    def norm(name, x):
        return normalised(x, eps, True) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv1d(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][ids] + w["wpe.weight"][:s]
    for i in range(sum(key.endswith("ln_1.weight") for key in w)):
        q, k, v = np.split(conv1d(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x)), 3, axis=-1)
        y = attend(*(z.reshape(b, s, heads, d // heads) for z in (q, k, v)))
        x = x + conv1d(f"h.{i}.attn.c_proj", y)
        y = conv1d(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x))
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + conv1d(f"h.{i}.mlp.c_proj", y)
    return norm("ln_f", x) @ w.get("lm_head.weight", w["wte.weight"]).T


def llama(state, ids, heads, eps=1e-5, theta=10000.0):
    """The same of Llama."""
    w = {key.removeprefix("model."): np.asarray(x, np.float64) for key, x in state.items()}
    (b, s), d = ids.shape, w["embed_tokens.weight"].shape[1]
    h = d // heads
    turn = np.exp(1j * np.arange(s)[:, None] * theta ** (-2 * np.arange(h // 2) / h))[:, None]  # [s, 1, h/2]

    def norm(name, x):
        return normalised(x, eps, False) * w[f"{name}.weight"]

    def linear(name, x):
        return x @ w[f"{name}.weight"].T

    def rotated(x):
        pairs = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = w["embed_tokens.weight"][ids]
    for i in range(sum(key.endswith("input_layernorm.weight") for key in w)):
        y = norm(f"layers.{i}.input_layernorm", x)
        q, k, v = (linear(f"layers.{i}.self_attn.{name}_proj", y).reshape(b, s, -1, h) for name in "qkv")
        x = x + linear(f"layers.{i}.self_attn.o_proj", attend(rotated(q), rotated(k), v))
        y = norm(f"layers.{i}.post_attention_layernorm", x)
        gate, up = linear(f"layers.{i}.mlp.gate_proj", y), linear(f"layers.{i}.mlp.up_proj", y)
        x = x + linear(f"layers.{i}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    return norm("norm", x) @ w.get("lm_head.weight", w["embed_tokens.weight"]).T
