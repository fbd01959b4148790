"""How much the gradients of replicas differ: the two numbers behind the gradient noise scale.

McCandlish et al., "An empirical model of large-batch training", arXiv:1812.06162, appendix A.1. The gradient g of a
batch of B sequences has E|g|^2 = |G|^2 + tr(S)/B, for the true gradient G and the covariance S of one sequence's. A
data-parallel step has it at two sizes: B/n on each of n replicas before the reduction, B after it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.config import AXES
from jax5d.parallel.data import is_spec, reduction_axes, spec_axes, squares

Tree = Any
Group = tuple[tuple[str, ...], tuple[str, ...]]
"""Axes that a leaf is reduced over, and axes that split it."""


def noise_groups(specs: list[Any], token_axes: tuple[str, ...], sizes: dict[str, int]) -> list[Group | None]:
    """For each leaf, what it is summed over; None where a device's gradient is not that of whole sequences.

    That is so where pp or tp devices hold parts of the sum, and where cp splits the sequences; and there is nothing to
    compare where there is one replica.
    """
    groups: list[Group | None] = []
    for spec in specs:
        axes = reduction_axes(spec, token_axes)
        large = {a for a in axes if sizes[a] > 1}
        groups.append((axes, spec_axes(spec)) if large and large <= {"dp", "ep"} else None)
    return groups


@jax.named_scope("gradient_noise")
def gradient_noise(
    before: Tree, reduced: Tree, specs: Tree, token_axes: tuple[str, ...], batch: int
) -> dict[str, jax.Array]:
    """Unbiased estimates of |G|^2 and tr(S), over the leaves whose local gradient is a replica's own.

    Args:
        before: each leaf's sum of squares on this device before the reduction, float32 []; of 1/n of the mean gradient
            of a replica's sequences.
        reduced: the gradients after it.
        batch: sequences B of the global batch.

    Returns:
        {"gradient_signal": |G|^2, "gradient_noise": tr(S) in units of one sequence}: float32 [], the same on every
        device; one step's are rough, and may be negative. Empty where no leaf qualifies. One psum of 8 bytes for each
        set of axes.
    """
    groups = noise_groups(jax.tree.leaves(specs, is_leaf=is_spec), token_axes, {a: lax.axis_size(a) for a in AXES})
    sums: dict[Group, jax.Array] = {}
    for group, local, grad in zip(groups, jax.tree.leaves(before), jax.tree.leaves(reduced), strict=True):
        if group:
            own = jnp.stack([local, squares(grad) / lax.axis_size(group[0])])
            sums[group] = sums.get(group, jnp.zeros(2)) + own
    signal = noise = jnp.zeros(())
    for group, own in sums.items():
        n = lax.axis_size(group[0])
        small, large = lax.psum(own, (*group[0], *group[1])) * jnp.array([n, 1], jnp.float32)
        signal += (n * large - small) / (n - 1)
        noise += (small - large) * batch / (n - 1)
    return {"gradient_signal": signal, "gradient_noise": noise} if sums else {}
