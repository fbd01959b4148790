"""The MoE's router: auxiliary loss, forced and empty experts, capacity, exact counts, independence of sequences."""

from __future__ import annotations

from typing import Any

import chex
import jax
import numpy as np
import pytest
import reference
from tiny import RATE, batch, check_equivalent, config, gradients, host, ids, name, put, start, trainer
from tiny import weights as initial

from jax5d.config import RunConfig


def step(run: RunConfig, params: Any = None) -> tuple[Any, dict[str, jax.Array]]:
    """One step of the run: gradients on the host, and metrics."""
    state, metrics = trainer(run).step(start(run, params), put(run, batch(run)))
    return host(gradients(state)), metrics


def test_auxiliary_loss_reaches_the_router_in_proportion() -> None:
    """B32: with coefficients 0, 0.01 and 1 the router's gradient moves a hundredth and all of the way."""
    router = {}
    for coefficient in (0.0, 0.01, 1.0):
        grads, metrics = step(config(moe=True, z_coef=0.0, aux_coef=coefficient))
        router[coefficient] = grads["blocks"]["mlp"]["router"]
        assert 0.9 < float(metrics["aux_loss"]) / 4 < 2  # 1 a layer where even; logged without the coefficient
    whole, part = router[1.0] - router[0.0], router[0.01] - router[0.0]
    assert np.max(np.abs(whole)) > 1e-3
    assert np.linalg.norm(whole - 100 * part) < 0.01 * np.linalg.norm(whole)


@pytest.mark.parametrize(("mesh", "microbatches"), [({}, 1), ({"dp": 2, "ep": 2}, 1), ({"pp": 2}, 4)])
def test_auxiliary_loss_is_the_same_on_every_mesh(mesh: dict[str, int], microbatches: int) -> None:
    """B32: coefficient 1; the update follows CE + aux, and both are logged apart."""
    check_equivalent(config(mesh, moe=True, microbatches=microbatches, z_coef=0.0, aux_coef=1.0), steps=1)


def forced(run: RunConfig) -> Any:
    """Parameters that send every token to experts 0 and 1: the norm before the MoE puts out ones."""
    params = jax.tree.map(np.array, initial(run.model))
    params["blocks"]["norm_2"]["scale"][:] = 0
    params["blocks"]["norm_2"]["bias"][:] = 1
    params["blocks"]["mlp"]["router"][:] = np.array([1, 1, -1, -1], np.float32)
    return params


@pytest.mark.parametrize(
    ("ep", "capacity", "optimizer"),
    [(1, 0, "sgd"), (2, 1, "sgd"), (4, 0, "sgd"), (1, 1, "adamw"), (2, 0, "adamw"), (4, 1, "adamw")],
)
def test_experts_without_tokens(ep: int, capacity: float, optimizer: str) -> None:
    """B34: gradients of experts 2, 3 are exactly 0; SGD leaves them, AdamW decays them by (1 - rate wd) a step.

    Groups of 8 tokens with 2 choices of 4 experts have ceil(1.0 x 8 x 2 / 4) = 4 slots an expert, so half of the
    choices find none: 2 experts x 4 x 32 groups x 4 layers = 1024.
    """
    run = config({"ep": ep}, moe=True, capacity_factor=capacity, group=8, optimizer=optimizer, weight_decay=0.1)
    params = forced(run)
    state, data = start(run, params), put(run, batch(run))
    for _ in range(3):
        state, metrics = trainer(run).step(state, data)
        chex.assert_tree_all_finite(host(state.params))
        assert np.asarray(metrics["expert_load"]).tolist() == [1024, 1024, 0, 0]  # 256 tokens x 4 layers
        assert int(metrics["dropped_tokens"]) == (1024 if capacity else 0)
        for leaf in ("w_in", "w_out"):
            grads = np.asarray(gradients(state)["blocks"]["mlp"][leaf])
            assert not np.any(grads[:, 2:])
            assert np.all(np.any(grads[:, :2], axis=(2, 3)))
    for leaf in ("w_in", "w_out"):
        before, after = params["blocks"]["mlp"][leaf][:, 2:], np.asarray(state.params["blocks"]["mlp"][leaf])[:, 2:]
        if optimizer == "sgd":
            np.testing.assert_array_equal(after, before)
        else:
            chex.assert_trees_all_close(after, before * np.float32((1 - RATE * 0.1) ** 3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}, {"ep": 2}, {"cp": 2}, {"tp": 2}], ids=name)
