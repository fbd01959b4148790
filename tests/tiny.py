"""The tiny models that the tests train, and the comparison of a mesh with the plain model.

A run takes a few steps of SGD. Its optimizer keeps the last gradient in its state, so that one compiled step gives
the loss, the gradients and the new parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import optax
import reference

from jax5d.config import MeshConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig, check
from jax5d.mesh import make_mesh
from jax5d.models.build import Model
from jax5d.train.optimizer import make_optimizer
from jax5d.train.step import Trainer, TrainState

Tree = Any

VOCAB, ROWS, LENGTH, RATE = 96, 8, 32, 0.1
IGNORE = -100


def config(mesh: dict[str, int] | None = None, *, moe: bool = False, **options: Any) -> RunConfig:
    """A checked run. `options` are fields of the model, the training or the parallel layout, by their names."""
    model = {
        "name": "gpt2-tiny",
        "vocab": VOCAB,
        "context": LENGTH,
        "d_model": 32,
        "heads": 4,
        "layers": 4,
        "d_ff": 128,
        "experts": 4 if moe else 0,
    }
    train = {
        "optimizer": "sgd",
        "learning_rate": RATE,
        "warmup": 0,
        "final_lr": 1.0,
        "clip": 0,
        "global_batch": ROWS,
        "seq_len": LENGTH,
    }
    parallel: dict[str, Any] = {}
    seed = options.pop("seed", 0)
    for name, value in options.items():
        parts = [
            part
            for part, kind in ((model, ModelConfig), (train, TrainConfig), (parallel, ParallelConfig))
            if name in kind.__dataclass_fields__
        ]
        (part,) = parts
        part[name] = value
    run = RunConfig(
        mesh=MeshConfig(**(mesh or {})),
        model=ModelConfig(**model),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(**train),
        seed=seed,
    )
    check(run)
    return run


def name(mesh: dict[str, int]) -> str:
    """A mesh as a test's id: {"pp": 2, "tp": 2} is pp2tp2."""
    return "".join(f"{axis}{size}" for axis, size in mesh.items()) or "one"


def ids(rows: int = ROWS, length: int = LENGTH) -> np.ndarray:
    """Token ids int32 [rows, length + 1]: ids[b, t] = (7 b b + 3 t + 5 b t) mod 96."""
    b, t = np.arange(rows)[:, None], np.arange(length + 1)[None]
    return ((7 * b * b + 3 * t + 5 * b * t) % VOCAB).astype(np.int32)


