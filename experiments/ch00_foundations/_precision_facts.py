"""What 16 bits lose, shown on small sums and on the gradients of one batch."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax5d.config import MeshConfig, RunConfig
from jax5d.costs.formats import FORMATS, Format, round_to
from jax5d.data.batches import device_batch
from jax5d.data.tokens import TokenFile
from jax5d.mesh import make_mesh
from jax5d.parallel.ring import ring_all_reduce
from jax5d.train.loop import Data, open_data
from jax5d.train.step import Trainer, TrainState

MACHINE = [f for f in FORMATS.values() if f.name != "tf32"]
"""The formats that arrays can have; TF32 exists only inside a GPU's products."""

ROWS = 32
"""Sequences of the batch whose gradient is accumulated in pieces."""
SCALES = tuple(2.0**e for e in range(-15, 16, 5))
"""Loss scales at which the gradients that float16 loses are counted."""


def format_errors(format: Format) -> int:
    """Of largest, smallest normal and subnormal number and epsilon: how many differ from JAX's."""
    info = jnp.finfo(format.name)
    theirs = (info.max, info.smallest_normal, info.smallest_subnormal, info.eps)
    ours = (format.largest, format.smallest_normal, format.smallest_subnormal, format.epsilon)
    return sum(float(a) != b for a, b in zip(theirs, ours, strict=True))


def rounding_errors(format: Format, seed: int) -> int:
    """Of 4000 float32 numbers from 2^-30 to 2^20, and those halfway between neighbours: how many the device rounds
    to another number of the format than `round_to` does."""
    draw = np.random.default_rng(seed)
    x = (draw.choice([-1, 1], 4000) * 2.0 ** draw.uniform(-30, 20, 4000)).astype(np.float32)
    halfway = np.array([(1 + (i + 0.5) * format.epsilon) for i in range(min(256, int(1 / format.epsilon)))], np.float32)
    x = np.concatenate([x, halfway, -halfway])
    rounded = np.asarray(jax.jit(lambda x: x.astype(format.name).astype(jnp.float32))(x))
    wanted = np.array([round_to(float(v), format) for v in x], np.float32)
    return int(np.sum(~((rounded == wanted) | (np.isnan(rounded) & np.isnan(wanted)))))


def running_sums(first: float, term: float, count: int, dtype: str) -> np.ndarray:
    """`first` and then `count` times `term`, added one by one on the device in `dtype`: float32 [count + 1]."""

    def add(total: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        total = total + jnp.asarray(term, dtype)
        return total, total

    start = jnp.asarray(first, dtype)
    _, sums = jax.jit(lambda start: lax.scan(add, start, None, length=count))(start)
    return np.concatenate([[first], np.asarray(sums, np.float32)])


def sums_by_rounding(first: float, term: float, count: int, format: Format) -> np.ndarray:
    """The same by `round_to`: float32 [count + 1]."""
    sums = [first]
    for _ in range(count):
        sums.append(round_to(sums[-1] + term, format))
    return np.array(sums, np.float32)


def ring_sums(n: int, dtype: str) -> np.ndarray:
    """256 on device 0 and 1 on each other of n, summed by a ring that adds in `dtype`: float32 [n], by chunk.

    The sum of chunk j begins on device j + 1 and goes round, so that 256 is where the last chunk's begins.
    """

    def body(x: jax.Array) -> jax.Array:
        return ring_all_reduce(jnp.broadcast_to(x, (n,)), ("dp",))

    mesh = make_mesh(MeshConfig(dp=n), jax.devices()[:n])
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P()))
    return np.asarray(mapped(jnp.array([256.0, *[1.0] * (n - 1)], dtype)), np.float32)


def ring_by_rounding(n: int, format: Format) -> np.ndarray:
    """The same by `round_to`."""
    values = [256.0, *[1.0] * (n - 1)]
    sums = []
    for chunk in range(n):
        total = values[(chunk + 1) % n]
        for hop in range(2, n + 1):
            total = round_to(total + values[(chunk + hop) % n], format)
        sums.append(total)
    return np.array(sums, np.float32)


def vector(tree: object) -> np.ndarray:
    """All leaves end to end, float32."""
    return np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(tree)])


def accumulation_error(config: RunConfig, file: TokenFile, microbatches: int) -> float:
    """Distance of bfloat16's gradient sums from float32's, over the latter's norm: bfloat16 compute, one device."""
    grads = []
    for accumulate in ("bfloat16", "float32"):
        layout = replace(config.parallel, microbatches=microbatches, accumulate=accumulate)
        model = replace(config.model, dtype="bfloat16", param_dtype="float32")
        train = replace(config.train, global_batch=ROWS)
        run = replace(config, mesh=MeshConfig(), model=model, parallel=layout, train=train)
        trainer = Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[:1]))
        batch = device_batch(open_data(run, file).batches, 0, trainer.batch_sharding)
        grads.append(vector(trainer.gradients(trainer.init(), batch)[0]))
    return float(np.linalg.norm(grads[0] - grads[1]) / np.linalg.norm(grads[1]))


def underflow(trainer: Trainer, state: TrainState, data: Data) -> dict[float, float]:
    """Share of gradients that are 0 at the weights of `state`, by loss scale, of a float16 trainer.

    A scale of 1/k is the mean over k times as many tokens without one.
    """
    batch, shares = device_batch(data.batches, 0, trainer.batch_sharding), {}
    for factor in SCALES:
        scaled = replace(state, loss_scale=state.loss_scale | {"factor": jnp.float32(factor)})
        shares[factor] = float(np.mean(vector(trainer.gradients(scaled, batch)[0]) == 0))
    return shares
