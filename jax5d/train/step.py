"""One training step: the library's only jit(shard_map(...)) over parameters, with every collective explicit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax5d.config import RunConfig
from jax5d.costs.parameter_traffic import check_bucket
from jax5d.mesh import DEVICE, check_memory, make_mesh, memories, placed
from jax5d.models.build import BATCH_SPEC, Model
from jax5d.parallel import pipeline
from jax5d.parallel.data import (
    clip_by_norm,
    diverge,
    global_norm,
    is_spec,
    split_axes,
    sum_over_shards,
    sum_over_varying,
)
from jax5d.parallel.noise import gradient_noise
from jax5d.parallel.reduction import Reduction, make_reduction
from jax5d.parallel.schedules import SCHEDULES, forward_only
from jax5d.parallel.zero import Zero, make_zero
from jax5d.train.elementwise import by_parameter, check_elementwise
from jax5d.train.optimizer import learning_rate, make_optimizer
from jax5d.train.scaling import Dynamic, Fixed, Scaling
from jax5d.train.update import Step, Update, make_update

Tree = Any
Batch = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step changes. `step` int32 [] is the number of steps done."""

    step: jax.Array
    params: Tree
    """What the optimizer updates; in pieces under ZeRO."""
    opt_state: Tree
    loss_scale: Tree = ()
    """What dynamic loss scaling remembers; nothing without it."""
    replica: Tree = ()
    """ZeRO-1 and 2: what the model computes with, whole, in the computation's dtype; made of `params`."""


