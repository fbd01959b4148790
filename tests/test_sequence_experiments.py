"""What the experiments on sequence parallelism compute by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiny import config

from experiments.ch04_sequence_and_context import _megatron_layer as megatron
from experiments.ch04_sequence_and_context._memory_rows import Case
from experiments.ch04_sequence_and_context._memory_terms import terms
from experiments.ch04_sequence_and_context._sequence_compared import LeftOut
from experiments.ch04_sequence_and_context._sequence_costs import sent_by_hand
from experiments.ch04_sequence_and_context._sequence_runs import apart, configure, parts, summed_over_tp, trainer_of
from jax5d.config import RunConfig


@pytest.mark.parametrize(
    ("model", "sequence", "textbook", "here"),
    [
        # GPT-3 6.7B: 5 a s / h = 80, of which the mask is 16; the log-sum-exp is 4 a / h = 1 / 32
        ("gpt3-7b-plain", False, 10 + 24 / 4 + 80 / 4, 8 + 16 / 4 + 64 / 4),
        ("gpt3-7b-plain", True, (34 + 80) / 4, (24 + 64) / 4),
        ("gpt3-7b", False, 10 + 24 / 4, 8 + (16 + 1 / 32) / 4),
        ("gpt3-7b", True, 34 / 4, (24 + 1 / 32) / 4),
        # Llama 3 8B: k and v of 8 heads for 32, two products of 3.5 h: 1 + 14 bytes instead of 4 + 8
        ("llama3-8b", False, 10 + 24 / 4, 8 + (4 + 1 + 14 + 1 / 32) / 4),
    ],
)
def test_terms_add_up(model: Any, sequence: bool, textbook: float, here: float) -> None:
    """To the equations of arXiv:2205.05198, and to them less what is named, on tp 4."""
    found = terms(Case(model, 4, sequence).config)
    assert sum(term.textbook for term in found) == pytest.approx(textbook, rel=1e-12)
    assert sum(term.here for term in found) == pytest.approx(here, rel=1e-12)
    assert all(term.why for term in found if term.saved)


def run_megatron(run: RunConfig) -> tuple[Any, Any]:
    """Gradients of two of Megatron's layers on random values, as float32 on the host."""
    layer, t = megatron.MegatronLayer(run), run.mesh.tp
    keys = jax.random.split(jax.random.key(1), 7)
    params = {
        name: (1.0 if name.startswith("norm") else 0.2 * jax.random.normal(key, kind.shape)) * jnp.ones(kind.shape)
        for key, (name, kind) in zip(keys[1:], layer.shapes(2).items(), strict=True)
    }
    x = jax.random.normal(keys[0], (2, 16, run.model.d_model))
    stream = P(None, "tp" if run.parallel.sequence else None)
    specs = megatron.SPECS, stream
    mesh = Mesh(np.array(jax.devices()[:t]), ("tp",))
    mapped = jax.jit(jax.shard_map(layer.gradients, mesh=mesh, in_specs=specs, out_specs=specs))
    return jax.tree.map(np.asarray, mapped(params, x))


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_megatron_layer_on_tp(sequence: bool) -> None:
    """In float32 without dropout it has one device's gradients."""
    want = run_megatron(config())
    got = run_megatron(config({"tp": 2}, sequence=sequence))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.max(np.abs(b)))


def test_left_out_is_off_by_the_others_parts() -> None:
    """Parts (3, 0) and (0, 4) of (3, 4): the first lacks 4 of 5, the second 3."""
    found = LeftOut.of("leaf", np.array([[3.0, 0.0], [0.0, 4.0]]), np.array([3.0, 4.0]))
    assert (found.least, found.worst, found.missing) == pytest.approx((0.6, 0.8, 0.8))
    assert found.summed == 0
    assert found.check("here").held
    wrong = LeftOut.of("leaf", np.array([[3.0, 0.0], [0.0, 4.0]]), np.array([3.0, 5.0]))
    assert not wrong.check("here").held


def test_sent_by_hand() -> None:
    """K = 4 x 32 x 64 floats. Six vectors of 64 are summed for GPT-2, two for Llama, and its shared heads."""
    k = 4 * 32 * 64 * 4
    assert sent_by_hand(configure("gpt2", 2)) == 4 * k
    assert sent_by_hand(configure("gpt2", 2, "tp + sp")) == 5 * k + 6 * 64 * 4
    assert sent_by_hand(configure("llama", 2, "tp + sp")) == 5 * k + 2 * 64 * 4
    assert sent_by_hand(configure("llama", 4)) == 0.75 * (8 * k + 2 * 4 * (64 * 2 * 2 * 8))


def test_apart() -> None:
    """Over the largest wanted entry."""
    assert apart({"a": np.array([1.0, 5.0])}, {"a": np.array([2.0, 4.0])}) == {"a": 0.25}


def test_which_gradients_are_summed_over_tp() -> None:
    """Norms, biases behind a sum and positions under sequence parallelism alone; shared heads either way."""
    norms = ["blocks.norm_1.scale", "blocks.norm_2.scale", "outer.norm_f.scale"]
    assert summed_over_tp(trainer_of(configure("llama", 2))) == []
    assert summed_over_tp(trainer_of(configure("llama", 4))) == ["blocks.attention.w_kv"]
    assert summed_over_tp(trainer_of(configure("llama", 2, "tp + sp"))) == norms
    biases = ["blocks.attention.b_out", "blocks.mlp.b_out", *(name.replace("scale", "bias") for name in norms)]
    found = summed_over_tp(trainer_of(configure("gpt2", 2, "tp + sp")))
    assert set(found) == {*norms, *biases, "outer.wpe"}


def test_parts_are_of_the_devices_own_tokens() -> None:
    """On tp 2 a position that only one device has gets nothing on the other."""
    run = configure("gpt2", 2, "tp + sp")
    tokens = np.random.default_rng(0).integers(0, 96, (1, 4, 33), np.int32)
    batch = {"inputs": tokens[..., :-1], "labels": tokens[..., 1:]}
    found = parts(trainer_of(replace(run, seed=3)), batch)["outer.wpe"]
    assert found.shape == (2, 32, 64)
    assert not found[0, 16:].any()
    assert not found[1, :16].any()
    assert found[0, :16].any()
    assert found[1, 16:].any()
