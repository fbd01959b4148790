"""16 bits compute; float32 accumulates, reduces and updates, unless the parameters themselves are bfloat16."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import carried, equations
from tiny import assert_close, batch, config, gradients, host, put, start, trainer, weights

from jax5d.config import MeshConfig, ParallelConfig, RunConfig
from jax5d.mesh import make_mesh
from jax5d.parallel.data import varying
from jax5d.parallel.reduction import make_reduction
from jax5d.parallel.tensor import VOCAB_AXES, TensorBoundary, embed_tokens

PURE = {"dtype": "bfloat16", "param_dtype": "bfloat16"}


def test_many_microbatches_equal_one() -> None:
    """B73: 32 microbatches of one row against one of 32, bfloat16: gradients differ by less than 1 % in norm."""
    grads = {}
    for microbatches in (1, 32):
        run = config(dtype="bfloat16", microbatches=microbatches, global_batch=32)
        tree = host(trainer(run).gradients(start(run), put(run, batch(run)))[0])
        assert all(x.dtype == np.float32 for x in jax.tree.leaves(tree))
        grads[microbatches] = np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    difference = np.linalg.norm(grads[32] - grads[1]) / np.linalg.norm(grads[1])
    assert 0 < difference < 0.01


ROWS = 24
"""Rows with which no activation has the shape of a weight: 6 in each microbatch of a device."""


def check_sums(run: RunConfig, dtype: str) -> None:
    """Every accumulator of a leaf's shape, and every sum of leaves over dp, has `dtype`.

    But for the token table: whatever the dtype, its rows are summed in float32 within one microbatch.
    """
    proof = trainer(run)
    program = jax.make_jaxpr(proof.gradients)(*trainer(run).arguments)
    shards = jax.tree.map(lambda x, s: s.shard_shape(x.shape), proof.model.shapes, proof.shardings.params)
    shapes = set(jax.tree.leaves(shards, is_leaf=lambda x: isinstance(x, tuple)))
    kinds: dict[tuple[int, ...], set] = {}
    for x in carried(program.jaxpr):
        kinds.setdefault(x.shape, set()).add(x.dtype)
    sums = [e for e in equations(program.jaxpr) if e.primitive.name in ("psum", "psum_invariant")]
    reduced = [x.aval for e in sums if "dp" in e.params["axes"] for x in e.invars]
    assert shapes <= set(kinds)
    table = shards["outer"]["wte"]
    assert all(kinds[shape] == {jnp.dtype(dtype)} for shape in shapes - {table})
    assert jnp.dtype(dtype) in kinds[table] <= {jnp.dtype(dtype), jnp.dtype(jnp.float32)}
    layers = {shape[1:] for shape in shapes}  # those of the blocks are reduced layer by layer
    assert {x.dtype for x in reduced if x.shape in shapes | layers and x.shape} == {jnp.dtype(dtype)}
    assert {x.dtype for x in reduced if not x.shape} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


@pytest.mark.parametrize("moe", [False, True], ids=["gpt2", "moe"])
def test_gradients_are_carried_and_reduced_in_float32(moe: bool) -> None:
    """B73: by default, in the program, under bfloat16 compute."""
    run = config({"pp": 2, "dp": 2, "tp": 2}, moe=moe, dtype="bfloat16", microbatches=2, global_batch=ROWS)
    check_sums(run, "float32")


@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
def test_the_sums_of_a_pure_16_bit_run(accumulate: str) -> None:
    """B73: bfloat16 where it is asked for, with bfloat16 weights; float32 where it is not."""
    run = config({"pp": 2, "dp": 2, "tp": 2}, microbatches=2, accumulate=accumulate, global_batch=ROWS, **PURE)
    check_sums(run, accumulate)


@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["overlap", "leaf", "bucket", "single"])
def test_the_dtype_of_reductions_in_hlo(reduction: str, accumulate: str) -> None:
    """B73: what goes to the compiler: every all-reduce of an array of a thousand numbers or more has the dtype."""
    run = config(
        {"dp": 4}, dtype="bfloat16", microbatches=2, reduction=reduction, accumulate=accumulate, bucket_mb=0.05
    )
    text = trainer(run).gradients.lower(*trainer(run).arguments).as_text()
    large = set()
    for operation in text.split('"stablehlo.all_reduce"')[1:]:
        over_dp = re.search(
            r'tensor<\d+x4xi64>|"dp"', operation[: operation.index("^bb0")]
        )  # groups as jax 0.10, 0.12 write
        shape, kind = re.findall(r"\}\) : \(tensor<([0-9x]*?)x?([a-z]+[0-9]+)>", operation)[0]
        if over_dp and shape and math.prod(map(int, shape.split("x"))) >= 1000:
            large.add(kind)
    assert large == {{"float32": "f32", "bfloat16": "bf16"}[accumulate]}


@pytest.mark.parametrize("all_reduce", ["psum", "ring", "two_way_ring"])
def test_a_sum_over_replicas(all_reduce: str) -> None:
    """B73: 256 and seven ones, on dp 8, are 263 in float32. A bfloat16 ring that begins with 256 stays there."""
    mesh, specs = make_mesh(MeshConfig(dp=8), jax.devices()[:8]), {"outer": {"w": P()}, "blocks": {}}
    summed = {"outer": {"w": ("pp", "dp", "ep", "cp")}, "blocks": {}}
    reduction = make_reduction(ParallelConfig(reduction="leaf", all_reduce=all_reduce), specs, summed, {})

    def body(x: jax.Array) -> jax.Array:
        own = varying(jnp.broadcast_to(x, (16,)), ("pp", "dp", "ep", "cp"))
        return reduction.rest({"outer": {"w": own}, "blocks": {}})["outer"]["w"]

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P()))
    values = jnp.array([256.0, *[1.0] * 7])
    assert np.array_equal(mapped(values), np.full(16, 263))
    narrow = np.asarray(mapped(values.astype(jnp.bfloat16)), np.float32)
    assert set(narrow) <= {256, 258, 260, 262, 264}
    if all_reduce != "psum":  # XLA may add in float32 inside its own
        assert narrow.min() == 256


def test_parameters_and_moments_stay_float32() -> None:
    """Under bfloat16 the state of AdamW keeps float32 weights and moments, and integer counts."""
    run = config(dtype="bfloat16", optimizer="adamw")
    state, metrics = trainer(run).step(start(run), put(run, batch(run)))
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    assert state.step.dtype == jnp.int32
    assert metrics["loss"].dtype == jnp.float32


MODELS = {"gpt2": {}, "moe": {"moe": True}, "llama": {"architecture": "llama", "tied": False}}


@pytest.mark.parametrize(("dtypes", "limit"), [({"dtype": "float16"}, 0.003), (PURE, 0.03)], ids=["float16", "pure"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_in_16_bits(dtypes: dict[str, str], limit: float, model: str) -> None:
    """On cp 2, tp 2, with dropout and recomputation, gradients are float32's up to 16-bit rounding, in norm."""
    initial = weights(config(**MODELS[model]).model)
    initial = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), initial)
    grads = []
    for options in ({}, dtypes):
        run = config({"cp": 2, "tp": 2}, dropout=0.1, remat="full", **MODELS[model], **options)
        params = jax.tree.map(lambda x, kind: x.astype(kind.dtype), initial, trainer(run).model.shapes)
        tree = trainer(run).gradients(start(run, params), put(run, batch(run)))[0]
        grads.append(np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(tree)]))
    difference = np.linalg.norm(grads[1] - grads[0]) / np.linalg.norm(grads[0])
    assert 0 < difference < limit