@dataclass(frozen=True)
class Trainer:
    """A configuration laid out on a mesh: makes states and steps.

    Args:
        config: checked configuration.
        mesh: the five-axis mesh (`jax5d.mesh.make_mesh`).
        optimizer: any elementwise optax transformation; default from the configuration.
    """

    config: RunConfig
    mesh: Mesh
    optimizer: optax.GradientTransformation

    @staticmethod
    def create(
        config: RunConfig, *, mesh: Mesh | None = None, optimizer: optax.GradientTransformation | None = None
    ) -> Trainer:
        """A trainer for `config`, on all devices and with its own optimizer unless others are given.

        Raises `ConfigError` for a bucket larger than the gradients (`check_bucket`), for an optimizer that is not
        elementwise (`check_elementwise`) where it gets only parts of parameters, and where devices cannot offload
        (`check_memory`).
        """
        check_bucket(config)
        mesh = make_mesh(config.mesh) if mesh is None else mesh
        trainer = Trainer(config, mesh, optimizer or make_optimizer(config.train))
        check_memory(mesh, trainer.update.memory)
        split = any(mesh.shape[axis] > 1 for axis in split_axes(trainer.specs.params))
        if optimizer and (split or trainer.update.parts):
            check_elementwise(trainer.optimizer, trainer.model.shapes)
        return trainer

    @cached_property
    def model(self) -> Model:
        """The model, for this mesh."""
        platform = self.mesh.devices.flat[0].platform
        return Model(self.config.model, self.config.mesh, self.config.parallel, platform)

    @cached_property
    def zero(self) -> Zero:
        """Who stores what, and what the model computes with."""
        return make_zero(self.config, self.model.shapes, self.model.specs)

    @cached_property
    def specs(self) -> TrainState:
        """PartitionSpecs of the state: the optimizer's leaves lie as their parameters do."""
        specs = self.zero.stored
        opt_state = self._of_optimizer(specs, P())
        scale = jax.tree.map(lambda _: P(), self.scaling.init())
        replica = self.model.specs if self.zero.replicates else ()
        return TrainState(cast(Any, P()), specs, opt_state, scale, replica)

    @cached_property
    def shardings(self) -> TrainState:
        """NamedShardings of the state, memory included."""
        memory = jax.tree.map(lambda _: DEVICE, self.specs, is_leaf=is_spec)
        moments = self._of_optimizer(jax.tree.map(lambda _: self.update.memory, self.model.shapes), DEVICE)
        memory = replace(memory, opt_state=moments)
        return jax.tree.map(partial(placed, self.mesh), self.specs, memory, is_leaf=is_spec)

    def _of_optimizer(self, values: Tree, other: Any) -> Tree:
        """The optimizer's state with each leaf replaced by its parameter's in `values`, or by `other`."""
        return by_parameter(self.optimizer, jax.eval_shape(self.optimizer.init, self.model.shapes), values, other)

    @cached_property
    def update(self) -> Update:
        """How and where parameters are updated."""
        return make_update(self.config.parallel.offload, self.optimizer)

    @property
    def scaling(self) -> Scaling:
        """What keeps small gradients from vanishing in float16."""
        return Dynamic() if self.config.model.dtype == "float16" else Fixed()

    @cached_property
    def reduction(self) -> Reduction:
        """How gradients are summed over replicas."""
        return make_reduction(self.config.parallel, self.model.specs, self.model.summed, self.zero.cuts)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of a batch's arrays [microbatches, rows, sequence]."""
        return placed(self.mesh, BATCH_SPEC)

    def _create(self) -> TrainState:
        return self._begin(self.model.init(jax.random.key(self.config.seed)))

    def _begin(self, whole: Tree) -> TrainState:
        params = self.zero.padded(whole)
        return TrainState(jnp.int32(0), params, self.optimizer.init(params), self.scaling.init())

    @cached_property
    def shapes(self) -> TrainState:
        """ShapeDtypeStructs of the state, global; nothing is computed."""
        kind = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(self.config.model.dtype))
        replica = jax.tree.map(lambda x: kind(x.shape), self.model.shapes) if self.zero.replicates else ()
        return replace(jax.eval_shape(self._create), replica=replica)

    @property
    def arguments(self) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
        """State and batch of a step as ShapeDtypeStructs laid out on the mesh, to trace or compile it with."""
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), self.shapes, self.shardings
        )
        train, pieces = self.config.train, self.config.parallel.microbatches
        shape = pieces, train.global_batch // pieces, train.seq_len
        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        return state, {"inputs": ids, "labels": ids}

    def completed(self, state: TrainState) -> TrainState:
        """A state whose replica is made of its parameters: a new one, or one from a checkpoint."""
        if not self.zero.replicates:
            return state
        return replace(state, replica=self.replica(state.params))

    @cached_property
    def replica(self) -> jax.stages.Wrapped:
        """Compiled params -> the whole copy that the model computes with, at ZeRO-1 and 2."""
        body = self._shard_map(self.zero.replica, (self.specs.params,), self.specs.replica)
        return jax.jit(body, out_shardings=self.shardings.replica)

    def init(self) -> TrainState:
        """The state before the first step: bitwise the same on every mesh for one seed."""
        # it runs once, and what the compiler makes faster could depend on the shards' shapes in the last bit
        plainly = {"xla_backend_optimization_level": 0}
        bare = replace(self.shardings, replica=())
        return self.completed(jax.jit(self._create, out_shardings=bare, compiler_options=plainly)())

    def begin(self, params: Tree) -> TrainState:
        """The state before the first step, with given parameters: whole, global, at the shapes of `model.shapes`."""
        return self.completed(jax.jit(self._begin, out_shardings=replace(self.shardings, replica=()))(params))

    @cached_property
    def step(self) -> jax.stages.Wrapped:
        """Compiled (state, batch) -> (state, metrics). The old state is donated.

        A batch is {"inputs", "labels"}: int32 [microbatches, rows, sequence], laid out by `batch_sharding`; negative
        labels are ignored. Metrics are float32 [] but for the counts of an MoE.
        """
        body = self._shard_map(self._step, (self.specs, BATCH_SPEC), (self.specs, P()))
        # left to itself JAX respells the specs of results, and the next step would be compiled anew; but for devices
        # that are not there it could not find its results' memories
        shardings = (self.shardings, placed(self.mesh, P())) if memories(self.mesh) else None
        return jax.jit(body, out_shardings=shardings, donate_argnums=0)

    @cached_property
    def evaluate(self) -> jax.stages.Wrapped:
        """Compiled (params, batch) -> {"loss_sum", "tokens"}: float32 []; no dropout, nothing is changed."""
        return jax.jit(self._shard_map(self._evaluate, (self.specs.params, BATCH_SPEC), P()))

    @cached_property
    def gradients(self) -> jax.stages.Wrapped:
        """Compiled (state, batch) -> (reduced gradients laid out as the parameters, metrics), for proofs."""
        body = self._shard_map(self._gradients, (self.specs, BATCH_SPEC), (self.specs.params, P()))
        return jax.jit(body)

    def _shard_map(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, metrics = self._gradients(state, batch)
        norm = global_norm(grads, self.specs.params)
        with jax.named_scope("optimizer"):
            new, skipped = self._updated(state, grads, norm)
        rate = learning_rate(self.config.train)(self.scaling.updates(state.step, state.loss_scale))
        return new, metrics | skipped | {"grad_norm": norm, "learning_rate": rate}

    def _updated(self, state: TrainState, grads: Tree, norm: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        """The state after an update with `grads`; metrics of the loss scale."""
        clip = partial(clip_by_norm, norm=norm, limit=self.config.train.clip)
        step = Step(norm, clip, partial(self.scaling.choose, norm))
        params, opt_state = self.update(step, grads, state.opt_state, state.params)
        scale, metrics = self.scaling.after(norm, state.loss_scale)
        replica = self.zero.replica(params) if self.zero.replicates else ()
        return TrainState(state.step + 1, params, opt_state, scale, replica), metrics

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[Tree, dict[str, jax.Array]]:
        """Local: params and batch are this device's shards."""
        model, specs, summed = self.model, self.model.specs, self.model.summed
        key = jax.random.fold_in(jax.random.key(self.config.seed), state.step)
        count = batch["inputs"].shape[0]
        tokens = sum_over_shards(jnp.sum(batch["labels"] >= 0, dtype=jnp.int32))
        mean, scale = 1 / jnp.maximum(tokens, 1).astype(jnp.float32), self.scaling.factor(state.loss_scale)
        own = diverge(state.params, summed)
        whole = diverge(state.replica, summed) if self.zero.replicates else own
        result = pipeline.train(
            SCHEDULES[self.config.parallel.schedule](self.config.mesh.pp, count),
            model.work(batch, key, self._global_rows(batch)),
            self.zero.computed(whole),
            whole if self.zero.stage < 2 else own,
            model.stream_zeros(batch),
            mean * scale,
            {name: scale * weight / count for name, weight in model.loss_weights().items()},
            reduction=self.reduction,
        )
        with jax.named_scope("reduce_gradients"):
            grads = self.reduction.rest({"outer": result.outer_grads, "blocks": result.block_grads})
        noise = gradient_noise(
            result.squares, grads, specs, self.specs.params, summed, batch=self.config.train.global_batch, pieces=count
        )
        losses = {name: sum_over_varying(value) / count for name, value in result.losses.items()}
        stats = jax.tree.map(sum_over_varying, result.stats)
        metrics = {"loss": sum_over_shards(result.head) * mean, **losses, **stats}
        return self.scaling.unscale(grads, scale), metrics | {k: v / scale**2 for k, v in noise.items()}

    def _evaluate(self, params: Tree, batch: Batch) -> dict[str, jax.Array]:
        model = self.model.without_dropout()
        count = batch["inputs"].shape[0]
        work = model.work(batch, jax.random.key(0), self._global_rows(batch))
        table = forward_only(self.config.mesh.pp, count)
        result = pipeline.evaluate(table, work, self.zero.opened(params), model.stream_zeros(batch))
        tokens = jnp.sum(batch["labels"] >= 0, dtype=jnp.int32)
        return {"loss_sum": sum_over_shards(result.head), "tokens": sum_over_shards(tokens)}

    def _global_rows(self, batch: Batch) -> int:
        return batch["inputs"].shape[1] * self.config.mesh.batch_shards
