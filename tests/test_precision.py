"""bfloat16 computes; float32 accumulates, reduces and updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import carried, equations
from tiny import batch, config, host, put, start, trainer


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
