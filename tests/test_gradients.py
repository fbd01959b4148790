"""Gradients and their norm have no factor of any axis.

`test_equivalence` has these cases' meshes of one axis and of 2 x 2; the larger ones are here.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny import (
    RATE,
    assert_close,
    batch,
    check_equivalent,
    check_replica,
    config,
    gradients,
    host,
    name,
    pad_to,
    put,
    start,
    trainer,
    weights,
)
from tiny import reference_gradients as plain

from jax5d.config import MeshConfig
from jax5d.mesh import make_mesh
from jax5d.parallel.data import diverge, global_norm, is_spec, reduction_axes

NORM_MESHES = [{}, {"dp": 8}, {"tp": 4}, {"pp": 4}, {"pp": 2, "dp": 2, "tp": 2}]
STAGES = [(mesh, stage) for mesh in NORM_MESHES for stage in (range(4) if "dp" in mesh else (0, 3))]
"""Where there is one replica, every stage of ZeRO is stage 0: there 3 stands for them all."""


def part(x: Any) -> str:
    """A part of a case's id."""
    return name(x) if isinstance(x, dict) else str(x)


@pytest.mark.parametrize(("mesh", "stage"), STAGES, ids=part)
def test_norm_and_clipping(mesh: dict[str, int], stage: int) -> None:
    """B01 (a), (c): the logged norm is one device's raw gradient's; clipping to half of it halves the update."""
    run = config(mesh)
    _, grads = plain(run, weights(run.model), batch(run))
    norm = float(optax.tree.norm(grads))
    run = config(mesh, clip=0.5 * norm, zero=stage)
    state, metrics = trainer(run).step(start(run), put(run, batch(run)))
    chex.assert_trees_all_close(float(metrics["grad_norm"]), norm, rtol=1e-5, atol=0)
    want = jax.tree.map(lambda p, g: p - np.float32(RATE * 0.5) * g, weights(run.model), grads)
    chex.assert_trees_all_close(host(state.params, run.model), want, rtol=0, atol=1e-6)
    check_replica(state, run)


@pytest.mark.parametrize(
    ("mesh", "stage", "options", "count"),
    [
        *((mesh, stage, {}, 54976) for mesh, stage in STAGES),
        ({"dp": 4, "tp": 2}, 3, {"d_model": 30, "heads": 2, "vocab": 97}, 50642),
        ({"dp": 8}, 1, {"d_model": 30, "heads": 2, "vocab": 97}, 50642),
    ],
    ids=part,
)
def test_norm_counts_each_parameter_once(mesh: dict[str, int], stage: int, options: dict[str, int], count: int) -> None:
    """B01 (b): the norm of ones is the root of the number of parameters, the tied table counted once, padding never.

    With d 30, 97 tokens and 32 places: 97 d + 32 d + 4 (4 d d + 2 x 128 d + 4 d + 128 + 5 d) + 2 d.
    """
    run = config(mesh, zero=stage, **options)
    proof = trainer(run)
    specs = proof.specs.params
    ones = jax.tree.map(lambda x, y: pad_to(np.ones_like(x), y.shape), weights(run.model), proof.shapes.params)
    ones = jax.device_put(ones, proof.shardings.params)
    norm = jax.shard_map(partial(global_norm, specs=specs), mesh=proof.mesh, in_specs=(specs,), out_specs=P())
    assert float(jax.jit(norm)(ones)) == np.float32(math.sqrt(count))


