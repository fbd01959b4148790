"""Loss scaling: float16 ends at 6e-8, and the gradients of a mean over thousands of tokens are smaller than that.

The loss is multiplied by a factor before differentiating, and the gradients are divided by it afterwards, in float32.
Dynamic scaling (Micikevicius et al., arXiv:1710.03740, section 3.2): a step whose gradients overflow is left out and
the factor halved; after many good steps it is doubled.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

Tree = Any


class Scaling(Protocol):
    """What a step does about the range of its dtype."""

    def init(self) -> Tree:
        """The state before the first step."""
        ...

    def factor(self, state: Tree) -> jax.Array:
        """What the loss is multiplied by: float32 []."""
        ...

    def unscale(self, grads: Tree, factor: jax.Array) -> Tree:
        """Gradients divided by the factor."""
        ...

    def updates(self, step: jax.Array, state: Tree) -> jax.Array:
        """Of `step` steps, those that changed the parameters: int32 []."""
        ...

    def choose(self, norm: jax.Array, new: Tree, old: Tree) -> Tree:
        """The new or the old values by whether the gradients' norm is finite."""
        ...

    def after(self, norm: jax.Array, state: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """The state after a step with such a norm; metrics."""
        ...


class Fixed:
    """Factor 1: float32 and bfloat16 have the range. What is not finite is for the caller to see."""

    def init(self) -> Tree:
        """Nothing."""
        return ()

    def factor(self, state: Tree) -> jax.Array:
        """1."""
        return jnp.ones(())

    def unscale(self, grads: Tree, factor: jax.Array) -> Tree:
        """As they are."""
        return grads

    def updates(self, step: jax.Array, state: Tree) -> jax.Array:
        """All."""
        return step

    def choose(self, norm: jax.Array, new: Tree, old: Tree) -> Tree:
        """Always the new."""
        return new

    def after(self, norm: jax.Array, state: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Nothing."""
        return state, {}


class Dynamic:
    """A factor that follows the gradients: the largest power of two that has not overflowed lately."""

    START = 2.0**15
    PATIENCE = 1000
    """Good steps after which the factor is doubled."""

    def init(self) -> Tree:
        """The factor float32 [], good steps since it changed and skipped steps in all, int32 []."""
        return {"factor": jnp.float32(self.START), "good": jnp.int32(0), "skipped": jnp.int32(0)}

    def factor(self, state: Tree) -> jax.Array:
        """The current one."""
        return state["factor"]

    def unscale(self, grads: Tree, factor: jax.Array) -> Tree:
        """In the dtype of the gradients."""
        return jax.tree.map(lambda g: g / factor.astype(g.dtype), grads)

    def updates(self, step: jax.Array, state: Tree) -> jax.Array:
        """Those that were not skipped."""
        return step - state["skipped"]

    def choose(self, norm: jax.Array, new: Tree, old: Tree) -> Tree:
        """The old after an overflow."""
        return jax.tree.map(lambda n, o: jnp.where(jnp.isfinite(norm), n, o), new, old)

    def after(self, norm: jax.Array, state: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Half the factor after an overflow, and twice after many good steps."""
        finite = jnp.isfinite(norm)
        patient = finite & (state["good"] + 1 >= self.PATIENCE)
        change = jnp.where(finite, jnp.where(patient, 2.0, 1.0), 0.5)
        following = {
            "factor": state["factor"] * change,
            "good": jnp.where(finite & ~patient, state["good"] + 1, 0),
            "skipped": state["skipped"] + jnp.where(finite, 0, 1),
        }
        metrics = {"loss_scale": state["factor"], "skipped": jnp.where(finite, 0.0, 1.0)}
        return following, metrics
