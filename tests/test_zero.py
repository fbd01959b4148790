"""ZeRO changes what lies where, and nothing else: every stage trains as one device does.

One registry: stages and options vary along it instead of in a full product. It covers

    axes                   dp, ep, cp alone; with tp, pp; pairs; all five, of the dense models and the MoE
    stages                 1, 2, 3 on one axis, on pairs, with pp, with tp, on all five
    hybrid sharding        dp, ep or cp of a pair, at every stage, with experts and without
    pieces with padding    d_model 30, 2 heads, vocabulary 97 over 8, over 4, over 4 beside tp 2, at every stage
    sequence parallelism, afab and 1f1b, microbatches 1, 2 and 4, no, selective and full recomputation, chunks of the
    loss, parameters kept from the forward pass, tied and not, one layer for each stage, one layer alone
"""

from __future__ import annotations

import io
import math
from functools import cache
from pathlib import Path
from typing import Any

import chex
import fitting
import jax
import numpy as np
import pytest
import reference
from programs import carried
from rich.console import Console
from tiny import batch, check_equivalent, check_replica, config, host, ids, masked, name, put, weights
from tiny import trainer as proof

import run_experiment
from jax5d.config import ConfigError
from jax5d.train.loop import fit, open_data
from jax5d.train.step import TrainState

FIVE = {"pp": 2, "dp": 2, "ep": 2, "cp": 2, "tp": 2}
UNEVEN = {"d_model": 30, "heads": 2, "vocab": 97}
MOE, LLAMA = {"moe": True}, {"architecture": "llama", "tied": False}

REGISTRY: list[tuple[dict[str, int], int, dict[str, Any]]] = [
    ({"dp": 8}, 1, {}),
    ({"dp": 4}, 2, {"microbatches": 2, "loss_chunks": 3, **MOE}),
    ({"dp": 4}, 3, {"microbatches": 2, "remat": "selective", **LLAMA}),
    ({"ep": 4}, 1, {"microbatches": 2, **MOE}),
    ({"ep": 4}, 3, {"remat": "full", **MOE}),
    ({"cp": 4}, 2, {"microbatches": 4, "remat": "selective"}),
    ({"cp": 4}, 3, {"remat": "full", "save": ("qkv", "mlp_in"), "tied": False}),
    ({"dp": 2, "tp": 4}, 3, {"sequence": True, "microbatches": 4}),
    ({"ep": 2, "tp": 2}, 1, {"sequence": True, "remat": "full", **MOE}),
    ({"cp": 2, "tp": 2}, 2, {"sequence": True, **LLAMA}),
    ({"pp": 2, "dp": 2}, 1, {"microbatches": 4, "remat": "full", **MOE}),
    ({"pp": 4, "dp": 2}, 2, {"microbatches": 2, "schedule": "afab"}),
    ({"pp": 4, "cp": 2}, 3, {"microbatches": 4}),
    ({"pp": 2, "ep": 2}, 3, {"microbatches": 2, "schedule": "afab", "regather": False, **MOE}),
    ({"dp": 2, "ep": 2}, 2, {"microbatches": 2, **MOE}),
    ({"ep": 2, "cp": 2}, 3, {"microbatches": 4, **MOE}),
    ({"dp": 2, "ep": 2}, 3, {"zero_axes": ("ep",), **MOE}),
    ({"dp": 2, "ep": 2}, 2, {"zero_axes": ("ep",), "microbatches": 2}),
    ({"dp": 2, "cp": 2}, 1, {"zero_axes": ("cp",), "microbatches": 2, "tied": False}),
    ({"dp": 2, "ep": 4}, 3, {"zero_axes": ("dp",), "regather": False, **MOE}),
    ({"dp": 8}, 1, UNEVEN),
    ({"dp": 8}, 3, {"microbatches": 1, "remat": "full", **UNEVEN}),
    ({"dp": 4}, 2, {"microbatches": 2, "tied": False, **UNEVEN}),
    ({"dp": 4, "tp": 2}, 3, {"microbatches": 2, "sequence": True, "regather": False, **UNEVEN}),
    ({"dp": 2}, 3, {"layers": 1, "microbatches": 2}),
    ({"dp": 2}, 3, {"layers": 1, "regather": False}),
    (FIVE, 1, {"microbatches": 2, "schedule": "afab", **MOE}),
    (FIVE, 2, {"microbatches": 2, "sequence": True, "remat": "full"}),
    (FIVE, 3, {"microbatches": 2, "sequence": True, "remat": "full", **MOE}),
    (FIVE, 3, {"microbatches": 2, "schedule": "afab", "regather": False, **LLAMA}),
]


