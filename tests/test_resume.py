"""A run that was killed goes on as if it had not been; on another mesh it goes on too."""

from __future__ import annotations

import chex
import fitting
import jax
import numpy as np
import pytest
import tiny

from jax5d.config import ConfigError
from jax5d.data.tokens import write_tokens
from jax5d.train.checkpoint import Checkpoints, read_about
from jax5d.train.metrics import read_metrics

TWELVE = {"steps": 12, "checkpoint_every": 1, "microbatches": 4}
MESH = {"pp": 2, "dp": 2, "tp": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 12 steps over 40 sequences: it crosses two epochs."""
    folder = tmp_path_factory.mktemp("whole")
    file = fitting.token_file(folder)
    run, trainer, data = fitting.train(fitting.config(MESH, **TWELVE), file, folder / "run")
    assert len(data.train) == fitting.SEQUENCES
    return run, trainer, file, folder / "run"


@pytest.mark.parametrize("step", [3, 7])
def test_same_mesh_is_bitwise(whole, step, tmp_path):
    """B38 B39 B40: data, learning rate, dropout and optimizer go on, to the bit, from any step; compiled once (B55)."""
    run, trainer, file, folder = whole
    again, _, _ = fitting.train(trainer.config, file, fitting.killed_after(folder, step, tmp_path / "run"), trainer)
    assert fitting.losses(again) == fitting.losses(run)
    assert [r["learning_rate"] for r in again.records] == [r["learning_rate"] for r in run.records]
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [*range(1, 13)]
    chex.assert_trees_all_equal(jax.device_get(again.state), jax.device_get(run.state))
    assert trainer.step._cache_size() == 1


@pytest.mark.parametrize("mesh", [{}, {"tp": 4}, {"pp": 4, "dp": 2}], ids=tiny.name)
def test_other_mesh(whole, mesh, tmp_path):
    """B46: onto one, four, eight other devices: losses within 1e-5, leaves with the new mesh's shardings."""
    run, _, file, folder = whole
    copy = fitting.killed_after(folder, 3, tmp_path / "run")
    again, trainer, _ = fitting.train(fitting.config(mesh, **TWELVE), file, copy)
    np.testing.assert_allclose(fitting.losses(again), fitting.losses(run), atol=1e-5)
    for leaf, sharding in zip(jax.tree.leaves(again.state), jax.tree.leaves(trainer.shardings), strict=True):
        assert leaf.sharding == sharding
    assert type(again.state.opt_state) is type(run.state.opt_state)
    assert jax.tree.structure(again.state) == jax.tree.structure(run.state)


def test_moe_with_dropout(tmp_path):
    """B40: the MoE on dp2 ep4, 3 + 3 steps, bitwise those of 6."""
    file = fitting.token_file(tmp_path)
    run = fitting.config({"dp": 2, "ep": 4}, moe=True, layers=2)
    first, trainer, _ = fitting.train(run, file, tmp_path / "a")
    again, _, _ = fitting.train(run, file, fitting.killed_after(tmp_path / "a", 3, tmp_path / "b"), trainer)
    assert fitting.losses(again) == fitting.losses(first)
    chex.assert_trees_all_equal(jax.device_get(again.state), jax.device_get(first.state))


def test_more_steps_says_so(whole, tmp_path, capsys):
    """B39: another end moves the learning rate's decay; both numbers are named. Fewer steps than done are refused."""
    from rich.console import Console

    from jax5d.train.loop import fit, open_data

    run, _, file, folder = whole
    copy = fitting.killed_after(folder, 11, tmp_path / "run")
    longer = fitting.trainer(fitting.config(MESH, **TWELVE | {"steps": 13}))
    result = fit(longer, open_data(longer.config, file), copy, Console())
    said = capsys.readouterr().out
    assert "12" in said
    assert "13" in said
    assert len(result.records) == 13
    assert fitting.losses(result)[:11] == fitting.losses(run)[:11]
    shorter = fitting.config(MESH, **TWELVE | {"steps": 5})
    with pytest.raises(ConfigError, match=r"step 13.*train\.steps=5"):
        fitting.train(shorter, file, copy)


def test_evaluation_leaves_training_alone(tmp_path):
    """B31: losses with evaluation never, after each and after every third step are bitwise equal."""
    file = fitting.token_file(tmp_path)
    found = {}
    for every in (0, 1, 3):
        run = fitting.config({"dp": 2}, layers=2, eval_every=every, dropout=0.2)
        result, trainer, _ = fitting.train(run, file, tmp_path / str(every))
        found[every] = fitting.losses(result)
        validated = [r["step"] for r in result.records if "validation_loss" in r]
        assert validated == [n for n in range(1, 7) if n == 6 or (every and n % every == 0)]
        assert trainer.step._cache_size() == 1
    assert found[0] == found[1] == found[3]


def test_one_changed_byte_of_the_data_is_refused(tmp_path):
    """A run does not go on over other text, though it is as long as before."""
    first = fitting.token_file(tmp_path)
    run = fitting.config(layers=1, steps=3)
    fitting.train(run, first, tmp_path / "run")
    changed = np.array(np.concatenate([first.tokens("train"), first.tokens("validation")]))
    changed[5] = (changed[5] + 1) % 256
    share = len(first.tokens("validation")) / len(changed)
    other = write_tokens(tmp_path / "other.tokens", [changed], first.tokenizer, validation=share)
    with pytest.raises(ConfigError, match="other data"):
        fitting.train(fitting.config(layers=1, steps=6), other, tmp_path / "run")


def test_numbers_that_are_not_finite_are_never_saved(tmp_path):
    """A rate that blows the weights up ends the run; every checkpoint that it leaves is finite."""
    run = fitting.config(layers=1, optimizer="sgd", learning_rate=1e18, warmup=0, clip=0, checkpoint_every=1)
    file = fitting.token_file(tmp_path)
    with pytest.raises(FloatingPointError, match=r"not finite at step .*learning_rate"):
        fitting.train(run, file, tmp_path / "run")
    trainer = fitting.trainer(run)
    folder = tmp_path / "run" / "checkpoints"
    for step in (int(p.name) for p in folder.iterdir() if p.name.isdigit()):
        with Checkpoints(folder, trainer, read_about(folder, step)["data"]) as checkpoints:
            state = checkpoints.restore(step)
        if step < max(int(p.name) for p in folder.iterdir() if p.name.isdigit()):
            chex.assert_tree_all_finite(jax.device_get(state.params))


def test_data_that_ends(tmp_path):
    """B64: 40 sequences are 5 steps of 8. Repeated, 20 steps take 4 epochs; not repeated, 6 steps are refused."""
    from dataclasses import replace

    from jax5d.config import DataConfig
    from jax5d.train.loop import open_data

    file = fitting.token_file(tmp_path)
    run = fitting.config(steps=20)
    batches = open_data(run, file).batches
    assert [batches.epoch(step) for step in range(20)] == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    once = replace(run, data=DataConfig(repeat=False))
    with pytest.raises(ConfigError, match=r"train\.steps=20.*40.*5 steps"):
        open_data(once, file)
    assert open_data(replace(once, train=replace(once.train, steps=5)), file).batches.steps_available == 5
