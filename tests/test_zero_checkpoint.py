"""A checkpoint of one stage of ZeRO goes on at any other, on any mesh, with any padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import fitting
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tiny

from jax5d.config import MeshConfig
from jax5d.costs.memory import state_bytes
from jax5d.measure.memory import buckets
from jax5d.train.checkpoint import Checkpoints, from_checkpoint
from jax5d.train.step import Trainer, TrainState

RECORD = {"train_windows": 40, "validation_windows": 10}
UNEVEN = {"d_model": 30, "heads": 2, "vocab": 97, "tied": False}
CUBE = {"pp": 2, "dp": 2, "tp": 2}


def through(folder: Path, state: TrainState, there: Trainer, here: Trainer) -> TrainState:
    """`state`, saved by one trainer and restored by another."""
    with Checkpoints(folder, there, RECORD) as checkpoints:
        checkpoints.save(3, state)
        checkpoints.finish()
    with Checkpoints(folder, here, RECORD) as checkpoints:
        return checkpoints.restore(3)


def drawn(trainer: Trainer) -> Any:
    """A state of one device with every number drawn anew, on the host."""
    draw = np.random.default_rng(0)

    def one(x: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.asarray(draw.normal(size=x.shape) if x.dtype == np.float32 else fitting.COUNTER, x.dtype)

    return jax.tree.map(one, trainer.shapes)


def check_state(state: TrainState, trainer: Trainer, want: TrainState) -> None:
    """Parameters, moments and counters are `want` to the bit where they are not padding, which is 0; on every device.

    The replica is the parameters; all is laid out for the trainer.
    """
    tiny.assert_shards(replace(state, replica=()), want)
    replica = jax.tree.map(lambda x: x.astype(trainer.config.model.dtype), want.params)
    tiny.assert_shards(state.replica, replica if trainer.config.parallel.zero in (1, 2) else ())
    for leaf, sharding, like in zip(*map(jax.tree.leaves, (state, trainer.shardings, trainer.shapes)), strict=True):
        assert (leaf.sharding, leaf.dtype, leaf.shape) == (sharding, like.dtype, like.shape)


CHAINS = {
    "dp": [({"dp": 8}, 3), ({"dp": 4}, 3), ({"dp": 4}, 0), ({"dp": 8}, 1), ({"dp": 2}, 2)],
    "others": [({"dp": 4, "tp": 2}, 2), ({"cp": 8}, 3), ({"pp": 4, "ep": 2}, 1), ({"pp": 2, "dp": 4}, 3), (CUBE, 2)],
}


@pytest.mark.parametrize(("chain", "dtype"), [("dp", "float32"), ("others", "bfloat16")])
def test_from_stage_to_stage(chain: str, dtype: str, tmp_path: Path) -> None:
    """B45, B46: d 30 and 97 tokens, whose padding differs from mesh to mesh: what one device began with arrives.

    A device then holds the bytes of theory. Under bfloat16 compute parameters and moments stay float32. Counters beyond
    float32's integers stay what they are.
    """
    there = fitting.trainer(fitting.config(dtype=dtype, **UNEVEN))
    want = drawn(there)
    state = jax.device_put(want, there.shardings)
    for number, (mesh, stage) in enumerate(CHAINS[chain]):
        here = fitting.trainer(fitting.config(mesh, zero=stage, dtype=dtype, **UNEVEN))
        state = through(tmp_path / str(number), state, there, here)
        check_state(state, here, want)
        held = buckets(here, state)
        assert held.parameters + held.optimizer == state_bytes(here.config)
        there = here
    kinds = {x.dtype for x in jax.tree.leaves((state.params, state.opt_state, state.step))}
    assert kinds == {np.dtype("float32"), np.dtype("int32")}
    assert int(state.step) == 16777217


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_saved(stage: int, tmp_path: Path) -> None:
    """B11, B46: the table once, no replica; one device opens it without a configuration, all optax types kept."""
    eight = fitting.trainer(fitting.config({"dp": 8}, zero=stage, **UNEVEN | {"tied": True}))
    state = eight.init()
    through(tmp_path, state, eight, eight)
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata((tmp_path / "3" / "state").absolute()).item_metadata.tree
    assert set(tree) == {"step", "params", "opt_state", "loss_scale"}
    assert set(tree["params"]["outer"]) == {"wte", "wpe", "norm_f"}
    trainer, again = from_checkpoint(tmp_path, MeshConfig(), devices=jax.devices()[:1])
    assert trainer.zero.stage == 0
    assert again.params["outer"]["wte"].shape == (97, 30)
    fresh = jax.device_get(fitting.trainer(trainer.config).init())  # initial values do not depend on the stage
    chex.assert_trees_all_equal(jax.device_get(again), fresh)
    assert isinstance(again.opt_state[0], optax.ScaleByAdamState)
    check_state(state, eight, jax.device_get(again))


SIX = {"steps": 6, "microbatches": 4, "eval_sequences": 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps at stage 3 on eight devices, saved at 3."""
    folder = tmp_path_factory.mktemp("whole")
    file = fitting.token_file(folder)
    return *fitting.train(fitting.config(CUBE, zero=3, **SIX), file, folder / "run")[:2], file, folder / "run"


def test_going_on_is_bitwise(whole, tmp_path: Path) -> None:
    """B55: at stage 3 steps 4 to 6 after a restore are those of the whole run, by the same compiled step."""
    run, trainer, file, folder = whole
    again, _, _ = fitting.train(trainer.config, file, fitting.killed_after(folder, 3, tmp_path / "run"), trainer)
    assert fitting.losses(again) == fitting.losses(run)
    chex.assert_trees_all_equal(jax.device_get(again.state), jax.device_get(run.state))
    assert trainer.step._cache_size() == 1


@pytest.mark.parametrize(("mesh", "stage"), [({}, 3), ({"tp": 4}, 3), ({"pp": 4, "dp": 2}, 1), ({"dp": 2}, 2)], ids=str)
def test_going_on_elsewhere(whole, mesh: dict[str, int], stage: int, tmp_path: Path) -> None:
    """B46: from stage 3 on eight devices: losses 4 to 6 within 1e-5, optax's types, the new mesh's shardings.

    B55: the step is compiled once for the restored state, and not anew for a fresh one.
    """
    run, _, file, folder = whole
    copy = fitting.killed_after(folder, 3, tmp_path / "run")
    again, trainer, _ = fitting.train(fitting.config(mesh, zero=stage, **SIX), file, copy)
    assert len(again.records) == 6
    np.testing.assert_allclose(fitting.losses(again), fitting.losses(run), rtol=0, atol=1e-5)
    for leaf, sharding in zip(jax.tree.leaves(again.state), jax.tree.leaves(trainer.shardings), strict=True):
        assert leaf.sharding == sharding
    assert jax.tree.structure(again.state.opt_state) == jax.tree.structure(run.state.opt_state)
    assert isinstance(again.state.opt_state[0], optax.ScaleByAdamState)
    tiny.check_replica(again.state, trainer.config)
    trainer.step(trainer.init(), jax.device_put(tiny.batch(trainer.config), trainer.batch_sharding))
    assert trainer.step._cache_size() == 1
