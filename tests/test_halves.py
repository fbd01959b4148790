"""A function's two halves are its vjp, and keep no more than the activations that it needs."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jax5d.parallel.halves import halve


def layers(params, x, m):
    """Two layers of tanh(x W) with W cast, and a mask that depends on `m` alone; loss and statistic beside."""

    def layer(x, w):
        mask = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), m), 0.5, x.shape)
        return jnp.tanh(x @ w.astype(x.dtype)) * mask.astype(x.dtype), None

    y, _ = jax.lax.scan(layer, x, params["w"])
    return (y, {"square": jnp.sum(y * y)}), {"count": jnp.int32(7)}


def example():
    w = jax.random.normal(jax.random.key(1), (2, 4, 4))
    return {"w": w}, jax.random.normal(jax.random.key(2), (3, 4)), jnp.int32(5)


def test_halves_are_the_vjp():
    params, x, m = example()
    halves = halve(layers, params, x, m)
    d_out = jnp.ones((3, 4)), {"square": jnp.float32(0.5)}
    out, stats, saved = halves.forward(params, x, m)
    found = halves.backward(params, m, saved, d_out)
    expected, vjp, _ = jax.vjp(lambda p, x: layers(p, x, m), params, x, has_aux=True)
    chex.assert_trees_all_close(out, expected, rtol=1e-6)
    chex.assert_trees_all_close(found, vjp(d_out), rtol=1e-6)
    assert stats == {"count": 7}


def test_what_is_kept():
    """Only values of the activations' shape, [3, 4] in each layer: no weight [4, 4], and no mask."""
    params, x, m = example()
    halves = halve(layers, params, x, m)
    _, vjp, _ = jax.vjp(lambda p, x: layers(p, x, m), params, x, has_aux=True)
    whole = [leaf.shape for leaf in jax.tree.leaves(vjp)]
    assert (2, 4, 4) in whole, "left alone, the vjp keeps the weights"
    assert {kind.shape[-2:] for kind in halves.saved} == {(3, 4)}
    assert {kind.dtype for kind in halves.saved} == {jnp.dtype("float32")}, "a mask is made again from its key"
    assert len(halves.saved) < len(whole)
    assert [kind.shape for kind in halves.saved] == [s.shape for s in halves.forward(params, x, m)[2]]
