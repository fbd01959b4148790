"""Linear layers cut by columns and rows against NumPy in float64, their bytes against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import assert_shards

from experiments import training
from experiments.ch03_tensor_parallelism import _one_product, _pairs, column_row, split_a_layer
from jax5d.config import ConfigError, MeshConfig
from jax5d.costs.collectives import Collective
from jax5d.measure.ledger import ledger
from jax5d.mesh import make_mesh
from jax5d.parallel.linear import keep, linear, multiply, product_2d

N, D, F = 6, 16, 24
ALONG = {"whole": P(), "split": P(None, "tp")}
BIAS = {"whole": P(), "split": P("tp")}
WEIGHT = {"columns": P(None, "tp"), "rows": P("tp", None)}
LAYERS = list(product(("columns", "rows"), ("whole", "split"), ("whole", "split")))
"""Cut, input, output."""

SENT: dict[tuple[str, str, str], tuple[dict[str, int], dict[str, int]]] = {
    ("columns", "whole", "split"): ({}, {"psum": 576}),
    ("columns", "split", "split"): ({"all_gather": 288}, {"psum_scatter": 288}),
    ("columns", "whole", "whole"): ({"all_gather": 432}, {"psum": 576}),
    ("columns", "split", "whole"): ({"all_gather": 288 + 432}, {"psum_scatter": 288}),
    ("rows", "split", "whole"): ({"psum": 864}, {}),
    ("rows", "whole", "whole"): ({"psum": 864}, {"all_gather": 288}),
    ("rows", "split", "split"): ({"psum_scatter": 432}, {"all_gather": 432}),
    ("rows", "whole", "split"): ({"psum_scatter": 432}, {"all_gather": 288 + 432}),
}
"""Bytes forward and backward on 4 devices: X is 6 x 16 x 4 = 384 bytes, Y 576; 3/4 of them, and in a psum 3/2."""


def arrays() -> tuple[np.ndarray, ...]:
    """X, W, b and the derivative by Y."""
    random = np.random.default_rng(0)
    return tuple(random.standard_normal(shape, np.float32) for shape in ((N, D), (D, F), (F,), (N, F)))


def by_hand(x: Any, w: Any, b: Any, d_y: Any) -> tuple[np.ndarray, ...]:
    """Y, dX, dW, db in float64."""
    x, w, b, d_y = (a.astype(np.float64) for a in (x, w, b, d_y))
    return x @ w + b, d_y @ w.T, x.T @ d_y, d_y.sum(axis=0)


def programs(cut: Any, given: Any, left: Any, t: int) -> tuple[Any, Any, Any]:
    """Forward; forward and backward; specs."""
    mesh = make_mesh(MeshConfig(tp=t), jax.devices()[:t])
    specs, out = (ALONG[given], WEIGHT[cut], BIAS[left]), ALONG[left]
    layer = partial(linear, cut=cut, given=given, left=left)

    def step(x: jax.Array, w: jax.Array, b: jax.Array, d_y: jax.Array) -> Any:
        y, vjp = jax.vjp(layer, x, w, b)
        return y, *vjp(d_y)

    forward = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out)
    both = jax.shard_map(step, mesh=mesh, in_specs=(*specs, out), out_specs=(out, *specs))
    return forward, both, mesh


@pytest.mark.parametrize("t", [1, 2, 4, 8])
@pytest.mark.parametrize(("cut", "given", "left"), LAYERS)
def test_values_and_gradients(cut: str, given: str, left: str, t: int) -> None:
    """Output and three gradients as NumPy's, each shard on its owner; devices with the same part have the same bits."""
    _, both, _ = programs(cut, given, left, t)
    assert_shards(jax.jit(both)(*arrays()), by_hand(*arrays()), relative=1e-6)


@pytest.mark.parametrize(("cut", "given", "left"), LAYERS)
def test_bytes(cut: str, given: str, left: str) -> None:
    """On 4 devices, forward and backward."""
    forward, both, _ = programs(cut, given, left, 4)
    sent = ledger(forward, *arrays()[:3])
    back = training.less(ledger(both, *arrays()), sent)
    ops = [{e.op: e.wire_bytes for e in entries} for entries in (sent, back)]
    assert tuple(ops) == SENT[cut, given, left]


def test_both_dims_cut() -> None:
    """Rows over cp 2, columns over tp 4: Y, dX, dW; a psum over cp of Y/4 forward, one over tp of X/2 backward."""
    x, w, _, d_y = arrays()
    mesh = make_mesh(MeshConfig(cp=2, tp=4), jax.devices()[:8])
    specs, out = (P(None, "cp"), P("cp", "tp")), P(None, "tp")

    def step(x: jax.Array, w: jax.Array, d_y: jax.Array) -> Any:
        y, vjp = jax.vjp(product_2d, x, w)
        return y, *vjp(d_y)

    both = jax.shard_map(step, mesh=mesh, in_specs=(*specs, out), out_specs=(out, *specs))
    y, d_x, d_w, _ = by_hand(x, w, np.zeros(F), d_y)
    assert_shards(jax.jit(both)(x, w, d_y), (y, d_x, d_w), relative=1e-6)
    forward = Collective("psum", ("cp",), 1, 144, Fraction(144))
    backward = Collective("psum", ("tp",), 1, 192, Fraction(288))
    assert ledger(both, x, w, d_y) == [forward, backward]


