"""GPUs, number formats, links, rooflines, bubbles and hidden communication: arithmetic by hand, other libraries."""

from __future__ import annotations

import math
from dataclasses import astuple
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax5d.config import ConfigError
from jax5d.costs import hiding
from jax5d.costs.bubbles import SCHEDULES, bubble, idle_share, in_flight
from jax5d.costs.collectives import wire_bytes
from jax5d.costs.formats import FORMATS, round_to
from jax5d.costs.gpus import GPUS, gpu, gpu_of_kind
from jax5d.costs.links import (
    Link,
    all_gather,
    all_to_all,
    crossover,
    reduce_scatter,
    ring_all_reduce,
    tree_all_reduce,
    two_level_all_reduce,
)
from jax5d.costs.rooflines import Roofline
from jax5d.parallel.schedules import afab, one_f_one_b

CHIPS = {
    # SMs, float32 cores of an SM, tensor FMAs of an SM and clock, boost GHz of each; memory bits and Gb/s a pin; links
    "a100-40": (108, 64, 1024, 1.41, 1.41, 5120, 2.43, 12 * 25e9),
    "a100-80": (108, 64, 1024, 1.41, 1.41, 5120, 3.186, 12 * 25e9),
    "h100": (132, 128, 2048, 1.98, 1.83, 5120, 5.238, 18 * 25e9),
    "h200": (132, 128, 2048, 1.98, 1.83, 6144, 6.25, 18 * 25e9),
    "b200": (148, 128, 4096, 1.965, 1.8353, 8192, 7.992, 18 * 50e9),
    "rtx4090": (128, 128, 256, 2.52, 2.52, 384, 21.0, 16 * 2e9),
}
"""NVIDIA's architecture white papers, and device descriptions in XLA."""


@pytest.mark.parametrize("name", CHIPS)
def test_gpus_follow_from_their_chips(name):
    """Peaks are units x clock x 2, dense; bandwidth is pins x rate: within 3 % of the data sheets' round numbers."""
    sms, cores, fmas, clock, tensor_clock, pins, rate, link = CHIPS[name]
    found = gpu(name)
    assert found.float32 == pytest.approx(sms * cores * 2 * clock * 1e9, rel=0.03)
    assert found.half == pytest.approx(sms * fmas * 2 * tensor_clock * 1e9, rel=0.03)
    assert found.peak("bfloat16") == found.peak("float16") == found.half
    assert found.tf32 == pytest.approx(found.half / 2, rel=0.002)
    assert found.float8 is None or found.float8 == pytest.approx(2 * found.half, rel=0.001)
    assert found.bandwidth == pytest.approx(pins * rate / 8 * 1e9, rel=0.03)
    assert found.link == link
    assert found.memory * 0.98 < found.visible <= found.memory / 1e9 * 2**30


def test_gpus_are_found_by_name_and_by_kind():
    assert list(GPUS) == list(CHIPS)
    kinds = {
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA H100 PCIe": "h100-pcie",
    }
    for kind, name in kinds.items():
        found = gpu_of_kind(kind)
        assert found is not None and found.name == name
    assert gpu_of_kind("cpu") is None
    with pytest.raises(ConfigError, match=r"gpu='h-100' is not known; did you mean h100\?"):
        gpu("h-100")
    with pytest.raises(ConfigError, match=r"dtype='float8_e4m3fn' has no peak on a100-80; choose one of float32, tf32"):
        gpu("a100-80").peak("float8_e4m3fn")
    assert gpu("h100").peak("float8_e5m2") == 1979e12


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"tf32"}))
def test_formats_against_finfo(name):
    """What follows from the bits is what ml_dtypes and NumPy have in their tables."""
    info, ours = ml_dtypes.finfo(name), FORMATS[name]
    assert ours.bits == info.bits
    assert (ours.exponent, ours.mantissa) == (info.nexp, info.nmant)
    assert ours.largest == float(info.max)
    assert ours.smallest_normal == float(info.smallest_normal)
    assert ours.smallest_subnormal == float(info.smallest_subnormal)
    assert ours.epsilon == float(info.eps) == float(jnp.finfo(name).eps)
    # float8 has none by C's definition, as 10 > 2^3; ml_dtypes rounds up to 1
    assert ours.digits == (info.precision if info.bits > 8 else 0)


