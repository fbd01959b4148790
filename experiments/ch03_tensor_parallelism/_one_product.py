"""One matrix product Y = X W on n devices, W cut by columns, by rows, or by both: measured, and by theory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from experiments.ch03_tensor_parallelism._pairs import FLOAT, place
from experiments.training import apart, less
from jax5d.config import MeshConfig
from jax5d.costs.collectives import Collective
from jax5d.measure.ledger import ledger
from jax5d.mesh import make_mesh
from jax5d.parallel.data import spec_axes
from jax5d.parallel.linear import product, product_2d

ARRAYS = ("W", "X", "Y")


class Shape(NamedTuple):
    """X is [n, d], W [d, f]."""

    n: int
    d: int
    f: int


@dataclass(frozen=True)
class Way:
    """How W is cut: into rows x columns pieces."""

    name: str
    mesh: MeshConfig
    specs: tuple[P, P, P]
    """Of X, W and Y."""
    apply: Callable[[jax.Array, jax.Array], jax.Array]
    rows: int
    """Pieces that the rows are cut into, over the axis that W's spec names first."""
    columns: int
    """Pieces that the columns are cut into, over tp."""

    def held(self, shape: Shape) -> dict[str, int]:
        """Theory: bytes on a device. X is cut as W's rows are, Y as its columns are."""
        n, d, f = shape
        return {
            "W": FLOAT * d * f // (self.rows * self.columns),
            "X": FLOAT * n * d // self.rows,
            "Y": FLOAT * n * f // self.columns,
        }

    def sums(self, shape: Shape) -> tuple[list[Collective], list[Collective]]:
        """Theory: Y is summed over the pieces of the rows forward, dX over those of the columns backward."""
        held, row_axis = self.held(shape), spec_axes(self.specs[1])[0]
        return _sum(row_axis, self.rows, held["Y"]), _sum("tp", self.columns, held["X"])


def _sum(axis: str, n: int, size: int) -> list[Collective]:
    return [Collective("psum", (axis,), 1, size, Fraction(2 * (n - 1), n) * size)] if n > 1 else []


def ways(n: int) -> list[Way]:
    """The ways to cut W into n pieces; by both where n has two factors, the rows into 2."""
    whole, features = P(), P(None, "tp")
    columns = partial(product, cut="columns", given="whole", left="split")
    rows = partial(product, cut="rows", given="split", left="whole")
    found = [
        Way("columns", MeshConfig(tp=n), (whole, features, features), columns, rows=1, columns=n),
        Way("rows", MeshConfig(tp=n), (features, P("tp"), whole), rows, rows=n, columns=1),
    ]
    if n >= 4:
        specs = P(None, "cp"), P("cp", "tp"), features
        found.append(Way(f"2 x {n // 2}", MeshConfig(cp=2, tp=n // 2), specs, product_2d, rows=2, columns=n // 2))
    return found


@dataclass(frozen=True)
class Row:
    """One way on n devices, measured."""

    way: Way
    n: int
    shape: Shape
    held: dict[str, list[int]]
    """Bytes of each array on every device."""
    forward: list[Collective]
    backward: list[Collective]
    error: dict[str, float]
    """Of Y and both gradients: see `apart`."""

    @property
    def unlike(self) -> int:
        """Devices and arrays whose bytes are not theory's."""
        theory = self.way.held(self.shape)
        return sum(size != theory[name] for name, sizes in self.held.items() for size in sizes)

    @property
    def differing(self) -> int:
        """Collectives that are not theory's."""
        theory = self.way.sums(self.shape)
        return sum(len(set(a) ^ set(b)) for a, b in zip((self.forward, self.backward), theory, strict=True))


def draw(seed: int, shape: Shape) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """X, W and the derivative by Y; and Y and both gradients by one device."""
    random = np.random.default_rng(seed)
    n, d, f = shape
    x, w, d_y = (random.standard_normal(dims, np.float32) for dims in ((n, d), (d, f), (n, f)))
    w /= np.float32(d**0.5)

    def plain(x: jax.Array, w: jax.Array, d_y: jax.Array) -> tuple:
        y, vjp = jax.vjp(jax.numpy.matmul, x, w)
        return y, *vjp(d_y)

    return [x, w, d_y], dict(zip(("Y", "dX", "dW"), map(np.asarray, jax.jit(plain)(x, w, d_y)), strict=True))


def measure(way: Way, arrays: list[np.ndarray], answer: dict[str, np.ndarray]) -> Row:
    """Run a way on as many devices as it has pieces."""
    n = way.mesh.size
    mesh = make_mesh(way.mesh, jax.devices()[:n])
    x_spec, w_spec, y_spec = way.specs

    def step(x: jax.Array, w: jax.Array, d_y: jax.Array) -> Any:
        y, vjp = jax.vjp(way.apply, x, w)
        return y, *vjp(d_y)

    forward = jax.jit(jax.shard_map(way.apply, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=way.specs, out_specs=(y_spec, x_spec, w_spec))
    x, w, d_y = place(mesh, tuple(arrays), way.specs)
    sent = ledger(forward, x, w)
    y, d_x, d_w = jax.jit(mapped)(x, w, d_y)
    return Row(
        way,
        n,
        Shape(*arrays[0].shape, *arrays[1].shape[1:]),
        held={name: [s.data.nbytes for s in a.addressable_shards] for name, a in zip(ARRAYS, (w, x, y), strict=True)},
        forward=sent,
        backward=less(ledger(mapped, x, w, d_y), sent),
        error={name: apart(a, answer[name]) for name, a in {"Y": y, "dX": d_x, "dW": d_w}.items()},
    )
