"""A pair of linear layers, each cut by columns or by rows: laid out, measured, and by theory.

Shapes: t devices of tp, n tokens; widths d in, h hidden, f out. Sizes of everything are float32's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.training import apart, less
from jax5d.config import MeshConfig
from jax5d.costs.collectives import Collective, merge
from jax5d.measure.ledger import ledger
from jax5d.mesh import make_mesh
from jax5d.parallel.data import is_spec
from jax5d.parallel.linear import Cut, Layout, linear

Tree = Any
Activation = Callable[[jax.Array], jax.Array]

COUNTS = (1, 2, 4, 8)
"""Numbers of devices t, as far as the mesh has them."""
FLOAT = 4
"""Bytes of a float32."""

ACTIVATIONS: dict[Layout, P] = {"whole": P(), "split": P(None, "tp")}
WEIGHTS: dict[Cut, P] = {"columns": P(None, "tp"), "rows": P("tp")}
BIASES: dict[Layout, P] = {"whole": P(), "split": P("tp")}

ENTER: dict[tuple[Cut, Layout], tuple[str, str]] = {
    ("columns", "whole"): ("", "psum"),
    ("columns", "split"): ("all_gather", "psum_scatter"),
    ("rows", "whole"): ("", "all_gather"),
    ("rows", "split"): ("", ""),
}
"""Theory: what bringing the input sends forward and backward, by the weight's cut and by how the input lies."""
LEAVE: dict[tuple[Cut, Layout], tuple[str, str]] = {
    ("columns", "split"): ("", ""),
    ("columns", "whole"): ("all_gather", ""),
    ("rows", "whole"): ("psum", ""),
    ("rows", "split"): ("psum_scatter", "all_gather"),
}
"""And bringing the output, by how it is to lie."""


class Widths(NamedTuple):
    """Of a pair of layers, and the tokens that go through it."""

    n: int
    d: int
    h: int
    f: int


class Hop(NamedTuple):
    """One collective of theory, over all of tp."""

    stage: str
    """start, between or end."""
    backward: bool
    op: str
    whole: int
    """Bytes of the whole array that it gathers or sums."""

    def sent(self, t: int) -> Fraction:
        """Bytes that a device sends."""
        return (2 if self.op == "psum" else 1) * Fraction(t - 1, t) * self.whole

    def collective(self, t: int) -> Collective:
        """As the ledger has it: the operand of an all_gather is a piece."""
        payload = self.whole // t if self.op == "all_gather" else self.whole
        return Collective(self.op, ("tp",), 1, payload, self.sent(t))


