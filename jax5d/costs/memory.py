"""Memory of a training step on one device: four buckets, and what comes and goes.

Parameters, gradients, optimizer state and activations are the buckets of the Ultra-Scale Playbook and of Rajbhandari et
al., ZeRO, arXiv:1910.02054, section 3. A step also needs room to work in, which grows with the batch as activations do.
All of it follows from the configuration; `experiments/ch00_foundations/memory_buckets.py` holds it against what the GPU
compiler reserves. What theory cannot know: how kernels of another XLA are fused and in which order they run, workspaces
that cuBLAS, cuDNN and NCCL take for themselves, the CUDA context, and fragments between arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, prod

from jax5d.config import ConfigError, RunConfig
from jax5d.costs.activations import Activations
from jax5d.costs.parameters import BYTES, FLOAT32, INT32, Leaf, leaves
from jax5d.costs.working import Working

MOMENTS = {"adamw": 2, "sgd": 0}
"""Arrays that an optimizer keeps for each parameter, in the parameter's dtype."""

COUNTERS = {"adamw": 3, "sgd": 2}
"""The step, the schedule's count and Adam's, int32 each, on every device."""

LOSS_SCALE = FLOAT32 + 2 * INT32
"""The factor, good steps and skipped steps, under float16."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    """Weights, in `model.param_dtype`."""
    gradients: int
    """The sums over microbatches, in `parallel.accumulate`, from the first backward pass to the update."""
    optimizer: int
    """Moments in the parameters' dtype, counters, and the state of a loss scale."""
    activations: int
    """What waits for its backward pass, of all microbatches in flight."""
    working: int
    """What comes and goes, at its most: logits, the values of one layer's backward pass, casts, copies."""
    batch: int
    """Token ids and labels."""

    @property
    def state(self) -> int:
        """What stays from step to step: parameters and optimizer."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """All of it, at the moment when there is most."""
        return sum(getattr(self, field.name) for field in fields(self))


def memory(config: RunConfig, zero: int = 0) -> Memory:
    """Bytes per device of one step of a dense model.

    Args:
        config: checked configuration.
        zero: stage of ZeRO, over the replicas dp x ep x cp: from 1 on they share the optimizer's state, from 2 on the
            gradients, at 3 the parameters. A formula for a step that is not built: the working set stays that of the
            step without ZeRO, where stage 3 would add the layers that are gathered at the time.

    Raises:
        ConfigError: a mixture of experts, or another stage.
    """
    if zero not in range(4):
        raise ConfigError(f"zero={zero} is no stage of ZeRO; give 0, 1, 2 or 3")
    activations, accumulate = Activations(config), BYTES[config.parallel.accumulate]
    return Memory(
        parameters=_elements(config, shared=zero >= 3) * BYTES[config.model.param_dtype],
        gradients=_elements(config, shared=zero >= 2) * accumulate,
        optimizer=_optimizer(config, shared=zero >= 1),
        activations=activations.total,
        working=Working(config).total,
        batch=2 * config.parallel.microbatches * activations.tokens * INT32,
    )


def state_bytes(config: RunConfig) -> int:
    """Bytes per device of parameters and optimizer state, exactly, of any model: what a trainer's state holds."""
    return _elements(config) * BYTES[config.model.param_dtype] + _optimizer(config)


def _elements(config: RunConfig, *, shared: bool = False) -> int:
    """Parameters on one device; `shared` out among the replicas of each, the last of which may get fewer."""

    def replicas(leaf: Leaf) -> int:
        return prod(getattr(config.mesh, axis) for axis in ("dp", "ep", "cp") if axis not in leaf.axes)

    every = leaves(config.model, config.mesh)
    return sum(ceil(leaf.local_size(config.mesh) / (replicas(leaf) if shared else 1)) for leaf in every)


def _optimizer(config: RunConfig, *, shared: bool = False) -> int:
    name, width = config.train.optimizer, BYTES[config.model.param_dtype]
    scale = LOSS_SCALE if config.model.dtype == "float16" else 0
    return MOMENTS[name] * _elements(config, shared=shared) * width + COUNTERS[name] * INT32 + scale
