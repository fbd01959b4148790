"""The ledger against sums done by hand, and the step's ledger against the theory of `jax5d.costs`."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny import config, name, trainer

from jax5d.config import MeshConfig, RunConfig
from jax5d.costs.collectives import Collective
from jax5d.costs.communication import StepTraffic
from jax5d.measure.ledger import ledger
from jax5d.mesh import make_mesh


def mapped(body: Callable[..., Any], **mesh: int) -> Callable[..., Any]:
    """`body` on a mesh, without checks of replication: only what it sends matters."""
    sizes = MeshConfig(**mesh)
    devices = make_mesh(sizes, jax.devices()[: sizes.size])
    return jax.jit(jax.shard_map(body, mesh=devices, in_specs=P(), out_specs=P(), check_vma=False))


def test_collectives_counted_by_hand() -> None:
    """pp 2, tp 4. A loop of 5 sums 4 x 8 floats over tp and sends them on over pp; then each of the others once.

    psum: 5 x 128 bytes, 2 x 3/4 of them on the wire. ppermute of one pair: half the devices send 128. all_gather of
    32 floats over 8 devices: 7 shards. psum_scatter of 32 int16: 3/4 of 64. all_to_all of 32 floats: 3/4.
    """

    def body(x: jax.Array) -> Any:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x = lax.psum(x, "tp")
            lax.psum(x, "dp")  # of one device: moves nothing
            return lax.ppermute(x, "pp", [(0, 1)]), None

        x, _ = lax.scan(step, x, length=5)
        lax.psum(x, "pp")  # unused: dead code
        small = lax.psum_scatter(x.astype(jnp.int16), "tp", tiled=True)
        return lax.all_gather(x, ("pp", "tp")), small, lax.all_to_all(x, "tp", 0, 0, tiled=True), lax.pmax(x, "pp")

    assert ledger(mapped(body, pp=2, tp=4), jnp.zeros((4, 8))) == sorted(
        [
            Collective("psum", ("tp",), 5, 5 * 128, Fraction(5 * 128 * 2 * 3, 4)),
            Collective("ppermute", ("pp",), 5, 5 * 128, Fraction(5 * 128, 2)),
            Collective("all_gather", ("pp", "tp"), 1, 128, Fraction(7 * 128)),
            Collective("psum_scatter", ("tp",), 1, 64, Fraction(48)),
            Collective("all_to_all", ("tp",), 1, 128, Fraction(96)),
            Collective("pmax", ("pp",), 1, 128, Fraction(128)),
        ]
    )


def test_nested_loops_multiply() -> None:
    """3 x 4 sums in a loop inside a loop, of a tuple of two arrays of 2 and 3 floats: 24 entries."""

    def inner(x: Any, _: None) -> Any:
        return lax.psum(x, "dp"), None

    def outer(x: Any, _: None) -> Any:
        return lax.scan(inner, x, length=4)[0], None

    body = lambda x: lax.scan(outer, (x, jnp.ones(3)), length=3)[0]  # noqa: E731
    assert ledger(mapped(body, dp=2), jnp.zeros(2)) == [Collective("psum", ("dp",), 24, 12 * 20, Fraction(12 * 20))]


def test_what_cannot_be_counted_is_refused() -> None:
    """A loop whose length is not known, and branches that send different things."""
    endless = lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: lax.psum(x, "dp"), x)  # noqa: E731
    with pytest.raises(NotImplementedError, match="unknown length"):
        ledger(mapped(endless, dp=2), jnp.ones(2))
    fork = lambda x: lax.cond(x[0] > 0, lambda: lax.psum(x, "dp"), lambda: x)  # noqa: E731
    with pytest.raises(NotImplementedError, match="branches"):
        ledger(mapped(fork, dp=2), jnp.ones(2))
    same = lambda x: lax.cond(x[0] > 0, lambda: lax.psum(x, "dp"), lambda: lax.psum(2 * x, "dp"))  # noqa: E731
    assert [e.count for e in ledger(mapped(same, dp=2), jnp.ones(2))] == [1]


def of_step(run: RunConfig) -> list[Collective]:
    """The ledger of a training step; nothing is computed."""
    proof = trainer(run)
    return ledger(proof.step, *proof.arguments)


FIVE = {"pp": 2, "dp": 2, "ep": 2, "cp": 2, "tp": 2}

STEPS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {"microbatches": 2}),
    ({"dp": 4}, {"remat": "full", "reduction": "leaf"}),
    ({"ep": 2}, {"microbatches": 2, "sequence": True, "reduction": "single", "accumulate": "bfloat16"}),
    ({"cp": 4}, {"microbatches": 2, "remat": "full", "loss_chunks": 3, "all_reduce": "ring"}),
    ({"cp": 2}, {"remat": "selective", "all_reduce": "two_way_ring", "reduction": "bucket", "bucket_mb": 0.05}),
    ({"dp": 2, "cp": 2}, {"all_reduce": "two_level", "inner": 2}),
    ({"tp": 2, "dp": 2}, {"remat": "full", "save": ("qkv", "mlp_in"), "reduction": "bucket", "bucket_mb": 0.05}),
    ({"tp": 2}, {"microbatches": 2}),
    ({"tp": 4}, {"sequence": True, "remat": "full", "dtype": "bfloat16"}),
    ({"tp": 4, "dp": 2}, {"sequence": True, "overlap": True, "kv_heads": 2, "seq_len": 12}),
    ({"tp": 4, "pp": 2}, {"sequence": True, "overlap": True, "remat": "full", "save": (), "kv_heads": 1}),
    ({"pp": 4}, {"microbatches": 2, "schedule": "afab"}),
    ({"pp": 2, "tp": 2}, {"microbatches": 4, "loss_chunks": 3, "vocab": 97, "dtype": "bfloat16"}),
    ({"dp": 2, "ep": 2, "tp": 2}, {"sequence": True, "dropout": 0.1}),
    (FIVE, {"microbatches": 2}),
    (FIVE, {"microbatches": 2, "sequence": True, "remat": "full", "schedule": "afab", "loss_chunks": 3}),
]


@pytest.mark.parametrize("moe", [False, True], ids=["gpt2", "moe"])
@pytest.mark.parametrize(("mesh", "options"), STEPS, ids=[name(mesh) for mesh, _ in STEPS])
def test_step_equals_theory(mesh: dict[str, int], options: dict[str, Any], moe: bool) -> None:
    """Every collective of a step, op by op, count by count, byte by byte."""
    run = config(mesh, moe=moe, **options)
    assert of_step(run) == StepTraffic(run).table()


LLAMA: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"cp": 2, "tp": 2}, {"remat": "full", "tied": False, "dtype": "float16"}),
    ({"pp": 2, "tp": 2}, {"sequence": True, "microbatches": 4, "vocab": 97, "tied": False}),
    ({"cp": 2, "tp": 4}, {"sequence": True, "overlap": True, "kv_heads": 2, "remat": "selective"}),
    ({"cp": 2, "tp": 2, "dp": 2}, {"kv_heads": 1, "reduction": "bucket", "bucket_mb": 0.05}),
    (FIVE, {"sequence": True, "remat": "full", "dropout": 0.1}),
]


@pytest.mark.parametrize(("mesh", "options"), LLAMA, ids=[name(mesh) for mesh, _ in LLAMA])
def test_step_of_llama_equals_theory(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Other layers, the same collectives: only the leaves that are reduced differ."""
    run = config(mesh, architecture="llama", **options)
    assert of_step(run) == StepTraffic(run).table()


