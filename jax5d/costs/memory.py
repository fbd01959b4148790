"""Memory of a training step on one device: four buckets, and what comes and goes.

Parameters, gradients, optimizer state and activations are the buckets of the Ultra-Scale Playbook and of Rajbhandari et
al., ZeRO, arXiv:1910.02054, section 3. A step also needs room to work in, which grows with the batch as activations do.
All of it follows from the configuration; `experiments/ch00_foundations/memory_buckets.py` holds it against what the GPU
compiler reserves. What theory cannot know: how kernels of another XLA are fused and in which order they run, workspaces
that cuBLAS, cuDNN and NCCL take for themselves, the CUDA context, and fragments between arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jax5d.config import RunConfig
from jax5d.costs.activations import Activations
from jax5d.costs.parameters import BYTES, FLOAT32, INT32
from jax5d.costs.working import Working
from jax5d.costs.zero import Shares

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
    """What the model computes with: weights in `model.param_dtype`, by ZeRO-3 this device's pieces of them; by ZeRO-1
    and 2 a whole copy in `model.dtype`."""
    gradients: int
    """The sums over microbatches, in `parallel.accumulate`, from the first backward pass to the update. By ZeRO-2 and 3
    this device's pieces of them; by ZeRO-1 too, where there is one tick and nothing to add up."""
    optimizer: int
    """Moments in the parameters' dtype unless they are offloaded, counters, and the state of a loss scale; by ZeRO-1
    and 2 also the weights that are updated, in `model.param_dtype`; by ZeRO of this device's pieces."""
    activations: int
    """What waits for its backward pass, of all microbatches in flight."""
    working: int
    """What comes and goes, at its most: logits, the values of one layer's backward pass, casts, copies."""
    batch: int
    """Token ids and labels."""
    host: int
    """In the host's memory for this device, and not in `state` or `total`: the moments, where they are offloaded."""

    @property
    def state(self) -> int:
        """What stays from step to step: parameters and optimizer."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """All of it, at the moment when there is most. One layer's moments come and go after that moment."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host


def memory(config: RunConfig) -> Memory:
    """Bytes per device of one step of a dense model.

    Raises:
        ConfigError: a mixture of experts.
    """
    activations, shares = Activations(config), Shares(config)
    at_once = config.parallel.microbatches + config.mesh.pp == 2
    pieces = shares.stage >= 2 or (shares.stage == 1 and at_once)
    return Memory(
        parameters=_parameters(shares),
        gradients=(shares.owned if pieces else shares.whole) * BYTES[config.parallel.accumulate],
        optimizer=_optimizer(shares),
        activations=activations.total,
        working=Working(config).total,
        batch=2 * config.parallel.microbatches * activations.tokens * INT32,
        host=_moments(shares) if config.parallel.offload == "optimizer" else 0,
    )


def state_bytes(config: RunConfig) -> int:
    """Bytes per device of parameters and optimizer state, exactly, of any model: what a trainer's state holds there."""
    shares = Shares(config)
    return _parameters(shares) + _optimizer(shares)


def _parameters(shares: Shares) -> int:
    model = shares.config.model
    if shares.copies:
        return shares.whole * BYTES[model.dtype]
    return shares.owned * BYTES[model.param_dtype]


def _optimizer(shares: Shares) -> int:
    name, model = shares.config.train.optimizer, shares.config.model
    scale = LOSS_SCALE if model.dtype == "float16" else 0
    updated = shares.owned * BYTES[model.param_dtype] if shares.copies else 0
    moments = _moments(shares) if shares.config.parallel.offload == "none" else 0
    return updated + moments + COUNTERS[name] * INT32 + scale


def _moments(shares: Shares) -> int:
    config = shares.config
    return MOMENTS[config.train.optimizer] * shares.owned * BYTES[config.model.param_dtype]
