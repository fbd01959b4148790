"""Whether this environment can compile for a GPU that is not there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

PLUGIN = any(find_spec("jax_plugins") and find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13))
needs_plugin = pytest.mark.skipif(not PLUGIN, reason="JAX's CUDA plugin is not installed")
