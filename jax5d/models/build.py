"""From a configuration to a model that the executor can run: parameters, their specs, and the three parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import PartitionSpec as P

from jax5d.config import MeshConfig, ModelConfig, ParallelConfig
from jax5d.layers.attention import Attend, Meet, choose_attention, recomputed
from jax5d.layers.dropout import Place, site
from jax5d.mesh import DATA_AXES
from jax5d.models.transformer import Block, Transformer
from jax5d.parallel.data import reduction_axes, varying
from jax5d.parallel.overlap import OverlappedBoundary
from jax5d.parallel.pipeline import Work
from jax5d.parallel.sequence import SequenceBoundary
from jax5d.parallel.tensor import Boundary, TensorBoundary

Tree = Any

BATCH_SPEC = P(None, ("dp", "ep"), "cp")
"""Spec of a batch's arrays [microbatches, rows, sequence]."""


def _merge(graph: Any, params: Tree) -> Any:
    """The module of a graph with these parameters, which may be local shards: nnx does not check shapes."""
    return nnx.merge(graph, nnx.State(params))


def _is_shared(param: nnx.Param) -> bool:
    """Whether devices along tp use one weight where it cannot be split: heads of keys and values."""
    return param.get_metadata().get("shared", False)


@dataclass(frozen=True)
class Model:
    """A model laid out for a mesh. Its methods but `init` run inside the step's shard_map.

    Parameters are a dict {"outer": ..., "blocks": ...} of plain arrays; "blocks" has a leading layers dim.
    """

    config: ModelConfig
    mesh: MeshConfig
    parallel: ParallelConfig
    platform: str = "cpu"

    @cached_property
    def boundary(self) -> Boundary:
        """Chosen once, here, from the configuration."""
        if not self.parallel.sequence:
            return TensorBoundary()
        kind = OverlappedBoundary if self.parallel.overlap else SequenceBoundary
        return kind(regather=self.parallel.remat != "full")

    @property
    def rows(self) -> int:
        """Vocabulary rows with padding: the next multiple of pp x tp."""
        shards = self.mesh.vocab_shards
        return -(-self.config.vocab // shards) * shards

    def without_dropout(self) -> Model:
        """The model as evaluation runs it."""
        return replace(self, config=replace(self.config, dropout=0.0))

    def for_inference(self) -> Model:
        """The model as text is written with it: its residual stream whole, as one token cannot be split over tp."""
        config = self.without_dropout().config
        # without a capacity groups change nothing, and a new token is no whole group
        config = replace(config, group=config.group if config.capacity_factor else 0)
        return replace(self, config=config, parallel=replace(self.parallel, sequence=False, overlap=False))

    def _transformer(self, key: jax.Array) -> Transformer:
        return Transformer(self.config, self.rows, self.boundary, self.attend, nnx.Rngs(params=key))

    @property
    def attend(self) -> Attend:
        """What attention is computed with."""
        attend = choose_attention(self.config, self.platform, self.mesh.cp)
        return recomputed(attend) if self.parallel.remat == "selective" else attend

    def init(self, key: jax.Array) -> Tree:
        """Parameters at full shape, drawn in float32; values depend on the key alone. Jit it with out_shardings."""
        params = nnx.to_pure_dict(nnx.state(self._transformer(key), nnx.Param))
        return jax.tree.map(lambda x: x.astype(self.config.param_dtype), params)

    @cached_property
    def _abstract(self) -> Transformer:
        return nnx.eval_shape(lambda: self._transformer(jax.random.key(0)))

    @cached_property
    def shapes(self) -> Tree:
        """ShapeDtypeStruct of every parameter, global."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @cached_property
    def specs(self) -> Tree:
        """PartitionSpec of every parameter: the one beside the weight, behind "pp" for a stacked one."""
        return self._each_parameter(self._spec)

    @cached_property
    def summed(self) -> Tree:
        """For every parameter the axes whose devices have parts of its gradient."""
        return self._each_parameter(
            lambda path, param: reduction_axes(
                self._spec(path, param), ("tp",) if _is_shared(param) else self.boundary.axes
            )
        )

    def _each_parameter(self, function: Callable[[tuple, nnx.Param], Any]) -> Tree:
        """A tree like the parameters: `function` of each one's path and abstract nnx.Param."""
        state = nnx.state(self._abstract, nnx.Param)
        return nnx.traversals.unflatten_mapping({path: function(path, p) for path, p in nnx.to_flat_state(state)})

    def _spec(self, path: tuple, param: nnx.Param) -> P:
        """A shared weight is split only where its heads divide over tp."""
        spec = param.get_metadata("spec")
        if _is_shared(param) and self.config.groups % self.mesh.tp:
            spec = P(*(None if axis == "tp" else axis for axis in spec))
        return P("pp", *spec) if path[0] == "blocks" else spec

    @cached_property
    def _graphs(self) -> tuple[Any, Any]:
        block = nnx.eval_shape(
            lambda: Block(self.config, self.boundary, self.attend, nnx.Rngs(params=jax.random.key(0)))
        )
        return nnx.graphdef(self._abstract.outer), nnx.graphdef(block)

    def work(self, batch: dict[str, jax.Array], key: jax.Array, global_rows: int) -> Work:
        """The model's three parts on this device's shard of a batch.

        Args:
            batch: "inputs" and, for the loss, "labels": int32 [M, b, s] local.
            key: the step's key, typed; the same on every device.
            global_rows: rows of a microbatch over the whole mesh.
        """
        outer_graph, block_graph = self._graphs

        def embed(outer: Tree, m: jax.Array) -> jax.Array:
            ids = batch["inputs"][m]
            return self.embed(outer, ids, self._place(ids, m, global_rows), site(key, self.config.layers))

        def layer(params: Tree, x: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, Tree], Tree]:
            m, index = at
            block = _merge(block_graph, params)
            place = self._place(batch["inputs"][m], m, global_rows)
            x, losses, stats = block(x, place, jax.random.fold_in(key, index))
            return (x, losses), stats

        def head(outer: Tree, y: jax.Array, m: jax.Array) -> jax.Array:
            return _merge(outer_graph, outer).loss(y, batch["labels"][m], self.parallel.loss_chunks)

        return Work(embed, self._recompute(layer), head)

    def embed(self, outer: Tree, ids: jax.Array, place: Place, key: jax.Array) -> jax.Array:
        """int32 [b, s] -> the residual stream; see `Vocabulary.embed`."""
        return _merge(self._graphs[0], outer).embed(ids, place, key, jnp.dtype(self.config.dtype))

    def remembering(self, params: Tree, x: jax.Array, place: Place, meet: Meet) -> tuple[jax.Array, Any]:
        """One layer that looks at keys and values from before; see `Block.remembering`."""
        return _merge(self._graphs[1], params).remembering(x, place, meet)

    def logits(self, outer: Tree, y: jax.Array) -> jax.Array:
        """The head's logits of the last layer's y; see `Vocabulary.logits`."""
        return _merge(self._graphs[0], outer).logits(y)

    def _recompute(self, layer: Any) -> Any:
        """A layer under the policy for its backward pass. Selective recomputation is attention's own."""
        if self.parallel.remat != "full":
            return layer
        policy = checkpoint_policies.save_only_these_names(*self.parallel.save)
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def _place(self, ids: jax.Array, m: jax.Array, global_rows: int) -> Place:
        b, s = ids.shape
        rows = m * global_rows + lax.axis_index(("dp", "ep")) * b + jnp.arange(b)
        return Place(rows, lax.axis_index("cp") * s + jnp.arange(s), self.config.context)

    def stream_zeros(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Zeros of a stage's input [b, s_stream, d], with its varying axes."""
        _, b, s = batch["inputs"].shape
        split = self.boundary.split(jnp.arange(s)).shape[0]
        zeros = jnp.zeros((b, split, self.config.d_model), jnp.dtype(self.config.dtype))
        return varying(zeros, ("pp", *DATA_AXES, *self.boundary.axes))

    def loss_weights(self) -> dict[str, float]:
        """Weights of the stage's losses in the objective; empty for a dense model."""
        c = self.config
        return {"aux_loss": c.aux_coef, "router_z_loss": c.z_coef} if c.experts else {}
