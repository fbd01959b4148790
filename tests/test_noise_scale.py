"""The gradient noise scale: estimates of known numbers, their averages, and averages that a resume goes on with."""

from __future__ import annotations

import math

import fitting
import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.config import MeshConfig
from jax5d.mesh import make_mesh
from jax5d.parallel.data import squares, varying
from jax5d.parallel.noise import gradient_noise
from jax5d.train.noise import DECAY, NoiseScale


def record(signal: float, noise: float) -> dict[str, float]:
    return {"gradient_signal": signal, "gradient_noise": noise}


def test_averages_by_hand() -> None:
    """The ratio of two sums with weights that fall by the decay for each step of age; rough steps average out."""
    pairs = [(4.0, 10.0), (-1.0, 30.0), (3.0, -2.0), (2.0, 40.0)]
    scale, seen = NoiseScale(), []
    for i, (signal, noise) in enumerate(pairs):
        seen.append(scale.after({"loss": 1.0, **record(signal, noise)}))
        weights = [DECAY ** (i - j) for j in range(i + 1)]
        total = [math.fsum(w * pair[part] for w, pair in zip(weights, pairs, strict=False)) for part in (0, 1)]
        assert seen[-1] == {"noise_scale": pytest.approx(total[1] / total[0])}
    assert seen[0] == {"noise_scale": pytest.approx(2.5)}


def test_what_is_not_known() -> None:
    """A step without estimates changes nothing; averages that are not above 0 have no ratio yet."""
    scale, other = NoiseScale(), NoiseScale()
    assert scale.after({"loss": 1.0}) == {}
    assert scale.after(record(-1.0, 5.0)) == {}
    assert scale.after({"gradient_signal": None, "gradient_noise": 3.0}) == {}
    assert other.after(record(-1.0, 5.0)) == {}
    assert scale.after(record(9.0, 5.0)) == other.after(record(9.0, 5.0)) != {}
    assert NoiseScale().after(record(1.0, -5.0)) == {}


def test_a_resumed_run_logs_the_same(tmp_path) -> None:
    """Killed after 3 of 9 steps: the averages go on from the log, not from nothing."""
    file = fitting.token_file(tmp_path)
    run = fitting.config({"dp": 2}, layers=1, steps=9)
    whole, built, _ = fitting.train(run, file, tmp_path / "run")
    again, _, _ = fitting.train(run, file, fitting.killed_after(tmp_path / "run", 3, tmp_path / "copy"), built)
    logged = [r.get("noise_scale") for r in whole.records]
    assert [r.get("noise_scale") for r in again.records] == logged
    averages = NoiseScale()
    assert logged == [averages.after(r).get("noise_scale") for r in whole.records]
    assert sum(x is not None for x in logged[3:]) > 0
    fresh = NoiseScale()
    assert logged[3:] != [fresh.after(r).get("noise_scale") for r in whole.records[3:]]


DRAWS, BATCH, REPLICAS = 2000, 16, 8
AXES = ("pp", "dp", "ep", "cp")
SPECS = {"split": P("tp"), "whole": P()}
SUMMED = dict.fromkeys(SPECS, ("pp", "dp", "ep", "cp"))
SIZES = {"split": 12, "whole": 5}
TRUE, SPREAD = {"split": 0.5, "whole": -1.0}, {"split": 2.0, "whole": 3.0}
"""Every entry of the true gradient, and the standard deviation of one sequence's."""


def estimates(draws: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The two estimates of each draw, on dp 4, ep 2, tp 2. `draws` is the replicas' mean gradients [D, n, entries]."""
    mesh = make_mesh(MeshConfig(dp=4, ep=2, tp=2), jax.devices()[:16])

    def one(means: dict[str, jax.Array]) -> dict[str, jax.Array]:
        own = jax.tree.map(lambda x: varying(x[0] / REPLICAS, AXES), means)  # a part of the mean over the batch
        reduced = {name: lax.psum(x, AXES) for name, x in own.items()}
        return gradient_noise(squares(own), reduced, SPECS, SPECS, SUMMED, batch=BATCH, pieces=1)

    def body(means: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return lax.map(one, means)

    layout = {"split": P(None, ("dp", "ep"), "tp"), "whole": P(None, ("dp", "ep"))}
    found = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(layout,), out_specs=P()))(draws)
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def test_estimates_of_known_numbers() -> None:
    """Gaussian gradients of sequences: means over draws are |G|^2 and tr(S), and their spread is what theory says.

    With b = B/n sequences a replica, the noise estimate is b times the replicas' sample variance: its variance is
    2 tr(S^2) / (n-1). The signal estimate is |mean|^2 less noise/B, the two independent: its variance is
    2 tr(S^2)/B^2 + 4 G'SG/B + 2 tr(S^2) / (B^2 (n-1)).
    """
    draw = np.random.default_rng(0)
    deviation = {name: SPREAD[name] / math.sqrt(BATCH / REPLICAS) for name in SIZES}  # of a replica's mean
    means = {
        name: (TRUE[name] + deviation[name] * draw.standard_normal((DRAWS, REPLICAS, size))).astype(np.float32)
        for name, size in SIZES.items()
    }
    signal = sum(n * TRUE[name] ** 2 for name, n in SIZES.items())
    noise = sum(n * SPREAD[name] ** 2 for name, n in SIZES.items())
    fourth = sum(n * SPREAD[name] ** 4 for name, n in SIZES.items())
    along = sum(n * TRUE[name] ** 2 * SPREAD[name] ** 2 for name, n in SIZES.items())
    noise_variance = 2 * fourth / (REPLICAS - 1)
    signal_variance = 2 * fourth / BATCH**2 + 4 * along / BATCH + noise_variance / BATCH**2
    found = estimates(means)
    for name, true, variance in (
        ("gradient_signal", signal, signal_variance),
        ("gradient_noise", noise, noise_variance),
    ):
        error = math.sqrt(variance / DRAWS)
        assert error < 0.02 * true
        assert abs(found[name].mean() - true) < 5 * error
        assert found[name].std() == pytest.approx(math.sqrt(variance), rel=0.15)
