"""Sequence parallelism: between the tensor-parallel regions the sequence is split over tp.

Norms, dropout and residual additions then work on 1/t of the tokens, and the boundary's all-reduce becomes an
all-gather and a reduce-scatter of the same total bytes. Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax

from jax5d.parallel.tensor import Product, Tree


@dataclass(frozen=True)
class SequenceBoundary:
    """The residual stream's tokens are split over tp: g and g-bar of the paper."""

    regather: bool = True
    """Keep a column-parallel layer's input split for the backward pass, and gather it again there, as the paper does. A
    layer that is recomputed gathers anyway."""
    axes: tuple[str, ...] = ("tp",)

    @jax.named_scope("tp_gather")
    def enter(self, x: jax.Array) -> jax.Array:
        """[b, s/t, ...] -> [b, s, ...]: all_gather over tp, (t-1)/t of the output's bytes. Transpose: psum_scatter."""
        return lax.all_gather(x, "tp", axis=1, tiled=True)

    @jax.named_scope("tp_scatter")
    def leave(self, x: jax.Array) -> jax.Array:
        """[b, s, d] -> [b, s/t, d]: psum_scatter over tp, (t-1)/t of the input's bytes. Transpose: all_gather."""
        return lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True)

    def columns(self, product: Product, x: jax.Array, weights: Tree) -> Tree:
        """Bytes: those of `enter`, and in the backward pass once more with `regather`."""

        def gathered(x: jax.Array, weights: Tree) -> Tree:
            return product(self.enter(x), weights)

        return (jax.checkpoint(gathered, prevent_cse=False) if self.regather else gathered)(x, weights)

    def rows(self, product: Product, x: Tree, weights: Tree) -> jax.Array:
        """Bytes: those of `leave`."""
        return self.leave(product(x, weights))

    def split(self, x: jax.Array) -> jax.Array:
        """[s, ...] -> [s/t, ...]: this tp device's tokens of a value that all of them know. Bytes: 0."""
        size = x.shape[0] // lax.axis_size("tp")
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * size, size)
