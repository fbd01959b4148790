"""Llama on one device, as plain as `reference`: whole arrays, no code of the library's.

Written from the papers: RMSNorm (arXiv:1910.07467, eq. 4), RoFormer (2104.09864, eq. 34, with a dim's partner half a
head away, as in Llama's published weights), GLU variants (2002.05202, eq. 6).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np


def rms_norm(p, x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"][None, None]


def rotation(length, width, theta):
    """Each position's rotation as a matrix [length, width, width]: column vectors are turned."""
    matrices = np.zeros((length, width, width))
    for p in range(length):
        for i in range(width // 2):
            angle, j = p / theta ** (2 * i / width), i + width // 2
            matrices[p, i, i] = matrices[p, j, j] = math.cos(angle)
            matrices[p, j, i], matrices[p, i, j] = math.sin(angle), -math.sin(angle)
    return jnp.asarray(matrices, jnp.float32)


def attention(p, x, theta):
    q = jnp.einsum("bsd,dnh->bsnh", x, p["w_q"])
    k, v = (jnp.einsum("bsd,dmh->bsmh", x, p["w_kv"][i]) for i in range(2))
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))  # arXiv:2305.13245
    length, width = x.shape[1], q.shape[-1]
    turn = rotation(length, width, theta)
    q, k = (jnp.einsum("sij,bsnj->bsni", turn, y, precision="highest") for y in (q, k))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(width)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool))[None, None], scores, -jnp.inf)
    return jnp.einsum("bsnh,nhd->bsd", jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, -1), v), p["w_out"])


def mlp(p, x):
    gate = x @ p["w_gate"]
    return (gate / (1 + jnp.exp(-gate)) * (x @ p["w_up"])) @ p["w_out"]


def forward(params, inputs, config):
    """Logits [b, s, vocab]."""
    outer, blocks = params["outer"], params["blocks"]
    x = outer["wte"][inputs]
    for i in range(config.layers):
        p = jax.tree.map(lambda leaf: leaf[i], blocks)  # noqa: B023
        x = x + attention(p["attention"], rms_norm(p["norm_1"], x), config.rope_theta)
        x = x + mlp(p["mlp"], rms_norm(p["norm_2"], x))
    table = outer["wte"] if config.tied else outer["head"]
    return rms_norm(outer["norm_f"], x) @ table[: config.vocab].T
