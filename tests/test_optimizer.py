"""The update: learning rate, clipping of the accumulated gradient, decay, donation, and one compilation."""

from __future__ import annotations

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny import RATE, batch, config, gradients, host, ids, put, start, trainer, weights
from tiny import reference_gradients as plain

from jax5d.config import MeshConfig, ParallelConfig, TrainConfig
from jax5d.mesh import make_mesh
from jax5d.parallel import pipeline
from jax5d.parallel.data import clip_by_norm, diverge, global_norm, varying
from jax5d.parallel.reduction import make_reduction
from jax5d.parallel.schedules import SCHEDULES
from jax5d.parallel.stack import Resident, Weights
from jax5d.train.optimizer import learning_rate
from jax5d.train.step import Trainer

FIVE = {"pp": 2, "dp": 2, "tp": 2}


def rate_by_hand(step: int, *, peak: float, warmup: int, steps: int, final: float) -> float:
    """Linear to the peak at update `warmup`, then half a cosine wave down to `final` of it at the last update."""
    if step < warmup:
        return peak * (step + 1) / warmup
    angle = math.pi * (step - warmup) / (steps - 1 - warmup)
    return peak * (final + (1 - final) * (1 + math.cos(angle)) / 2)


def test_learning_rate_of_each_update() -> None:
    """B39: warm-up 4, peak 1e-2, cosine to step 12. Logged and used, from the first update on."""
    run = config(learning_rate=1e-2, warmup=4, steps=12, final_lr=0.1)
    state, data = start(run), put(run, batch(run))
    for step in range(12):
        before = np.asarray(state.params["outer"]["wpe"])
        state, metrics = trainer(run).step(state, data)
        want = rate_by_hand(step, peak=1e-2, warmup=4, steps=12, final=0.1)
        chex.assert_trees_all_close(float(metrics["learning_rate"]), want, rtol=0, atol=2e-9)
        moved, grad = (
            before - np.asarray(state.params["outer"]["wpe"]),
            np.asarray(gradients(state)["outer"]["wpe"]),
        )
        assert np.vdot(moved, grad) / np.vdot(grad, grad) == pytest.approx(want, rel=1e-4)
        assert int(state.step) == step + 1
    assert want == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("warmup", "steps", "wanted"), [(0, 1, [1.0]), (10, 4, [0.25, 0.5, 0.75, 1.0]), (0, 3, [1.0, 0.55, 0.1])]
)
def test_learning_rate_of_short_runs(warmup: int, steps: int, wanted: list[float]) -> None:
    """B39: one step only, a warm-up longer than the run, no warm-up at all; beyond the end it stays."""
    schedule = learning_rate(TrainConfig(learning_rate=1.0, warmup=warmup, steps=steps))
    chex.assert_trees_all_close([float(schedule(i)) for i in range(steps)], wanted, rtol=0, atol=1e-6)
    if steps == 3:
        assert float(schedule(100)) == pytest.approx(0.1)


REPLICAS = ("pp", "dp", "ep", "cp")
"""Axes whose devices have parts of every gradient here."""


