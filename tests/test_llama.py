"""Llama's layers against their equations. `test_equivalence` trains the whole model."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax5d.layers.linear import silu_times
from jax5d.layers.norm import RmsNorm
from jax5d.layers.rotary import rotate
from jax5d.parallel.halves import halve


def test_rotation_of_one_pair() -> None:
    """Two dims are one pair of frequency 1: (1, 0) at position p is (cos p, sin p), and (0, 1) is (-sin p, cos p)."""
    positions = jnp.array([0, 1, 5], jnp.int32)
    x = jnp.tile(jnp.eye(2)[None, None], (1, 3, 1, 1))  # two heads: the two unit vectors
    got = np.asarray(rotate(x, positions, 10000.0))
    for i, p in enumerate((0, 1, 5)):
        want = [[math.cos(p), math.sin(p)], [-math.sin(p), math.cos(p)]]
        np.testing.assert_allclose(got[0, i], want, rtol=0, atol=1e-6)


def test_dims_pair_up_half_a_head_apart() -> None:
    """Of 6 dims the unit vector i stays in the plane of i and i + 3, at an angle of 7 theta^(-i/3)."""
    x = jnp.eye(6)[None, None]  # six heads, one position
    got = np.asarray(rotate(x, jnp.array([7], jnp.int32), 1000.0))[0, 0]
    want = np.zeros((6, 6))
    for i, frequency in enumerate((1, 0.1, 0.01)):
        angle = 7 * frequency
        want[i, [i, i + 3]] = math.cos(angle), math.sin(angle)
        want[i + 3, [i, i + 3]] = -math.sin(angle), math.cos(angle)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_score_depends_on_the_distance_alone(dtype: str) -> None:
    """A query at p + 9 meets a key at p alike for every p up to 4000; the angles are float32 in any dtype."""
    q, k = (jax.random.normal(key, (1, 1, 1, 8)).astype(dtype) for key in jax.random.split(jax.random.key(0)))
    limit = 3e-3 if dtype == "float32" else 40 * float(jnp.finfo(dtype).eps)  # float32: an angle of 4000 is off by 1e-4
    at = lambda x, p: rotate(x, jnp.array([p], jnp.int32), 10000.0).astype(jnp.float32)  # noqa: E731
    scores = [float(jnp.sum(at(q, p + 9) * at(k, p))) for p in (0, 1, 100, 1023, 4000)]
    assert rotate(q, jnp.array([1], jnp.int32), 10000.0).dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(scores, scores[0], rtol=0, atol=limit)
    assert abs(float(jnp.sum(at(q, 10) * at(k, 0))) - scores[0]) > 0.1


def test_rms_norm_in_16_bits() -> None:
    """Rows of 4096 equal numbers a: a / sqrt(a a + 1e-5), twice that by its scale. In float16 300 squared overflows."""
    norm = RmsNorm(4096)
    norm.scale[...] = jnp.full(4096, 2.0)
    x = jnp.tile(jnp.array([[300.0], [-0.5], [0.001]]), (1, 4096))
    for dtype in ("float32", "bfloat16", "float16"):
        y = norm(x.astype(dtype))
        assert y.dtype == jnp.dtype(dtype)
        want = np.array([2.0, -2 * 0.5 / math.sqrt(0.25 + 1e-5), 2 * 0.001 / math.sqrt(1e-6 + 1e-5)])
        got = np.asarray(y.astype(jnp.float32))
        np.testing.assert_allclose(got, np.tile(want[:, None], (1, 4096)), rtol=4 * float(jnp.finfo(dtype).eps))


def test_swiglu_keeps_two_arrays_for_the_backward_pass() -> None:
    """Gate and up, 16-bit, and no third array of their size; silu(2) 3 = 6 / (1 + e^-2)."""

    def layer(weight: jax.Array, x: jax.Array, m: jax.Array) -> Any:
        del m
        return silu_times(jnp.sin(x), jnp.cos(x), weight, "bf,fd->bd"), None  # neither is x itself

    halves = halve(layer, jnp.ones((16, 4)), jnp.ones((8, 16), jnp.bfloat16), jnp.int32(0))
    kept = [(x.shape, str(x.dtype)) for x in halves.saved]
    slopes = [((8, 16), "bfloat16")] * 2  # of sin and cos
    assert kept == [((8, 16), "bfloat16")] * 2 + slopes
    value = silu_times(jnp.full((1, 1), 2.0), jnp.full((1, 1), 3.0), jnp.ones((1, 1)), "bf,fd->bd")
    assert float(value[0, 0]) == pytest.approx(6 / (1 + math.exp(-2)), rel=1e-6)
