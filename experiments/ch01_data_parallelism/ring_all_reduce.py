"""The ring all-reduce, step by step: who holds what, what it sends, and where a tree beats it.

Claim: a ring of N devices sums their arrays in 2(N-1) steps, each of which sends one chunk; the result is psum's, the
same bits on every device, for 2(N-1)/N K bytes a device, which is the least possible.

    python run_experiment.py ring_all_reduce            about 20 seconds on 2 CPU cores: 16 fake devices
    python run_experiment.py ring_all_reduce --quick    12 seconds: 8

Expected: two rings that turn against each other, and rings inside and across hosts, send the same bytes. By the
alpha-beta model of H100s, trees win below the payload where the ring's 2(N-1) latencies weigh more than its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch01_data_parallelism._ring_figures import MODELLED, steps_figure, times_figure, tree_limit
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import wire_total
from jax5d.config import ConfigError, MeshConfig
from jax5d.measure.ledger import ledger
from jax5d.mesh import DATA_AXES, make_mesh
from jax5d.parallel import data
from jax5d.parallel.ring import (
    Ring,
    gather_step,
    reduce_step,
    ring_all_reduce,
    two_level_all_reduce,
    two_way_ring_all_reduce,
)

CAPSULES = [10]
CLAIM = "A ring sums what psum sums in 2(N-1) steps and 2(N-1)/N K bytes a device, the least possible"
NEEDS = "16 fake CPU devices and 20 seconds on 2 cores, or 2 GPUs or more"

DEFAULTS = Options(mesh=MeshConfig(dp=16))
QUICK = replace(DEFAULTS, mesh=MeshConfig(dp=8))

SIZES = (2, 3, 4, 8, 16)
"""Numbers of devices N, as far as the mesh has them."""
ELEMENTS = 96 * 2048
"""Of the array that is summed: a multiple of 2 N for each N, so that no chunk is padded."""

AllReduce = Callable[[jax.Array, tuple[str, ...]], jax.Array]


@dataclass(frozen=True)
class Row:
    """One way to sum over N devices, measured."""

    way: str
    n: int
    sends: int
    """Collectives in the program, each of which sends once."""
    sends_theory: int
    bytes: float
    """What a device sends."""
    wrong: int
    """Elements of integer sums, on any device, that are not NumPy's."""
    difference: float
    """Largest difference of a float32 sum from psum's, over what rounding in two orders can make."""
    other_bits: int
    """Devices that hold other bits than the first."""
    seconds: float
    """Of one float32 sum; the best of several."""


def check(options: Options, folder: Path) -> None:
    """Refuse a single device. The mesh only says how many devices there are to build rings of."""
    if options.mesh.size < 2:
        raise ConfigError(
            f"ring_all_reduce needs 2 devices or more, the mesh has {options.mesh.size}; write --mesh.dp 8"
        )


def run(options: Options, folder: Path, console: Console) -> Outcome:
    """Watch a ring of each size chunk by chunk, then compare the ways to sum."""
    sizes = [n for n in SIZES if n <= options.mesh.size]
    traces = {n: trace(n) for n in sizes}
    rows: list[Row] = []
    for n in track(sizes, description="rings", console=console, disable=not console.is_terminal):
        rows += _measure(n, np.random.default_rng(options.seed))
    shown = min(4, sizes[-1])
    save_figure(steps_figure(traces[shown]), folder, "steps")
    save_figure(times_figure(), folder, "times")
    cells = sum(_cells(held) for held in traces.values())
    checks = [Check.equal("chunks that at some step do not hold what theory says, all N", cells, 0), *_checks(rows)]
    metrics = {
        "steps": traces[shown],
        "rows": [vars(row) for row in rows],
        "tree_faster_below_bytes": {str(n): tree_limit(n) for n in MODELLED},
    }
    return Outcome(checks, metrics, [_table(rows)])


def trace(n: int) -> np.ndarray:
    """Which contributions each chunk holds: bit d is set where device d's is in. int32 [2n - 1, device, chunk].

    Every device contributes 2^d in each chunk, so that a partial sum is the set of those that it is made of.
    Entry 0 is the start, then come the steps, read from the devices.
    """
    ring = Ring(("dp",), n)

    def body() -> jax.Array:
        buffer = data.varying(jnp.ones((n, 1), jnp.int32), ring.axes) << ring.position()
        held = [buffer]
        for t in range(n - 1):
            held.append(reduce_step(held[-1], ring, t))
        for t in range(n - 1):
            held.append(gather_step(held[-1], ring, t))
        return jnp.stack(held)[:, None, :, 0]

    return np.asarray(jax.jit(jax.shard_map(body, mesh=_mesh(n), in_specs=(), out_specs=P(None, "dp")))())


