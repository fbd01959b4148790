"""A tiny model under the policies of `recompute`: the same gradients, and what is sent again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from experiments.ch01_data_parallelism._recompute_policies import Policy, under
from experiments.harness import Check
from experiments.training import Traffic, on_first_devices
from jax5d.config import MeshConfig, ModelConfig, RunConfig, TrainConfig


def _tiny(name: Policy) -> RunConfig:
    """Two layers with dropout on tp 2."""
    model = replace(ModelConfig(), layers=2, d_model=32, heads=4, d_ff=128, vocab=96, context=32, dropout=0.1)
    return under(name, RunConfig(mesh=MeshConfig(tp=2), model=model, train=TrainConfig(global_batch=8, seq_len=32)))


def gradients(policies: tuple[Policy, ...], seed: int) -> list[Check]:
    """Gradients of the tiny model in float32, against those of the first policy; dropout's masks are drawn again."""
    first, *others = policies
    state = on_first_devices(_tiny(first)).init()
    ids = np.random.default_rng(seed).integers(0, 96, (1, 8, 33), dtype=np.int32)

    def of(name: Policy) -> Any:
        trainer = on_first_devices(_tiny(name))
        batch = jax.device_put({"inputs": ids[..., :-1], "labels": ids[..., 1:]}, trainer.batch_sharding)
        return jax.tree.map(np.asarray, trainer.gradients(state, batch)[0])

    def apart(got: np.ndarray, want: np.ndarray) -> float:
        return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))

    want = of(first)
    largest = {name: max(jax.tree.leaves(jax.tree.map(apart, of(name), want))) for name in others}
    what = f"largest difference of a gradient from {first}'s, over the leaf's largest"
    return [Check.equal(f"{what}, {name}", difference, 0, 1e-6) for name, difference in largest.items()]


def sums_over_tp() -> list[Check]:
    """Sums over tp that full recomputation repeats: attention's of each layer, unless it was kept."""
    names: tuple[Policy, ...] = ("flash", "flash-full", "flash-bare")
    traffic = {name: Traffic.of(on_first_devices(_tiny(name))) for name in names}
    sums = {name: sum(e.count for e in found.measured if e.op == "psum") for name, found in traffic.items()}
    expected = {"flash-full": 0, "flash-bare": _tiny("flash").model.layers}
    repeated = [Check.equal(f"sums over tp repeated, {n}", sums[n] - sums["flash"], expected[n]) for n in expected]
    return [*repeated, *(c for name in names for c in traffic[name].checks(f"a step on tp 2, {name}"))]