def per_device(loss: Any, check_vma: bool) -> Any:
    """Gradient of sum over dp of `loss(params, data)` on 2 devices by the library's rule, and each device's own."""
    spec = {"w": P()}

    def body(params: dict, data: jax.Array) -> tuple[dict, dict]:
        own = jax.grad(loss)(diverge(params, {"w": ("pp", "dp", "ep", "cp")}), data)
        total = jax.tree.map(lambda s, g: lax.psum(g, reduction_axes(s, ())), spec, own, is_leaf=is_spec)
        return total, jax.tree.map(lambda g: jnp.expand_dims(g, 0), own)

    mesh = make_mesh(MeshConfig(dp=2), jax.devices()[:2])
    every = P(("pp", "dp", "ep", "cp"))
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(spec, P("dp")), out_specs=(spec, {"w": every}), check_vma=check_vma)
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_convention_with_and_without_checking(check_vma: bool) -> None:
    """B03 (a), (b): a copy's gradient is local and `reduce` sums it, with and without shard_map's check."""
    dot = lambda p, x: jnp.sum(x @ p["w"])  # noqa: E731
    samples = jnp.array([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    total, own = per_device(dot, check_vma)({"w": jnp.array([1.0, 2.0])}, samples)
    chex.assert_trees_all_equal(host(own), {"w": np.array([[1.0, 2.0], [1.0, 0.0]], np.float32)})
    chex.assert_trees_all_equal(host(total), {"w": np.array([2.0, 2.0], np.float32)})

    square = lambda p, d: jnp.sum((p["w"] * p["w"] + 1) * d)  # noqa: E731
    total, own = per_device(square, check_vma)({"w": jnp.float32(1)}, jnp.array([0.0, 1.0]))
    chex.assert_trees_all_equal(host(own), {"w": np.array([0.0, 2.0], np.float32)})
    assert float(total["w"]) == 2.0


DENSE_MESHES = [
    {"dp": 8},  # B03, B20
    {"dp": 2, "cp": 2, "tp": 2},  # B03, B20
    {"dp": 2, "cp": 4},  # B20
    {"cp": 8},  # B20
    {"pp": 2, "dp": 2, "cp": 2},  # B20
]


@pytest.mark.parametrize("mesh", DENSE_MESHES, ids=name)
def test_data_and_context_axes_add_no_factor(mesh: dict[str, int]) -> None:
    """B03, B20: loss, norm and raw gradients without a factor of dp, cp or their inverse."""
    check_equivalent(config(mesh), steps=1)


EXPERT_MESHES = [
    ({"dp": 4}, False),  # B07
    ({"dp": 2, "ep": 4}, False),  # B07
    ({"tp": 2}, False),  # B06
    ({"tp": 4}, True),  # B06
    ({"ep": 2, "tp": 2}, False),  # B06
    ({"dp": 2, "ep": 2, "tp": 2}, False),  # B06
    ({"dp": 2, "ep": 2, "tp": 2}, True),  # B06
]


@pytest.mark.parametrize(("mesh", "sequence"), EXPERT_MESHES, ids=part)
def test_experts_and_router(mesh: dict[str, int], sequence: bool) -> None:
    """B06, B07: expert gradients have no factor of ep, and router copies stay equal through 3 steps."""
    run = config(mesh, moe=True, sequence=sequence)
    state, _ = check_equivalent(run)
    for tree in (state.params, gradients(state)):
        router = tree["blocks"]["mlp"]["router"]
        assert len({np.asarray(shard.data).tobytes() for shard in router.addressable_shards}) == 1


def test_expert_gradient_ratio_is_one() -> None:
    """B07: on ep 4 each gradient is 1.000 times that of one device, in the least squares sense."""
    run = config({"ep": 4}, moe=True)
    _, want = plain(run, weights(run.model), batch(run))
    state, _ = trainer(run).step(start(run), put(run, batch(run)))
    got = host(gradients(state))
    ratio = jax.tree.map(lambda g, w: float(np.vdot(g, w) / np.vdot(w, w)), got, want)
    chex.assert_trees_all_close(ratio, jax.tree.map(lambda _: 1.0, ratio), rtol=0, atol=1e-5)
    assert_close(got, want, 2e-5)


def test_sequence_parallel_copies_stay_equal() -> None:
    """B05: norms and biases under sequence parallelism are bitwise equal copies after 5 steps on 8 devices."""
    state, _ = check_equivalent(config({"dp": 2, "tp": 4}, sequence=True), steps=5)
    blocks, outer = state.params["blocks"], state.params["outer"]
    copies = [
        blocks["norm_1"],
        blocks["norm_2"],
        outer["norm_f"],
        blocks["attention"]["b_out"],
        blocks["mlp"]["b_out"],
    ]
    for leaf in jax.tree.leaves(copies):
        shards = leaf.addressable_shards
        assert len(shards) == 8
        assert len({np.asarray(shard.data).tobytes() for shard in shards}) == 1