def test_a_sum_that_was_forgotten_is_an_error() -> None:
    """The types know that partial sums are not the whole."""
    mesh = make_mesh(MeshConfig(tp=2), jax.devices()[:2])
    broken = jax.shard_map(multiply, mesh=mesh, in_specs=(ALONG["split"], WEIGHT["rows"]), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(broken, *arrays()[:2])


def test_a_bias_counts_once_or_t_times() -> None:
    """After the sum, and before it."""
    found = column_row.bias_counts(4, seed=1)
    np.testing.assert_allclose(list(found.values()), [1, 1, 4, 4], rtol=1e-6)


def test_an_mlp_by_hand() -> None:
    """Columns then rows on 8 devices, 64 tokens, widths 96, 384, 160: all-reduces of Y forward and of X backward.

    Kept: X, an eighth of the hidden array before and after the activation, an eighth of both weights.
    """
    pair = _pairs.natural("columns", "rows")
    row = _pairs.measure(pair, 8, _pairs.draw(0, column_row.WIDTHS, split_a_layer.gelu))
    y, x = 64 * 160 * 4, 64 * 96 * 4
    assert row.forward == [Collective("psum", ("tp",), 1, y, Fraction(7 * y, 4))]
    assert row.backward == [Collective("psum", ("tp",), 1, x, Fraction(7 * x, 4))]
    assert row.kept == x + 2 * 64 * 48 * 4 + (96 + 160) * 48 * 4
    assert row.differing == 0
    assert max(row.error.values()) < 1e-5


def test_another_collective_differs_from_theory() -> None:
    """So that the checks can fail: one more, one less, other bytes."""
    row = _pairs.measure(_pairs.natural("rows", "rows"), 2, _pairs.draw(0, _pairs.Widths(4, 8, 8, 8), keep))
    assert row.differing == 0
    assert replace(row, forward=row.backward).differing > 0
    assert replace(row, backward=[]).differing == 1
    (entry,) = row.backward
    assert replace(row, backward=[replace(entry, wire_bytes=entry.wire_bytes + 1)]).differing == 2


def test_less() -> None:
    """Entries of the same kind are subtracted, what is left of none goes."""
    one, three = (Collective("psum", ("tp",), k, 8 * k, Fraction(12 * k)) for k in (1, 3))
    other = Collective("all_gather", ("tp",), 1, 8, Fraction(24))
    assert training.less([other, three], [one]) == [other, replace(three, count=2, payload_bytes=16, wire_bytes=24)]
    assert training.less([one], [one]) == []


def test_apart_sees_one_wrong_shard() -> None:
    """Each device's copy is looked at, not the first alone."""
    mesh = make_mesh(MeshConfig(tp=4), jax.devices()[:4])
    want = np.array([1.0, 2.0, -4.0], np.float32)
    shards = [jax.device_put(want + (i == 3), device) for i, device in enumerate(mesh.devices.flat)]
    copies = jax.make_array_from_single_device_arrays((3,), jax.sharding.NamedSharding(mesh, P()), shards)
    assert training.apart(copies, want) == 0.25


@pytest.mark.parametrize("t", [1, 2, 8])
def test_error_of_an_early_gelu(t: int) -> None:
    """The integral against a million draws in float64."""
    parts = np.random.default_rng(0).standard_normal((t, 10**6)) / np.sqrt(t)
    g = lambda h: 0.5 * h * (1 + np.tanh(0.7978845608 * (h + 0.044715 * h**3)))  # noqa: E731
    right, early = g(parts.sum(axis=0)), g(parts).sum(axis=0)
    drawn = np.sqrt(np.mean((early - right) ** 2) / np.mean(right**2))
    assert abs(split_a_layer.early_gelu_theory(t) - drawn) < 0.003


def test_ways_of_one_product() -> None:
    """Bytes of W, X, Y that a device holds of [8, 16] x [16, 32] on 8 devices, by hand."""
    held = {way.name: way.held(_one_product.Shape(8, 16, 32)) for way in _one_product.ways(8)}
    assert held == {
        "columns": {"W": 256, "X": 512, "Y": 128},
        "rows": {"W": 256, "X": 64, "Y": 1024},
        "2 x 4": {"W": 256, "X": 256, "Y": 256},
    }


@pytest.mark.parametrize(
    ("experiment", "changes", "said"),
    [
        (split_a_layer, {"mesh": MeshConfig(dp=3)}, "has 3; write --devices 8"),
        (split_a_layer, {"d_model": 770}, "d_model=770 .* 8 equal pieces; write --d_model 768"),
        (split_a_layer, {"d_ff": 0}, "d_ff=0 .* write --d_ff 8"),
        (split_a_layer, {"tokens": 0}, "tokens=0 is below 1"),
        (column_row, {"mesh": MeshConfig()}, "the mesh has 1; write --devices 8"),
    ],
)
def test_refusals(experiment: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        experiment.check(replace(experiment.DEFAULTS, **changes), Path("unused"))
