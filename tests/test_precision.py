"""16 bits compute; float32 accumulates, reduces and updates, unless the parameters themselves are bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import carried, equations
from tiny import batch, config, host, put, start, trainer, weights

from jax5d.config import MeshConfig
from jax5d.mesh import make_mesh
from jax5d.parallel.tensor import VOCAB_AXES, TensorBoundary, embed_tokens


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


@pytest.mark.parametrize("moe", [False, True], ids=["gpt2", "moe"])
def test_gradients_are_carried_and_reduced_in_float32(moe: bool) -> None:
    """B73: in the program, every accumulator of a leaf's shape and every sum of gradients over dp is float32."""
    run = config({"pp": 2, "dp": 2, "tp": 2}, moe=moe, dtype="bfloat16", microbatches=2)
    proof = trainer(run)
    data = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch(run).items()}
    program = jax.make_jaxpr(proof.gradients)(jax.eval_shape(proof.init), data)
    shards = jax.tree.map(lambda x, s: s.shard_shape(x.shape), proof.model.shapes, proof.shardings.params)
    shapes = set(jax.tree.leaves(shards, is_leaf=lambda x: isinstance(x, tuple)))
    kinds: dict[tuple[int, ...], set] = {}
    for x in carried(program.jaxpr):
        kinds.setdefault(x.shape, set()).add(x.dtype)
    sums = [e for e in equations(program.jaxpr) if e.primitive.name in ("psum", "psum_invariant")]
    reduced = {x.aval.dtype for e in sums if "dp" in e.params["axes"] for x in e.invars}
    assert shapes <= set(kinds)
    assert all(kinds[shape] == {jnp.dtype(jnp.float32)} for shape in shapes)
    assert reduced == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


def test_parameters_and_moments_stay_float32() -> None:
    """Under bfloat16 the state of AdamW keeps float32 weights and moments, and integer counts."""
    run = config(dtype="bfloat16", optimizer="adamw")
    state, metrics = trainer(run).step(start(run), put(run, batch(run)))
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    assert state.step.dtype == jnp.int32
    assert metrics["loss"].dtype == jnp.float32


PURE = {"dtype": "bfloat16", "param_dtype": "bfloat16"}


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