def label(mesh: dict[str, int], stage: int, options: dict[str, Any]) -> str:
    """A case's id."""
    return "-".join([name(mesh), str(stage), *(f"{key}:{value}" for key, value in options.items())])


@pytest.mark.parametrize(("mesh", "stage", "options"), REGISTRY, ids=[label(*case) for case in REGISTRY])
def test_training_equals_one_device(mesh: dict[str, int], stage: int, options: dict[str, Any]) -> None:
    """Loss, gradients, their norm, parameters after 2 steps of SGD, the replica, and every shard of every device."""
    check_equivalent(config(mesh, zero=stage, **options), steps=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_with_unequal_numbers_of_tokens(stage: int) -> None:
    """Rows with 3 to 24 valid labels, over dp 2, cp 2 and 2 microbatches: a mean over tokens; evaluation as well."""
    run, labels = config({"dp": 2, "cp": 2}, zero=stage, microbatches=2), masked(ids()[:, 1:], [*range(3, 27, 3)])
    state, _ = check_equivalent(run, labels=labels, steps=1)
    data = batch(run, labels=labels)
    sums = proof(run).evaluate(state.params, put(run, data))
    loss, _ = reference.objective(host(state.params), data["inputs"], data["labels"], run.model)
    assert int(sums["tokens"]) == sum(range(3, 27, 3))
    assert float(sums["loss_sum"]) / int(sums["tokens"]) == pytest.approx(float(loss), rel=1e-6)


ADAMW: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 8}, {"global_batch": 16}),
    ({"dp": 4, "tp": 2}, {"dropout": 0.1, "remat": "full", **MOE}),
    ({"pp": 2, "dp": 2, "tp": 2}, {"sequence": True}),
    ({"dp": 2, "ep": 2, "cp": 2}, MOE),
]


@cache
def ten_steps(case: int, stage: int) -> tuple[np.ndarray, TrainState]:
    """Ten losses, and the state on the host with whole parameters."""
    mesh, options = ADAMW[case]
    run = config(mesh, zero=stage, microbatches=2, optimizer="adamw", learning_rate=1e-3, warmup=4, clip=0.5, **options)
    trainer = fitting.trainer(run)
    state, data = trainer.init(), jax.device_put(batch(run), trainer.batch_sharding)
    losses = []
    for _ in range(10):
        state, metrics = trainer.step(state, data)
        losses.append(float(metrics["loss"]))
    assert float(metrics["grad_norm"]) > 0.5  # it is clipped to the end
    check_replica(state, run)
    return np.array(losses), host(state)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", range(len(ADAMW)), ids=[name(mesh) for mesh, _ in ADAMW])
def test_stages_agree_under_adamw(case: int, stage: int) -> None:
    """Ten steps, 2 microbatches, clipped: losses within 1e-6, parameters within 1e-5 of stage 0's, moments too."""
    losses, state = ten_steps(case, stage)
    plain, want = ten_steps(case, 0)
    assert plain[-1] < plain[0] - 0.1
    np.testing.assert_allclose(losses, plain, rtol=0, atol=1e-6)
    chex.assert_trees_all_close(state.params, want.params, rtol=0, atol=1e-5)
    chex.assert_trees_all_close(state.opt_state, want.opt_state, rtol=0, atol=1e-5)


def held(tree: Any, device: int = 0) -> int:
    """Bytes of a tree on one device."""
    return sum(x.addressable_shards[device].data.nbytes for x in jax.tree.leaves(tree))


