"""What passes between pipeline stages: activations to the next, their gradients back, the last one's output to all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.data import varying


@jax.named_scope("pp_send")
def step_to(x: jax.Array, by: int) -> jax.Array:
    """Send to the stage `by` further; the end stage receives zeros. Transpose: by -by. Bytes: (p-1)/p K a device."""
    size = lax.axis_size("pp")
    return lax.ppermute(x, "pp", [(i, i + by) for i in range(size) if 0 <= i + by < size])


def is_first() -> jax.Array:
    return lax.axis_index("pp") == 0


def is_last() -> jax.Array:
    return lax.axis_index("pp") == lax.axis_size("pp") - 1


@jax.named_scope("pp_share")
def from_last(y: jax.Array) -> jax.Array:
    """Each stage's own copy of the last one's value: psum of a masked value over pp, 2 (p-1)/p K bytes.

    Transpose: the same psum, of the copies' gradients, to the last stage.
    """
    return varying(lax.psum(jnp.where(is_last(), y, 0), "pp"), ("pp",))
