"""Inference by theory against programs: collectives, FLOPs and bytes of prefill and decode; and numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import config, name, start, trainer

from jax5d.config import PRESETS, ConfigError, MeshConfig, ParallelConfig, RunConfig
from jax5d.costs.collectives import Collective
from jax5d.costs.gpus import gpu
from jax5d.costs.inference import Held, Pass, cache_bytes, held
from jax5d.inference.decoder import Decoder
from jax5d.inference.sample import Sampling
from jax5d.measure.ledger import ledger
from jax5d.measure.memory import bytes_on_device
from jax5d.measure.operations import operations

ROWS, PROMPT, CAPACITY = 8, 12, 24
GREEDY = Sampling(temperature=0)
SAMPLINGS = [
    (GREEDY, {}),
    (Sampling(top_k=5), {"top_k": True}),
    (Sampling(top_p=0.9), {"top_p": True}),
    (Sampling(top_k=5, top_p=0.9), {"top_k": True, "top_p": True}),
]
LLAMA = {"architecture": "llama", "tied": False}
CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {}),
    ({"tp": 2}, {}),
    ({"tp": 4}, {"dtype": "bfloat16", "vocab": 97}),
    ({"dp": 2, "tp": 2}, {"kv_heads": 2}),
    ({"tp": 2}, {**LLAMA, "kv_heads": 2}),
    ({"tp": 4}, {**LLAMA, "kv_heads": 2, "sequence": True, "overlap": True}),
    ({"dp": 2, "tp": 4}, {**LLAMA, "kv_heads": 1, "dtype": "bfloat16"}),
    ({"dp": 4}, {"zero": 3, "vocab": 97}),
    ({"dp": 4}, {**LLAMA, "zero": 3, "dtype": "bfloat16", "vocab": 99, "d_model": 30, "heads": 3, "d_ff": 90}),
    ({"dp": 2, "ep": 2}, {"zero": 3}),
    ({"dp": 2, "tp": 2}, {**LLAMA, "kv_heads": 2, "zero": 3}),
    ({"dp": 2, "tp": 4}, {**LLAMA, "kv_heads": 2, "zero": 3}),
    ({"dp": 2, "tp": 2}, {"zero": 1}),
    ({"dp": 2}, {"zero": 3, "layers": 1}),
]
IDS = [f"{name(mesh)}-{'-'.join(map(str, options.values()))}" for mesh, options in CASES]
cases = pytest.mark.parametrize(("mesh", "options"), CASES, ids=IDS)


def prefill_arguments(decoder: Decoder, sampling: Sampling) -> tuple[Any, ...]:
    weights, _, row, _, numbers = decoder.arguments(ROWS, sampling)
    return weights, jax.ShapeDtypeStruct((ROWS, PROMPT), jnp.int32, sharding=row.sharding), row, numbers


@cases
def test_collectives_are_the_ledgers(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Op by op, count by count, byte by byte."""
    run = config(mesh, **options)
    decoder = Decoder.create(trainer(run), CAPACITY)
    for sampling, cuts in SAMPLINGS:
        step = ledger(decoder.step, *decoder.arguments(ROWS, sampling))
        assert step == Pass(run, ROWS, 1, CAPACITY, **cuts).table()
    filled = ledger(decoder.prefill, *prefill_arguments(decoder, GREEDY))
    assert filled == Pass(run, ROWS, PROMPT, PROMPT).table()


def product_flops(function: Any, arguments: tuple[Any, ...]) -> int:
    return sum(op.flops * op.count for op in operations(function, *arguments) if op.name == "dot_general")


