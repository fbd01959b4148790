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
from jax5d.costs.memory import memory, state_bytes
from jax5d.costs.parameters import Leaf, count
from jax5d.costs.textbook import layer_bytes, state_bytes_per_parameter, zero_bytes_per_parameter, zero_traffic
from jax5d.measure.memory import buckets
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
        params = made.zero.opened(diverge(params, made.model.summed))
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
    {"moe": True, "zero_axes": ("ep",)},
    {"offload": "optimizer", "dtype": "bfloat16", "param_dtype": "bfloat16"},
]


@pytest.mark.parametrize("options", STATES, ids=str)
def test_state_is_that_of_the_trainer(options):
    """Shapes, dtypes and shards of everything that a trainer keeps: weights, moments, counters, loss scale, copies."""
    for mesh in ({"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "ep": 2, "cp": 2}):
        for zero in range(4):
            run = tiny.config(mesh, **{"optimizer": "adamw", "zero": zero, **options})
            made = trainer(run)
            leaves = zip(jax.tree.leaves(made.shapes), jax.tree.leaves(made.shardings), strict=True)
            held = {"device": 0, "pinned_host": 0}
            for x, sharding in leaves:
                held[sharding.memory_kind] += math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
            assert state_bytes(run) == held["device"]
            if not run.model.experts:
                assert (memory(run).state, memory(run).host) == (held["device"], held["pinned_host"])


@pytest.mark.parametrize(("policy", "architecture"), [("none", "gpt2"), ("full", "llama")])
def test_what_zero_keeps_of_gathered_layers(policy, architecture):
    """Nothing where layers are gathered again; otherwise the whole stage in the computation's dtype."""
    for regather in (True, False):
        options = {"zero": 3, "regather": regather, "dtype": "bfloat16", "microbatches": 2, **POLICIES[policy]}
        run = tiny.config({"pp": 2, "dp": 2, "tp": 2}, architecture=architecture, d_ff=96, **options)
        kept = Activations(run)
        assert ring_bytes(run) == kept.layers * kept.layer + kept.parameters
        assert (kept.parameters > 0) is not regather


BUCKETS = {
    "one tick": ({"dp": 8}, {}),
    "microbatches": ({"dp": 4}, {"microbatches": 2, "dtype": "bfloat16", "param_dtype": "bfloat16"}),
    "pipeline": ({"pp": 2, "dp": 2, "tp": 2}, {"layers": 2, "dtype": "float16", "vocab": 97, "accumulate": "bfloat16"}),
    "experts": ({"dp": 2, "ep": 2, "cp": 2}, {"moe": True, "zero_axes": ("dp", "ep")}),
    "offloaded": ({"dp": 2, "tp": 2}, {"offload": "optimizer"}),
    "zeros behind": ({"dp": 4}, {"d_model": 30, "heads": 2, "vocab": 97, "optimizer": "sgd"}),
}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("mesh", "options"), BUCKETS.values(), ids=BUCKETS)
def test_buckets_of_arrays(mesh, options, zero):
    """What the first device holds of a new state, by bucket, is what the formulas say."""
    run = tiny.config(mesh, **{"layers": 1, "optimizer": "adamw", "zero": zero, **options})
    made = trainer(run)
    found = buckets(made, made.init())
    assert found.parameters + found.optimizer == state_bytes(run)
    if not run.model.experts:
        theory = memory(run)
        wanted = theory.parameters, theory.gradients, theory.optimizer
        assert (found.parameters, found.gradients, found.optimizer) == wanted


def test_buckets_after_a_step():
    """A step changes none of them."""
    run = tiny.config({"dp": 2}, layers=1, optimizer="adamw", zero=2)
    made = trainer(run)
    state = made.init()
    before = buckets(made, state)
    state, _ = made.step(state, jax.device_put(tiny.batch(run), made.batch_sharding))
    assert buckets(made, state) == before


def test_stages_of_zero():
    """Over 4, mixed precision. ZeRO's figure 1 in bytes a parameter, 2 + 2 + 12 / n and so on.

    Ours in its order, with two microbatches: what is computed with, gradients in float32, and for the optimizer moments
    of 8 and, beside a 16-bit copy, the float32 parameters.
    """
    model = replace(PRESETS["gpt2"], dtype="bfloat16")
    train, parallel = TrainConfig(global_batch=4, seq_len=128), ParallelConfig(microbatches=2)
    run = RunConfig(MeshConfig(dp=2, cp=2), model, parallel, train)
    n, rest = count(model), 12
    stages = [memory(replace(run, parallel=replace(parallel, zero=zero))) for zero in range(4)]
    found = [[m.parameters, m.gradients, m.optimizer - rest] for m in stages]
    wanted = [[4, 4, 8], [2, 4, 12 / 4], [2, 4 / 4, 12 / 4], [4 / 4, 4 / 4, 8 / 4]]
    assert found == [[x * n for x in row] for row in wanted]
    assert [zero_bytes_per_parameter(zero, 4) for zero in range(4)] == [16, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]


def test_pieces_of_a_leaf():
    """By hand, over dp 4: along the dim that needs fewest zeros, of equals the first; never along layers."""
    mesh = MeshConfig(pp=2, dp=4, tp=2)

    def piece(shape, *split, axes=("dp", "cp"), name="leaf"):
        return Leaf(name, shape, split).piece(mesh, axes)

    assert piece((8, 6), (), ()) == (("dp", "cp"), 2 * 6, ("dp", "cp"))
    assert piece((6, 8), (), ()) == (("dp", "cp"), 6 * 2, ("dp", "cp"))
    assert piece((5, 6), (), ()).size == min(2 * 6, 5 * 2)
    assert piece((97, 30), (), ()).size == 25 * 30  # 3 of 100 rows are zeros; 2 of 32 columns would be more
    assert piece((8, 6), ("pp", "tp"), ()) == (("dp", "cp"), 2 * 2, ("pp", "tp", "dp", "cp"))  # 2 rows: 6 to 8 columns
    assert piece((8, 8), ("tp",), ("dp",)) == (("cp",), 4 * 2, ("tp", "cp", "dp"))
    assert piece((8, 6), ("pp",), (), name="blocks.leaf").size == 4 * 2
    assert piece((6,), ("tp",)) == ((), 3, ("tp",))  # zeros would move the split: whole
    assert piece((8, 6), (), (), axes=()) == ((), 48, ())


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
    assert [zero_traffic(stage) for stage in range(4)] == [2, 2, 2, 3]


def test_experts_are_refused():
    with pytest.raises(ConfigError, match=r"model.experts=4.*--model.experts 0"):
        memory(tiny.config(moe=True))
