"""float16: the loss is scaled, a step that overflows leaves no trace, and the run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import fitting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import RATE, batch, config, gradients, host, put, start, trainer

from jax5d.config import RunConfig
from jax5d.data.tokens import TokenFile
from jax5d.train.loop import Run
from jax5d.train.optimizer import learning_rate
from jax5d.train.scaling import Dynamic, Fixed
from jax5d.train.step import Trainer, TrainState

HUGE = 2.0**40
"""A factor under which every gradient of the tiny model overflows."""
NEAR = 2.0**26
"""One that overflows at first, and after a few halvings no more."""


def scaled(run: RunConfig, factor: float) -> TrainState:
    """The state before the first step, with this factor."""
    state = start(run)
    return replace(state, loss_scale=jax.device_put(state.loss_scale | {"factor": np.float32(factor)}))


def vector(tree: Any) -> np.ndarray:
    """All leaves end to end, float32."""
    return np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(tree)])


def test_an_overflow_leaves_no_trace() -> None:
    """Parameters, moments and optax's count stay bitwise; the factor halves, the step is counted as skipped."""
    run = config({"dp": 2, "tp": 2}, dtype="float16", optimizer="adamw")
    state, _ = trainer(run).step(start(run), put(run, batch(run)))  # moments and count are not 0
    before = host((state.params, state.opt_state))
    state = replace(state, loss_scale=jax.device_put(state.loss_scale | {"factor": np.float32(HUGE)}))
    state, metrics = trainer(run).step(state, put(run, batch(run)))
    chex.assert_trees_all_equal(host((state.params, state.opt_state)), before)
    assert not np.isfinite(metrics["grad_norm"])
    assert np.isfinite(metrics["loss"])
    assert int(state.step) == 2
    assert host(state.loss_scale) == {"factor": HUGE / 2, "good": 0, "skipped": 1}
    assert (float(metrics["loss_scale"]), float(metrics["skipped"])) == (HUGE, 1)


def test_learning_rate_follows_updates() -> None:
    """After two skipped steps the warm-up is where it was: logged, and used by the next update."""
    run = config(dtype="float16", learning_rate=RATE, warmup=4)
    state, data = scaled(run, HUGE), put(run, batch(run))
    for step in range(3):
        if step == 2:
            state = replace(state, loss_scale=jax.device_put(state.loss_scale | {"factor": np.float32(1024)}))
        before = np.asarray(state.params["outer"]["wpe"])
        state, metrics = trainer(run).step(state, data)
        assert float(metrics["learning_rate"]) == pytest.approx(RATE / 4)
        assert float(metrics["skipped"]) == (step < 2)
    moved, grad = before - np.asarray(state.params["outer"]["wpe"]), np.asarray(gradients(state)["outer"]["wpe"])
    assert np.vdot(moved, grad) / np.vdot(grad, grad) == pytest.approx(RATE / 4, rel=1e-4)
    _, metrics = trainer(run).step(state, data)
    assert float(metrics["learning_rate"]) == pytest.approx(2 * RATE / 4)


@pytest.mark.parametrize(
    ("norm", "good", "wanted"),
    [
        (1.0, 0, {"factor": 8.0, "good": 1, "skipped": 3}),
        (1.0, Dynamic.PATIENCE - 2, {"factor": 8.0, "good": Dynamic.PATIENCE - 1, "skipped": 3}),
        (1.0, Dynamic.PATIENCE - 1, {"factor": 16.0, "good": 0, "skipped": 3}),
        (np.inf, Dynamic.PATIENCE - 1, {"factor": 4.0, "good": 0, "skipped": 4}),
        (np.nan, 5, {"factor": 4.0, "good": 0, "skipped": 4}),
    ],
)
def test_the_factor(norm: float, good: int, wanted: dict[str, float]) -> None:
    """Doubled after so many good steps in a row, halved after one that is not finite."""
    state = {"factor": jnp.float32(8), "good": jnp.int32(good), "skipped": jnp.int32(3)}
    new, old = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    following, metrics = Dynamic().after(jnp.float32(norm), state)
    assert host(following) == wanted
    assert {k: x.dtype for k, x in following.items()} == {k: x.dtype for k, x in state.items()}
    chex.assert_trees_all_equal(Dynamic().choose(jnp.float32(norm), new, old), new if np.isfinite(norm) else old)
    assert (float(metrics["loss_scale"]), float(metrics["skipped"])) == (8, not np.isfinite(norm))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_are_not_scaled(dtype: str) -> None:
    """No state, no metrics, and what is not finite is not hidden."""
    proof = trainer(config(dtype=dtype))
    assert isinstance(proof.scaling, Fixed)
    assert proof.shapes.loss_scale == ()
    new, old = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    assert Fixed().choose(jnp.float32(np.nan), new, old) is new
    assert Fixed().after(jnp.float32(np.nan), ()) == ((), {})


