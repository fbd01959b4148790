"""GPUs as the compiler sees them: the numbers of a GpuTargetConfigProto, so that none has to be present.

The numbers of A100, H100, H200 and B200 are those that OpenXLA keeps, as read from such devices
(xla/backends/gpu/target_config/specs).
Limits of a compute capability are also in the CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

from jax5d.costs.gpus import gpu

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Limits:
    """What the CUDA guide says of a compute capability."""

    major: int
    minor: int
    shared_kib: int
    """Shared memory of a multiprocessor, KiB; a block gets up to one less."""
    threads: int
    """Threads resident on a multiprocessor."""
    float32_units: int
    """Float32 units of a multiprocessor."""


CC_80 = Limits(8, 0, shared_kib=164, threads=2048, float32_units=64)
CC_89 = Limits(8, 9, shared_kib=100, threads=1536, float32_units=128)  # no file of OpenXLA: the guide alone
CC_90 = Limits(9, 0, shared_kib=228, threads=2048, float32_units=128)
CC_100 = Limits(10, 0, shared_kib=228, threads=2048, float32_units=128)


@dataclass(frozen=True)
class Chip:
    """What the compiler asks about a product, beside its memory (`jax5d.costs.gpus`)."""

    description: str
    """The name that the driver reports."""
    limits: Limits
    multiprocessors: int
    boost_ghz: float
    l2_bytes: int
    bandwidth: int
    """Of its memory, bytes per second."""


CHIPS: dict[str, Chip] = {
    # OpenXLA, a100_sxm_40 and a100_sxm_80
    "a100-40": Chip("NVIDIA A100-SXM4-40GB", CC_80, 108, 1.41, 40 * MIB, 1_555_200_000_000),
    "a100-80": Chip("NVIDIA A100-SXM4-80GB", CC_80, 108, 1.41, 40 * MIB, 2_039_040_000_000),
    # OpenXLA, h100_sxm
    "h100": Chip("NVIDIA H100 80GB HBM3", CC_90, 132, 1.98, 50 * MIB, 3_352_320_000_000),
    # OpenXLA, h200: the same die, more and faster memory
    "h200": Chip("NVIDIA H200", CC_90, 132, 1.98, 50 * MIB, 4_800_000_000_000),
    # OpenXLA, b200
    "b200": Chip("NVIDIA B200", CC_100, 148, 1.965, 129_536 * KIB, 7_672_320_000_000),
    # NVIDIA's specification: 128 SMs, 2.52 GHz, 72 MB L2, 1.008 TB/s
    "rtx4090": Chip("NVIDIA GeForce RTX 4090", CC_89, 128, 2.52, 72 * MIB, 1_008_000_000_000),
}
"""By the names of `jax5d.costs.gpus`."""


def target_config(name: str, memory: int | None = None) -> str:
    """The text of a GpuTargetConfigProto: what XLA asks a device before it compiles for it.

    `memory` are its bytes; default: what the driver shows of them. Raises `ConfigError` for a GPU that
    `jax5d.costs.gpus` does not know.
    """
    row, chip = gpu(name), CHIPS[name]
    memory = row.visible if memory is None else memory
    limits = chip.limits
    # from 9.0 on XLA uses the instructions that only this very architecture has (sm_90a, sm_100a)
    own = "feature_extension: ACCELERATED_FEATURES" if limits.major >= 9 else ""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {limits.threads}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: {48 * KIB} shared_memory_per_core: {limits.shared_kib * KIB}
          shared_memory_per_block_optin: {(limits.shared_kib - 1) * KIB}
          core_count: {chip.multiprocessors} fpus_per_core: {limits.float32_units} clock_rate_ghz: {chip.boost_ghz}
          l2_cache_size: {chip.l2_bytes} memory_bandwidth: {chip.bandwidth} device_memory_size: {memory}
          cuda_compute_capability {{ major: {limits.major} minor: {limits.minor} {own} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 12 minor: 9 }}
        device_description_str: "{chip.description}"
    """
