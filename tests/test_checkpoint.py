"""What a checkpoint holds, and what it refuses to be restored into."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import chex
import fitting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jax5d.config import ConfigError, MeshConfig
from jax5d.train.checkpoint import Checkpoints, SaveError, check_resume, from_checkpoint
from jax5d.train.step import Trainer, TrainState

RECORD = {"train_windows": 40, "validation_windows": 10}


def saved(folder: Path, trainer: Trainer, state: TrainState, step: int = 3) -> Path:
    with Checkpoints(folder, trainer, RECORD) as checkpoints:
        checkpoints.save(step, state)
        checkpoints.finish()
    return folder


def restored(folder: Path, trainer: Trainer, step: int = 3) -> TrainState:
    with Checkpoints(folder, trainer, RECORD) as checkpoints:
        return checkpoints.restore(step)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def counted(trainer: Trainer, value: int) -> TrainState:
    """A fresh state whose integer counters are all `value`."""
    count = lambda x: jnp.full_like(x, value) if jnp.issubdtype(x.dtype, jnp.integer) else x  # noqa: E731
    state = jax.tree.map(count, trainer.init())
    return jax.device_put(state, trainer.shardings)


def test_dtypes_and_counters_survive(tmp_path):
    """B45: float32 master weights and moments under bfloat16 compute, and a counter that float32 cannot hold."""
    trainer = fitting.trainer(fitting.config({"dp": 2, "tp": 2}, dtype="bfloat16"))
    state = counted(trainer, fitting.COUNTER)
    again = restored(saved(tmp_path / "c", trainer, state), trainer)
    chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(state))
    chex.assert_trees_all_equal_dtypes(again, state)
    assert int(again.step) == 16777217
    assert {leaf.dtype for leaf in jax.tree.leaves(again)} == {np.dtype("float32"), np.dtype("int32")}


@pytest.mark.parametrize("zero", [0, 1])
def test_asynchronous_save_has_its_own_step(zero, tmp_path):
    """B58: the next steps, which take the buffers over, cannot reach into a save that is still being written."""
    trainer = fitting.trainer(fitting.config({"dp": 2}, layers=2, zero=zero))
    state = trainer.init()
    kept = jax.device_get(state)
    batch = {k: jax.device_put(v, trainer.batch_sharding) for k, v in tiny.batch(trainer.config).items()}
    with Checkpoints(tmp_path / "c", trainer, RECORD) as checkpoints:
        checkpoints.save(0, state)
        for _ in range(3):
            state, _ = trainer.step(state, batch)
        checkpoints.finish()
        chex.assert_trees_all_equal(jax.device_get(checkpoints.restore(0)), kept)
    for now, then in [(state.params, kept.params), (state.replica, kept.replica)][: zero + 1]:
        with pytest.raises(AssertionError):
            chex.assert_trees_all_equal(jax.device_get(now), then)


OTHERS = {
    "fewer layers": ({"layers": 6}, {"layers": 4}, r"model\.layers.*\(6, .*\(4, |model\.layers.*\(4, .*\(6, "),
    "more layers": ({"layers": 4}, {"layers": 6}, r"model\.layers is 6 here and 4 there.*blocks\."),
    "vocabulary": ({"vocab": 96}, {"vocab": 128}, r"model\.vocab.*wte.*\(128, 32\).*\(96, 32\)"),
    "width": ({"d_model": 32}, {"d_model": 64}, r"model\.d_model.*\(257, 64\).*\(257, 32\)"),
    "experts": ({"moe": True, "experts": 4}, {"moe": True, "experts": 8}, r"model\.experts.*router.*8\).*4\)"),
    "dtype": ({"dtype": "float32"}, {"dtype": "bfloat16"}, r"model\.dtype is bfloat16 here and float32 there"),
    "optimizer": ({"optimizer": "adamw"}, {"optimizer": "sgd"}, r"train\.optimizer is sgd here and adamw there"),
    "seed": ({"seed": 0}, {"seed": 1}, r"seed is 1 here and 0 there"),
}


@pytest.mark.parametrize(("there", "here", "message"), OTHERS.values(), ids=OTHERS)
def test_another_model_is_refused(there, here, message, tmp_path):
    """B44: the option, the leaf and both shapes are named; nothing in the folder changes."""
    trainer = fitting.trainer(fitting.config(**there))
    folder = saved(tmp_path / "c", trainer, trainer.init())
    before = files(folder)
    with pytest.raises(ConfigError, match=message):
        check_resume(folder, fitting.config(**here), RECORD)
    with pytest.raises(ConfigError, match=message):
        restored(folder, fitting.trainer(fitting.config(**here)))
    assert files(folder) == before


def test_microbatches_are_part_of_an_moes_objective(tmp_path):
    """Router losses are means over microbatches: a dense run may go on with others, an MoE may not."""
    for moe in (False, True):
        trainer = fitting.trainer(fitting.config(moe=moe, layers=1, microbatches=2))
        folder = saved(tmp_path / str(moe), trainer, trainer.init())
        other = fitting.config(moe=moe, layers=1, microbatches=4)
        if moe:
            with pytest.raises(ConfigError, match=r"parallel\.microbatches is 4 here and 2 there"):
                check_resume(folder, other, RECORD)
        else:
            assert check_resume(folder, other, RECORD) == 3


def test_other_data_is_refused(tmp_path):
    trainer = fitting.trainer(fitting.config(layers=1))
    folder = saved(tmp_path / "c", trainer, trainer.init())
    with pytest.raises(ConfigError, match=r"40.*41"):
        check_resume(folder, trainer.config, RECORD | {"train_windows": 41})


def test_a_leaf_of_another_shape_is_refused_whatever_the_record_says(tmp_path):
    """B44: the arrays themselves are looked at, not only the record beside them."""
    small, large = (fitting.trainer(fitting.config(layers=n)) for n in (1, 2))
    with Checkpoints(tmp_path / "c", small, RECORD) as checkpoints:
        checkpoints.about = {"config": {**_as_dict(large)}, "data": RECORD}
        checkpoints.save(3, small.init())
        checkpoints.finish()
    with pytest.raises(ConfigError, match=r"blocks\..*\(2, .*\(1, "):
        restored(tmp_path / "c", large)


def _as_dict(trainer: Trainer) -> dict:
    from dataclasses import asdict

    return asdict(trainer.config)


@pytest.mark.parametrize(("there", "here"), [({"tp": 4}, {}), ({}, {"tp": 4}), ({"tp": 2}, {"pp": 2, "tp": 4})])
def test_vocabulary_padding_is_laid_out_anew(there, here, tmp_path):
    """B16 B12: 97 rows padded to 100, 97 or 104; every true row survives, padding is zero, each device has its part."""
    first, second = (fitting.trainer(fitting.config(mesh, vocab=97, tied=False)) for mesh in (there, here))
    state = first.init()
    again = restored(saved(tmp_path / "c", first, state), second)
    for table in ("wte", "head"):
        before, after = (np.asarray(s.params["outer"][table]) for s in (state, again))
        np.testing.assert_array_equal(after[:97], before[:97])
        assert not after[97:].any()
        shards = again.params["outer"][table].addressable_shards
        assert {s.data.shape for s in shards} == {(-(-97 // len(shards)), 32)}


def test_restored_table_is_split(tmp_path):
    """B12: after a restore onto tp4 each device holds 24 of the 96 rows."""
    one, four = fitting.trainer(fitting.config(vocab=96)), fitting.trainer(fitting.config({"tp": 4}, vocab=96))
    again = restored(saved(tmp_path / "c", one, one.init()), four)
    assert [s.data.shape for s in again.params["outer"]["wte"].addressable_shards] == [(24, 32)] * 4


def test_without_a_configuration(tmp_path):
    """B46: a checkpoint of eight devices opens on one, knowing its own configuration."""
    eight = fitting.trainer(fitting.config({"pp": 2, "dp": 2, "tp": 2}))
    state = eight.init()
    folder = saved(tmp_path / "c", eight, state)
    trainer, again = from_checkpoint(folder, MeshConfig(), devices=jax.devices()[:1])
    assert trainer.config == replace(eight.config, mesh=MeshConfig())
    for name in ("norm_1", "attention", "mlp"):
        chex.assert_trees_all_equal(
            jax.device_get(again.params["blocks"][name]), jax.device_get(state.params["blocks"][name])
        )
    being_written = folder / "6.orbax-checkpoint-tmp"
    being_written.mkdir()
    from_checkpoint(folder, MeshConfig(), devices=jax.devices()[:1])
    assert being_written.is_dir(), "to read is not to clean up after a run that may be writing"
    with pytest.raises(ConfigError, match=r"heads.*4.*tp=3"):
        from_checkpoint(folder, MeshConfig(tp=3), devices=jax.devices()[:3])
    with pytest.raises(ConfigError, match="no checkpoint"):
        from_checkpoint(tmp_path, MeshConfig(), devices=jax.devices()[:1])


def test_a_save_that_fails_is_an_error(tmp_path):
    """A run that could not save must not end well: the error of the background thread comes out."""
    trainer = fitting.trainer(fitting.config(layers=1))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((SaveError, OSError)), Checkpoints(tmp_path / "file" / "c", trainer, RECORD) as checkpoints:
        checkpoints.save(1, trainer.init())
        checkpoints.finish()


def test_no_room(tmp_path, monkeypatch):
    """A disk without room is found out before anything is written, with both numbers."""
    trainer = fitting.trainer(fitting.config(layers=1))
    state = trainer.init()
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    with Checkpoints(tmp_path / "c", trainer, RECORD) as checkpoints:
        usage = shutil.disk_usage(tmp_path)._replace(free=needed - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(SaveError, match=rf"{needed} bytes needed, {needed - 1} free"):
            checkpoints.save(1, state)
    assert not list((tmp_path / "c").iterdir())


def test_newest_are_kept(tmp_path):
    trainer = fitting.trainer(fitting.config(layers=1, keep=2))
    state = trainer.init()
    with Checkpoints(tmp_path / "c", trainer, RECORD) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state)
        checkpoints.finish()
    assert sorted(p.name for p in (tmp_path / "c").iterdir() if p.name.isdigit()) == ["3", "4"]
