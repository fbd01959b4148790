"""The property that everything rests on: on any mesh, with any options, training is that of one device.

One registry of meshes; GPT-2 and the MoE run all of it, Llama the same meshes (but tp 4 for some of tp 2), with other
options. Options vary along the registry instead of in a full product,
each with every model on several meshes:

    sequence parallelism   tp2, pp2tp2, dp2tp2, ep2tp2, cp2tp2, all five      without: tp4, pp2cp2tp2, all five
    overlap                pp2tp2, dp2tp2, ep2tp2, all five                   without: tp2, cp2tp2
    afab                   ep2, pp4, pp2ep2, pp2cp2tp2, all five              1f1b: the others
    full recomputation     dp4, cp2, pp2, pp2cp2, dp2cp2, dp2tp2, cp2tp2, all five
    several microbatches   M 2: nine meshes; M 4: five; fewer than stages: pp4; as many or more: the rest
    chunks of the loss     2 and 3 (which do not divide a device's tokens)
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny import check_equivalent, config, name

FIVE = {"pp": 2, "dp": 2, "ep": 2, "cp": 2, "tp": 2}

REGISTRY: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {"microbatches": 4, "loss_chunks": 3}),
    ({"dp": 2}, {"microbatches": 2, "loss_chunks": 3}),
    ({"dp": 4}, {"remat": "full"}),
    ({"ep": 2}, {"microbatches": 4, "schedule": "afab"}),
    ({"ep": 4}, {}),
    ({"cp": 2}, {"microbatches": 2, "remat": "full"}),
    ({"cp": 4}, {"loss_chunks": 2}),
    ({"tp": 2}, {"microbatches": 2, "sequence": True}),
    ({"tp": 4}, {"loss_chunks": 3}),
    ({"pp": 2}, {"microbatches": 4, "remat": "full"}),
    ({"pp": 4}, {"microbatches": 2, "schedule": "afab"}),
    ({"pp": 2, "dp": 2}, {"microbatches": 4, "loss_chunks": 2}),
    ({"pp": 2, "ep": 2}, {"microbatches": 2, "schedule": "afab"}),
    ({"pp": 2, "cp": 2}, {"microbatches": 4, "remat": "full"}),
    ({"pp": 2, "tp": 2}, {"microbatches": 2, "sequence": True, "overlap": True}),
    ({"dp": 2, "ep": 2}, {"microbatches": 2, "loss_chunks": 3}),
    ({"dp": 2, "cp": 2}, {"remat": "full"}),
    ({"dp": 2, "tp": 2}, {"sequence": True, "remat": "full", "overlap": True}),
    ({"ep": 2, "cp": 2}, {"microbatches": 2}),
    ({"ep": 2, "tp": 2}, {"microbatches": 2, "sequence": True, "loss_chunks": 3, "overlap": True}),
    ({"cp": 2, "tp": 2}, {"sequence": True, "remat": "full"}),
    ({"pp": 2, "cp": 2, "tp": 2}, {"microbatches": 4, "schedule": "afab"}),
    (FIVE, {"loss_chunks": 3}),
    (FIVE, {"microbatches": 2, "sequence": True, "remat": "full", "schedule": "afab", "overlap": True}),
]


@pytest.mark.parametrize("moe", [False, True], ids=["gpt2", "moe"])
@pytest.mark.parametrize(
    ("mesh", "options"),
    REGISTRY,
    ids=["-".join([name(mesh), *map(str, options.values())]) for mesh, options in REGISTRY],
)
def test_training_equals_one_device(mesh: dict[str, int], options: dict[str, Any], moe: bool) -> None:
    """Loss, gradients, their norm, parameters after 3 steps of SGD, and every shard of every device."""
    check_equivalent(config(mesh, moe=moe, **options))


LLAMA: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {"microbatches": 2, "loss_chunks": 3, "tied": False, "kv_heads": 1}),
    ({"dp": 2}, {"microbatches": 2, "remat": "full", "kv_heads": 2}),
    ({"ep": 2}, {"tied": False}),
    ({"cp": 4}, {"remat": "full", "tied": False, "kv_heads": 2}),
    ({"tp": 4}, {"vocab": 97}),
    ({"tp": 4}, {"sequence": True, "overlap": True}),
    ({"tp": 4}, {"microbatches": 2, "kv_heads": 2}),
    ({"tp": 2}, {"sequence": True, "microbatches": 2, "vocab": 97, "tied": False, "kv_heads": 2}),
    ({"pp": 4}, {"microbatches": 2, "schedule": "afab", "tied": False, "kv_heads": 1}),
    ({"pp": 2, "tp": 4}, {"microbatches": 2, "sequence": True, "overlap": True, "kv_heads": 1}),
    ({"dp": 2, "tp": 2}, {"sequence": True, "overlap": True, "kv_heads": 2, "remat": "selective"}),
    ({"ep": 2, "tp": 4}, {"remat": "full", "tied": False, "kv_heads": 2}),
    ({"dp": 4}, {"remat": "full", "kv_heads": 1}),
    ({"ep": 4}, {"kv_heads": 2}),
    ({"cp": 2}, {"microbatches": 2, "remat": "full", "kv_heads": 1}),
    ({"pp": 2}, {"microbatches": 4, "remat": "full", "kv_heads": 2}),
    ({"pp": 2, "cp": 2, "tp": 2}, {"microbatches": 4, "schedule": "afab", "kv_heads": 1}),
    ({"pp": 2, "dp": 2}, {"microbatches": 2, "kv_heads": 2}),
    ({"pp": 2, "ep": 2}, {"microbatches": 2, "schedule": "afab", "kv_heads": 1}),
    ({"pp": 2, "cp": 2}, {"microbatches": 2, "remat": "full", "kv_heads": 2}),
    ({"dp": 2, "ep": 2}, {"kv_heads": 1, "loss_chunks": 3}),
    ({"dp": 2, "cp": 2}, {"kv_heads": 2}),
    ({"ep": 2, "cp": 2}, {"kv_heads": 1, "microbatches": 2}),
    ({"cp": 2, "tp": 2}, {"rope_theta": 100.0, "kv_heads": 1}),
    ({"cp": 2, "tp": 4}, {"sequence": True, "remat": "full", "tied": False, "kv_heads": 2}),
    (FIVE, {"loss_chunks": 3, "kv_heads": 1}),
    (FIVE, {"microbatches": 2, "sequence": True, "remat": "full", "schedule": "afab", "tied": False, "kv_heads": 2}),
    (FIVE, {"microbatches": 2, "sequence": True, "overlap": True, "kv_heads": 1}),
]


@pytest.mark.parametrize(
    ("mesh", "options"),
    LLAMA,
    ids=["-".join([name(mesh), *map(str, options.values())]) for mesh, options in LLAMA],
)
def test_llama_equals_one_device(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """The same of Llama, tied and not, with 1, 2 and all heads of keys and values: on single axes, pairs, all five."""
    check_equivalent(config(mesh, architecture="llama", **options))


def test_an_untied_gpt2_equals_one_device() -> None:
    """A second table is not Llama's alone."""
    check_equivalent(config({"pp": 2, "tp": 2}, tied=False, vocab=97), steps=1)


