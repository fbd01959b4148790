"""One linear layer on several devices: its weight cut by columns or by rows, its input and output whole or split.

The layers of a model are at the boundaries of `tensor.py` and its neighbours; here one layer stands alone, in every
layout of its input and output, as `split_a_layer` and `column_row` take it apart.

    a layer = what brings the input (ENTER), a product of what each device holds, what brings the output (LEAVE)

By columns a device makes some of the output's features, from all of the input's. By rows it takes some of the input's
features, and makes a partial sum of all of the output's. Megatron-LM, arXiv:1909.08053, section 3.

Shapes: t devices of tp, n tokens, d features in, f features out. A *whole* array is the same on all of them; of a
*split* one each holds 1/t of the features. K is the bytes of the whole array that an operation is about. All run
inside a `shard_map`. What each sends, also in the backward pass (its transpose), is in the docstrings; the transposes
follow from the types under `check_vma=True`, except that of `take`, which is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax5d.parallel.data import varying

Cut = Literal["columns", "rows"]
"""Of a weight [d, f] over tp: [d, f/t] or [d/t, f] on a device."""
Layout = Literal["whole", "split"]
"""Of activations [n, d] over tp: [n, d] or [n, d/t] on a device; of a bias [f] or [f/t]."""


def linear(x: jax.Array, w: jax.Array, b: jax.Array, *, cut: Cut, given: Layout, left: Layout) -> jax.Array:
    """x W + b: [n, d] -> [n, f].

    Args:
        x: [n, d] where it is given whole, [n, d/t] where it is given split.
        w: [d, f/t] cut by columns, [d/t, f] by rows.
        b: [f] where the output is left whole, [f/t] where it is left split. It is added after the sum, so once.
        cut: how the weight is cut.
        given: how the input lies.
        left: how the output is to lie.
    """
    return product(x, w, cut=cut, given=given, left=left) + b[None]


def product(x: jax.Array, w: jax.Array, *, cut: Cut, given: Layout, left: Layout) -> jax.Array:
    """x W, as in `linear`."""
    return LEAVE[cut, left](multiply(ENTER[cut, given](x), w))


def product_2d(x: jax.Array, w: jax.Array) -> jax.Array:
    """x W with the weight's rows cut over cp and its columns over tp: [n, d/c] x [d/c, f/t] -> [n, f/t].

    The input is split over cp, the output over tp. Psum over cp, 2 (c-1)/c of the output's K/t. Transpose: psum over
    tp, 2 (t-1)/t of the input's K/c.
    """
    return lax.psum(multiply(copy(x), w), "cp")


def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product of what a device holds: [n, d] x [d, f], either of them a piece. Bytes: 0."""
    return jnp.einsum("nd,df->nf", x, w)


def keep(x: jax.Array) -> jax.Array:
    """As it lies. Transpose: the same. Bytes: 0."""
    return x


@jax.named_scope("tp_copy")
def copy(x: jax.Array) -> jax.Array:
    """Whole [n, d] -> each device's own copy, to multiply with its columns. Bytes: 0. Transpose: psum, 2 (t-1)/t K."""
    return varying(x, ("tp",))


@jax.named_scope("tp_gather_copy")
def gather_copy(x: jax.Array) -> jax.Array:
    """Split [n, d/t] -> each device's own copy [n, d]: all_gather, (t-1)/t K. Transpose: psum_scatter, (t-1)/t K."""
    return lax.all_gather(x, "tp", axis=1, tiled=True)


@jax.custom_vjp
@jax.named_scope("tp_take")
def take(x: jax.Array) -> jax.Array:
    """Whole [n, d] -> split [n, d/t]: a slice, 0 bytes. Transpose: all_gather, (t-1)/t K.

    By the types alone the transpose would be a psum of slices among zeros, which sends twice as much.
    """
    size = x.shape[1] // lax.axis_size("tp")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * size, size, axis=1)


@jax.named_scope("tp_gather")
def gather(x: jax.Array) -> jax.Array:
    """Split [n, f/t] -> whole [n, f]: all_gather, (t-1)/t K. Transpose: a slice, 0 bytes."""
    return lax.all_gather(x, "tp", axis=1, tiled=True, to="invarying")


take.defvjp(lambda x: (take(x), None), lambda _, d_y: (gather(d_y),))


@jax.named_scope("tp_sum")
def total(x: jax.Array) -> jax.Array:
    """Partial sums [n, f] -> whole [n, f]: psum, 2 (t-1)/t K. Transpose: identity, 0 bytes."""
    return lax.psum(x, "tp")


@jax.named_scope("tp_scatter")
def total_split(x: jax.Array) -> jax.Array:
    """Partial sums [n, f] -> split [n, f/t]: psum_scatter, (t-1)/t K. Transpose: all_gather, (t-1)/t K."""
    return lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True)


Move = Callable[[jax.Array], jax.Array]

ENTER: dict[tuple[Cut, Layout], Move] = {
    ("columns", "whole"): copy,
    ("columns", "split"): gather_copy,
    ("rows", "whole"): take,
    ("rows", "split"): keep,
}
"""By cut and by how the input lies."""

LEAVE: dict[tuple[Cut, Layout], Move] = {
    ("columns", "split"): keep,
    ("columns", "whole"): gather,
    ("rows", "whole"): total,
    ("rows", "split"): total_split,
}
"""By cut and by how the output is to lie."""
