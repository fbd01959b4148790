"""Parameters, bytes and FLOPs by formula, against published and hand-counted numbers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny

from jax5d.config import PRESETS
from jax5d.costs.flops import active_parameters, flops_per_token
from jax5d.costs.memory import state_bytes
from jax5d.costs.parameters import count, leaves
from jax5d.measure.memory import bytes_on_device
from jax5d.mesh import make_mesh
from jax5d.train.step import Trainer


@pytest.mark.parametrize(("layers", "parameters"), [(4, 54_976), (5, 67_680), (6, 80_384)])
def test_tiny_gpt2(layers, parameters):
    """B01 B13: the counts that the reports give."""
    assert count(tiny.config(layers=layers).model) == parameters


@pytest.mark.parametrize(("name", "millions"), [("gpt2", 124), ("gpt2-medium", 355), ("gpt2-large", 774)])
def test_published_sizes(name, millions):
    """N = h v + h s + L (12 h^2 + 13 h) + 2 h, and the sizes that the models go by."""
    m = PRESETS[name]
    h = m.d_model
    assert count(m) == h * m.vocab + h * m.context + m.layers * (12 * h * h + 13 * h) + 2 * h
    assert round(count(m) / 1e6) == millions


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-1b", "1.34"), ("llama-3b", "3.57"), ("llama-9b", "8.86"), ("llama-80b", "80.0")]
)
def test_published_llamas(name, billions):
    """N = h v + L (4 h^2 + 3 h f + 2 h) + h, and h v more untied; the Ultra-Scale Playbook gives three digits."""
    m = PRESETS[name]
    h, f = m.d_model, m.d_ff
    assert count(m) == (2 - m.tied) * h * m.vocab + m.layers * (4 * h * h + 3 * h * f + 2 * h) + h
    assert f"{count(m) / 1e9:.3g}" == f"{float(billions):.3g}"


def test_experts_that_a_token_meets():
    """Of four experts of 2 x 32 x 128 weights a token meets two, in each of four layers."""
    model = tiny.config(moe=True).model
    assert count(model) - active_parameters(model) == 4 * 2 * (2 * 32 * 128)
    dense = tiny.config().model
    assert flops_per_token(dense, 32) == 6 * 54_976 + 12 * 4 * 32 * 32


MODELS = {
    "gpt2": {"tied": False},
    "moe": {"moe": True},
    "llama": {"architecture": "llama"},
    "llama-untied": {"architecture": "llama", "tied": False},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", [{}, {"pp": 2, "tp": 2}, {"ep": 2, "tp": 2}], ids=tiny.name)
def test_leaves_and_state_are_the_arrays(mesh, model):
    """Shapes, splits and bytes by formula are those of the arrays that a trainer makes; 97 rows are padded."""
    run = tiny.config(mesh, vocab=97, optimizer="adamw", **MODELS[model])
    trainer = Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[: run.mesh.size]))
    state = trainer.init()
    found = {}
    for path, x in jax.tree.leaves_with_path(state.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("outer.")
        found[name] = x.shape, int(np.prod(x.addressable_shards[0].data.shape))
    assert found == {x.name: (x.shape, x.local_size(run.mesh)) for x in leaves(run.model, run.mesh)}
    assert bytes_on_device(state, jax.devices()[0]) == state_bytes(run)
    padding = state.params["outer"]["wte"].shape[0] - 97
    tables = 1 if run.model.tied else 2
    assert count(run.model) == sum(x.size for x in jax.tree.leaves(state.params)) - tables * padding * 32