@dataclass(frozen=True)
class Pair:
    """How two layers are cut, and how what goes in, between and out of them lies."""

    first: Cut
    second: Cut
    given: Layout
    left: Layout

    @property
    def name(self) -> str:
        """Such as columns, rows."""
        return f"{self.first}, {self.second}"

    @property
    def middle(self) -> Layout:
        """Of what is between the layers: split, unless partial sums of it are needed as whole columns' input.

        There a psum sends what a psum_scatter and an all_gather would send, in one message.
        """
        return "whole" if (self.first, self.second) == ("rows", "columns") else "split"

    @property
    def params(self) -> dict[str, P]:
        """Specs of weights and biases; a bias lies as the output that it is added to."""
        return {
            "w1": WEIGHTS[self.first],
            "b1": BIASES[self.middle],
            "w2": WEIGHTS[self.second],
            "b2": BIASES[self.left],
        }

    def __call__(self, x: jax.Array, params: dict[str, jax.Array], activation: Activation) -> jax.Array:
        """activation(x W1 + b1) W2 + b2, inside a shard_map: [n, d] -> [n, f], whole or split."""
        w1, b1, w2, b2 = (params[key] for key in ("w1", "b1", "w2", "b2"))
        hidden = activation(linear(x, w1, b1, cut=self.first, given=self.given, left=self.middle))
        return linear(hidden, w2, b2, cut=self.second, given=self.middle, left=self.left)

    def hops(self, widths: Widths) -> list[Hop]:
        """Theory: every collective, forward and backward."""
        n, d, h, f = widths
        steps = (
            ("start", ENTER[self.first, self.given], d),
            ("between", LEAVE[self.first, self.middle], h),
            ("between", ENTER[self.second, self.middle], h),
            ("end", LEAVE[self.second, self.left], f),
        )
        found = [Hop(stage, bool(i), ops[i], FLOAT * n * width) for stage, ops, width in steps for i in (0, 1)]
        return [hop for hop in found if hop.op]

    def kept(self, widths: Widths, t: int) -> int:
        """Theory: bytes on a device that the backward pass of a pair needs, both weights among them.

        What enters each product and what enters the activation, whole or 1/t of it.
        """
        n, d, h, f = widths
        parts = {"columns": 1, "rows": t}
        x, hidden = d // parts[self.first], h // parts[self.second]
        before = h // (t if self.middle == "split" else 1)
        return FLOAT * (n * (x + before + hidden) + h * (d + f) // t)


def natural(first: Cut, second: Cut) -> Pair:
    """Columns take their input whole and leave their output split, rows the other way: each as its cut needs it."""
    return Pair(first, second, "whole" if first == "columns" else "split", "split" if second == "columns" else "whole")


def streamed(first: Cut, second: Cut) -> Pair:
    """Input and output whole, as a residual stream that is replicated over tp."""
    return Pair(first, second, "whole", "whole")


CUTS: tuple[Cut, ...] = ("columns", "rows")
ORDERS = tuple(product(CUTS, CUTS))


class Problem(NamedTuple):
    """Global arrays of float32, and what one device makes of them."""

    x: np.ndarray
    params: dict[str, np.ndarray]
    target: np.ndarray
    activation: Activation
    answer: dict[str, np.ndarray]
    """The output `y` and the gradients of half the squared distance to the target, by name, and that as `loss`."""


def draw(seed: int, widths: Widths, activation: Activation) -> Problem:
    """Weights that keep the variance, biases of the size of what they are added to; solved by the plain layers."""
    random = np.random.default_rng(seed)
    n, d, h, f = widths
    params = {
        "w1": random.standard_normal((d, h), np.float32) / np.float32(d**0.5),
        "b1": random.standard_normal(h, np.float32),
        "w2": random.standard_normal((h, f), np.float32) / np.float32(h**0.5),
        "b2": random.standard_normal(f, np.float32),
    }
    x, target = random.standard_normal((n, d), np.float32), random.standard_normal((n, f), np.float32)

    def distance(x: jax.Array, params: Tree) -> tuple[jax.Array, jax.Array]:
        hidden = activation(x @ params["w1"] + params["b1"][None])
        y = hidden @ params["w2"] + params["b2"][None]
        return jnp.sum((y - target) ** 2) / 2, y

    grads, y = jax.jit(jax.grad(distance, (0, 1), has_aux=True))(x, params)
    answer = {key: np.asarray(value) for key, value in {"y": y, "x": grads[0], **grads[1]}.items()}
    return Problem(x, params, target, activation, answer)


@dataclass(frozen=True)
class Row:
    """One pair on t devices, measured."""

    pair: Pair
    t: int
    widths: Widths
    forward: list[Collective]
    backward: list[Collective]
    kept: int
    """Bytes on a device of what the forward pass leaves for the backward pass."""
    error: dict[str, float]
    """See `apart`; of the output and of each gradient."""
    loss: float
    """Relative difference from one device's."""

    def theory(self, *, backward: bool) -> list[Collective]:
        """Of one pass."""
        hops = self.pair.hops(self.widths) if self.t > 1 else []
        return merge(hop.collective(self.t) for hop in hops if hop.backward == backward)

    @property
    def differing(self) -> int:
        """Collectives that are not theory's."""
        passes = ((self.forward, False), (self.backward, True))
        return sum(len(set(found) ^ set(self.theory(backward=b))) for found, b in passes)


def measure(pair: Pair, t: int, problem: Problem) -> Row:
    """Run a pair on the first t devices."""
    mesh = make_mesh(MeshConfig(tp=t), jax.devices()[:t])
    specs = (ACTIVATIONS[pair.given], pair.params)
    out = ACTIVATIONS[pair.left]
    kept: list[int] = []

    def apply(x: jax.Array, params: Tree) -> jax.Array:
        return pair(x, params, problem.activation)

    def step(x: jax.Array, params: Tree, target: jax.Array) -> tuple:
        y, vjp = jax.vjp(apply, x, params)
        arrays = {id(leaf): leaf for leaf in jax.tree.leaves(vjp)}  # an array that two operations need is kept once
        kept.append(sum(leaf.size * leaf.dtype.itemsize for leaf in arrays.values()))
        return y, *vjp(y - target)

    forward = jax.jit(jax.shard_map(apply, mesh=mesh, in_specs=specs, out_specs=out))
    both = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*specs, out), out_specs=(out, *specs)))
    arrays = place(mesh, (problem.x, problem.params, problem.target), (*specs, out))
    sent, sent_by_both = ledger(forward, *arrays[:2]), ledger(both, *arrays)
    y, d_x, d_params = both(*arrays)
    found = {"y": y, "x": d_x, **d_params}
    ours, plain = (np.sum((np.asarray(a, np.float64) - problem.target) ** 2) for a in (y, problem.answer["y"]))
    return Row(
        pair,
        t,
        Widths(*problem.x.shape, *problem.params["w2"].shape),
        forward=sent,
        backward=less(sent_by_both, sent),
        kept=kept[0],
        error={key: apart(value, problem.answer[key]) for key, value in found.items()},
        loss=float(abs(ours / plain - 1)),
    )


def place(mesh: jax.sharding.Mesh, arrays: Tree, specs: Tree) -> Tree:
    """Arrays on a mesh, each by its spec."""
    return jax.device_put(arrays, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec))