def test_numbers_of_the_papers():
    """FP8 (arXiv:2209.05433, table 1): 448 and 2^-9, 57344 and 2^-16. TF32 has float32's range, float16's digits."""
    e4m3, e5m2, tf32 = FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"], FORMATS["tf32"]
    assert (e4m3.largest, e4m3.smallest_subnormal) == (448, 2**-9)
    assert (e5m2.largest, e5m2.smallest_subnormal) == (57344, 2**-16)
    assert (tf32.bits, tf32.smallest_normal, tf32.epsilon) == (19, 2**-126, FORMATS["float16"].epsilon)
    exact = {"float32": 2**24, "tf32": 2048, "bfloat16": 256, "float16": 2048, "float8_e4m3fn": 16, "float8_e5m2": 8}
    assert {name: f.exact_integers for name, f in FORMATS.items()} == exact


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_exact_integers(name):
    """Every one up to the bound, and not the next."""
    bound = FORMATS[name].exact_integers
    assert all(round_to(float(n), FORMATS[name]) == n for n in range(bound + 1))
    assert round_to(float(bound + 1), FORMATS[name]) != bound + 1


def samples() -> np.ndarray:
    """float32 of all magnitudes: random ones, and such with few digits, which are often halfway between two others."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-149, 128, 4000)
    digits = np.where(rng.random(4000) < 0.5, rng.integers(-64, 64, 4000) / 32, rng.uniform(-2, 2, 4000))
    near = rng.integers(-2048, 2048, 2000) / 4  # about the smallest and largest of float8
    finite = np.ldexp(np.concatenate([digits, near]), np.concatenate([exponents, rng.integers(-20, 11, 2000)]))
    with np.errstate(over="ignore"):
        return np.concatenate([finite, [np.inf, -np.inf, np.nan, 0.0, -0.0, 464, 465, 61440, 65520]]).astype(np.float32)


def by_bits(x: np.ndarray) -> np.ndarray:
    """float32 to TF32 on its bits: the 13 last ones are rounded away, half to even."""
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding(name):
    """Bit for bit as ml_dtypes and NumPy round float32."""
    x = samples()
    with np.errstate(over="ignore", invalid="ignore"):
        want = by_bits(x) if name == "tf32" else x.astype(jnp.dtype(name)).astype(np.float32)
    got = np.array([round_to(float(v), FORMATS[name]) for v in x], np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


def test_seconds_of_collectives():
    """Four devices, 1 s a message, 100 bytes/s, 400 bytes: ring 2 x 3 x (1 + 1), tree 2 x 2 x 1 + 2 x 4."""
    link = Link(alpha=1.0, beta=100.0)
    assert link.send(400) == 5
    assert reduce_scatter(4, 400, link) == all_gather(4, 100, link) == all_to_all(4, 400, link) == 6
    assert ring_all_reduce(4, 400, link) == 12
    assert tree_all_reduce(4, 400, link) == 12
    # 2 x 4 devices: 3 x 2 s each way inside a host, 2 x (1 + 100 / 2 / 50) s outside
    assert two_level_all_reduce(2, 4, 400, link, Link(1.0, 50.0)) == 6 + 4 + 6


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_seconds_are_bytes_without_latency(n):
    """At alpha 0 a ring takes the bytes on the wire over beta."""
    link = Link(0.0, 10.0)
    for op, seconds in (
        ("psum", ring_all_reduce),
        ("psum_scatter", reduce_scatter),
        ("all_gather", all_gather),
        ("all_to_all", all_to_all),
    ):
        assert seconds(n, 240, link) == pytest.approx(float(wire_bytes(op, 240, n)) / 10)
    assert two_level_all_reduce(1, n, 240, link, link) == ring_all_reduce(n, 240, link)
    assert two_level_all_reduce(n, 1, 240, link, link) == ring_all_reduce(n, 240, link)


def test_crossover():
    """8 devices, 10 us, 100 GB/s: 8 x 1e-5 x 1e11 x (7 - 3) = 32 MB. A tree at 0.8 of the bandwidth: 4e6 / 0.375."""
    link = Link(1e-5, 1e11)
    assert crossover(8, link.alpha, link.beta) == pytest.approx(32e6)
    assert crossover(8, link.alpha, link.beta, slowdown=1.25) == pytest.approx(4e6 / 0.375)
    assert crossover(2, link.alpha, link.beta) == crossover(1, link.alpha, link.beta) == 0
    for payload, tree_is_faster in ((31e6, True), (33e6, False)):
        assert (tree_all_reduce(8, payload, link) < ring_all_reduce(8, payload, link)) == tree_is_faster


def test_roofline():
    """H100, bfloat16: 989e12 / 3.35e12 = 295 FLOPs a byte. Sums of two vectors, 1/6; products of n x n, n / 3."""
    h100 = gpu("h100")
    roof = Roofline(h100.peak("bfloat16"), h100.bandwidth)
    assert round(roof.ridge) == 295
    assert roof.attainable(1 / 6) == pytest.approx(3.35e12 / 6)
    assert roof.attainable(1000) == 989e12
    for n, limit in ((768, "memory"), (1024, "compute")):
        flops, moved = 2 * n**3, 3 * 2 * n**2
        assert roof.bound(flops, moved) == limit
        assert roof.time(flops, moved) == pytest.approx(flops / roof.attainable(flops / moved))


def test_bubbles():
    """Four stages, eight microbatches: 3/8 of ideal, 3/11 of all; ZB-H1 takes 3 m + p - 1 ticks where 3 m are ideal."""
    assert bubble("afab", 4, 8) == bubble("1f1b", 4, 8) == bubble("uniform-1f1b", 4, 8) == Fraction(3, 8)
    assert idle_share("1f1b", 4, 8) == Fraction(3, 11)
    assert bubble("interleaved", 4, 8, chunks=3) == Fraction(1, 8)
    assert 1 + bubble("zb1p", 4, 8) == Fraction(3 * 8 + 4 - 1, 3 * 8)
    assert bubble("zb2p", 4, 8) == bubble("zbv", 4, 8) == 0
    assert bubble("v-half", 4, 8) == Fraction(3, 16)
    assert {s: bubble(s, 1, 8) for s in SCHEDULES} == dict.fromkeys(SCHEDULES, 0)
    with pytest.raises(ConfigError, match=r"schedule='gpipe' is not known; choose one of afab, 1f1b"):
        bubble("gpipe", 4, 8)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize(("schedule", "make"), [("afab", afab), ("uniform-1f1b", one_f_one_b)])
def test_bubbles_of_the_tables(schedule, make, stages, microbatches):
    """The executor's own: ticks of each kind over microbatches, and what waits for its backward pass at once."""
    table = make(stages, microbatches)
    for work in ("forward", "backward"):
        ticks = sum(getattr(tick, work) is not None for tick in table.ticks)
        assert Fraction(ticks, microbatches) == 1 + bubble(schedule, stages, microbatches)
    most, waiting = 0, [set() for _ in range(stages)]
    for tick in table.ticks:
        for stage, held in enumerate(waiting):
            held |= {tick.forward[stage]} & set(range(microbatches)) if tick.forward else set()
            most = max(most, len(held))
            held -= {tick.backward[stage]} if tick.backward else set()
    assert most == in_flight(schedule, stages, microbatches)
    bound = 2 * stages - 1 if schedule == "uniform-1f1b" else math.inf
    assert table.slots(range(stages)) == min(bound, microbatches + stages - 1)


