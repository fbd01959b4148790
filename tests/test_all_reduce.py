"""The ring all-reduces against NumPy: sums, order of additions, the same bits on every device, bytes by hand."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import name

from jax5d.config import MeshConfig
from jax5d.costs.collectives import Collective
from jax5d.measure.ledger import ledger
from jax5d.mesh import make_mesh
from jax5d.parallel.ring import ring_all_reduce, two_level_all_reduce, two_way_ring_all_reduce

AllReduce = Callable[[jax.Array, tuple[str, ...]], jax.Array]

DTYPES = ("float32", "bfloat16", "float16", "int32")
SHAPES = ((), (7,), (4, 16), (1000,))
MESHES = [{"dp": n} for n in (1, 2, 3, 4, 8, 16)] + [
    {"dp": 4, "cp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 2, "dp": 3, "cp": 2, "tp": 2},
]
WAYS: dict[str, AllReduce] = {"ring": ring_all_reduce, "two_way": two_way_ring_all_reduce}


def two_level(inner: int) -> AllReduce:
    return partial(two_level_all_reduce, inner=inner)


def program(all_reduce: AllReduce, mesh: dict[str, int], axes: tuple[str, ...]) -> Callable[..., Any]:
    """All-reduces arrays [pp, dp, cp, tp, ...], one entry of which is a device's, to [pp, tp, ...]."""
    sizes = MeshConfig(**mesh)
    devices = make_mesh(sizes, jax.devices()[: sizes.size])

    def body(tree: Any) -> Any:
        return jax.tree.map(lambda x: all_reduce(x[0, 0, 0, 0], axes)[None, None], tree)

    split = P("pp", *(a if a in axes else None for a in ("dp", "cp")), "tp")
    return jax.jit(jax.shard_map(body, mesh=devices, in_specs=split, out_specs=P("pp", "tp")))


def contributions(mesh: dict[str, int]) -> dict[str, np.ndarray]:
    """Numbers below 100 of every dtype and shape, [pp, dp, cp, tp, ...]: the sums of integers are exact."""
    draw = np.random.default_rng(0)
    devices = tuple(mesh.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    arrays = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            numbers = draw.uniform(-100, 100, devices + shape)
            arrays[f"{dtype}{shape}"] = np.asarray(jnp.asarray(numbers.astype(np.float32)).astype(dtype))
    return arrays


def added(parts: np.ndarray, turn: int) -> np.ndarray:
    """The sum of `parts` [n, n, c], devices first, as a ring adds up: chunk r from the device after r round to r."""
    n = len(parts)
    total = np.empty_like(parts[0])
    for r in range(n):
        first, *others = [(r + turn * k) % n for k in range(1, n + 1)]
        total[r] = parts[first, r]
        for device in others:
            total[r] = total[r] + parts[device, r]
    return total


def expected(way: str, parts: np.ndarray) -> np.ndarray:
    """`parts` [n, ...] summed in the order that the docstrings state: of two ways, the second one backwards."""
    n, shape = len(parts), parts.shape[1:]
    flat = parts.reshape(n, -1)
    turns = (1,) if way == "ring" else (1, -1)
    c = -(-flat.shape[1] // (n * len(turns)))
    padded = np.zeros((n, len(turns) * n * c), parts.dtype)
    padded[:, : flat.shape[1]] = flat
    halves = padded.reshape(n, len(turns), n, c)
    total = np.stack([added(halves[:, i], turn) for i, turn in enumerate(turns)])
    return total.reshape(-1)[: flat.shape[1]].reshape(shape)


def assert_everywhere(got: jax.Array, want: np.ndarray) -> None:
    """Each device holds its part of `want`, bit by bit."""
    assert got.dtype == want.dtype
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index], strict=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_sum_in_the_stated_order(mesh: dict[str, int], way: str) -> None:
    """Every dtype and shape, also smaller than n; groups along pp and tp each on their own; to the bit."""
    axes = ("dp", "cp") if "cp" in mesh else ("dp",)
    arrays = contributions(mesh)
    got = program(WAYS[way], mesh, axes)(arrays)
    for key, x in arrays.items():
        pp, dp, cp, tp, *shape = x.shape
        want = np.empty((pp, tp, *shape), x.dtype)
        for i in range(pp):
            for j in range(tp):
                want[i, j] = expected(way, x[i, :, :, j].reshape(dp * cp, *shape))
        assert_everywhere(got[key], want)


@pytest.mark.parametrize(
    ("mesh", "inner"),
    [({"dp": n}, i) for n, i in ((1, 1), (4, 1), (4, 4), (8, 2), (8, 4), (6, 3), (16, 4))]
    + [({"dp": 4, "cp": 2}, 2), ({"pp": 2, "dp": 4, "tp": 2}, 2)],
    ids=str,
)
def test_two_levels(mesh: dict[str, int], inner: int) -> None:
    """Integers exactly, floats within n roundings of the largest partial sum; every device the same bits."""
    axes = ("dp", "cp") if "cp" in mesh else ("dp",)
    arrays = contributions(mesh)
    got = program(two_level(inner), mesh, axes)(arrays)
    n = mesh["dp"] * mesh.get("cp", 1)
    for key, x in arrays.items():
        want = x.astype(np.float64).sum(axis=(1, 2))
        limit = 0 if x.dtype == np.int32 else float(jnp.finfo(x.dtype).eps) * n * 100 * n
        np.testing.assert_allclose(np.asarray(got[key]).astype(np.float64), want, rtol=0, atol=limit)
        assert_everywhere(got[key], np.asarray(got[key]))


def test_two_levels_add_inside_the_host_first() -> None:
    """4 devices hold 33, 33, 2^30 and -2^30 in float32, whose spacing is 128 above 2^30 and 64 below.

    Hosts of 2: (33 + 33) + 0 in each chunk. One ring, chunk 0: 33 + 2^30 is 2^30, less 2^30 is 0, + 33. Chunk 1: 0 +
    33 + 33. Chunk 2: -2^30 + 33 is -2^30 + 64, + 33 is -2^30 + 128. Chunk 3: 66 + 2^30 is 2^30 + 128.
    """
    x = np.float32([33, 33, 2**30, -(2**30)])[None, :, None, None, None].repeat(4, axis=-1)
    hosts = program(two_level(2), {"dp": 4}, ("dp",))(x)
    assert_everywhere(hosts, np.full((1, 1, 4), 66, np.float32))
    ring = program(ring_all_reduce, {"dp": 4}, ("dp",))(x)
    assert_everywhere(ring, np.float32([[[33, 66, 128, 128]]]))


def test_order_of_axes_does_not_matter() -> None:
    x = np.arange(8 * 5, dtype=np.int32).reshape(1, 4, 2, 1, 5)
    got = program(ring_all_reduce, {"dp": 4, "cp": 2}, ("cp", "dp"))(x)
    assert_everywhere(got, x.sum(axis=(1, 2), dtype=np.int32))


def test_an_array_that_all_devices_share_counts_n_times() -> None:
    """As psum of it."""
    mesh = make_mesh(MeshConfig(dp=4), jax.devices()[:4])
    body = lambda x: ring_all_reduce(x, ("dp",))  # noqa: E731
    got = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P()))(jnp.arange(6))
    assert_everywhere(got, 4 * np.arange(6, dtype=np.int32))


