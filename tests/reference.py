"""The plain one-device model that every mesh is held against: no mesh, no shard_map, no pipeline, no rings.

Written apart from the library, from the papers. Parameters are the library's pure dict at full shape.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import reference_llama


def layer_norm(p, x):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * p["scale"][None, None] + p["bias"][None, None]


def attention(p, x):
    q = jnp.einsum("bsd,dnh->bsnh", x, p["w_q"]) + p["b_q"][None, None]
    k, v = (jnp.einsum("bsd,dmh->bsmh", x, p["w_kv"][i]) + p["b_kv"][None, None, i] for i in range(2))
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1])
    length = x.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool))[None, None], scores, -jnp.inf)
    y = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, -1), v)
    return jnp.einsum("bsnh,nhd->bsd", y, p["w_out"]) + p["b_out"][None, None]


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(p, x):
    return gelu(x @ p["w_in"] + p["b_in"][None, None]) @ p["w_out"] + p["b_out"][None, None]


def moe(p, x, config):
    """Every expert on every token, then a choice: dropless unless the group's capacity says otherwise."""
    logits = x @ p["router"]
    probs = jax.nn.softmax(logits, -1)
    b, s, e = probs.shape
    _, chosen = jax.lax.top_k(probs, config.top_k)
    hot = jax.nn.one_hot(chosen, e)  # [b, s, k, e]
    keep = jnp.ones_like(hot)
    if config.capacity_factor:
        size = math.ceil(config.capacity_factor * config.group * config.top_k / e)
        # queue of each group: all first choices, then all second ones
        g = hot.reshape(b, s // config.group, config.group, config.top_k, e).swapaxes(2, 3)
        queue = jnp.cumsum(g.reshape(b, s // config.group, -1, e), 2).reshape(g.shape).swapaxes(2, 3)
        keep = (queue.reshape(hot.shape) <= size).astype(hot.dtype)
    gate = jnp.einsum("bske,bse->bse", hot * keep, probs)
    outs = jnp.stack([gelu(x @ p["w_in"][i]) @ p["w_out"][i] for i in range(e)], 2)
    share = hot.mean((0, 1)).sum(0) / config.top_k
    aux = e * jnp.sum(share * probs.mean((0, 1)))
    z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    return jnp.einsum("bse,bsed->bsd", gate, outs), aux, z


def forward(params, inputs, config):
    """Logits [b, s, vocab], summed auxiliary loss, summed z-loss."""
    if config.architecture == "llama":
        return reference_llama.forward(params, inputs, config), jnp.float32(0), jnp.float32(0)
    outer = params["outer"]
    x = outer["wte"][inputs] + outer["wpe"][None, : inputs.shape[1]]

    def layer(x, p):
        x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
        h = layer_norm(p["norm_2"], x)
        y, aux, z = moe(p["mlp"], h, config) if config.experts else (mlp(p["mlp"], h), 0.0, 0.0)
        return x + y, (aux, z)

    x, (aux, z) = jax.lax.scan(layer, x, params["blocks"])
    x = layer_norm(outer["norm_f"], x)
    return x @ outer.get("head", outer["wte"])[: config.vocab].T, jnp.sum(aux), jnp.sum(z)


def objective(params, inputs, labels, config):
    """The objective of inputs, labels [microbatches, rows, sequence]; its cross-entropy is the mean over tokens."""
    total = aux = z = jnp.float32(0)
    for ids, targets in zip(inputs, labels, strict=True):
        logits, a, b = forward(params, ids, config)
        logp = jax.nn.log_softmax(logits, -1)
        picked = jnp.take_along_axis(logp, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        total, aux, z = total - jnp.sum(jnp.where(targets >= 0, picked, 0)), aux + a, z + b
    m = len(inputs)
    ce = total / jnp.maximum(jnp.sum(labels >= 0), 1).astype(jnp.float32)
    extra = (config.aux_coef * aux + config.z_coef * z) / m if config.experts else 0.0
    return ce + extra, {"loss": ce, "aux_loss": aux / m, "router_z_loss": z / m}
