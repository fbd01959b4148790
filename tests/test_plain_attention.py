"""The textbook's attention computes what the ring computes, and keeps the scores that the ring does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import assert_close, batch, check_equivalent, config, host, put, start, trainer

from jax5d.config import MeshConfig
from jax5d.layers.attention import plain_attention
from jax5d.mesh import make_mesh
from jax5d.parallel.context import Draw, ring_attention
from jax5d.parallel.halves import halve

SHAPE = (2, 16, 2, 8)


def derivatives(attend: Any, rate: float, dtype: str) -> Any:
    """Output and gradients by q, k, v of random values, all in `dtype`."""
    values = [jax.random.normal(key, SHAPE).astype(dtype) for key in jax.random.split(jax.random.key(2), 4)]
    queries = jnp.arange(2 * 2 * 16, dtype=jnp.uint32).reshape(2, 2, 16)
    draw = Draw(jnp.array([3, 4], jnp.uint32), queries)

    def body(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, vjp = jax.vjp(partial(attend, draw=draw, rate=rate), q, k, v)
        return out, vjp(d_out)

    one = make_mesh(MeshConfig(), jax.devices()[:1])
    mapped = jax.shard_map(body, mesh=one, in_specs=(P("dp", "cp"),) * 4, out_specs=P("dp", "cp"))
    return jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32)), jax.jit(mapped)(*values))


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 0.02), ("float16", 0.002)])
def test_plain_equals_ring(dtype: str, tolerance: float, rate: float) -> None:
    """Values and all three gradients, with the same dropout mask; in 16 bits up to their rounding."""
    want = derivatives(ring_attention, rate, dtype)
    assert_close(derivatives(plain_attention, rate, dtype), want, tolerance)


@pytest.mark.parametrize("mesh", [{}, {"dp": 2, "tp": 2}], ids=["one", "dp2tp2"])
def test_training_with_plain_attention(mesh: dict[str, int]) -> None:
    """Loss and gradients are the plain model's, and under dropout those of fused attention."""
    check_equivalent(config(mesh, attention="plain"), steps=1)

    results = {}
    for attention in ("flash", "plain"):
        run = config(mesh, attention=attention, dropout=0.3)
        grads, metrics = trainer(run).gradients(start(run), put(run, batch(run)))
        results[attention] = float(metrics["loss"]), host(grads)
    chex.assert_trees_all_close(results["plain"][0], results["flash"][0], rtol=1e-6, atol=0)
    assert_close(results["plain"][1], results["flash"][1], 5e-6)


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 2), (2, 2), (4, 1)])
def test_training_with_plain_attention_of_fewer_heads(tp: int, kv_heads: int) -> None:
    """Each of the key and value heads gets the gradients of all its query heads."""
    check_equivalent(config({"tp": tp}, attention="plain", kv_heads=kv_heads), steps=1)


@pytest.mark.parametrize(("rate", "arrays"), [(0.0, 1), (0.4, 2)])
def test_what_the_backward_pass_keeps(rate: float, arrays: int) -> None:
    """bfloat16: the weights, with dropout also what is left of them, in 16 bits; the mask is drawn again."""
    draw = Draw(jnp.zeros(2, jnp.uint32), jnp.zeros((2, 2, 16), jnp.uint32))

    def attend(_: Any, x: jax.Array, m: jax.Array) -> Any:
        del m
        return plain_attention(*x, draw, rate=rate), None

    halves = halve(attend, {}, jnp.ones((3, *SHAPE), jnp.bfloat16), jnp.int32(0))
    squares = [str(x.dtype) for x in halves.saved if x.shape == (2, 2, 16, 16)]
    assert squares == ["bfloat16"] * arrays
    assert all(x.dtype == jnp.bfloat16 for x in halves.saved)
