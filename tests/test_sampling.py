"""Draws from a split vocabulary: who may be drawn, and how often, by NumPy's definitions over the whole of it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import name

from jax5d.config import MeshConfig
from jax5d.inference.sample import Sampling, choose
from jax5d.mesh import make_mesh
from jax5d.parallel.sampling import keep_likeliest, likeliest, vocabulary_logits
from jax5d.parallel.tensor import VOCAB_AXES

VOCAB, PADDED = 97, 100
MESHES = [{}, {"tp": 4}, {"pp": 2, "tp": 2, "dp": 2}]
ROWS, SPLIT = P(("dp", "ep")), P(("dp", "ep"), VOCAB_AXES)


def mapped(body: Any, mesh: dict[str, int], *specs: P, out: P = ROWS) -> Any:
    sizes = MeshConfig(**mesh)
    devices = make_mesh(sizes, jax.devices()[: sizes.size])
    return jax.jit(jax.shard_map(body, mesh=devices, in_specs=specs, out_specs=out, check_vma=True))


def padded(logits: np.ndarray) -> np.ndarray:
    """As the head gives them: minus infinity behind the vocabulary."""
    return np.pad(logits, ((0, 0), (0, PADDED - VOCAB)), constant_values=-np.inf).astype(np.float32)


def allowed(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities float64 [v] that a token is drawn with: sort, keep the first k, then the first of share p."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled)
    kept = order[: sampling.top_k or len(order)]
    probs = np.exp(scaled[kept] - scaled[kept[0]])
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    kept, probs = kept[before < sampling.top_p], probs[before < sampling.top_p]
    whole = np.zeros(len(logits))
    whole[kept] = probs / probs.sum()
    return whole


SAMPLINGS = [
    Sampling(seed=1),
    Sampling(temperature=0.5, seed=2),
    Sampling(top_k=7, seed=3),
    Sampling(top_p=0.8, seed=4),
    Sampling(temperature=1.7, top_k=20, top_p=0.6, seed=5),
    Sampling(top_k=97, top_p=0.999, seed=6),
    Sampling(top_p=1e-6, seed=7),
]


@pytest.mark.parametrize("mesh", MESHES, ids=name)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_follow_the_definition(mesh: dict[str, int], sampling: Sampling) -> None:
    """4000 draws: none that may not be, each frequency within 5 sigma, and chi-square within 5 sigma of its mean.

    A chi-square of f degrees of freedom has mean f and variance 2 f; ids that are expected less than 5 times count as
    one.
    """
    count = 4000
    logits = np.random.default_rng(0).normal(size=VOCAB) * 2
    want = allowed(logits, sampling)
    draw = mapped(choose, mesh, SPLIT, ROWS, P())
    ids = np.asarray(draw(padded(np.tile(logits, (count, 1))), np.arange(count, dtype=np.int32) % 9, sampling.numbers))
    seen = np.bincount(ids, minlength=VOCAB)
    assert not np.any(seen[want == 0])
    assert np.all(np.abs(seen - count * want) <= 5 * np.sqrt(count * want * (1 - want)) + 1)
    rare = count * want < 5
    expected = np.append(count * want[~rare], count * want[rare].sum())
    found, expected = np.append(seen[~rare], seen[rare].sum())[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert abs(np.sum((found - expected) ** 2 / expected) - freedom) <= 5 * np.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[4]], ids=str)
def test_draws_are_the_same_on_every_mesh(sampling: Sampling) -> None:
    """A function of seed, row and position: however the rows and the vocabulary are split."""
    logits = padded(np.random.default_rng(1).normal(size=(64, VOCAB)))
    position = np.arange(64, dtype=np.int32) // 2
    first, *others = (
        np.asarray(mapped(choose, mesh, SPLIT, ROWS, P())(logits, position, sampling.numbers)) for mesh in MESHES
    )
    for other in others:
        np.testing.assert_array_equal(first, other)
    alike = np.tile(logits[:1], (64, 1))
    draws = np.asarray(mapped(choose, {}, SPLIT, ROWS, P())(alike, np.full(64, 3, np.int32), sampling.numbers))
    assert len(set(draws.tolist())) > 3, "rows draw apart"
    one_row = [
        int(mapped(choose, {}, SPLIT, ROWS, P())(alike[:1], np.full(1, p, np.int32), sampling.numbers)[0])
        for p in range(20)
    ]
    assert len(set(one_row)) > 3, "positions draw apart"


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_the_fewest_are_kept(mesh: dict[str, int]) -> None:
    """Exact sets over magnitudes from 1e-30 to 1e30, both signs, zeros and equals; the first of equals is chosen."""
    rng = np.random.default_rng(2)
    logits = (rng.choice([-1, 1], (8, VOCAB)) * 10.0 ** rng.uniform(-30, 30, (8, VOCAB))).astype(np.float32)
    logits[0], logits[1, :50], logits[2, ::2] = 0, -0.0, logits[2, 0]
    ones = np.isfinite(padded(logits)).astype(np.float32)
    keep = mapped(keep_likeliest, mesh, SPLIT, SPLIT, P(), out=SPLIT)
    for k in (1, 2, 50, 96, 97, 200):
        kept = np.asarray(keep(padded(logits), ones, np.float32(k)))[:, :VOCAB]
        smallest = np.sort(logits, axis=1)[:, ::-1][:, min(k, VOCAB) - 1]
        np.testing.assert_array_equal(np.isfinite(kept), logits >= smallest[:, None])
        np.testing.assert_array_equal(kept[np.isfinite(kept)], logits[np.isfinite(kept)])
    np.testing.assert_array_equal(mapped(likeliest, mesh, SPLIT)(padded(logits)), np.argmax(logits, axis=1))


def test_logits_of_padding() -> None:
    """A product, and minus infinity behind the vocabulary, whatever is stored there."""
    y, table = np.ones((2, 3, 4), np.float32), np.full((PADDED, 4), 100, np.float32)
    table[:VOCAB] = np.arange(VOCAB)[:, None]
    head = mapped(
        lambda y, t: vocabulary_logits(y, t, VOCAB), {"tp": 4}, P(), P(VOCAB_AXES), out=P(None, None, VOCAB_AXES)
    )
    got = np.asarray(head(y, table))
    np.testing.assert_array_equal(got[:, :, :VOCAB], np.broadcast_to(4.0 * np.arange(VOCAB), (2, 3, VOCAB)))
    assert np.all(got[:, :, VOCAB:] == -np.inf)