def test_same_tokens_are_dropped_on_every_mesh(mesh: dict[str, int]) -> None:
    """Capacity factor 1.0, groups of 8: what is dropped does not depend on the mesh, nor does anything else."""
    run = config(mesh, moe=True, capacity_factor=1.0, group=8, sequence=True)
    _, metrics = check_equivalent(run, steps=1)
    assert int(metrics["dropped_tokens"]) == dropped_by_hand(run)


def dropped_by_hand(run: RunConfig) -> int:
    """Walk the tokens of each group and count who finds no slot, from the plain model's router."""
    seen: list[np.ndarray] = []
    params, inputs = initial(run.model), ids()[:, :-1]
    x = params["outer"]["wte"][inputs] + params["outer"]["wpe"][None]
    for layer in range(4):
        p = jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"])
        x = x + reference.attention(p["attention"], reference.layer_norm(p["norm_1"], x))
        h = reference.layer_norm(p["norm_2"], x)
        seen.append(np.asarray(h @ p["mlp"]["router"]))
        x = x + reference.moe(p["mlp"], h, run.model)[0]
    dropped = 0
    for group in np.concatenate(seen).reshape(-1, 8, 4):
        queue = np.zeros(4, int)
        choices = np.argsort(-group, axis=-1, kind="stable")[:, :2]
        for expert in choices.T.ravel():  # all first choices, then all second ones
            dropped += queue[expert] >= 4
            queue[expert] += 1
    assert dropped > 0
    return dropped


@pytest.mark.parametrize("dp", [1, 2])
def test_counts_are_exact_in_bfloat16(dp: int) -> None:
    """B35: 257 and 255 tokens, which bfloat16 would count as 256 and 255; the auxiliary loss is float32's.

    Token 0 is a pattern of signs and token 1 its negative, attention and positions are 0, so the norm gives the
    pattern back and logits are +-32 x 0.02 for the two experts, 0 for the others.
    """
    run = config({"dp": dp}, moe=True, dtype="bfloat16", layers=1, top_k=1, context=128, seq_len=128, global_batch=4)
    params = jax.tree.map(np.array, initial(run.model))
    pattern = np.where(np.arange(32) % 2, 1, -1).astype(np.float32)
    params["outer"]["wte"][:2] = pattern, -pattern
    params["outer"]["wpe"][:] = 0
    params["blocks"]["attention"]["w_out"][:] = 0
    params["blocks"]["mlp"]["router"][0] = 0.02 * np.stack([pattern, -pattern, 0 * pattern, 0 * pattern], 1)
    inputs = np.ones((4, 128), np.int32)
    inputs.reshape(2, 256)[0, :129], inputs.reshape(2, 256)[1, :128] = 0, 0  # 129 and 128 on the two halves
    state = start(run, params)
    _, metrics = trainer(run).step(state, put(run, batch(run, inputs, inputs)))
    assert np.asarray(metrics["expert_load"]).tolist() == [257, 255, 0, 0]
    high, low, zero = np.exp([0.64, -0.64, 0.0])
    first, second = np.array([257, 255]) / 512
    total = high + low + 2 * zero
    chosen = first * (first * high + second * low) + second * (first * low + second * high)
    assert float(metrics["aux_loss"]) == pytest.approx(4 * chosen / total, rel=1e-6)
    z = np.log(total) ** 2
    assert float(metrics["router_z_loss"]) == pytest.approx(z, rel=1e-5)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_sequence_does_not_see_its_neighbours(ep: int) -> None:
    """B37: dropless; the losses of row 0 stay when rows 1-7 are replaced, or all go to the same experts."""
    run = config({"ep": ep}, moe=True)
    params, tokens = start(run).params, ids()
    others = [tokens[:, :-1].copy() for _ in range(3)]
    others[1][1:] = (others[1][1:] * 5 + 11) % 96
    others[2][1:] = 3  # one token, so one pair of experts
    for position in (0, 7, 15, 31):
        labels = np.full((8, 32), -100, np.int32)
        labels[0, position] = tokens[0, position + 1]
        losses = [float(trainer(run).evaluate(params, put(run, batch(run, x, labels)))["loss_sum"]) for x in others]
        assert max(losses) - min(losses) <= 1e-6
    whole = [float(trainer(run).evaluate(params, put(run, batch(run, x)))["loss_sum"]) for x in others]
    assert len(set(whole)) == 3  # the neighbours did change
