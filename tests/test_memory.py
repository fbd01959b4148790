"""Bytes by formula, against the types of what the program keeps, the tables of its pipeline and numbers by hand."""

from __future__ import annotations

import math
from itertools import product

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from jax5d.config import RunConfig
from jax5d.costs.activations import Activations
from jax5d.mesh import make_mesh
from jax5d.parallel.data import diverge, varying
from jax5d.parallel.stack import Stack
from jax5d.train.step import Trainer


def saved_bytes(run: RunConfig) -> int:
    """Bytes of what the program keeps of a layer between its halves, on one device: read from the types, not compiled."""
    trainer = Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[: run.mesh.size]))
    found = []

    def body(params, batch):
        model = trainer.model
        params = diverge(params, trainer.specs.params, model.boundary.axes)
        work = model.work(batch, jax.random.key(0), run.train.global_batch)
        stack = Stack(work.layer, params["blocks"], model.stream_zeros(batch), varying(jnp.int32(0), ("pp",)))
        found.append(sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in stack.halves.saved))
        return jnp.int32(0)

    train, count = run.train, run.parallel.microbatches
    ids = jax.ShapeDtypeStruct((count, train.global_batch // count, train.seq_len), jnp.int32)
    specs = trainer.specs.params, trainer.batch_sharding.spec
    jax.eval_shape(
        jax.shard_map(body, mesh=trainer.mesh, in_specs=specs, out_specs=P()),
        trainer.model.shapes,
        {"inputs": ids, "labels": ids},
    )
    return found[0]


POLICIES = {
    "none": {},
    "selective": {"remat": "selective"},
    "full": {"remat": "full"},
    "full, nothing": {"remat": "full", "save": ()},
    "full, all": {"remat": "full", "save": ("attention_sum", "qkv", "mlp_in")},
    "full, q k v": {"remat": "full", "save": ("qkv",)},
}
MESHES = [
    ({}, False),
    ({"tp": 2}, False),
    ({"dp": 2, "tp": 4}, True),
    ({"cp": 2, "tp": 2}, True),
    ({"pp": 2, "cp": 4}, False),
]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_layer_keeps(policy, architecture):
    """To the byte, over dtypes, meshes with and without sequence parallelism, and both attentions."""
    for (mesh, sequence), dtype, attention in product(MESHES, ("float32", "bfloat16"), ("flash", "plain")):
        if attention == "plain" and mesh.get("cp", 1) > 1:
            continue
        options = {"dtype": dtype, "attention": attention, "sequence": sequence, "d_ff": 96, "microbatches": 2}
        run = tiny.config(mesh, architecture=architecture, **options, **POLICIES[policy])
        assert saved_bytes(run) == Activations(run).layer, (mesh, sequence, dtype, attention)