def test_a_pure_16_bit_run_keeps_16_bits() -> None:
    """Parameters and both moments are bfloat16, before a step and after; they begin as the float32 ones, rounded."""
    run = config({"pp": 2, "tp": 2}, optimizer="adamw", **PURE)
    state = trainer(run).init()
    for _ in range(2):
        kinds = {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[1]))}
        assert kinds == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)}
        state, metrics = trainer(run).step(state, put(run, batch(run)))
    assert metrics["loss"].dtype == jnp.float32
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights(config().model))
    jax.tree.map(np.testing.assert_array_equal, host(trainer(run).init().params), rounded)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_frequent_token_in_a_bfloat16_table(tp: int) -> None:
    """The gradient of a row that 1000 tokens read is 1000: a sum of ones in bfloat16 stops at 256."""
    ids = jnp.full((1, 1000), 3, jnp.int32)

    def body(table: jax.Array) -> jax.Array:
        total = lambda t: jnp.sum(embed_tokens(t, ids, TensorBoundary(), jnp.dtype(jnp.bfloat16)))  # noqa: E731
        return jax.grad(lambda t: total(t).astype(jnp.float32))(table)

    mesh, rows = make_mesh(MeshConfig(tp=tp), jax.devices()[:tp]), P(VOCAB_AXES)
    grad = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows))(jnp.ones((4, 2), jnp.bfloat16))
    assert grad.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(grad, np.float32), np.array([[0, 0], [0, 0], [0, 0], [1000, 1000]]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_overlap_in_16_bits(dtype: str) -> None:
    """Sums that go round in pieces are off by roundings alone: by 3 hops of 2^-9 (2^-12) at most, twice a layer."""
    found = []
    for overlap in (False, True):
        run = config({"tp": 4}, dtype=dtype, sequence=True, overlap=overlap)
        state, metrics = trainer(run).step(start(run), put(run, batch(run)))
        found.append((host(gradients(state)), float(metrics["loss"])))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)
    assert_close(found[1][0], found[0][0], 4 * 2 * 3 * float(jnp.finfo(dtype).eps))
