"""The one mesh: five named axes, outermost first, over every device of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax5d.config import AXES, ConfigError, MeshConfig, check_devices

DATA_AXES = ("dp", "ep", "cp")
"""Axes over which devices hold different tokens."""

DEVICE, HOST = "device", "pinned_host"
"""JAX's names of a device's own memory, and of the host's memory that it can copy from and to by itself."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """The five-axis mesh over `devices` (default: all). Raises `ConfigError` where the product does not match."""
    shape = tuple(getattr(config, axis) for axis in AXES)
    if devices is None:
        devices = jax.devices()
        check_devices(config, len(devices))
        return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    check_devices(config, len(devices))
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def memories(mesh: Mesh) -> set[str]:
    """Kinds of memory that the mesh's devices can use; none where they are not there and only compiled for."""
    return {memory.kind for device in mesh.devices.flat for memory in device.addressable_memories()}


def check_memory(mesh: Mesh, memory: str) -> None:
    """Raise `ConfigError` where the mesh's devices cannot use a kind of memory."""
    if (found := memories(mesh)) and memory not in found:
        raise ConfigError(
            f"parallel.offload=optimizer needs memory of kind {memory}, but {mesh.devices.flat[0].device_kind} has "
            f"{', '.join(sorted(found))}; write --parallel.offload none"
        )


def placed(mesh: Mesh, spec: PartitionSpec, memory: str = DEVICE) -> NamedSharding:
    """The layout of an array on a mesh, in one of its memories; also on devices that are only compiled for."""
    if memories(mesh):
        return NamedSharding(mesh, spec, memory_kind=memory)
    return _Absent.of(mesh, spec, memory)


class _Absent(NamedSharding):
    """A layout on devices that are not there, whose memories JAX does not know and would therefore leave out."""

    kind: str

    @classmethod
    def of(cls, mesh: Any, spec: PartitionSpec, memory: str) -> _Absent:
        """`NamedSharding` makes itself in C++, so not in `__init__`."""
        made = cls(mesh, spec)
        made.kind = memory
        return made

    @property
    def memory_kind(self) -> str:
        return self.kind

    def with_memory_kind(self, kind: str) -> _Absent:
        return self.of(self.mesh, self.spec, kind)

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.kind))

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.kind == getattr(other, "kind", None)


def gpu_options(reduction: str) -> dict[str, int]:
    """XLA's options for a step on GPUs, by name without dashes.

    Where gradients leave layer by layer (parallel.reduction = overlap) a layer's are one message, and so are its
    parameters where they come so (ZeRO-3). Cut into several, as XLA does beyond 30 MB, they follow one another, and the
    first may have only small kernels to hide behind. For the same reason both messages may be under way at a time.
    """
    if reduction != "overlap":
        return {}
    names = ("all_reduce", "all_gather", "reduce_scatter")
    whole = {f"xla_gpu_{n}_combine_threshold_bytes": 2**28 for n in names}
    return whole | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


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
