"""A strict session on 32 fake CPU devices: no implicit rank or dtype promotion; pyproject makes warnings errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import optax

from jax5d.mesh import use_cpu_devices

# Compiling a step takes most of a test's time. Without LLVM's optimisation it halves, and by the older code generation
# of fusions, where JAX still has it, it halves again; the HLO stays the same.
FLAGS = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
use_cpu_devices(32)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def _standard_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return inner


# Optax's Adam raises a Python float to the power of its int32 count: the one promotion that is let through.
optax.tree.bias_correction = _standard_promotion(optax.tree.bias_correction)
