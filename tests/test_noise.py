"""The gradient noise scale's two numbers, against the plain gradients of each replica's rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import batch, config, name, put, start, trainer, weights
from tiny import reference_gradients as plain

from jax5d.config import MeshConfig, RunConfig
from jax5d.mesh import DATA_AXES, make_mesh
from jax5d.parallel.data import squares, sum_over_shards
from jax5d.parallel.noise import gradient_noise

EXPERTS = ("['mlp']['w_in']", "['mlp']['w_out']")
WHOLE = ("norm", "b_out", "router", "wpe")
"""Leaves that tp does not split; under sequence parallelism tp devices hold parts of their sums."""


def own_gradients(run: RunConfig, n: int) -> list[dict[str, np.ndarray]]:
    """The plain gradients of a block of rows in each microbatch, one of n for each replica, by path."""
    params, found = weights(run.model), []
    for m in range(run.parallel.microbatches):
        for r in range(n):
            rows = {key: np.split(value[m : m + 1], n, axis=1)[r] for key, value in batch(run).items()}
            _, grads = plain(run, params, rows)
            found.append({jax.tree_util.keystr(path): g for path, g in jax.tree.leaves_with_path(grads)})
    return found


def expected(run: RunConfig, names: list[str], n: int) -> np.ndarray:
    """|G|^2 and tr(S) over the named leaves, from k = n M gradients, of B/k sequences each.

    The mean square of one of them estimates |G|^2 + k tr(S)/B, the square of their mean |G|^2 + tr(S)/B. These are two
    linear equations.
    """
    own = own_gradients(run, n)
    small = np.mean([sum(np.sum(np.square(g[key], dtype=np.float64)) for key in names) for g in own])
    large = sum(np.sum(np.square(np.mean([g[key] for g in own], axis=0, dtype=np.float64))) for key in names)
    size = run.train.global_batch
    return np.linalg.solve([[1, len(own) / size], [1, 1 / size]], [small, large])


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 4}, {}),
    ({"dp": 2}, {"microbatches": 2, "reduction": "leaf"}),
    ({"ep": 2, "dp": 2}, {}),
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"sequence": True}),
    ({}, {"microbatches": 4}),
    ({"tp": 2}, {"microbatches": 2}),
    ({"dp": 4}, {"zero": 2, "microbatches": 2}),
    ({"dp": 2, "ep": 2}, {"zero": 3, "zero_axes": ("ep",), "microbatches": 2}),
]


@pytest.mark.parametrize("moe", [False, True], ids=["gpt2", "moe"])
@pytest.mark.parametrize(("mesh", "options"), CASES, ids=["-".join([name(m), *o]) for m, o in CASES])
def test_signal_and_noise(mesh: dict[str, int], options: dict[str, Any], moe: bool) -> None:
    """All leaves of the microbatches of dp x ep replicas; an expert's of dp, each with the sequences of all ep devices.

    Without the load-balancing loss, whose gradient is not that of a replica's rows alone.
    """
    run = config(mesh, moe=moe, aux_coef=0.0, **options)
    metrics = trainer(run).gradients(start(run), put(run, batch(run)))[1]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(weights(run.model))]
    if run.parallel.sequence:
        names = [key for key in names if not any(part in key for part in WHOLE)]
    shared = [key for key in names if not (moe and key.endswith(EXPERTS))]
    want = expected(run, shared, run.mesh.batch_shards)
    if moe:
        want = want + expected(run, [key for key in names if key.endswith(EXPERTS)], run.mesh.dp)
    got = np.array([float(metrics["gradient_signal"]), float(metrics["gradient_noise"])])
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert want[1] > 0


@pytest.mark.parametrize("mesh", [{}, {"cp": 2}, {"pp": 2}, {"tp": 2}], ids=name)
def test_one_gradient_has_nothing_to_compare(mesh: dict[str, int]) -> None:
    run = config(mesh)
    _, metrics = jax.eval_shape(trainer(run).gradients, *trainer(run).arguments)
    assert "loss" in metrics
    assert not {"gradient_signal", "gradient_noise"} & set(metrics)


def test_estimates_are_unbiased() -> None:
    """8 replicas of 2 sequences whose gradients are G + noise: over 4000 draws both means are within 4 standard errors.

    |G|^2 = 1 + 4 + 9, and tr(S) = 3 x 25 for a deviation of 5 in each of 3 dims.
    """
    draws, n = 4000, 8
    mesh = make_mesh(MeshConfig(dp=n), jax.devices()[:n])
    noise = 5 * np.random.default_rng(0).standard_normal((n, draws, 2, 3)).astype(np.float32)
    own = np.array([1, 2, 3], np.float32) + noise.mean(axis=2)

    def body(own: jax.Array) -> dict[str, jax.Array]:
        def one(g: jax.Array) -> dict[str, jax.Array]:
            part = {"w": g / n}
            specs = {"w": P()}
            reduced = jax.tree.map(sum_over_shards, part)
            summed = {"w": ("pp", *DATA_AXES)}
            return gradient_noise(squares(part), reduced, specs, specs, summed, batch=2 * n, pieces=1)

        return jax.vmap(one)(own[0])

    # pp has one device, but a leaf that names no axis is summed over it too
    split = P(("pp", *DATA_AXES))
    found = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False))(jnp.asarray(own))
    for key, true in (("gradient_signal", 14), ("gradient_noise", 75)):
        estimates = np.asarray(found[key])
        assert abs(estimates.mean() - true) < 4 * estimates.std() / np.sqrt(draws)
