"""Tensor parallelism's experiments: a block's theory and a model of the links against counts by hand; refusals."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from experiments.ch03_tensor_parallelism import _tp_equal, _tp_model, tensor_parallel, tp_block
from experiments.ch03_tensor_parallelism._block_program import WAYS, Block, draw, run_of, theory, units
from experiments.ch03_tensor_parallelism._tp_model import Cluster, Step
from jax5d.config import PRESETS, ConfigError, MeshConfig
from jax5d.costs.collectives import Collective
from jax5d.costs.links import Link

MODEL = tp_block.MODELS["GPT-2"]
K = 2 * 32 * 64 * 4
"""Bytes of 2 x 32 tokens of 64 float32."""


def test_theory_by_hand() -> None:
    """Four devices: 3/4 K for a gather or a scatter, twice that for an all-reduce; a piece is K / 4."""
    sums = Collective("psum", ("tp",), 2, 2 * K, Fraction(3 * K))
    assert theory(run_of(MODEL, "TP", 4, rows=2)) == ([sums], [sums])
    scatters = Collective("psum_scatter", ("tp",), 2, 2 * K, Fraction(3 * K, 2))
    gathers = [Collective("all_gather", ("tp",), n, n * K // 4, Fraction(n * 3 * K, 4)) for n in (2, 4)]
    assert theory(run_of(MODEL, "TP + SP", 4, rows=2)) == ([gathers[0], scatters], [gathers[1], scatters])
    hops = [Collective("ppermute", ("tp",), n, n * K // 4, Fraction(n * K, 4)) for n in (12, 18)]
    assert theory(run_of(MODEL, "overlapped", 4, rows=2)) == ([hops[0]], [gathers[0], hops[0]])
    assert theory(run_of(MODEL, "overlapped", 4, rows=2, remat="full")) == ([hops[0]], [hops[1]])


@pytest.mark.parametrize("way", WAYS)
def test_units(way: str) -> None:
    run = run_of(MODEL, way, 8, rows=2)
    assert [units(entries, run) for entries in theory(run)] == [4, 4 if way == "TP" else 6]


@pytest.mark.parametrize("name", tp_block.MODELS)
def test_a_wrong_block_is_seen(name: str) -> None:
    """A result that is 1 % larger than it should be is off by 1 %."""
    model = tp_block.MODELS[name]
    arrays = draw(model, 1, 0)
    block = Block(run_of(model, "TP", 2, rows=1))
    y, d_x, d_weights = Block(run_of(model, "TP", 1, rows=1)).run(arrays)
    off = block.error(arrays, (1.01 * np.asarray(y), np.asarray(d_x), _numpy(d_weights)))
    assert off["outputs"] == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert off["gradients of the input"] < 5e-6
    assert off["gradients of weights"] < 5e-6


def _numpy(tree: dict) -> dict:
    return {key: _numpy(value) if isinstance(value, dict) else np.asarray(value) for key, value in tree.items()}


def test_shards_off() -> None:
    """The worst entry over the largest one; rows of padding count against zeros."""
    whole = _tp_equal.Shards([((slice(None),), np.array([1.0, -4.0, 2.0]))])
    right = _tp_equal.Shards([((slice(0, 2),), np.array([1.0, -4.0])), ((slice(2, 4),), np.array([2.0, 0.0]))])
    wrong = _tp_equal.Shards([((slice(0, 2),), np.array([1.0, -4.0])), ((slice(2, 4),), np.array([2.0, 1.0]))])
    assert _tp_equal._off(right, whole) == 0
    assert _tp_equal._off(wrong, whole) == 0.25


def test_gather_over_hosts_by_hand() -> None:
    """16 GPUs in hosts of 8: one message of 1/16 over the network, then seven of 2/16 inside."""
    cluster = Cluster(8, Link(1.0, 10.0), Link(100.0, 1.0))
    assert cluster.gather(16, 1600.0) == (100 + 100) + 7 * (1 + 20)
    assert cluster.gather(4, 1600.0) == 3 * (1 + 40)
    assert cluster.ring(16, 1600.0) == 15 * (100 + 100)


def test_step_by_hand() -> None:
    """Infinitely fast links leave the products alone, slow ones 4 + 10 L gathers beside them."""
    model = replace(PRESETS["llama-tiny"], layers=3)
    fast = Cluster(8, Link(0.0, 1e30), Link(0.0, 1e30))
    one = Step(model, 1, fast).seconds
    assert Step(model, 4, fast).seconds == pytest.approx(one / 4)
    assert Step(model, 4, fast, overlap=True).seconds == pytest.approx(one / 4)
    slow = Cluster(8, Link(1.0, 1e30), Link(1.0, 1e30))
    assert Step(model, 4, slow).waited == pytest.approx((4 + 10 * 3) * 3)
    assert Step(model, 4, slow, overlap=True).waited == pytest.approx((4 + 10 * 3) * 3, rel=1e-6)
    assert _tp_model.pays_up_to(model, fast, overlap=False) == 32
    assert _tp_model.pays_up_to(model, slow, overlap=False) == 1


def test_calibrated_at_its_first_figure() -> None:
    assert _tp_model.calibrated()[2] == pytest.approx(13923)


@pytest.mark.parametrize("module", [tp_block, tensor_parallel])
def test_one_device_is_refused(module) -> None:
    with pytest.raises(ConfigError, match=r"2 devices or more, the mesh has 1; write --"):
        module.check(replace(module.DEFAULTS, mesh=MeshConfig()), Path())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": ("GPT-3",)}, "models=GPT-3: give some of GPT-2"),
        ({"ways": ()}, "ways=nothing: give some of TP"),
        ({"preset": "gpt2-xl"}, "preset='gpt2-xl' .* gpt2-medium"),
        ({"gpu": "h1000"}, "gpu='h1000'"),
    ],
)
def test_what_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tensor_parallel.check(replace(tensor_parallel.DEFAULTS, **changes), Path())