CUBE = {"pp": 2, "dp": 2, "tp": 2}
DATA = {"ep": 2, "dp": 2, "cp": 2}
EACH = (1, 2, 3)
ZERO: dict[str, tuple[tuple[int, ...], dict[str, int], dict[str, Any]]] = {
    "dp8": (EACH, {"dp": 8}, {}),
    "sequence": (EACH, {"dp": 4, "tp": 2}, {"sequence": True, "remat": "full"}),
    "1f1b": (EACH, CUBE, {"microbatches": 4, "dtype": "bfloat16"}),
    "afab": (EACH, CUBE, {"microbatches": 4, "schedule": "afab"}),
    "five axes": (EACH, FIVE, {"moe": True, "microbatches": 2, "sequence": True, "remat": "full"}),
    "experts": (EACH, DATA, {"moe": True, "remat": "full", "save": ("qkv", "mlp_in")}),
    "over cp and dp": (EACH, DATA, {"zero_axes": ("cp", "dp"), "microbatches": 2}),
    "zeros behind": (EACH, {"dp": 4}, {"d_model": 30, "heads": 2, "vocab": 97, "microbatches": 2}),
    "16 bits": (EACH, {"dp": 2}, {"dtype": "bfloat16", "accumulate": "bfloat16", "remat": "full", "save": ()}),
    "experts over ep": ((1, 3), DATA, {"moe": True, "zero_axes": ("ep",)}),
    "over dp": ((2,), DATA, {"zero_axes": ("dp",)}),
    "along nothing": ((2,), {"cp": 2}, {"zero_axes": ("dp", "ep")}),
    "one device": ((3,), {}, {"microbatches": 2}),
    "one layer a stage": ((3,), {"pp": 4, "dp": 2}, {"microbatches": 2}),
    "kept": ((3,), CUBE, {"regather": False, "microbatches": 2}),
    "llama": ((3,), {"dp": 2}, {"architecture": "llama", "remat": "selective", "dropout": 0.1, "tied": False}),
    "shared heads": (EACH, {"dp": 2, "tp": 4}, {"kv_heads": 2, "sequence": True, "overlap": True, "remat": "full"}),
}


