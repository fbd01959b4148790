"""The one mesh: five named axes, outermost first, over every device of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax5d.config import AXES, MeshConfig, check_devices

DATA_AXES = ("dp", "ep", "cp")
"""Axes over which devices hold different tokens."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """The five-axis mesh over `devices` (default: all). Raises `ConfigError` where the product does not match."""
    shape = tuple(getattr(config, axis) for axis in AXES)
    if devices is None:
        devices = jax.devices()
        check_devices(config, len(devices))
        return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    check_devices(config, len(devices))
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def gpu_options(reduction: str) -> dict[str, int]:
    """XLA's options for a step on GPUs, by name without dashes.

    Where gradients leave layer by layer (parallel.reduction = overlap) a layer's are one message, and so are its
    parameters where they come so (ZeRO-3). Cut into several, as XLA does beyond 30 MB, they follow one another, and the
    first may have only small kernels to hide behind.
    """
    names = ("all_reduce", "all_gather", "reduce_scatter")
    return {f"xla_gpu_{n}_combine_threshold_bytes": 2**28 for n in names} if reduction == "overlap" else {}


def use_gpus(reduction: str = "overlap") -> None:
    """Set XLA's options for GPUs, for a `parallel.reduction`. Call before anything asks JAX for a device."""
    for name, value in gpu_options(reduction).items():
        _add_flag(f"--{name}={value}")


def _add_flag(flag: str) -> None:
    """To XLA_FLAGS, unless the user has set it."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.split("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def use_cpu_devices(count: int) -> None:
    """Make `count` fake CPU devices. Call before anything asks JAX for a device.

    The scheduler flag keeps independent collectives in one order on every fake device; without it, two
    collectives that do not depend on each other may start in a different order on each and wait for ever.
    """
    _add_flag("--xla_cpu_enable_concurrency_optimized_scheduler=false")
    quieten_plugins()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def quieten_plugins() -> None:
    """Keep the compiler of a plugin from printing warnings (that a program does not fit a GPU, for one).

    Plugins read the level when JAX loads them, at its first look for devices. "1" is what JAX itself has set; any other
    value is the user's.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
