"""Ring attention against dense attention in float64: values, all three gradients, precision, and positions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import carried, equations
from tiny import assert_close, batch, check_equivalent, config, gradients, ids, put, start, trainer, weights
from tiny import reference_gradients as plain

from jax5d.config import MeshConfig
from jax5d.mesh import make_mesh
from jax5d.parallel import context
from jax5d.parallel.context import Draw, ring_attention


def ring(cp: int, *, causal: bool = True) -> Any:
    """(q, k, v, d_out) -> out, (d_q, d_k, d_v), all [b, t, n, h], on a ring of cp devices."""

    def body(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        draw = Draw(jnp.zeros(2, jnp.uint32), jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.uint32))
        out, vjp = jax.vjp(partial(ring_attention, draw=draw, causal=causal), q, k, v)
        return out, vjp(d_out)

    blocks = P(None, "cp")
    mesh = make_mesh(MeshConfig(cp=cp), jax.devices()[:cp])
    return jax.shard_map(body, mesh=mesh, in_specs=(blocks,) * 4, out_specs=(blocks, (blocks,) * 3))


def dense(q: Any, k: Any, v: Any, d_out: Any, *, causal: bool = True) -> Any:
    """The same in NumPy float64, with the derivatives written out."""
    q, k, v, d_out = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, d_out))
    length, scale = q.shape[1], 1 / math.sqrt(q.shape[-1])
    scores = np.einsum("bsnh,btnh->bnst", q, k) * scale
    if causal:
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("bsnh,btnh->bnst", d_out, v)
    d_scores = weights * (d_weights - np.sum(d_weights * weights, -1, keepdims=True)) * scale
    return np.einsum("bnst,btnh->bsnh", weights, v), (
        np.einsum("bnst,btnh->bsnh", d_scores, k),
        np.einsum("bnst,bsnh->btnh", d_scores, q),
        np.einsum("bnst,bsnh->btnh", weights, d_out),
    )


def random(shape: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.Array]:
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in jax.random.split(jax.random.key(0), 4)]


@pytest.mark.parametrize("piece", [512, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_values_and_gradients(cp: int, causal: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B22: output, d_q, d_k, d_v as dense attention's, each block's on its owner; also by pieces of blocks."""
    monkeypatch.setattr(context, "PIECE", piece)
    values = random((2, 32, 4, 8))
    got = jax.jit(ring(cp, causal=causal))(*values)
    assert_close(jax.tree.map(np.asarray, got), dense(*values, causal=causal), 1e-5)
    for gradient in got[1]:
        assert [shard.data.shape[1] for shard in gradient.addressable_shards] == [32 // cp] * cp


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_error_of_16_bits_does_not_grow_with_the_ring(dtype: Any) -> None:
    """B23: the largest error of the output grows by at most 1.5, that of each gradient by 2, from 1 device to 8."""
    values = random((1, 64, 4, 16), dtype)
    want = dense(*values)
    wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    errors = {}
    for cp in (1, 2, 4, 8):
        out, grads = jax.jit(ring(cp))(*values)
        errors[cp] = [np.max(np.abs(wide(g) - w)) for g, w in zip((out, *grads), (want[0], *want[1]), strict=True)]
    assert min(errors[1]) > 0
    for cp in (2, 4, 8):
        assert errors[cp][0] <= 1.5 * errors[1][0]
        assert all(e <= 2 * one for e, one in zip(errors[cp][1:], errors[1][1:], strict=True)), errors


def test_accumulators_are_float32() -> None:
    """B23: with bfloat16 inputs, loops carry the travelling keys and values in 16 bits and all else in 32."""
    b, s, n, h = 1, 16, 4, 16
    program = jax.make_jaxpr(ring(4))(*random((b, 4 * s, n, h), jnp.bfloat16))
    kept = carried(program.jaxpr)
    block = (b, s, n, h)
    narrow = [x.shape for x in kept if x.dtype == jnp.bfloat16]
    assert set(narrow) == {block}
    wide = {x.shape for x in kept if x.dtype == jnp.float32}
    assert wide == {(b, n, s), block}  # maximum and sum; output, d_q, d_k and d_v
    sent = {e.invars[0].aval.dtype for e in equations(program.jaxpr) if e.primitive.name == "ppermute"}
    assert sent == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}


def test_positions_go_on_over_the_ring() -> None:
    """B25: cp 4. Every row of the position table has the gradient of one device, none is 0."""
    run = config({"cp": 4})
    state, _ = check_equivalent(run, steps=1)
    got = np.asarray(gradients(state)["outer"]["wpe"])
    _, want = plain(run, weights(run.model), batch(run))
    for row in range(32):
        assert np.max(np.abs(got[row])) > 0
        assert_close(got[row], want["outer"]["wpe"][row], 2e-5)


def test_positions_alone_tell_equal_tokens_apart() -> None:
    """B25: cp 4, one token all along, so that only positions differ: the loss at each is one device's."""
    run = config({"cp": 4}, global_batch=1)
    proof = trainer(run)
    inputs, targets = np.full((1, 32), 7, np.int32), ids(1)[:, 1:]
    params, losses = start(run).params, []
    for position in range(32):
        labels = np.where(np.arange(32)[None] == position, targets, -100).astype(np.int32)
        result = proof.evaluate(params, put(run, batch(run, inputs, labels)))
        metrics, _ = plain(run, weights(run.model), batch(run, inputs, labels))
        losses.append(float(result["loss_sum"]))
        chex.assert_trees_all_close(losses[-1], float(metrics["loss"]), rtol=1e-6, atol=0)
    assert len(set(losses)) == 32