def test_microbatches_in_flight():
    """p of 1F1B, 4 (1 + 3 / (4 x 2)) interleaved, half to twice of p without bubbles; never more than there are."""
    names = ("1f1b", "interleaved", "zb1p", "zb2p", "zbv", "v-half")
    assert [in_flight(s, 4, 16, chunks=2) for s in names] == [4, Fraction(11, 2), 4, 8, 4, 2]
    assert [in_flight(s, 4, 3, chunks=2) for s in names] == [3, 3, 3, 3, 3, 2]


def test_hidden_communication():
    """Seconds of sending over seconds of computing, by hand, for N parameters and a sequence of s tokens, 2 bytes each.

    C = 1e15, W = 5e10, n = 8, h = 4096, s = 4096, four layers of 16 h^2 weights, N = 1e9.
    """
    peak, link, n, h, s, layers, size = 1e15, 5e10, 8, 4096, 4096, 4, 1e9
    gradients = (2 * 7 / 8 * 2 * size / link) / (4 * s * size / peak)
    assert hiding.data_parallel(n, s, peak, link) == pytest.approx(gradients)
    weights = (7 / 8 * 2 * size / link) / (2 * s * size / peak)
    assert hiding.zero_3(n, s, peak, link) == pytest.approx(weights)
    activations = (7 / 8 * 2 * s * h / link) / (2 * s * h * h / n / peak)
    assert hiding.tensor_parallel(n, h, peak, link) == pytest.approx(activations)
    hop = (2 * s * h / link) / (2 * s * layers * 16 * h * h / peak)
    assert hiding.pipeline_parallel(layers, h, peak, link) == pytest.approx(hop)
    for ratio, size in ((hiding.data_parallel, s), (hiding.zero_3, s), (hiding.tensor_parallel, h)):
        assert ratio(n, size, peak, link, element=4) == 2 * ratio(n, size, peak, link)
    assert hiding.pipeline_parallel(layers, h, peak, link, element=4) == pytest.approx(2 * hop)


def test_rows_are_complete():
    """No row has a zero or a negative number."""
    numbers = [x for row in GPUS.values() for x in astuple(row) if isinstance(x, (int, float))]
    assert all(x > 0 and math.isfinite(x) for x in numbers)
