"""Moments in the host's memory: the same training, and the device's memory falls by what lies there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from plugin import needs_plugin
from test_checkpoint import RECORD, restored, saved
from tiny import batch, config, host

from jax5d import mesh as meshes
from jax5d.config import ConfigError, ModelConfig, RunConfig, check
from jax5d.costs.memory import memory
from jax5d.costs.parameters import leaves
from jax5d.measure.aot import Memory, compile_step
from jax5d.mesh import make_mesh
from jax5d.train.checkpoint import Checkpoints
from jax5d.train.step import Trainer, TrainState

Tree = Any
HUGE = 2.0**40
"""A loss scale under which every gradient overflows."""

EIGHT = {"dp": 4, "tp": 2}
PIPELINE = {"pp": 2, "dp": 2, "tp": 2}
CASES: dict[str, dict[str, Any]] = {
    "dp4tp2": {"mesh": EIGHT},
    "pp2dp2tp2 zero2": {"mesh": PIPELINE, "zero": 2, "microbatches": 2},
    "pp2dp2tp2 zero3": {"mesh": PIPELINE, "zero": 3, "microbatches": 2, "accumulate": "bfloat16"},
    "moe dp2ep2 zero1": {"mesh": {"dp": 2, "ep": 2}, "moe": True, "zero": 1, "clip": 0.1},
}


def trainer(run: RunConfig, optimizer: optax.GradientTransformation | None = None) -> Trainer:
    """On the first devices."""
    return Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[: run.mesh.size]), optimizer=optimizer)


def pair(**options: Any) -> tuple[Trainer, Trainer]:
    """AdamW with its moments on the device and in the host's memory."""
    run = config(**{"optimizer": "adamw", "learning_rate": 1e-2, "layers": 2} | options)
    away = replace(run, parallel=replace(run.parallel, offload="optimizer"))
    check(away)
    return trainer(run), trainer(away)


def trained(made: Trainer, steps: int = 3, state: TrainState | None = None) -> tuple[TrainState, dict[str, jax.Array]]:
    """A few steps on one batch."""
    state, metrics = made.init() if state is None else state, {}
    data = jax.device_put(batch(made.config), made.batch_sharding)
    for _ in range(steps):
        state, metrics = made.step(state, data)
    return state, metrics


def assert_away(state: TrainState) -> None:
    """The moments are in the host's memory and nothing else is."""
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        moment = ".mu." in name or ".nu." in name
        assert leaf.sharding.memory_kind == ("pinned_host" if moment else "device"), name


def without_keys_biases(state: Any) -> Any:
    """Zeros in their place: the softmax does not see them, and Adam makes steps of the rounding of a zero gradient."""

    def one(path: tuple, leaf: np.ndarray) -> np.ndarray:
        keys = jax.tree_util.keystr(path, simple=True, separator=".").endswith("b_kv")
        return np.stack([np.zeros_like(leaf[:, 0]), leaf[:, 1]]) if keys else leaf

    return jax.tree.map_with_path(one, state)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_same_training(options: dict[str, Any]) -> None:
    """Three steps of AdamW give the same parameters, moments, counters and metrics.

    One compilation, every array donated, and each stays in its memory.
    """
    near, away = pair(**options)
    want, theirs = trained(near)
    before = away.init()
    assert_away(before)
    got, ours = trained(away, state=before)
    assert_away(got)
    found, wanted = (without_keys_biases(host(state)) for state in (got, want))
    chex.assert_trees_all_close((found, host(ours)), (wanted, host(theirs)), rtol=0, atol=1e-6)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert away.step._cache_size() == 1
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), host(got.params), host(near.init().params))
    assert min(jax.tree.leaves(moved)) > 1e-3  # every leaf, as three updates of about 1e-2 each move it


def test_a_skipped_step() -> None:
    """float16: an overflow leaves parameters, moments and counters bitwise as they were, also in the host's memory."""
    _, away = pair(mesh=PIPELINE, dtype="float16", zero=3, microbatches=2)
    state, _ = trained(away, 1)
    before = host((state.params, state.opt_state))
    factor = jax.device_put(np.float32(HUGE), away.shardings.loss_scale["factor"])
    state, metrics = trained(away, 1, replace(state, loss_scale=state.loss_scale | {"factor": factor}))
    assert float(metrics["skipped"]) == 1
    chex.assert_trees_all_equal(host((state.params, state.opt_state)), before)
    assert_away(state)
    state, metrics = trained(away, 20, state)
    assert float(metrics["skipped"]) == 0
    assert np.any(host(state.params["outer"]["wpe"]) != before[0]["outer"]["wpe"])


