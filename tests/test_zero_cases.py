"""What sharded optimizers elsewhere got wrong: tied tables, padding, sums in 16 bits, clipping, donation, overflow."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import chex
import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax import lax
from jax.sharding import PartitionSpec as P
from programs import carried, equations
from tiny import (
    RATE,
    assert_close,
    assert_shards,
    batch,
    check_equivalent,
    check_replica,
    config,
    gradients,
    host,
    ids,
    name,
    put,
    start,
    trainer,
    weights,
)
from tiny import reference_gradients as plain

from jax5d.config import MeshConfig, ParallelConfig
from jax5d.mesh import make_mesh
from jax5d.parallel.cuts import Cut
from jax5d.parallel.data import varying
from jax5d.parallel.reduction import make_reduction
from jax5d.train.optimizer import decay_mask
from jax5d.train.step import Trainer

CUBE = {"pp": 2, "dp": 2, "tp": 2}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 2}, {"pp": 4, "dp": 2}], ids=name)
def test_a_tied_table_over_stages_of_the_pipeline(mesh: dict[str, int], stage: int) -> None:
    """B10: 10 SGD steps of all parameters as on one device; the replica is the parameters, to the bit."""
    state, _ = check_equivalent(config(mesh, microbatches=4, zero=stage), steps=10)
    assert set(state.params["outer"]) == {"wte", "wpe", "norm_f"}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_tied_table_with_adamw(stage: int) -> None:
    """B10: the table after 10 steps is that of optax on one device; it has one set of moments, in pieces."""
    run = config({"pp": 2, "dp": 2}, microbatches=4, optimizer="adamw", learning_rate=1e-3, zero=stage)
    state, params, data = start(run), weights(run.model), batch(run)
    adamw = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decay_mask)
    alone = adamw.init(params)
    for _ in range(10):
        state, _ = trainer(run).step(state, put(run, data))
        updates, alone = jax.jit(adamw.update)(plain(run, params, data)[1], alone, params)
        params = host(optax.apply_updates(params, updates))
        check_replica(state, run)
    chex.assert_trees_all_close(np.asarray(state.params["outer"]["wte"]), params["outer"]["wte"], rtol=0, atol=1e-5)
    moments = [x for x in jax.tree.leaves(state.opt_state[1]) if x.shape == (96, 32)]
    assert [x.addressable_shards[0].data.size for x in moments] == [96 * 32 // 4] * 2  # over pp 2 and dp 2


def test_an_optimizer_of_ones_own() -> None:
    """Momentum and schedule of optax's SGD, at ZeRO-3: all parameters after 5 steps are those of one device."""
    run = config({"dp": 2, "tp": 2}, zero=3, microbatches=2)
    optimizer = optax.sgd(optax.linear_schedule(0.1, 0.02, 4), momentum=0.9, nesterov=True)
    proof = Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[:4]), optimizer=optimizer)
    params, data = weights(run.model), batch(run)
    state, alone = proof.begin(params), optimizer.init(params)
    for _ in range(5):
        state, _ = proof.step(state, put(run, data))
        updates, alone = jax.jit(optimizer.update)(plain(run, params, data)[1], alone, params)
        params = host(optax.apply_updates(params, updates))
    assert_shards(state.params, params, absolute=1e-5)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=name)
def test_a_tied_gradient_is_the_sum_of_both_uses(mesh: dict[str, int]) -> None:
    """B11: ZeRO-3; the table's gradient is the embedding's plus the head's, of an untied copy of the model."""
    run = config(mesh, zero=3)
    data, params = batch(run), weights(run.model)
    untied = {**params, "outer": {**params["outer"], "head": params["outer"]["wte"]}}
    value = lambda p: reference.objective(p, data["inputs"], data["labels"], run.model)[0]  # noqa: E731
    parts = host(jax.jit(jax.grad(value))(untied))["outer"]
    assert min(np.max(np.abs(parts[part])) for part in ("wte", "head")) > 1e-3
    state, _ = trainer(run).step(start(run), put(run, data))
    assert_close(np.asarray(gradients(state)["outer"]["wte"]), parts["wte"] + parts["head"], 2e-5)