@pytest.mark.parametrize("reduction", ["overlap", "single"])
@pytest.mark.parametrize("zero", [0, 3])
def test_heads_that_devices_share(zero: int, reduction: str) -> None:
    """B09: 2 heads of keys and values on tp 4, with biases: their gradients are parts of a sum over tp, in any form."""
    if zero and reduction == "single":
        pytest.skip("stages of ZeRO overlap")
    mesh = {"dp": 2, "tp": 4}
    check_equivalent(config(mesh, kv_heads=2, zero=zero, reduction=reduction, microbatches=2), steps=2)


def test_heads_that_devices_share_round_a_ring() -> None:
    """B09: 8 heads, 2 of keys and values, on tp 4 and cp 4; and a mixture of experts with one on tp 4."""
    check_equivalent(config({"cp": 4, "tp": 4}, heads=8, kv_heads=2), steps=1)
    check_equivalent(config({"ep": 2, "tp": 4}, moe=True, kv_heads=1, sequence=True, overlap=True), steps=1)


def test_pieces_of_odd_number() -> None:
    """3 devices: one behind and one ahead; and one token on a device."""
    check_equivalent(
        config({"tp": 3}, d_model=48, heads=6, kv_heads=3, d_ff=96, seq_len=12, sequence=True, overlap=True), steps=1
    )
    check_equivalent(config({"tp": 4}, seq_len=4, sequence=True, overlap=True), steps=1)
