"""Bytes by formula, against the types of what the program keeps, its arrays, its tables, and numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from jax5d.config import PRESETS, ConfigError, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.activations import Activations
from jax5d.costs.memory import Memory, memory, state_bytes
from jax5d.costs.parameters import count
from jax5d.costs.textbook import layer_bytes, state_bytes_per_parameter
from jax5d.mesh import make_mesh
from jax5d.parallel.data import diverge, varying
from jax5d.parallel.schedules import SCHEDULES
from jax5d.parallel.stack import Stack
from jax5d.train.step import Trainer


def trainer(run: RunConfig) -> Trainer:
    return Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[: run.mesh.size]))


def ring_bytes(run: RunConfig) -> int:
    """A slot of the ring that the program keeps its layers' activations in, on one device: from the types; nothing is
    compiled."""
    made, found = trainer(run), []

    def body(params, batch):
        params = diverge(params, made.specs.params, made.model.boundary.axes)
        work = made.model.work(batch, jax.random.key(0), run.train.global_batch)
        stack = Stack(work.layer, params["blocks"], made.model.stream_zeros(batch), varying(jnp.int32(0), ("pp",)))
        found.extend(array.size * array.dtype.itemsize for array in stack.ring(slots=1))
        return jnp.int32(0)

    specs = made.specs.params, made.batch_sharding.spec
    mapped = jax.shard_map(body, mesh=made.mesh, in_specs=specs, out_specs=P())
    state, batch = made.arguments
    jax.eval_shape(mapped, state.params, batch)
    return sum(found)


POLICIES = {
    "none": {},
    "selective": {"remat": "selective"},
    "full": {"remat": "full"},
    "full, nothing": {"remat": "full", "save": ()},
    "full, all": {"remat": "full", "save": ("attention_sum", "qkv", "mlp_in")},
    "full, q k v": {"remat": "full", "save": ("qkv",)},
}

LAYOUTS = [
    ({}, {"attention": "plain", "dtype": "float32"}),
    ({"tp": 2}, {"attention": "plain", "dropout": 0.5}),
    ({"dp": 2, "tp": 4}, {"sequence": True}),
    ({"pp": 2, "cp": 2, "tp": 2}, {"sequence": True, "dtype": "float16"}),
    ({"cp": 4}, {"dtype": "float32", "dropout": 0.5}),
]
"""Each axis, precision, attention, sequence parallelism and dropout at least once."""


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_layer_keeps(policy, architecture):
    """To the byte."""
    for mesh, layout in LAYOUTS:
        options = {"dtype": "bfloat16", "d_ff": 96, "microbatches": 2, **layout, **POLICIES[policy]}
        run = tiny.config(mesh, architecture=architecture, **options)
        kept = Activations(run)
        assert ring_bytes(run) == kept.layers * kept.layer, (mesh, layout)


def test_units_of_a_layer():
    """By hand, at 2 rows of 16 tokens of 32: 12 units of GPT-2 and the softmax's statistics; less by policy."""
    unit = 2 * 16 * 32 * 2
    run = tiny.config(dtype="bfloat16", global_batch=2, seq_len=16)
    kept = lambda **options: Activations(replace(run, parallel=ParallelConfig(**options))).layer  # noqa: E731
    assert kept() == 12 * unit + 2 * 4 * 16 * 4
    assert kept(remat="selective") == 12 * unit
    assert kept(remat="full") == 2 * unit
    assert kept(remat="full", save=("qkv", "mlp_in")) == 8 * unit


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rings_of_the_pipeline(schedule):
    """As many slots as the schedule's table needs, for what layers keep and for outputs that wait for the head."""
    for p, m in [(1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2), (4, 8), (8, 16)]:
        run = tiny.config({"pp": p}, layers=8, microbatches=m, global_batch=16, schedule=schedule)
        table, a = SCHEDULES[schedule](p, m), Activations(run)
        assert (a.slots, a.waiting) == (table.slots(range(p)), table.slots(range(p - 1, p))), (p, m)
        assert a.total == a.slots * 8 // p * a.layer + a.waiting * a.stream


STATES = [
    {"dtype": "float16"},
    {"dtype": "bfloat16", "param_dtype": "bfloat16", "tied": False},
    {"optimizer": "sgd"},
    {"architecture": "llama", "vocab": 97},
]


@pytest.mark.parametrize("options", STATES, ids=str)
def test_state_is_that_of_the_trainer(options):
    """Shapes, dtypes and shards of everything that a trainer keeps: weights, moments, counters, loss scale."""
    run = tiny.config({"pp": 2, "dp": 2, "tp": 2}, **{"optimizer": "adamw", **options})
    made = trainer(run)
    leaves = zip(jax.tree.leaves(made.shapes), jax.tree.leaves(made.shardings), strict=True)
    held = sum(math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in leaves)
    assert memory(run).state == state_bytes(run) == held


def test_stages_of_zero():
    """ZeRO's table 1 for mixed precision is 16 N, 4 N + 12 N / 4, 2 N + 14 N / 4, 16 N / 4 over 4; ours in float32."""
    model = replace(PRESETS["gpt2"], dtype="bfloat16")
    run = RunConfig(MeshConfig(dp=2, cp=2), model, train=TrainConfig(global_batch=4, seq_len=128))
    n, rest = count(model), 12

    def shares(m: Memory) -> list[int]:
        return [m.parameters, m.gradients, m.optimizer - rest]

    wanted = [[4, 4, 8], [4, 4, 2], [4, 1, 2], [1, 1, 2]]
    assert [shares(memory(run, zero)) for zero in range(4)] == [[x * n for x in row] for row in wanted]
    with pytest.raises(ConfigError, match=r"zero=4 .* 0, 1, 2 or 3"):
        memory(run, 4)


def test_textbook():
    """GPT-3 175B of Korthikanti et al.: h 12288, a 96, s 2048, b 1, t 8: 5 a s / h is 80."""
    model = replace(PRESETS["gpt2"], d_model=12288, heads=96, d_ff=4 * 12288, layers=96, context=2048)
    unit = 2048 * 12288

    def layer(**options) -> float:
        run = RunConfig(MeshConfig(tp=8), model, ParallelConfig(**options), TrainConfig(global_batch=1, seq_len=2048))
        return layer_bytes(run) / unit

    assert layer() == 10 + 24 / 8 + 80 / 8
    assert layer(sequence=True) == (34 + 80) / 8
    assert layer(sequence=True, remat="selective") == 34 / 8
    assert layer(remat="full") == 2
    assert [state_bytes_per_parameter(mixed=mixed) for mixed in (False, True)] == [16, 16]
    assert state_bytes_per_parameter(mixed=True, float32_gradients=True) == 20


def test_experts_are_refused():
    with pytest.raises(ConfigError, match=r"model.experts=4.*--model.experts 0"):
        memory(tiny.config(moe=True))