@pytest.mark.parametrize(
    ("mesh", "stage", "width"), [({"dp": 8}, 1, 32), ({"dp": 8}, 2, 30), ({"dp": 2, "tp": 2}, 3, 30)], ids=str
)
def test_a_vocabulary_that_nothing_divides(mesh: dict[str, int], stage: int, width: int) -> None:
    """B16: 97 tokens; with a head of zeros the loss is ln 97; gradients of padding are 0; the norm is one device's."""
    run = config(mesh, zero=stage, vocab=97, tied=False, d_model=width, heads=2)
    params = weights(run.model)
    params = params | {"outer": params["outer"] | {"head": np.zeros_like(params["outer"]["head"])}}
    _, metrics = check_equivalent(run, params=params, steps=2)
    assert float(metrics["loss"]) == pytest.approx(math.log(97), rel=1e-6)


@pytest.mark.parametrize(("mesh", "stage"), [({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 3), (CUBE, 3)], ids=str)
def test_clipping_follows_accumulation(mesh: dict[str, int], stage: int) -> None:
    """B71: 4 microbatches, clip at 0.3 of the natural norm, 2 steps as with one batch; counters go up once a step."""
    base = config()
    clip = 0.3 * float(optax.tree.norm(plain(base, weights(base.model), batch(base))[1]))
    run = config(mesh, microbatches=4, clip=clip, zero=stage)
    state, params = start(run), weights(run.model)
    for _ in range(2):
        state, _ = trainer(run).step(state, put(run, batch(run)))
        grads = plain(run, params, batch(run))[1]
        scale = np.float32(RATE * clip / float(optax.tree.norm(grads)))
        params = jax.tree.map(lambda p, g, scale=scale: p - scale * g, params, grads)
    chex.assert_trees_all_close(host(state.params), params, rtol=0, atol=1e-6)
    assert [int(x) for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32] == [2]


@pytest.mark.parametrize("stage", [1, 2])
def test_sums_of_bfloat16_gradients(stage: int) -> None:
    """B73: 1, then 256 times 2^-9, on each of 8 devices: 1.5 there. 256 and seven ones, over devices: 263.

    The sum over devices is a reduce-scatter of 16 numbers into pieces of 2; stage 3 sums as stage 2 does.
    """
    mesh, specs = make_mesh(MeshConfig(dp=8), jax.devices()[:8]), {"outer": {"w": P()}, "blocks": {}}
    cuts = {"outer": {"w": Cut(("dp",), -1, 16)}, "blocks": {}}
    summed = {"outer": {"w": ("pp", "dp", "ep", "cp")}, "blocks": {}}
    reduction = make_reduction(ParallelConfig(zero=stage), specs, summed, cuts)

    def body(terms: jax.Array) -> jax.Array:
        spread = varying(jnp.broadcast_to(terms.reshape(-1, 1), (terms.size, 16)), ("pp", "dp", "ep", "cp"))
        held = {"outer": {"w": spread[0, : 16 if stage < 2 else 2]}, "blocks": {}}
        step = lambda total, term: (reduction.outer(total, [{"w": term}])[0], None)  # noqa: E731
        total, _ = lax.scan(step, reduction.zeros(held)["outer"], spread)
        return reduction.rest({"outer": total, "blocks": {}})["outer"]["w"]

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))
    small = jnp.array([1.0, *[2.0**-9] * 256], jnp.bfloat16)
    assert np.array_equal(mapped(jnp.tile(small, 8)), np.full(16, 8 * 1.5))
    assert np.array_equal(mapped(jnp.array([256.0, *[1.0] * 7], jnp.bfloat16)), np.full(16, 263))


