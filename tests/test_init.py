"""Initial weights depend on the seed alone."""

from __future__ import annotations

import hashlib
import math

import jax
import numpy as np
import pytest
from tiny import config, host, name, trainer, weights

MESHES = [{"dp": 8}, {"tp": 4}, {"pp": 4}, {"ep": 4}, {"cp": 4}, {"pp": 2, "dp": 2, "tp": 2}]
VOCAB = 97
"""Padded on most of the meshes."""


def digests(tree: dict) -> dict[str, str]:
    """SHA-256 of the bytes of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest() for path, x in leaves
    }


MODELS = {"gpt2": {}, "moe": {"moe": True}, "llama": {"architecture": "llama", "tied": False}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_same_weights_on_every_mesh(mesh: dict[str, int], model: str) -> None:
    """B30: bitwise those of one device, which `weights` makes without a mesh; padding rows are 0 and left out."""
    run = config(mesh, vocab=VOCAB, sequence=True, **MODELS[model])
    params = trainer(run).init().params
    assert digests(host(params, run.model)) == digests(weights(run.model))
    for table in ("wte", "head"):
        assert not np.any(np.asarray(params["outer"].get(table, np.zeros(0)))[VOCAB:])


@pytest.mark.parametrize("model", MODELS)
def test_other_seed_other_weights(model: str) -> None:
    """B30: every random leaf changes with the seed; norms and biases start at 1 and 0."""
    shape = config(**MODELS[model]).model
    first, second = weights(shape, 0), weights(shape, 1)
    for path, leaf in jax.tree_util.tree_leaves_with_path(first):
        last = path[-1].key
        other = jax.tree_util.tree_leaves_with_path(second)
        same = np.array_equal(leaf, dict((jax.tree_util.keystr(p), x) for p, x in other)[jax.tree_util.keystr(path)])
        constant = last in ("scale", "bias") or last.startswith("b_")
        assert same == constant
        if constant:
            assert np.all(leaf == (1 if last == "scale" else 0))


def test_layers_differ_and_have_the_claimed_spread() -> None:
    """B28: kernels differ from layer to layer; residual projections have std 0.02 / sqrt(2 layers), others 0.02."""
    params = weights(config().model)
    blocks = params["blocks"]
    kernels = [
        blocks["attention"]["w_q"],
        blocks["attention"]["w_out"],
        blocks["mlp"]["w_in"],
        blocks["mlp"]["w_out"],
        blocks["attention"]["w_kv"],
    ]
    for kernel in kernels:
        assert len({layer.tobytes() for layer in kernel}) == 4
    pooled = np.concatenate([kernels[1].ravel(), kernels[3].ravel()])
    assert pooled.std() == pytest.approx(0.02 / math.sqrt(2 * 4), rel=0.05)
    for kernel in (kernels[0], kernels[2], kernels[4], params["outer"]["wte"], params["outer"]["wpe"]):
        assert kernel.std() == pytest.approx(0.02, rel=0.05)
