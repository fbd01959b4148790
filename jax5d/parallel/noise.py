"""How much the gradients of replicas differ: the two numbers behind the gradient noise scale.

McCandlish et al., "An empirical model of large-batch training", arXiv:1812.06162, appendix A.1. The gradient g of a
batch of B sequences has E|g|^2 = |G|^2 + tr(S)/B, for the true gradient G and the covariance S of one sequence's. A
data-parallel step has it at two sizes: B/(n M) in each of n M microbatches of n replicas, B after the reduction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.config import AXES
from jax5d.parallel.data import is_axes, is_spec, spec_axes, squares

Tree = Any
Group = tuple[tuple[str, ...], tuple[str, ...]]
"""Axes that a leaf is reduced over, and axes that split it."""


def noise_groups(specs: list[Any], summed: list[tuple[str, ...]], sizes: dict[str, int]) -> list[Group | None]:
    """For each leaf, what it is summed over; None where a device's gradient is not that of whole sequences.

    That is so where pp or tp devices hold parts of the sum, and where cp splits the sequences.
    """
    groups: list[Group | None] = []
    for spec, axes in zip(specs, summed, strict=True):
        large = {a for a in axes if sizes[a] > 1}
        groups.append((axes, spec_axes(spec)) if large <= {"dp", "ep"} else None)
    return groups


@jax.named_scope("gradient_noise")
def gradient_noise(
    squared: Tree, reduced: Tree, specs: Tree, stored: Tree, summed: Tree, *, batch: int, pieces: int
) -> dict[str, jax.Array]:
    """Unbiased estimates of |G|^2 and tr(S), over the leaves whose local gradient is a replica's own.

    Args:
        squared: for each leaf, the sum of squares of this device's gradients, of one microbatch after another, before
            the reduction: float32 []. They are parts of the mean gradient of the global batch.
        reduced: the gradients after it, laid out by `stored`.
        specs: of the parameters; `stored` may name further axes, over which gradients lie in pieces.
        summed: for each parameter the axes over which its gradient is summed.
        batch: sequences B of the global batch.
        pieces: microbatches M of a replica.

    Returns:
        {"gradient_signal": |G|^2, "gradient_noise": tr(S) in units of one sequence}: float32 [], the same on every
        device; one step's are rough, and may be negative. Empty where no leaf qualifies, or there is only one gradient.
        One psum of 8 bytes for each set of axes.
    """
    leaves = partial(jax.tree.leaves, is_leaf=is_spec)
    sizes = {a: lax.axis_size(a) for a in AXES}
    groups = noise_groups(leaves(specs), jax.tree.leaves(summed, is_leaf=is_axes), sizes)
    sums: dict[Group, jax.Array] = {}
    for group, local, grad, spec in zip(groups, leaves(squared), leaves(reduced), leaves(stored), strict=True):
        if group and lax.axis_size(group[0]) * pieces > 1:
            alike = tuple(a for a in group[0] if a not in spec_axes(spec))
            own = jnp.stack([local, squares(grad) / lax.axis_size(alike)])
            sums[group] = sums.get(group, jnp.zeros(2)) + own
    signal = noise = jnp.zeros(())
    for group, own in sums.items():
        n = lax.axis_size(group[0]) * pieces
        small, large = lax.psum(own, (*group[0], *group[1])) * jnp.array([n, 1], jnp.float32)
        signal += (n * large - small) / (n - 1)
        noise += (small - large) * batch / (n - 1)
    return {"gradient_signal": signal, "gradient_noise": noise} if sums else {}
