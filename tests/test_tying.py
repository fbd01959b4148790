"""The token table is the embedding and the head: one matrix, one gradient, one set of moments, always split."""

from __future__ import annotations

import chex
import jax
import numpy as np
import optax
import pytest
import reference
from tiny import (
    assert_close,
    batch,
    check_equivalent,
    config,
    gradients,
    host,
    name,
    put,
    reference_gradients,
    start,
    trainer,
    weights,
)

from jax5d.train.optimizer import decay_mask


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 2}, {"pp": 4, "dp": 2}], ids=name)
def test_tied_table_over_stages(mesh: dict[str, int]) -> None:
    """B10: after 10 SGD steps with pp and dp the table is that of one device; there is no second copy."""
    state, _ = check_equivalent(config(mesh, microbatches=4), steps=10)
    assert set(state.params["outer"]) == {"wte", "wpe", "norm_f"}


def test_tied_table_with_adamw() -> None:
    """B10: 10 AdamW steps, held against optax on one device; the table has one set of moments."""
    run = config({"pp": 2, "dp": 2}, microbatches=4, optimizer="adamw", learning_rate=1e-3)
    state, proof, data = start(run), trainer(run), batch(run)
    on_mesh = put(run, data)
    params = weights(run.model)
    adamw = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decay_mask)
    plain = adamw.init(params)
    for _ in range(10):
        state, _ = proof.step(state, on_mesh)
        updates, plain = jax.jit(adamw.update)(reference_gradients(run, params, data)[1], plain, params)
        params = host(optax.apply_updates(params, updates))
    got = np.asarray(state.params["outer"]["wte"])
    chex.assert_trees_all_close(got, params["outer"]["wte"], rtol=0, atol=1e-5)
    tables = [leaf for leaf in jax.tree.leaves(state.opt_state[1]) if leaf.shape == (96, 32)]
    assert len(tables) == 2  # mu and nu


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}], ids=name)
def test_tied_gradient_is_the_sum_of_both_uses(mesh: dict[str, int]) -> None:
    """B11: the table's gradient is the embedding's plus the head's, of an untied copy of the model."""
    run = config(mesh)
    data, params = batch(run), weights(run.model)
    untied = {**params, "outer": {**params["outer"], "head": params["outer"]["wte"]}}
    value = lambda p: reference.objective(p, data["inputs"], data["labels"], run.model)[0]  # noqa: E731
    parts = host(jax.jit(jax.grad(value))(untied))["outer"]
    for part in ("wte", "head"):
        assert np.max(np.abs(parts[part])) > 1e-3
    state, _ = trainer(run).step(start(run), put(run, data))
    assert_close(np.asarray(gradients(state)["outer"]["wte"]), parts["wte"] + parts["head"], 2e-5)


@pytest.mark.parametrize("part", ["wte", "head"])
def test_each_device_holds_its_rows_only(part: str) -> None:
    """B12: with tp 4 a device has 24 of 96 rows of the table and its gradient, after init and after a step.

    So it has of a tied head, which is the table, and of a head of its own.
    """
    run = config({"tp": 4}, tied=part == "wte")
    proof = trainer(run)
    state = proof.init()
    for _ in range(2):
        for tree in (state.params, gradients(state)):
            table = tree["outer"][part]
            assert [shard.data.shape for shard in table.addressable_shards] == [(24, 32)] * 4
            first = sorted(shard.index[0].start or 0 for shard in table.addressable_shards)
            assert first == [0, 24, 48, 72]
        whole = [x for x in jax.tree.leaves(state) for shard in x.addressable_shards if shard.data.shape == (96, 32)]
        assert not whole
        state, _ = proof.step(state, put(run, batch(run)))