def test_bfloat16_is_rounded_at_each_step() -> None:
    """Device 0 of 16 holds 256, the others 1; between 256 and 512 bfloat16 has the even numbers, ties to 4 k.

    Chunk r first adds the 15 - r ones of the devices after r, exactly, then 256, then the ones of 1 .. r, each
    rounded. In float32 every chunk is 271, and rounds to 272 once.
    """
    even = lambda v: 2 * round(v / 2)  # noqa: E731  (Python rounds halves to even)
    want = []
    for r in range(16):
        total = even(15 - r + 256)
        for _ in range(r):
            total = even(total + 1)
        want.append(total)
    x = np.ones((1, 16, 1, 1, 16), jnp.bfloat16)
    x[:, 0] = 256

    def both(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jnp.stack([ring_all_reduce(x, axes), ring_all_reduce(x.astype(jnp.float32), axes).astype(x.dtype)])

    rounded, exact = np.asarray(program(both, {"dp": 16}, ("dp",))(x))[0, 0].astype(np.float32)
    np.testing.assert_array_equal(rounded, np.float32(want))
    np.testing.assert_array_equal(exact, np.full(16, 272, np.float32))
    assert min(want) == 256 < max(want) == 272


def sent(all_reduce: AllReduce, mesh: dict[str, int], axes: tuple[str, ...], dtype: str, size: int) -> list[Collective]:
    devices = tuple(mesh.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    return ledger(program(all_reduce, mesh, axes), jax.ShapeDtypeStruct((*devices, size), dtype))


@pytest.mark.parametrize(
    ("all_reduce", "mesh", "dtype", "size", "count", "payload"),
    [
        (ring_all_reduce, {"dp": 2}, "float32", 64, 2, 2 * 32 * 4),
        (ring_all_reduce, {"dp": 8}, "float32", 64, 14, 14 * 8 * 4),
        (ring_all_reduce, {"dp": 8}, "bfloat16", 1000, 14, 14 * 125 * 2),
        (ring_all_reduce, {"dp": 16}, "int32", 7, 30, 30 * 1 * 4),
        (ring_all_reduce, {"pp": 2, "dp": 3, "cp": 2, "tp": 2}, "float32", 100, 10, 10 * 17 * 4),
        (two_way_ring_all_reduce, {"dp": 8}, "float32", 64, 28, 28 * 4 * 4),
        (two_way_ring_all_reduce, {"dp": 4}, "float16", 1000, 12, 12 * 125 * 2),
        (two_level(4), {"dp": 8}, "float32", 64, 8, (6 * 16 + 2 * 8) * 4),
        (two_level(2), {"dp": 8}, "float32", 60, 8, (2 * 32 + 6 * 8) * 4),
    ],
)
def test_bytes_by_hand(
    all_reduce: AllReduce, mesh: dict[str, int], dtype: str, size: int, count: int, payload: int
) -> None:
    """2(n-1) steps of one chunk; two ways: twice as many of half; two levels: 2(i-1) large ones, 2(n/i - 1) small."""
    axes = tuple(a for a in ("dp", "cp") if a in mesh)
    entry = Collective("ppermute", axes, count, payload, Fraction(payload))
    assert sent(all_reduce, mesh, axes, dtype, size) == [entry]


def test_one_device_sends_nothing() -> None:
    for all_reduce in (*WAYS.values(), two_level(1)):
        assert sent(all_reduce, {"dp": 1}, ("dp",), "float32", 9) == []


@pytest.mark.parametrize("inner", [3, 0, 16])
def test_hosts_that_do_not_divide_are_refused(inner: int) -> None:
    with pytest.raises(ValueError, match=rf"inner={inner} .* 8 devices"):
        sent(two_level(inner), {"dp": 8}, ("dp",), "float32", 9)