N = 54976
"""Parameters of the tiny GPT-2; 8 divides a dim of each leaf."""
COUNTERS = 2 * 4
"""AdamW's count of steps and the learning rate's."""
SHARES = [(4 * N, 8 * N, 0), (4 * N // 8, 8 * N // 8, 2 * N), (4 * N // 8, 8 * N // 8, 2 * N), (N // 2, N, 0)]
"""Bytes of parameters and moments in float32, and of the bfloat16 replica, on one of 8 devices."""


@pytest.mark.parametrize("stage", range(4))
def test_memory_shrinks(stage: int) -> None:
    """What each of 8 devices really holds, before a step and after, is an eighth of what the stage shares out.

    Sums of gradients: in the step's loops, weights' gradients are carried whole up to stage 1 and in pieces from 2 on.
    """
    run = config({"dp": 8}, zero=stage, optimizer="adamw", dtype="bfloat16", microbatches=2, global_batch=16)
    trainer = fitting.trainer(run)
    state = trainer.init()
    for _ in range(2):
        for device in range(8):
            found = held(state.params, device), held(state.opt_state, device) - COUNTERS, held(state.replica, device)
            assert found == SHARES[stage]
        state, _ = trainer.step(state, jax.device_put(batch(run), trainer.batch_sharding))
    loops = {(x.shape, x.dtype.name) for x in carried(jax.make_jaxpr(trainer.step)(*trainer.arguments).jaxpr)}
    whole = {"w_kv": (4, 2, 32, 4, 8), "w_out": (4, 128, 32)}
    pieces = {"w_kv": (4, 2, 4, 4, 8), "w_out": (4, 16, 32)}
    for weight in whole:
        assert ((whole[weight], "float32") in loops) == (stage < 2)
        assert ((pieces[weight], "float32") in loops) == (stage > 0)


def test_a_group_of_some_axes_shares_among_itself() -> None:
    """dp 2, ep 4, over ep alone: a quarter of what all hold, and nothing of the experts, which ep splits already."""
    run = config({"dp": 2, "ep": 4}, zero=3, zero_axes=("ep",), moe=True)
    shapes, shardings = proof(run).shapes.params, proof(run).shardings.params
    local = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), shapes, shardings)
    total = jax.tree.map(lambda x: x.size, weights(run.model))
    assert local == jax.tree.map(lambda n: n // 4, total)
    experts = proof(run).specs.params["blocks"]["mlp"]
    assert "ep" not in str(proof(run).model.specs["blocks"]["mlp"]["router"])
    assert "dp" not in str((experts["w_in"], experts["w_out"], experts["router"]))


REFUSED = {
    "above": ({"zero": 4}, r"parallel\.zero=4 .*0, 1, 2, 3"),
    "below": ({"zero": -1}, r"parallel\.zero=-1 .*0, 1, 2, 3"),
    "no axis": ({"zero": 1, "zero_axes": ()}, r"parallel\.zero_axes=none .*dp, ep, cp"),
    "twice": ({"zero": 2, "zero_axes": ("dp", "cp", "dp")}, r"parallel\.zero_axes=dp cp dp .*each once"),
    "no data axis": ({"zero": 3, "zero_axes": ("dp", "tp")}, r"parallel\.zero_axes='tp' .*dp, ep, cp"),
    "whole sums": ({"zero": 1, "reduction": "leaf"}, r"reduction=leaf .*parallel\.zero=1 .*reduction overlap"),
    "buckets": ({"zero": 3, "reduction": "bucket"}, r"reduction=bucket .*parallel\.zero=3 .*--parallel\.zero 0"),
    "rings": ({"zero": 2, "all_reduce": "ring"}, r"all_reduce=ring .*parallel\.zero=2 .*all_reduce psum"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        config({"dp": 2}, **options)
    assert "\n" not in str(refusal.value)


COMMANDS = {
    "--parallel.zero 5": ["--parallel.zero", "'5'", "'0', '1', '2', '3'"],
    "--parallel.zero=-1": ["--parallel.zero", "'-1'"],
    "--parallel.zero_axes": ["parallel.zero_axes=none", "dp, ep, cp"],
    "--parallel.zero-axes dp dp": ["parallel.zero_axes=dp dp", "each once"],
    "--parallel.zero_axes tp": ["'tp'", "'dp', 'ep', 'cp'"],
    "--parallel.zero 2 --parallel.reduction leaf": ["parallel.reduction=leaf", "parallel.zero=2"],
    "--parallel.zero 3 --parallel.no-regather --parallel.all_reduce ring": ["parallel.all_reduce=ring", "zero=3"],
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_refused_command(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 2 and one line; no run is begun."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert run_experiment.main(["gpt2", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("run_experiment.py: error: ") and err.count("\n") == 1
    assert all(part in err for part in COMMANDS[words]), err


def test_nothing_to_share_out_is_said_once(tmp_path: Path) -> None:
    """One replica: the run says so in one line, and is to the bit the run without ZeRO; two replicas: not a word."""
    file, losses, said = fitting.token_file(tmp_path), {}, {}
    for stage, mesh in [(0, {"tp": 2}), (3, {"tp": 2}), (3, {"dp": 2})]:
        run = fitting.config(mesh, zero=stage, layers=1, steps=2)
        trainer, out = fitting.trainer(run), io.StringIO()
        assert trainer.zero.stage == (stage if "dp" in mesh else 0)
        result = fit(trainer, open_data(run, file), tmp_path / label(mesh, stage, {}), Console(file=out, width=200))
        losses[stage, *mesh], said[stage, *mesh] = fitting.losses(result), out.getvalue()
    assert losses[3, "tp"] == losses[0, "tp"]
    np.testing.assert_allclose(losses[3, "dp"], losses[0, "tp"], atol=1e-5)
    assert {key: text.count("parallel.zero=3") for key, text in said.items()} == {
        (0, "tp"): 0,
        (3, "tp"): 1,
        (3, "dp"): 0,
    }
    assert "dp = ep = cp = 1" in said[3, "tp"]