@pytest.mark.parametrize(
    ("case", "zero"), [(case, zero) for case, (stages, *_) in ZERO.items() for zero in stages], ids=str
)
def test_step_of_zero_equals_theory(case: str, zero: int) -> None:
    """Gathers and scatters of every stage, and what is still summed."""
    _, mesh, options = ZERO[case]
    run = config(mesh, zero=zero, **options)
    assert of_step(run) == StepTraffic(run).table()


def test_traffic_of_zero_by_hand() -> None:
    """dp 4, 2 layers of 12 d^2 + 13 d parameters; all divide by 4, so 3 N bytes are (n-1)/n K.

    Stages 1 and 2 scatter N and gather N: as many bytes as a sum of N. Stage 3 gathers N for the forward pass; then the
    layer before the last, as the last is there, and the first once more, since the loop runs ahead. Biases, which the
    backward pass does not read, come in one message with the norms' scales, which it does.
    """
    d = 32
    layer = 12 * d * d + 13 * d
    n = (96 + 32 + 2) * d + 2 * layer
    sent = []
    for zero in range(4):
        run = config({"dp": 4}, layers=2, zero=zero)
        found = {entry.op: int(entry.wire_bytes) for entry in of_step(run)}
        sent.append((found.get("psum_scatter", 0), found.get("all_gather", 0)))
        assert (found["psum"] > 2 * 3 * n) == (zero == 0)
    assert sent == [(0, 0), (3 * n, 3 * n), (3 * n, 3 * n), (3 * n, 3 * n + 2 * 3 * layer)]


def test_step_with_capacity_equals_theory() -> None:
    """An expert's slots follow from the capacity: ceil(1.0 x 8 x 2 / 4) = 4 a group instead of 8."""
    run = config(FIVE, moe=True, capacity_factor=1.0, group=8)
    assert of_step(run) == StepTraffic(run).table()


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("options", "sums"),
    [({}, 4 + 4 * 14), ({"reduction": "leaf"}, 18), ({"reduction": "bucket", "bucket_mb": 0.05}, 5 + 1 + 1)],
    ids=["overlap", "leaf", "bucket"],
)
def test_one_reduction_a_step(options: dict[str, Any], sums: int, microbatches: int) -> None:
    """dp 2: 54976 floats are summed once, whatever M; 2 x 1/2 of their bytes on the wire.

    18 leaves, 14 of them in each of 4 layers. 53120 floats are of leaves split over pp and tp, in 5 buckets of at most
    12500; 768 of leaves split over pp; positions and the final norm, 1088, are summed over pp too. Beside them loss and
    token count, and two squares for each of these three sets for the gradients' noise.
    """
    payload = 4 * 54976 + 2 * 4 + 3 * 8
    assert of_step(config({"dp": 2}, microbatches=microbatches, **options)) == [
        Collective("psum", ("dp",), sums + 2 + 3, payload, Fraction(payload))
    ]


def test_logits_are_not_gathered() -> None:
    """tp 4, 256 tokens: no all_gather at all, and over tp only what has no vocabulary dim.

    A sum of 256 x 32 floats: 1 embedding, 2 a layer forward and backward, 1 head's input; 256 x 2 for the loss; the
    norm's scalar. Largest logits: 256 floats of the maximum.
    """
    stream = 256 * 32 * 4
    entries = {(e.op, e.axes): (e.count, e.payload_bytes) for e in of_step(config({"tp": 4}))}
    streams = 1 + 2 * 4 + 2 * 4 + 1
    assert entries == {
        ("psum", ("tp",)): (streams + 2, streams * stream + 256 * 2 * 4 + 4),
        ("pmax", ("tp",)): (1, 256 * 4),
    }
