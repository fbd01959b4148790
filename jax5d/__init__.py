"""jax5d: five-dimensional parallelism for training transformers, every collective written out by hand.

The public names below are loaded at first use, so that reading a configuration does not start JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax5d.config import PRESETS as PRESETS
    from jax5d.config import ConfigError as ConfigError
    from jax5d.config import DataConfig as DataConfig
    from jax5d.config import MeshConfig as MeshConfig
    from jax5d.config import ModelConfig as ModelConfig
    from jax5d.config import ParallelConfig as ParallelConfig
    from jax5d.config import RunConfig as RunConfig
    from jax5d.config import TrainConfig as TrainConfig
    from jax5d.config import check as check
    from jax5d.costs.communication import StepTraffic as StepTraffic
    from jax5d.costs.memory import memory as memory
    from jax5d.inference.decoder import Decoder as Decoder
    from jax5d.inference.generate import generate as generate
    from jax5d.inference.sample import Sampling as Sampling
    from jax5d.measure.aot import compile_step as compile_step
    from jax5d.measure.ledger import ledger as ledger
    from jax5d.measure.trace import read_trace as read_trace
    from jax5d.mesh import make_mesh as make_mesh
    from jax5d.mesh import use_cpu_devices as use_cpu_devices
    from jax5d.mesh import use_gpus as use_gpus
    from jax5d.train.checkpoint import from_checkpoint as from_checkpoint
    from jax5d.train.step import Trainer as Trainer
    from jax5d.train.step import TrainState as TrainState

_HOME = {
    "jax5d.config": (
        "PRESETS",
        "ConfigError",
        "DataConfig",
        "MeshConfig",
        "ModelConfig",
        "ParallelConfig",
        "RunConfig",
        "TrainConfig",
        "check",
    ),
    "jax5d.costs.communication": ("StepTraffic",),
    "jax5d.costs.memory": ("memory",),
    "jax5d.inference.decoder": ("Decoder",),
    "jax5d.inference.generate": ("generate",),
    "jax5d.inference.sample": ("Sampling",),
    "jax5d.measure.aot": ("compile_step",),
    "jax5d.measure.ledger": ("ledger",),
    "jax5d.measure.trace": ("read_trace",),
    "jax5d.mesh": ("make_mesh", "use_cpu_devices", "use_gpus"),
    "jax5d.train.checkpoint": ("from_checkpoint",),
    "jax5d.train.step": ("Trainer", "TrainState"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'jax5d' has no attribute {name!r}")
    return getattr(import_module(_MODULE[name]), name)
