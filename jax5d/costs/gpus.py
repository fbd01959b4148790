"""GPUs by their data sheets: memory, bandwidths, and what they compute at most.

Matrix products are counted dense, not with the 2:4 sparsity that data sheets print. A link's bytes/s are those of one
direction: data sheets print NVLink both ways together. Networks are those of NVIDIA's own hosts of eight (DGX A100:
one 200 Gb/s adapter a GPU; DGX H100, H200 and B200: one of 400 Gb/s).
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from jax5d.config import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in a host of its usual size."""

    name: str
    kinds: tuple[str, ...]
    """Parts of JAX's `device_kind` that tell it."""
    memory: int
    """Bytes, as it is sold, a gigabyte taken for 1e9; a device may well have 2^30 for each."""
    visible: int
    """Bytes that the driver shows to a program; JAX takes 75 % of them unless told otherwise."""
    bandwidth: float
    """Bytes/s of its memory."""
    float32: float
    """FLOP/s outside the tensor cores."""
    tf32: float
    """FLOP/s of float32 matrix products rounded to TF32."""
    half: float
    """FLOP/s of bfloat16 or float16 products, summed in float32."""
    float8: float | None
    """FLOP/s of float8 products, summed in float32; None where there are none."""
    link: float
    """Bytes/s to the other GPUs of the host, one direction."""
    network: float
    """Bytes/s to other hosts for each GPU, one direction."""
    per_host: int
    """GPUs of a host."""

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of float32, tf32, bfloat16, float16 or a float8; `ConfigError` for what it lacks."""
        rates = {"float32": self.float32, "tf32": self.tf32, "bfloat16": self.half, "float16": self.half}
        rate = self.float8 if dtype.startswith("float8") else rates.get(dtype)
        if rate is None:
            known = [*rates, "float8"] if self.float8 else [*rates]
            raise ConfigError(f"dtype={dtype!r} has no peak on {self.name}; choose one of {', '.join(known)}")
        return rate


_ROWS = (
    # NVIDIA A100 data sheet (SXM): 19.5, 156 and 312 TFLOP/s, NVLink 600 GB/s
    Gpu(
        name="a100-40",
        kinds=("A100-SXM4-40GB", "A100-PCIE-40GB"),
        memory=40 * 10**9,
        visible=42_331_013_120,  # XLA's target description of the device
        bandwidth=1555e9,
        float32=19.5e12,
        tf32=156e12,
        half=312e12,
        float8=None,
        link=300e9,
        network=25e9,
        per_host=8,
    ),
    # the same data sheet
    Gpu(
        name="a100-80",
        kinds=("A100",),
        memory=80 * 10**9,
        visible=85_100_068_864,  # XLA
        bandwidth=2039e9,
        float32=19.5e12,
        tf32=156e12,
        half=312e12,
        float8=None,
        link=300e9,
        network=25e9,
        per_host=8,
    ),
    # NVIDIA H100 data sheet, SXM: 67 TFLOP/s; 989, 1,979 and 3,958 with sparsity; NVLink 900 GB/s
    Gpu(
        name="h100",
        kinds=("H100",),
        memory=80 * 10**9,
        visible=84_942_979_072,  # XLA
        bandwidth=3350e9,
        float32=67e12,
        tf32=494e12,
        half=989e12,
        float8=1979e12,
        link=450e9,
        network=50e9,
        per_host=8,
    ),
    # NVIDIA H200 data sheet, SXM: the H100's FLOP/s and links
    Gpu(
        name="h200",
        kinds=("H200",),
        memory=141 * 10**9,
        visible=151_397_597_184,  # XLA
        bandwidth=4800e9,
        float32=67e12,
        tf32=494e12,
        half=989e12,
        float8=1979e12,
        link=450e9,
        network=50e9,
        per_host=8,
    ),
    # NVIDIA HGX B200 data sheet, by eight: 600 TFLOP/s; 18, 36 and 72 PFLOP/s with sparsity; 1.44 TB and 64 TB/s of
    # memory (DGX B200), NVLink 14.4 TB/s
    Gpu(
        name="b200",
        kinds=("B200",),
        memory=180 * 10**9,
        visible=191_514_411_008,  # XLA
        bandwidth=8000e9,
        float32=75e12,
        tf32=1125e12,
        half=2250e12,
        float8=4500e12,
        link=900e9,
        network=50e9,
        per_host=8,
    ),
    # NVIDIA Ada GPU architecture, appendix A: sums in float32; no NVLink; PCIe 4, 64 GB/s both ways. Its host, assumed:
    # a workstation of two on 10 Gb/s Ethernet
    Gpu(
        name="rtx4090",
        kinds=("RTX 4090",),
        memory=24 * 10**9,
        visible=24_564 * 2**20,  # nvidia-smi
        bandwidth=1008e9,
        float32=82.6e12,
        tf32=82.6e12,
        half=165.2e12,
        float8=330.3e12,
        link=32e9,
        network=0.625e9,
        per_host=2,
    ),
)

GPUS = {row.name: row for row in _ROWS}
"""By name, special kinds before general ones."""

# NVIDIA H100 data sheet, PCIe: 51 TFLOP/s; 756, 1,513 and 3,026 with sparsity; NVLink bridge 600 GB/s, of pairs
# only, so the link is PCIe 5: 128 GB/s both ways
_H100_PCIE = Gpu(
    name="h100-pcie",
    kinds=("H100 PCIe",),
    memory=80 * 10**9,
    visible=84_942_979_072,  # as the SXM module
    bandwidth=2000e9,
    float32=51e12,
    tf32=378e12,
    half=756e12,
    float8=1513e12,
    link=64e9,
    network=50e9,
    per_host=8,
)


def gpu(name: str) -> Gpu:
    """A row of `GPUS`; `ConfigError` with the nearest name for any other."""
    if name not in GPUS:
        longer = [known for known in GPUS if known.startswith(name.lower())]
        (near, *_) = longer or get_close_matches(name.lower(), GPUS, n=1, cutoff=0)
        raise ConfigError(f"gpu={name!r} is not known; did you mean {near}? There are {', '.join(GPUS)}")
    return GPUS[name]


def gpu_of_kind(device_kind: str) -> Gpu | None:
    """The GPU that JAX calls `device_kind`, or None where it is not known (a CPU)."""
    return next((row for row in (_H100_PCIE, *GPUS.values()) if any(kind in device_kind for kind in row.kinds)), None)