def masked(labels: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Labels of which only the first lengths[b] of row b count."""
    return np.where(np.arange(labels.shape[1])[None] < np.array(lengths)[:, None], labels, IGNORE).astype(np.int32)


def batch(run: RunConfig, inputs: np.ndarray | None = None, labels: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Arrays int32 [M, rows/M, s]; microbatch m has the rows from m rows/M on. Default: `ids`."""
    tokens = ids(run.train.global_batch, run.train.seq_len)
    inputs = tokens[:, :-1] if inputs is None else inputs
    labels = tokens[:, 1:] if labels is None else labels
    shape = (run.parallel.microbatches, -1, inputs.shape[1])
    return {"inputs": inputs.reshape(shape), "labels": labels.reshape(shape)}


class Recorded(NamedTuple):
    """The state of `recording`: the gradient it saw last."""

    grads: Tree


def recording() -> optax.GradientTransformation:
    """Passes gradients on and keeps them."""
    return optax.GradientTransformation(
        lambda params: Recorded(jax.tree.map(jax.numpy.zeros_like, params)),
        lambda grads, state, params=None: (grads, Recorded(grads)),
    )


@lru_cache(maxsize=8)
def trainer(run: RunConfig) -> Trainer:
    """The run on the first devices; its last gradient is `gradients(state)`. One compiled step for each run."""
    devices = jax.devices()[: run.mesh.size]
    optimizer = optax.chain(recording(), make_optimizer(run.train))
    return Trainer.create(run, mesh=make_mesh(run.mesh, devices), optimizer=optimizer)


@cache
def weights(model: ModelConfig, seed: int = 0) -> Tree:
    """Initial parameters on the host, without padding; `test_init` proves that every mesh has these."""
    return host(jax.jit(Model(model, MeshConfig(), ParallelConfig()).init)(jax.random.key(seed)))


def pad_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros behind the entries of `x`: the padding of the vocabulary, and of pieces under ZeRO."""
    padded = np.zeros(shape, x.dtype)
    padded[tuple(slice(n) for n in x.shape)] = x
    return padded


def start(run: RunConfig, params: Tree | None = None) -> TrainState:
    """A state on the run's mesh from host parameters without padding; default: the initial ones."""
    proof = trainer(run)
    params = weights(run.model, run.seed) if params is None else params
    return proof.begin(jax.tree.map(lambda x, padded: pad_to(x, padded.shape), params, proof.model.shapes))


def gradients(state: TrainState) -> Tree:
    """The gradient of the step that made this state."""
    return state.opt_state[0].grads


def host(tree: Tree, model: ModelConfig | None = None) -> Tree:
    """NumPy copies; with `model`, of its parameters without their padding."""
    tree = jax.tree.map(np.array, tree)
    if model is None:
        return tree
    return jax.tree.map(lambda x, true: x[tuple(slice(n) for n in true.shape)], tree, weights(model))


_reference = jax.jit(jax.value_and_grad(reference.objective, has_aux=True), static_argnames="config")


def put(run: RunConfig, data: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A host batch on the run's mesh."""
    return jax.device_put(data, trainer(run).batch_sharding)


def reference_gradients(run: RunConfig, params: Tree, data: dict[str, np.ndarray]) -> tuple[dict, Tree]:
    """Metrics and gradients of the plain model on one device."""
    inputs, labels = data["inputs"], data["labels"]
    if not run.model.experts:  # the sum over all rows is the same, and compiles once for every M
        inputs, labels = (x.reshape(1, -1, x.shape[-1]) for x in (inputs, labels))
    (_, metrics), grads = _reference(params, inputs, labels, config=run.model)
    return host(metrics), host(grads)


class Expected(NamedTuple):
    """One SGD step of the plain model."""

    metrics: dict[str, np.ndarray]
    grads: Tree
    params: Tree
    """After the step."""


def reference_steps(run: RunConfig, params: Tree, data: dict[str, np.ndarray], steps: int) -> Iterator[Expected]:
    """SGD at the constant rate."""
    for _ in range(steps):
        metrics, grads = reference_gradients(run, params, data)
        params = jax.tree.map(lambda p, g: p - np.float32(run.train.learning_rate) * g, params, grads)
        yield Expected(metrics, grads, params)


def assert_close(got: Tree, want: Tree, tolerance: float) -> None:
    """Each leaf within `tolerance` of its largest expected entry."""
    scale = jax.tree.map(lambda w: max(float(np.max(np.abs(w))), 1e-30), want)
    unit = lambda tree: jax.tree.map(lambda x, s: np.asarray(x) / np.float32(s), tree, scale)  # noqa: E731
    chex.assert_trees_all_close(unit(got), unit(want), rtol=0, atol=tolerance)


def assert_shards(got: Tree, want: Tree, *, relative: float = 0, absolute: float = 0) -> None:
    """Every device's shard is that part of `want`, and devices with the same part hold the same bytes.

    Args:
        got: arrays on a mesh; what is padding there must be 0.
        want: NumPy arrays without padding.
        relative: allowed difference, over the largest entry of the leaf.
        absolute: allowed difference besides.
    """

    def leaf(path: Any, array: jax.Array, expected: np.ndarray) -> None:
        where = jax.tree_util.keystr(path)
        limit = np.full(expected.shape, relative * float(np.max(np.abs(expected))) + absolute)
        expected, limit, seen = pad_to(expected, array.shape), pad_to(limit, array.shape), {}
        for shard in array.addressable_shards:
            data = np.asarray(shard.data)
            part = str(shard.index)
            if part not in seen:
                difference = np.abs(data - expected[shard.index])
                assert np.all(difference <= limit[shard.index]), f"{where} {part}: off by {np.max(difference)}"
            same = seen.setdefault(part, data.tobytes()) == data.tobytes()
            assert same, f"{where}: device {shard.device} holds other bytes of {part}"

    jax.tree.map_with_path(leaf, got, want)


def check_replica(state: TrainState, run: RunConfig) -> None:
    """ZeRO-1 and 2 compute with the parameters, to the bit, on every device; other stages have no copy of them."""
    if not trainer(run).zero.replicates:
        assert state.replica == ()
        return
    params = jax.tree.map(lambda x: x.astype(run.model.dtype), host(state.params, run.model))
    assert_shards(state.replica, params)


def check_equivalent(
    run: RunConfig,
    *,
    params: Tree | None = None,
    inputs: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    steps: int = 3,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Train a few steps on the run's mesh, from `params` (default: initial ones), as the plain model trains.

    Step 1: loss and losses of the router within 1e-6, each gradient leaf within 2e-6 of its largest entry, the
    gradient norm within 1e-6. Last step: parameters within 1e-5; ZeRO's replica of them. All: every shard of every
    device.

    Returns:
        The last state, and the metrics of step 1.
    """
    proof, data = trainer(run), batch(run, inputs, labels)
    state = start(run, params)
    on_mesh = jax.device_put(data, proof.batch_sharding)
    first = {}
    for number, want in enumerate(reference_steps(run, host(state.params, run.model), data, steps)):
        state, metrics = proof.step(state, on_mesh)
        if number == 0:
            first = metrics
            for key in ("loss", "aux_loss", "router_z_loss") if run.model.experts else ("loss",):
                chex.assert_trees_all_close(float(metrics[key]), float(want.metrics[key]), rtol=1e-6, atol=0)
            assert_close(host(gradients(state), run.model), want.grads, 2e-6)
            assert_shards(gradients(state), want.grads, relative=2e-6)
            norm = float(optax.tree.norm(want.grads))
            chex.assert_trees_all_close(float(metrics["grad_norm"]), norm, rtol=1e-6, atol=0)
    chex.assert_trees_all_close(host(state.params, run.model), want.params, rtol=0, atol=1e-5)
    assert_shards(state.params, want.params, absolute=1e-5)
    check_replica(state, run)
    return state, first
