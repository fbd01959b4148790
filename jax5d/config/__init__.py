"""What a run is: frozen dataclasses, model presets, and every refusal that needs no file and no device.

The dataclasses are the single source of the command line's options, of `config.yaml` and of `result.json`.
"""

from jax5d.config.checks import check, check_devices, check_layout
from jax5d.config.errors import ConfigError
from jax5d.config.model import PRESETS, ModelConfig, check_model
from jax5d.config.run import (
    AXES,
    PROFILE_LIMIT,
    DataConfig,
    MeshConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "AXES",
    "PRESETS",
    "PROFILE_LIMIT",
    "ConfigError",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "check",
    "check_devices",
    "check_layout",
    "check_model",
]