def test_any_elementwise_optimizer() -> None:
    """One whose state differs from leaf to leaf, and that counts its own steps."""
    run = config(layers=2)
    labels = lambda params: jax.tree.map(lambda x: "average" if x.ndim > 2 else "momentum", params)  # noqa: E731
    average = optax.chain(optax.ema(0.9), optax.scale(-1e-2))  # no sign or quotient, which rounding of a 0 would flip
    optimizer = optax.partition({"average": average, "momentum": optax.sgd(1e-2, 0.9)}, labels)
    away = replace(run, parallel=replace(run.parallel, offload="optimizer"))
    want, got = (trained(trainer(each, optimizer))[0] for each in (run, away))
    chex.assert_trees_all_close(host(got), host(want), rtol=0, atol=1e-6)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(got.opt_state) if leaf.size > 1}
    assert kinds == {"pinned_host"}


def test_checkpoints_move_between_memories(tmp_path: Any) -> None:
    """Saved from the host's memory, a state is restored there, or to the device by a run without; both go on alike.

    The steps that follow a save at once, and take its buffers over, do not reach into it.
    """
    near, away = pair(mesh={"dp": 2}, zero=1)
    state, _ = trained(away, 1)
    kept, folder = host(state), tmp_path / "c"
    with Checkpoints(folder, away, RECORD) as checkpoints:
        checkpoints.save(3, state)
        trained(away, 2, state)
        checkpoints.finish()
    again, elsewhere = restored(folder, away), restored(folder, near)
    assert_away(again)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(elsewhere)} == {"device"}
    for each in (again, elsewhere):
        chex.assert_trees_all_equal(host(each), kept)
    chex.assert_trees_all_close(  # AdamW makes more of the rounding of gradients that are 0, those of keys' biases
        host(trained(away, 2, again)[0]), host(trained(near, 2, elsewhere)[0]), rtol=0, atol=1e-5
    )
    back = restored(saved(tmp_path / "d", near, restored(folder, near)), away)
    assert_away(back)
    chex.assert_trees_all_equal(host(back), kept)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that needs whole parameters, on one device too; a platform without such memory; another word."""
    run = config(offload="optimizer")
    with pytest.raises(ConfigError, match=r"not elementwise.*parallel\.offload"):
        trainer(run, optax.lamb(1e-3))
    trainer(config(), optax.lamb(1e-3))
    with pytest.raises(ConfigError, match=r"parallel\.offload='params'.*none, optimizer"):
        config(offload="params")
    monkeypatch.setattr(meshes, "memories", lambda _: {"device", "unpinned_host"})
    with pytest.raises(ConfigError, match=r"^parallel\.offload=optimizer needs .* pinned_host, but cpu has device, un"):
        trainer(run)
    trainer(config())


WIDE = {"d_model": 256, "d_ff": 1024, "layers": 8, "vocab": 512, "context": 64, "seq_len": 64, "dtype": "bfloat16"}


def bytes_of(model: ModelConfig, run: RunConfig, *, only: str = "") -> int:
    """float32 bytes on a device of one array in the shape of the parameters whose names begin with `only`."""
    return 4 * sum(leaf.local_size(run.mesh) for leaf in leaves(model, run.mesh) if leaf.name.startswith(only))


@needs_plugin
@pytest.mark.parametrize("zero", [0, 3])
def test_memory_of_a_gpu(zero: int) -> None:
    """By the compiler: of 8 bytes a parameter, cut by ZeRO over 4 replicas, none are left in a device's arguments.

    Its peak falls as much, but for one layer's moments and what is outside the layers. All is in the host's memory,
    once: donated.
    """
    found: dict[str, Memory] = {}
    for offload in ("none", "optimizer"):
        run = config({"dp": 4, "tp": 2}, optimizer="adamw", remat="full", zero=zero, offload=offload, **WIDE)
        found[offload] = compile_step(run, "h100").memory
    near, away, shares = found["none"], found["optimizer"], 4 if zero else 1
    moments = 2 * bytes_of(run.model, run) // shares
    assert near.host == 0
    assert away.host == memory(run).host == moments
    assert near.arguments - away.arguments == near.aliased - away.aliased == moments
    working = 2 * bytes_of(run.model, run, only="blocks") // run.model.layers // shares
    assert near.compiler_peak is not None
    assert away.compiler_peak is not None
    for before, after in ((near.peak, away.peak), (near.compiler_peak, away.compiler_peak)):
        assert abs(before - after - moments) <= working
