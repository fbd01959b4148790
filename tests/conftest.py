"""A strict session on 32 fake CPU devices: no implicit rank or dtype promotion; pyproject makes warnings errors."""

from __future__ import annotations

import os

import jax

from jax5d.mesh import use_cpu_devices

# The compile time of a step is most of a test's time. Without LLVM's optimisation it halves; the HLO stays the same.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
use_cpu_devices(32)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