def accumulated(slopes: jax.Array, dtype: Any = jnp.float32, accumulate: Any = jnp.float32) -> jax.Array:
    """Gradient by w of the sum over microbatches m of slopes[m] w, through the executor; `slopes` is [M, n]."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    def body(w: jax.Array, slopes: jax.Array) -> jax.Array:
        k = varying(jnp.ones((1, 1)), ("pp", "dp", "ep", "cp"))
        held = {"outer": diverge({"w": w}, {"w": REPLICAS}), "blocks": {"k": k}}
        supply = Resident(held["blocks"])
        params = held | {"blocks": Weights(1, supply, supply)}
        x = varying(jnp.zeros((1, 1, 1)), ("pp", "dp", "ep", "cp"))
        work = pipeline.Work(
            embed=lambda outer, m: x * jnp.sum(outer["w"]),
            layer=lambda params, x, at: ((x * params["k"][None, None], {}), {}),
            head=lambda outer, y, m: jnp.sum((outer["w"].astype(dtype) * slopes[m]).astype(jnp.float32)),
        )
        table = SCHEDULES["1f1b"](1, slopes.shape[0])
        reduction = make_reduction(ParallelConfig(reduction="leaf", accumulate=accumulate), {}, {}, {})
        result = pipeline.train(table, work, params, held, x, jnp.float32(1), {}, reduction=reduction)
        return lax.psum(result.outer_grads["w"], ("pp", "dp", "ep", "cp"))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())
    return jax.jit(mapped)(jnp.ones(slopes.shape[1]), slopes.astype(dtype))


def test_clipping_follows_accumulation() -> None:
    """B71: gradients (3, 0) and (0, 4), clipped to 1, rate 1: the update is (-0.6, -0.8), not (-1, -1)."""
    grads = {"w": accumulated(jnp.array([[3.0, 0.0], [0.0, 4.0]]))}
    norm = global_norm(grads, {"w": P()})
    assert float(norm) == 5
    update = -clip_by_norm(grads, norm, 1.0)["w"]
    chex.assert_trees_all_close(update, np.array([-0.6, -0.8], np.float32), rtol=1e-6)
    chex.assert_trees_all_equal(clip_by_norm(grads, norm, 0.0), grads)
    chex.assert_trees_all_equal(clip_by_norm(grads, norm, 6.0), grads)


def test_accumulation_keeps_small_contributions() -> None:
    """B73: 1, then 256 times 2^-9, of bfloat16 products: 1.5; a bfloat16 sum would stay at 1."""
    slopes = jnp.concatenate([jnp.ones((1, 1)), jnp.full((256, 1), 2.0**-9)])
    assert float(accumulated(slopes, jnp.bfloat16)[0]) == 1.5
    assert float(accumulated(slopes, jnp.bfloat16, jnp.bfloat16)[0]) == 1.0  # what the option can do


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4)])
def test_clipped_training_does_not_depend_on_microbatches(pp: int, microbatches: int) -> None:
    """B71: clip at 0.3 of the natural norm, 2 steps; counters go up once a step."""
    base = config()
    clip = 0.3 * float(optax.tree.norm(plain(base, weights(base.model), batch(base))[1]))
    run = config({"pp": pp}, microbatches=microbatches, clip=clip)
    state, data, params = start(run), put(run, batch(run)), weights(run.model)
    for _ in range(2):
        state, _ = trainer(run).step(state, data)
        grads = plain(run, params, batch(run))[1]
        scale = np.float32(RATE * clip / float(optax.tree.norm(grads)))
        params = jax.tree.map(lambda p, g, scale=scale: p - scale * g, params, grads)
    chex.assert_trees_all_close(host(state.params), params, rtol=0, atol=1e-6)
    counts = [int(x) for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32]
    assert counts == [2]
    assert int(state.step) == 2


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_decay_is_for_matrices(architecture: str) -> None:
    """With no valid label the gradient is 0 and AdamW only decays: matrices by 1 - rate wd, the rest not at all."""
    run = config(optimizer="adamw", weight_decay=0.5, architecture=architecture, tied=architecture == "gpt2")
    labels = np.full_like(ids()[:, 1:], -100)
    state, _ = trainer(run).step(start(run), put(run, batch(run, labels=labels)))
    before, after = weights(run.model), host(state.params)
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        matrix = path[-1].key in ("wte", "wpe", "head", "w_q", "w_kv", "w_out", "w_in", "w_gate", "w_up")
        assert matrix == (old.std() > 0)  # all that starts random is a matrix here
        chex.assert_trees_all_close(new, old * np.float32(1 - RATE * 0.5) if matrix else old, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("mesh", "zero"), [({}, 0), *((FIVE, stage) for stage in range(4))], ids=str)
def test_one_compilation_and_full_donation(mesh: dict[str, int], zero: int) -> None:
    """B55, B58: 5 steps with evaluations between them compile once; the state's memory, ZeRO's replica included, is
    used again in place."""
    run = config(mesh, optimizer="adamw", microbatches=2, zero=zero)
    proof = Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[: run.mesh.size]))
    state, data = proof.init(), put(run, batch(run))
    memory = proof.step.lower(state, data).compile().memory_analysis()
    own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.95 * own
    for _ in range(5):
        old = state
        state, _ = proof.step(state, data)
        proof.evaluate(state.params, data)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(old.params["outer"]["wte"])
    assert proof.step._cache_size() == 1
    assert proof.evaluate._cache_size() == 1


def test_reduction_over_ranks_is_float32() -> None:
    """B73: 256 and seven ones, a gradient on each of 8 ranks, sum to 263."""
    mesh = make_mesh(MeshConfig(dp=8), jax.devices()[:8])

    def body(x: jax.Array) -> jax.Array:
        own = diverge({"w": jnp.float32(1)}, {"w": REPLICAS})
        narrow = x.astype(jnp.bfloat16)
        grads = jax.grad(lambda p: jnp.sum(p["w"].astype(jnp.bfloat16) * narrow).astype(jnp.float32))(own)
        return lax.psum(grads["w"].astype(jnp.float32), ("pp", "dp", "ep", "cp"))

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P()))
    assert float(mapped(jnp.array([256.0, *[1.0] * 7]))) == 263
