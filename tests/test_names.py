"""The values that a policy of recomputation can keep by name are the ones that its user expects."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from programs import equations
from tiny import config, trainer

from jax5d.layers.names import MLP_IN, QKV, SAVED

MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "gpt2": ({}, (8, 16, 64), 1),
    "llama": ({"architecture": "llama"}, (8, 16, 64), 2),
    "moe": ({"moe": True}, (8, 4, 16, 64), 1),
}
"""Options, shape of the MLP's first product on cp 2, tp 2, and how many such products there are."""


@pytest.mark.parametrize(("options", "hidden", "products"), MODELS.values(), ids=MODELS)
def test_named_values(options: dict[str, Any], hidden: tuple[int, ...], products: int) -> None:
    """cp 2, tp 2, 8 rows of 32 tokens: q, k, v of 2 heads of 8, the sum of width 32, and 64 of 128 MLP columns."""
    run = config({"cp": 2, "tp": 2}, dtype="bfloat16", **options)
    proof = trainer(run)
    state, data = proof.arguments
    program = jax.make_jaxpr(proof.evaluate)(state.params, data)
    named = [e for e in equations(program.jaxpr) if e.primitive.name == "name"]
    found = [(e.params["name"], e.outvars[0].aval.shape, str(e.outvars[0].aval.dtype)) for e in named]
    shapes = [*[(8, 16, 2, 8)] * 3, (8, 16, 32), *[hidden] * products]
    names = [QKV] * 3 + [SAVED] + [MLP_IN] * products
    assert found == [(name, shape, "bfloat16") for name, shape in zip(names, shapes, strict=True)]
