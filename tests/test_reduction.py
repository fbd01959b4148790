"""The pieces in which gradients are sent, and the ways to sum them: always the gradients of one device, or refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from tiny import RATE, assert_shards, batch, check_equivalent, config, gradients, name, put, start, trainer, weights
from tiny import reference_gradients as plain

from jax5d.config import ConfigError, MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig, check
from jax5d.costs.parameter_traffic import check_bucket
from jax5d.mesh import make_mesh
from jax5d.train.step import Trainer

REDUCTIONS = ("overlap", "leaf", "bucket", "single")
ALL_REDUCES = ("psum", "ring", "two_way_ring", "two_level")
MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 4}, {}),
    ({"dp": 2, "cp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"sequence": True}),
    ({"pp": 2, "dp": 2}, {"microbatches": 2}),
]


def cases() -> list[Any]:
    """Two diagonals of a square: each reduction and each all-reduce twice, on every mesh and with both models."""
    found = []
    for (r, reduction), (a, all_reduce) in product(enumerate(REDUCTIONS), enumerate(ALL_REDUCES)):
        if (a - r) % len(ALL_REDUCES) > 1:
            continue
        mesh, options = MESHES[(r + a) % len(MESHES)]
        moe = (r // 2 + a) % 2 == 1
        label = "-".join([reduction, all_reduce, name(mesh), "moe" if moe else "gpt2"])
        found.append(pytest.param(mesh, {**options, "reduction": reduction, "all_reduce": all_reduce}, moe, id=label))
    return found


@pytest.mark.parametrize(("mesh", "options", "moe"), cases())
def test_reduced_gradients_are_those_of_one_device(mesh: dict[str, int], options: dict[str, Any], moe: bool) -> None:
    """Loss, every gradient leaf, parameters after two steps, every shard; buckets of 50 kB cut leaves in the middle."""
    check_equivalent(config(mesh, moe=moe, bucket_mb=0.05, inner=2, **options), steps=2)


@pytest.mark.parametrize(("reduction", "all_reduce"), [("overlap", "psum"), ("bucket", "ring")])
def test_sums_in_bfloat16(reduction: str, all_reduce: str) -> None:
    """dp 4, 2 microbatches: each element within the rounding of a sum of 8 terms, and beyond that of float32.

    A term is the plain gradient of a replica's rows in a microbatch, over 8. Each is rounded once and then takes part
    in at most 7 additions; each of these eight rounds by at most u = 2^-8 of the sum of magnitudes. The factor 1.1 is
    for the powers of 1 + u that this leaves out: (1 + u)^8 - 1 < 1.1 x 8 u.
    """
    run = config({"dp": 4}, microbatches=2, tied=False, accumulate="bfloat16", reduction=reduction, inner=2)
    run = replace(run, parallel=replace(run.parallel, all_reduce=all_reduce, bucket_mb=0.05))
    data, params = batch(run), weights(run.model)
    rows = {key: value.reshape(8, 1, 1, -1) for key, value in data.items()}
    terms = [plain(run, params, {key: value[i] for key, value in rows.items()})[1] for i in range(8)]
    want, magnitude = (
        jax.tree.map(lambda *g, part=part: sum(part(x) for x in g) / 8, *terms) for part in (np.asarray, np.abs)
    )
    state, _ = trainer(run).step(start(run), put(run, data))

    def within(got: jax.Array, want: np.ndarray, magnitude: np.ndarray) -> bool:
        limit = 1.1 * 8 * 2.0**-8 * magnitude + 2e-6 * np.max(np.abs(want))
        return all(
            np.all(np.abs(np.asarray(shard.data) - want[shard.index]) <= limit[shard.index])
            for shard in got.addressable_shards
        )

    got = gradients(state)
    assert all(jax.tree.leaves(jax.tree.map(within, got, want, magnitude)))
    off = jax.tree.map(lambda g, w: np.max(np.abs(np.asarray(g) - w)) / np.max(np.abs(w)), got, want)
    assert min(jax.tree.leaves(off)) > 1e-4
    moved = jax.tree.map(lambda p, g: p - np.float32(RATE) * np.asarray(g), params, got)
    assert_shards(state.params, moved, relative=1e-6)


REFUSED = {
    "no bucket": ({}, {"bucket_mb": 0.0}, r"parallel\.bucket_mb=0\.0 .*such as 25"),
    "negative bucket": ({}, {"bucket_mb": -25.0}, r"parallel\.bucket_mb=-25\.0 "),
    "nan": ({}, {"bucket_mb": float("nan")}, r"parallel\.bucket_mb=nan "),
    "endless": ({}, {"bucket_mb": float("inf")}, r"parallel\.bucket_mb=inf "),
    "no hosts": ({"dp": 4}, {"all_reduce": "two_level", "inner": 0}, r"parallel\.inner=0 is below 1"),
    "hosts": ({"dp": 4}, {"all_reduce": "two_level", "inner": 3}, r"dp x ep x cp=4 .* parallel\.inner=3;"),
    "more than there are": ({"dp": 2}, {"all_reduce": "two_level", "inner": 4}, r"cp=2 .* parallel\.inner=4;"),
    "hosts of experts": (
        {"dp": 2, "ep": 4},
        {"all_reduce": "two_level", "inner": 4, "moe": True},
        r"dp x cp=2 .* parallel\.inner=4;",
    ),
    "reduction": ({}, {"reduction": "sum"}, r"parallel\.reduction='sum' .*overlap, leaf, bucket, single"),
    "all_reduce": ({}, {"all_reduce": "tree"}, r"parallel\.all_reduce='tree' .*psum, ring, two_way_ring, two_level"),
    "accumulate": ({}, {"accumulate": "float16"}, r"parallel\.accumulate='float16' .*float32, bfloat16"),
    "saved": ({}, {"save": ("qkv", "attention")}, r"parallel\.save='attention' .*attention_sum, qkv, mlp_in"),
}


@pytest.mark.parametrize(("mesh", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(mesh: dict[str, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        config(mesh, **options)
    assert "\n" not in str(refusal.value)


TINY = ModelConfig(name="gpt2-tiny", vocab=96, context=32, d_model=32, heads=4, layers=4, d_ff=128)


def bucketed(size: float, mesh: MeshConfig | None = None, accumulate: Any = "float32") -> RunConfig:
    """54976 parameters, of which tp 2 splits 53120 (see `test_ledger`), with buckets of `size` MB."""
    parallel = ParallelConfig(reduction="bucket", bucket_mb=size, accumulate=accumulate)
    run = RunConfig(mesh or MeshConfig(), TINY, parallel, TrainConfig(global_batch=8, seq_len=32))
    check(run)
    return run


@pytest.mark.parametrize(
    ("mesh", "accumulate", "total"),
    [
        (MeshConfig(dp=2), "float32", 54976 * 4),
        (MeshConfig(dp=2), "bfloat16", 54976 * 2),
        (MeshConfig(dp=2, tp=2), "float32", (54976 - 53120 // 2) * 4),
    ],
)
def test_a_bucket_that_gradients_do_not_fill_is_refused(mesh: MeshConfig, accumulate: str, total: int) -> None:
    """One as large as they are is a bucket; a byte more is not. The trainer refuses too. Others have no bucket."""
    check_bucket(bucketed(total / 1e6, mesh, accumulate))
    too_large = bucketed((total + 1) / 1e6, mesh, accumulate)
    message = rf"parallel\.bucket_mb={(total + 1) / 1e6} is larger than .*, {total / 1e6:.3f} MB; .*single"
    with pytest.raises(ConfigError, match=message):
        check_bucket(too_large)
    with pytest.raises(ConfigError, match=message):
        Trainer.create(too_large, mesh=make_mesh(mesh, jax.devices()[: mesh.size]))
    check_bucket(replace(too_large, parallel=replace(too_large.parallel, reduction="single")))
