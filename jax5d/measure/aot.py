"""The training step compiled for GPUs that are not there, and what the compiler decided about it.

XLA needs a description of a device to compile for it, not the device. So the step of any configuration can be compiled
for any cluster on a laptop, and its memory and schedule read. Nothing is executed and no array is made. As no kernel
can be timed, XLA picks matrix multiplies without autotuning: a real run may choose others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from jax5d.config import ConfigError, RunConfig, check
from jax5d.costs.collectives import Collective
from jax5d.measure.ledger import ledger
from jax5d.measure.targets import target_config
from jax5d.measure.timeline import Scheduled, timeline
from jax5d.mesh import gpu_options, make_mesh, quieten_plugins
from jax5d.train.step import Trainer

HOST = 8
"""GPUs of a host, where a cluster's shape is not given."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by the compiler's own account."""

    arguments: int
    """State and batch."""
    outputs: int
    """New state and metrics."""
    aliased: int
    """Outputs that take the place of arguments: the donated state."""
    temporaries: int
    """Everything between: activations, gradients, workspaces."""
    code: int
    """Generated code."""
    compiler_peak: int | None
    """Peak of arguments, outputs and temporaries alive together, where this version of XLA reports it."""
    host: int
    """In the host's memory for this device, and in none of the other figures: what is offloaded."""

    @property
    def peak(self) -> int:
        """Bytes reserved while the step runs: arguments + outputs - aliased + temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @classmethod
    def of(cls, compiled: Any) -> Memory:
        """Of what `jax.jit(...).lower(...).compile()` gives."""
        stats = compiled.memory_analysis()
        host = (
            stats.host_argument_size_in_bytes
            + stats.host_output_size_in_bytes
            - stats.host_alias_size_in_bytes
            + stats.host_temp_size_in_bytes
        )
        peak = getattr(stats, "peak_memory_in_bytes", None)  # of both memories together
        return cls(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
            compiler_peak=peak - host if peak else None,
            host=host,
        )


@dataclass(frozen=True)
class Compiled:
    """A step compiled for `hosts` x `gpus_per_host` GPUs."""

    gpu: str
    hosts: int
    gpus_per_host: int
    memory: Memory
    trace_seconds: float
    """Tracing and lowering."""
    compile_seconds: float
    timeline: list[Scheduled]
    """Collectives as the compiler scheduled them."""
    ledger: list[Collective]
    """Collectives as the program asks for them."""
    hlo: str = field(repr=False)
    """The scheduled program of one device."""

    @property
    def exposed_bytes(self) -> dict[tuple[str, ...], Fraction]:
        """Bytes that one device sends in a step with no matrix multiply to hide behind, by axes.

        The axes are those of one collective together, ("pp", "tp") for a sum over both, so the total is the sum.
        """
        return self._wire_bytes(hidden=False)

    @property
    def hidden_bytes(self) -> dict[tuple[str, ...], Fraction]:
        """Bytes that one device sends in a step while a matrix multiply or attention kernel runs, by axes."""
        return self._wire_bytes(hidden=True)

    def _wire_bytes(self, *, hidden: bool) -> dict[tuple[str, ...], Fraction]:
        totals: dict[tuple[str, ...], Fraction] = {}
        for entry in self.timeline:
            if entry.hidden == hidden:
                totals[entry.axes] = totals.get(entry.axes, Fraction(0)) + entry.wire_bytes
        return totals


def compile_step(
    config: RunConfig,
    gpu: str,
    hosts: int | None = None,
    gpus_per_host: int | None = None,
    *,
    memory: int | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Compiled:
    """Compile the training step of `config` for a cluster; nothing is executed.

    Works beside ordinary runs in the same process. On a machine without a GPU call `jax5d.use_cpu_devices` first, as
    for any run, or use JAX for nothing else before.

    Args:
        config: the mesh, devices in its order: tp runs inside a host, as far as it fits.
        gpu: a name of `jax5d.costs.gpus.GPUS`.
        hosts: their number; default: as few as the mesh needs.
        gpus_per_host: default: 8, or what the given hosts make of the mesh.
        memory: bytes of a GPU, as the compiler is told; default: what it has. XLA compiles what does not fit, too, but
            prints an error where state and batch alone take more than 80 %.
        compiler_options: XLA flags of this one compilation, by name without dashes, over those of `mesh.gpu_options`.

    Raises:
        ConfigError: an unknown GPU, a cluster of another size than the mesh, an unknown option, or a JAX that cannot
            compile for CUDA.
    """
    target = target_config(gpu, memory)
    check(config)
    hosts, gpus_per_host = cluster(config.mesh.size, hosts, gpus_per_host)
    mesh = make_mesh(config.mesh, _devices(target, hosts, gpus_per_host))
    trainer = Trainer.create(config, mesh=mesh)
    arguments = trainer.arguments
    start = time.perf_counter()
    lowered = trainer.step.lower(*arguments)
    traced = time.perf_counter()
    try:
        options: dict[str, Any] = {**gpu_options(config.parallel.reduction), **(compiler_options or {})}
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if not compiler_options or "option" not in str(error):
            raise
        raise ConfigError(
            f"compiler_options={compiler_options} is refused by XLA ({error}); give flags and values that it knows"
        ) from None
    done = time.perf_counter()
    text = compiled.as_text() or ""
    return Compiled(
        gpu,
        hosts,
        gpus_per_host,
        Memory.of(compiled),
        traced - start,
        done - traced,
        timeline(text, config.mesh),
        ledger(trainer.step, *arguments),
        text,
    )


def check_compiler(gpu: str) -> None:
    """Raise `ConfigError` where `compile_step` would, whatever the configuration: before a run does anything else."""
    absent_gpu(gpu)


def cluster(devices: int, hosts: int | None = None, gpus_per_host: int | None = None) -> tuple[int, int]:
    """Hosts and GPUs per host of a mesh; what is not given follows. Raises `ConfigError` unless they multiply to it."""
    if gpus_per_host is None:
        gpus_per_host = min(HOST, devices) if hosts is None else max(1, devices // max(1, hosts))
    if hosts is None:
        hosts = max(1, devices // max(1, gpus_per_host))
    if hosts < 1 or gpus_per_host < 1 or hosts * gpus_per_host != devices:
        raise ConfigError(
            f"hosts x gpus_per_host = {hosts} x {gpus_per_host} = {hosts * gpus_per_host} but the mesh has {devices} "
            "devices; change one of the three"
        )
    return hosts, gpus_per_host


def absent_gpu(name: str) -> Any:
    """One GPU that is not there, to be compiled for: a device for a mesh.

    Raises `ConfigError` for an unknown name, and where JAX cannot compile for CUDA, as `compile_step` does.
    """
    return absent_gpus(name, 1)[0]


def absent_gpus(name: str, count: int) -> list[Any]:
    """GPUs that are not there, as `absent_gpu`, on hosts as `cluster` has them."""
    return _devices(target_config(name), *cluster(count))


@lru_cache(maxsize=16)  # JAX never lets go of such devices: each call would keep more of them
def _devices(target: str, hosts: int, gpus_per_host: int) -> list[Any]:
    """Devices that can be compiled for and nothing else."""
    if sys.platform != "linux":
        raise ConfigError(f"compiling for a GPU needs Linux, as CUDA's wheels do; this is {sys.platform}")
    if not any(find_spec("jax_plugins") and find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)):
        raise ConfigError(
            'compiling for a GPU needs JAX\'s CUDA plugin, which is not installed; pip install "jax[cuda12]"'
        )
    shape = f"1x{hosts}x{gpus_per_host}"
    try:
        with _no_driver_needed():
            topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape)
    except NotImplementedError:
        raise ConfigError(
            "JAX has started without its CUDA plugin, so it cannot compile for a GPU; call jax5d.use_cpu_devices(N) "
            "before anything uses JAX, or start anew"
        ) from None
    return topology.devices


@contextmanager
def _no_driver_needed() -> Iterator[None]:
    """If JAX looks for its plugins only now, let it accept CUDA's without asking a driver for versions."""
    quieten_plugins()
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