def _cells(measured: np.ndarray) -> int:
    """How many chunks of a trace do not hold what theory says.

    Chunk j starts at device j + 1 and goes round to j, so after s steps device d = j + 1 + k has the contributions of
    j + 1 .. d if k <= s, and its own otherwise. Then the sum goes from j on: to j + 1 .. j + s in s steps.
    """
    _, n, _ = measured.shape
    wrong = 0
    for s, d, j in np.ndindex(2 * n - 1, n, n):
        k = (d - j - 1) % n
        first = d - k if k <= s else d
        held = sum(1 << device % n for device in range(first, d + 1))
        if s >= n and (d - j) % n <= s - (n - 1):
            held = (1 << n) - 1
        wrong += int(measured[s, d, j] != held)
    return wrong


def _mesh(n: int) -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(dp=n), jax.devices()[:n])


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    del axes  # of the mesh's axes only dp is larger than 1
    return data.sum_over_shards(data.varying(x, DATA_AXES))


def _ways(n: int) -> dict[str, tuple[AllReduce, int]]:
    """Name, function, and how many collectives it should be. Hosts are of n / 2 devices."""
    ways: dict[str, tuple[AllReduce, int]] = {
        "psum": (_psum, 1),
        "ring": (ring_all_reduce, 2 * (n - 1)),
        "two-way ring": (two_way_ring_all_reduce, 2 * 2 * (n - 1)),
    }
    if n >= 4:
        inner = n // 2
        ways[f"two levels, 2 x {inner}"] = (partial(two_level_all_reduce, inner=inner), 2 * (inner - 1) + 2)
    return ways


def _measure(n: int, draw: np.random.Generator) -> list[Row]:
    mesh = _mesh(n)
    floats = draw.standard_normal((n, ELEMENTS), np.float32)
    integers = draw.integers(-(10**6), 10**6, (n, ELEMENTS), np.int32)
    scale = 2 * (n - 1) * 2.0**-24 * np.abs(floats).sum(axis=0)  # each of n - 1 additions rounds by half a spacing
    arrays = jax.device_put((floats, integers), NamedSharding(mesh, P("dp")))
    rows, psum = [], np.empty(0)
    for way, (all_reduce, sends) in _ways(n).items():
        body = partial(_first, all_reduce)
        function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P()))
        entries = ledger(function, arrays[0])
        sums, whole = function(arrays[0]), function(arrays[1])
        copies = [np.asarray(shard.data) for shard in sums.addressable_shards]
        psum = copies[0] if way == "psum" else psum
        rows.append(
            Row(
                way,
                n,
                sends=sum(e.count for e in entries),
                sends_theory=sends,
                bytes=wire_total(entries),
                wrong=sum(int(np.sum(np.asarray(s.data) != integers.sum(axis=0))) for s in whole.addressable_shards),
                difference=float(np.max(np.abs(copies[0] - psum) / scale)),
                other_bits=sum(copy.tobytes() != copies[0].tobytes() for copy in copies),
                seconds=min(_seconds(function, arrays[0]) for _ in range(5)),
            )
        )
    return rows


def _first(all_reduce: AllReduce, x: jax.Array) -> jax.Array:
    return all_reduce(x[0], ("dp",))  # [1, ELEMENTS] on each device


def _seconds(function: Callable[..., Any], x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(x))
    return time.perf_counter() - start


def _checks(rows: list[Row]) -> list[Check]:
    """psum is what the others are compared with: its bytes are a formula already."""
    rings = [row for row in rows if row.way != "psum"]
    checks = []
    for row in rings:
        where = f"{row.way}, N={row.n}"
        checks += [
            Check.equal(f"{where}: times that a device sends", row.sends, row.sends_theory),
            Check.equal(f"{where}: bytes it sends, 2(N-1)/N K", row.bytes, _least(row.n)),
        ]
    return [
        *checks,
        Check.equal("elements of integer sums, anywhere, that are not NumPy's", sum(row.wrong for row in rings), 0),
        Check.below("difference from psum over the bound of rounding", max(row.difference for row in rings), 1),
        Check.equal("devices that hold other bits than the first", sum(row.other_bits for row in rings), 0),
    ]


def _least(n: int) -> float:
    """Bytes that a device must send, whatever the algorithm: 2(N-1)/N K."""
    return float(Fraction(2 * (n - 1), n) * ELEMENTS * 4)


def _table(rows: list[Row]) -> Table:
    columns = ("N", "way", "sends", "sent, MB", "least, MB", "ms here")
    table = Table(*columns, title=f"All-reduce of K = {ELEMENTS * 4 / 1e6:.3f} MB, per device")
    for row in rows:
        cells = (str(row.sends), f"{row.bytes / 1e6:.3f}", f"{_least(row.n) / 1e6:.3f}", f"{row.seconds * 1e3:.1f}")
        table.add_row(str(row.n), row.way, *cells)
    return table