@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_dtypes_of_what_is_sent(stage: int, accumulate: str) -> None:
    """B73: under bfloat16 compute, in the program: parameters are gathered in 16 bits; sums are what was asked for.

    So they are over pp, in the loops' carry, and in the reduce-scatters that go to the compiler.
    """
    options = {"microbatches": 2, "global_batch": 16, "optimizer": "adamw"}  # no activation has the shape of a piece
    proof = fitting.trainer(config(CUBE, zero=stage, dtype="bfloat16", accumulate=accumulate, **options))
    program = jax.make_jaxpr(proof.step)(*proof.arguments).jaxpr
    sent: dict[str, set[str]] = {}
    for eqn in equations(program):
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if "dp" in axes:
            large = (x.aval.dtype.name for x in eqn.invars if x.aval.size > 8)
            sent.setdefault(eqn.primitive.name.removesuffix("_invariant"), set()).update(large)
    assert sent["all_gather"] == {"bfloat16"}
    assert sent["reduce_scatter"] == {accumulate}
    assert sent["psum"] == set()  # scalars alone: nothing whole is summed over replicas
    shards = jax.tree.map(lambda x, s: s.shard_shape(x.shape), proof.shapes.params, proof.shardings.params)
    pieces = set(jax.tree.leaves(shards, is_leaf=lambda x: isinstance(x, tuple)))
    if stage > 1:
        kinds = {x.dtype.name for x in carried(program) if x.shape in pieces and len(x.shape) > 2}
        assert kinds == {accumulate}
    text = proof.step.lower(*proof.arguments).as_text()
    found = re.findall(r"\}\) : \(tensor<[0-9x]*x([a-z]+[0-9]+)>", "".join(_bodies(text, "reduce_scatter")))
    assert set(found) == {{"float32": "f32", "bfloat16": "bf16"}[accumulate]}


def _bodies(text: str, operation: str) -> list[str]:
    """The operation's occurrences in StableHLO, up to the types of its operands."""
    return [part[: part.index(" -> ", part.index("}) :"))] for part in text.split(f'"stablehlo.{operation}"')[1:]]


def test_many_microbatches_equal_one() -> None:
    """B73: bfloat16, 16 microbatches of one row on each of 2 replicas against one of 32 rows: within 1 % in norm."""
    grads = {}
    for stage, microbatches, mesh in [(0, 1, {}), (1, 16, {"dp": 2}), (3, 16, {"dp": 2})]:
        run = config(mesh, zero=stage, dtype="bfloat16", microbatches=microbatches, global_batch=32, layers=2)
        tree = host(trainer(run).gradients(start(run), put(run, batch(run)))[0])
        assert {x.dtype for x in jax.tree.leaves(tree)} == {np.dtype("float32")}
        grads[stage] = np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    for stage in (1, 3):
        assert 0 < np.linalg.norm(grads[stage] - grads[0]) / np.linalg.norm(grads[0]) < 0.01


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_leaves_no_trace(stage: int) -> None:
    """float16: a step whose gradients overflow leaves parameters, moments and replica to the bit as they were."""
    run = config({"dp": 4}, zero=stage, dtype="float16", optimizer="adamw")
    state, _ = trainer(run).step(start(run), put(run, batch(run)))  # moments are not 0
    before = host((state.params, state.opt_state[1], state.replica))
    state = replace(state, loss_scale=jax.device_put(state.loss_scale | {"factor": np.float32(2.0**40)}))
    state, metrics = trainer(run).step(state, put(run, batch(run)))
    assert float(metrics["skipped"]) == 1
    chex.assert_trees_all_equal(host((state.params, state.opt_state[1], state.replica)), before)
    check_replica(state, run)


def test_pure_16_bits() -> None:
    """Parameters and moments in bfloat16, in pieces: after a step the parameters are stage 0's up to their rounding."""
    found = {}
    for stage in (0, 1, 3):
        run = config({"dp": 4}, zero=stage, dtype="bfloat16", param_dtype="bfloat16", layers=2)
        state, _ = trainer(run).step(trainer(run).init(), put(run, batch(run)))
        assert {x.dtype for x in jax.tree.leaves((state.params, state.replica))} == {jnp.dtype("bfloat16")}
        check_replica(state, run)
        found[stage] = jax.tree.map(lambda x: np.asarray(x, np.float32), state.params)
    for stage in (1, 3):
        chex.assert_trees_all_close(found[stage], found[0], rtol=2**-7, atol=1e-5)


def test_no_valid_label_at_all() -> None:
    """A batch without a label has gradient 0, no nan, and moves nothing: padding, pieces and replica included."""
    run = config({"dp": 8}, zero=2, clip=1.0, vocab=97, d_model=30, heads=2)
    labels = np.full_like(ids()[:, 1:], -100)
    state, metrics = trainer(run).step(start(run), put(run, batch(run, labels=labels)))
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    assert math.isfinite(float(metrics["gradient_noise"]))
    chex.assert_trees_all_equal(host(state.params, run.model), weights(run.model))
    check_replica(state, run)