@cases
def test_flops_are_the_programs_products(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """On one device; plain attention, as fused attention's blocks need not be a prompt's full square."""
    run = config(mesh, attention="plain", **options)
    decoder = Decoder.create(trainer(run), CAPACITY)
    assert product_flops(decoder.step, decoder.arguments(ROWS, GREEDY)) == Pass(run, ROWS, 1, CAPACITY).flops
    filled = product_flops(decoder.prefill, prefill_arguments(decoder, GREEDY))
    assert filled == Pass(run, ROWS, PROMPT, PROMPT).flops


@cases
def test_bytes_are_the_arrays(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Weights and cache, on every device."""
    run = config(mesh, **options)
    decoder = Decoder.create(trainer(run), CAPACITY)
    weights = decoder.weights(start(run).params)
    _, cache = decoder.prefill(weights, np.ones((ROWS, PROMPT), np.int32), np.full(ROWS, PROMPT, np.int32), {})
    found = held(run, ROWS, CAPACITY)
    for device in decoder.trainer.mesh.devices.flat:
        assert bytes_on_device(weights, device) == found.weights
        assert bytes_on_device(cache, device) == found.cache


def llama(mesh: MeshConfig, zero: Any = 0) -> RunConfig:
    return RunConfig(mesh, replace(PRESETS["llama-9b"], dtype="bfloat16"), ParallelConfig(zero=zero))


L, D, F, V = 32, 4096, 14336, 131072
LAYER = 4 * D * D + 3 * D * F + 2 * D
ALL = L * LAYER + 2 * V * D + D
TP, ZERO = llama(MeshConfig(tp=8)), llama(MeshConfig(dp=8), zero=3)


def test_llama_by_hand_on_tp() -> None:
    """8.86 billion parameters on 8 GPUs; norms are whole on each. 256 sequences of 4096 tokens, 32 heads of 128."""
    norms = (2 * L + 1) * D
    cache = 2 * L * 256 * 4096 * D // 8 * 2
    assert held(TP, 256, 4096) == Held(2 * ((ALL - norms) // 8 + norms), 0, cache)
    step = Pass(TP, 256, 1, 4096)
    stream, row = 256 * D * 2, 256 * 4
    psum, pmax = (65, 65 * stream), (2, 2 * row)
    assert step.table() == [
        Collective(op, ("tp",), count, size, size * Fraction(7, 4))
        for op, (count, size) in (("pmax", pmax), ("psum", psum))
    ]
    per_token = (L * (4 * D * D + 3 * D * F) + V * D + L * 2 * 4096 * D) // 8
    assert step.flops == 2 * 256 * per_token
    read = held(TP, 256, 4096).total - 2 * V * D // 8
    assert step.read_bytes == read
    times = step.seconds(gpu("h100"))
    assert times[:3] == pytest.approx(
        (step.flops / 989e12, read / 3350e9, 1.75 * (65 * stream + 2 * row) / 450e9), rel=1e-12
    )
    assert times.latency == pytest.approx(67 * 14 * 3.4e-6, rel=1e-9)
    assert times.bound == times.memory
    assert times.in_turn == pytest.approx(times.memory + times.wire + times.latency)


def test_llama_by_hand_on_zero() -> None:
    """6 matrices a layer and its norms, and 3 others; of whole weights most are the head, its norm and a layer."""
    found = held(ZERO, 256, 4096)
    assert found == Held(2 * ALL // 8, 2 * (V * D + D + LAYER), cache_bytes(TP, 256, 4096))
    step = Pass(ZERO, 256, 1, 4096)
    assert step.table() == [Collective("all_gather", ("dp",), 7 * L + 3, 2 * ALL // 8, Fraction(7 * 2 * ALL, 8))]
    assert step.flops == Pass(TP, 256, 1, 4096).flops
    assert step.read_bytes == 2 * (ALL - V * D) + found.cache
    assert step.seconds(gpu("h100")).bound == pytest.approx(7 / 8 * 2 * ALL / 450e9)


def test_groups_across_hosts_wait_for_the_network() -> None:
    """dp 2 x tp 8: the gathers go from host to host, the sums stay inside one."""
    run = llama(MeshConfig(dp=2, tp=8), zero=3)
    step = Pass(run, 2, 1, 4096)
    gathered, sums, choice = (next(e for e in step.table() if e.op == op) for op in ("all_gather", "psum", "pmax"))
    times = step.seconds(gpu("h100"))
    inside = float(sums.wire_bytes + choice.wire_bytes) / 450e9
    assert times.wire == pytest.approx(float(gathered.wire_bytes) / 50e9 + inside)
    assert times.latency == pytest.approx(gathered.count * 14e-6 + (sums.count + choice.count) * 14 * 3.4e-6)


@pytest.mark.parametrize(
    ("run", "rows", "words"),
    [
        (config({"pp": 2}), 8, "mesh.pp=2"),
        (config({"cp": 2}), 8, "mesh.cp=2"),
        (config({}, moe=True), 8, "model.experts=4"),
        (config({"dp": 4}), 6, "rows=6 is no multiple of dp x ep = 4; use 8"),
    ],
)
def test_refusals(run: RunConfig, rows: int, words: str) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match=words) as caught:
        Pass(run, rows, 1, CAPACITY)
    assert "\n" not in str(caught.value)
