"""The loss is the sum over valid tokens divided by their number, over the whole step and the whole evaluation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from tiny import ROWS, batch, check_equivalent, config, host, ids, masked, name, put, start, trainer, weights
from tiny import reference_gradients as plain

RAMP = [3 * (b + 1) for b in range(ROWS)]
HALF = RAMP[:4] + [0] * 4

RUNS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {"microbatches": 4}),
    ({"dp": 2}, {"microbatches": 2}),
    ({"dp": 4}, {}),
    ({"dp": 8}, {}),
    ({"pp": 2}, {"microbatches": 4, "schedule": "afab"}),
    ({"cp": 2}, {"microbatches": 2}),
]


@pytest.mark.parametrize(("mesh", "options"), RUNS, ids=[name(mesh) for mesh, _ in RUNS])
def test_every_valid_token_weighs_the_same(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """B18: rows with 3, 6, .. 24 valid labels, then with none in the last four, then none at all."""
    run = config(mesh, **options)
    labels = ids()[:, 1:]
    for lengths in (
        RAMP,
        HALF,
    ):  # HALF: with dp 2 the second device has no valid token, with M 2 the second microbatch
        check_equivalent(run, labels=masked(labels, lengths), steps=1)
    nothing = batch(run, labels=masked(labels, [0] * ROWS))
    state, metrics = trainer(run).step(start(run), put(run, nothing))
    assert float(metrics["loss"]) == 0
    assert float(metrics["grad_norm"]) == 0
    jax.tree.map(np.testing.assert_array_equal, host(state.params), weights(run.model))


def test_unit_ranks_with_different_counts() -> None:
    """B18: sums and counts (6, 2) and (40, 8) make 46 / 10, not the mean of two means.

    The numbers go through the trainer as two rows on dp 2, one with 2 valid labels and one with 8: the loss must be
    the two rows' summed losses over 10.
    """
    run = config({"dp": 2}, global_batch=2)
    labels = ids(2)[:, 1:]
    sums = []
    for lengths in ([2, 0], [0, 8]):
        metrics, _ = plain(run, weights(run.model), batch(run, labels=masked(labels, lengths)))
        sums.append(float(metrics["loss"]) * sum(lengths))
    _, metrics = trainer(run).step(start(run), put(run, batch(run, labels=masked(labels, [2, 8]))))
    loss = float(metrics["loss"])
    assert loss == pytest.approx(sum(sums) / 10, rel=1e-6)
    assert abs(loss - (sums[0] / 2 + sums[1] / 8) / 2) > 1e-3  # the wrong way is told apart


@pytest.mark.parametrize(
    ("mesh", "rows", "microbatches"),
    [
        ({}, 2, 1),
        ({}, 16, 1),
        ({"dp": 2}, 4, 1),
        ({"dp": 4}, 8, 2),
        ({"pp": 2}, 4, 2),
        ({"cp": 2, "tp": 2}, 16, 1),
    ],
)
def test_evaluation_is_one_mean_over_all_tokens(mesh: dict[str, int], rows: int, microbatches: int) -> None:
    """B19: 10 rows of 3, 6, .. 30 valid labels, 165 in all, in batches that do not divide 10."""
    tokens = ids(10)
    labels = masked(tokens[:, 1:], [3 * (r + 1) for r in range(10)])
    whole = config(global_batch=10)
    want, _ = plain(whole, weights(whole.model), batch(whole, labels=labels))
    run = config(mesh, global_batch=rows, microbatches=microbatches)
    loss = count = 0.0
    for first in range(0, 10, rows):
        fill = rows - len(labels[first : first + rows])  # as the data floor fills up: ids 0, labels ignored
        inputs = np.pad(tokens[first : first + rows, :-1], ((0, fill), (0, 0)))
        padded = np.pad(labels[first : first + rows], ((0, fill), (0, 0)), constant_values=-100)
        result = trainer(run).evaluate(start(run).params, put(run, batch(run, inputs, padded)))
        loss, count = loss + float(result["loss_sum"]), count + float(result["tokens"])
    assert count == 165
    assert loss / count == pytest.approx(float(want["loss"]), rel=1e-6)