def test_scaling_saves_small_gradients() -> None:
    """Gradients as small as those of a mean over 2^12 times as many tokens: lost without a factor, kept with one."""
    wanted = vector(trainer(config()).gradients(start(config()), put(config(), batch(config())))[0])
    run, errors, zeros = config(dtype="float16"), {}, {}
    for factor in (2.0**-12, 2.0**10, Dynamic.START):
        got = vector(trainer(run).gradients(scaled(run, factor), put(run, batch(run)))[0])
        errors[factor] = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        zeros[factor] = np.mean((got == 0) & (wanted != 0))
    assert errors[2.0**-12] > 0.1
    assert zeros[2.0**-12] > 0.1
    for factor in (2.0**10, Dynamic.START):
        assert 0 < errors[factor] < 0.003  # a few roundings of 2^-11
        assert zeros[factor] < 0.001


def test_metrics_do_not_know_the_factor() -> None:
    """Loss, norm and the noise estimates are those of the loss itself."""
    run = config({"dp": 2}, dtype="float16")
    found = [host(trainer(run).step(scaled(run, factor), put(run, batch(run)))[1]) for factor in (2.0**8, 2.0**14)]
    plain = config({"dp": 2})
    found.append(host(trainer(plain).step(start(plain), put(plain, batch(plain)))[1]))
    for name in ("loss", "grad_norm", "gradient_signal", "gradient_noise"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3)
        assert found[0][name] == pytest.approx(found[2][name], rel=1e-2)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> tuple[Run, Trainer, TokenFile, Path]:
    """A float16 run of 12 steps, the first of which overflow, and its folder."""
    folder = tmp_path_factory.mktemp("overflowing")
    file = fitting.token_file(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dynamic, "START", NEAR)
        config = fitting.config(dtype="float16", layers=1, steps=12, checkpoint_every=3)
        run, built, _ = fitting.train(config, file, folder / "run")
    # not while the factor is patched: other tests may come before this one's end
    return run, built, file, folder / "run"


def test_the_loop_goes_on(overflowing) -> None:
    """Skipped steps are in the log; after them the run trains, its learning rate as late as its updates."""
    run, built, _, _ = overflowing
    skipped = [record["skipped"] for record in run.records]
    assert set(skipped) == {0.0, 1.0}
    assert skipped[0] == 1.0
    before = [int(sum(skipped[:i])) for i in range(13)]
    assert [record["loss_scale"] for record in run.records] == [NEAR / 2**n for n in before[:12]]
    assert int(run.state.loss_scale["skipped"]) == before[12]
    assert {int(x) for x in jax.tree.leaves(run.state.opt_state) if x.dtype == jnp.int32} == {12 - before[12]}
    rate = learning_rate(built.config.train)  # tested in test_optimizer
    wanted = [float(rate(i - n)) for i, n in enumerate(before[:12])]
    assert [record["learning_rate"] for record in run.records] == pytest.approx(wanted)
    assert [record["grad_norm"] is None for record in run.records] == [bool(x) for x in skipped]


def test_resume_is_bitwise(overflowing, tmp_path) -> None:
    """The factor, its patience and the skipped steps are in the checkpoint: the rest of the run is the same."""
    whole, built, file, folder = overflowing
    again, _, _ = fitting.train(built.config, file, fitting.killed_after(folder, 3, tmp_path / "run"), built)
    chex.assert_trees_all_equal(host(again.state), host(whole.state))
    names = ("loss", "loss_scale", "skipped", "learning_rate", "grad_norm")
    assert [[r[n] for n in names] for r in again.records] == [[r[n] for n in names] for r in whole.records]
    assert int(whole.state.loss_scale["skipped"]) > 0


def test_an_exhausted_factor_ends_the_run(monkeypatch, tmp_path) -> None:
    """Weights that no factor can help: the run ends with the mend, after halving to below 1."""
    monkeypatch.setattr(Dynamic, "START", 2.0)
    run = fitting.config(dtype="float16", layers=1, optimizer="sgd", learning_rate=1e18, warmup=0, clip=0, steps=12)
    with pytest.raises(FloatingPointError, match=r"overflow at step \d+ even at loss scale 0\.5; .*--model\.dtype bf"):
        fitting.train(run, fitting.token_file(tmp_path), tmp_path / "run")
