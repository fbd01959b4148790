"""Kernels of programs of HLO written by hand: which there are, how often they run, what they read and write."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jax5d.measure.ceilings import measure_ceilings
from jax5d.measure.kernels import Kernel, kernels

HEAD = """
HloModule step, is_scheduled=true

%gelu (a: bf16[64,32]) -> bf16[64,32] {
  %a = bf16[64,32]{1,0} parameter(0)
  %wide = f32[64,32]{1,0} convert(%a)
  %tanh = f32[64,32]{1,0} tanh(%wide)
  ROOT %narrow = bf16[64,32]{1,0} convert(%tanh)
}

%gemm (b: bf16[64,32], c: bf16[32,16]) -> bf16[64,16] {
  %b = bf16[64,32]{1,0} parameter(0)
  %c = bf16[32,16]{1,0} parameter(1)
  ROOT %dot = bf16[64,16]{1,0} dot(%b, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (d: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %d = (s32[], bf16[64,32]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%d), index=0
  %v = bf16[64,32]{1,0} get-tuple-element(%d), index=1
  %again = bf16[64,32]{1,0} fusion(%v), kind=kLoop, calls=%gelu
  ROOT %out = (s32[], bf16[64,32]{1,0}) tuple(%n, %again)
}

%limit (e: (s32[], bf16[64,32])) -> pred[] {
  %e = (s32[], bf16[64,32]{1,0}) parameter(0)
  %m = s32[] get-tuple-element(%e), index=0
  ROOT %less = pred[] compare(%m, %m), direction=LT
}

%small (f: bf16[64,32]) -> bf16[64,32] {
  ROOT %f = bf16[64,32]{1,0} parameter(0)
}

%large (g: bf16[64,32]) -> bf16[64,32] {
  %g = bf16[64,32]{1,0} parameter(0)
  ROOT %once = bf16[64,32]{1,0} fusion(%g), kind=kLoop, calls=%gelu
}

"""

X, W, Y = 2 * 64 * 32, 2 * 32 * 16, 2 * 64 * 16
"""Bytes of x [64, 32], of w [32, 16] and of their product, bfloat16."""


def main(*lines: str) -> list[Kernel]:
    """The kernels of a program of x, w and an s32 i with these lines."""
    entry = (
        "ENTRY %main (x: bf16[64,32], w: bf16[32,16], i: s32[]) -> bf16[64,32] {",
        "  %x = bf16[64,32]{1,0} parameter(0)",
        "  %w = bf16[32,16]{1,0} parameter(1)",
        "  %i = s32[] parameter(2)",
        *(f"  {line}" for line in lines),
        "}",
    )
    return kernels(HEAD + "\n".join(entry))


def sizes(found: list[Kernel]) -> list[tuple[int, int, int]]:
    return [(kernel.bytes_in, kernel.bytes_out, kernel.count) for kernel in found]


def test_a_fusion_is_one_kernel():
    """What is inside it, float32 as it is, moves nothing; views are free; a product in a fusion is found."""
    gelu, gemm = main(
        "%h = bf16[64,32]{1,0} fusion(%x), kind=kLoop, calls=%gelu",
        "%flat = bf16[2048]{0} bitcast(%h)",
        "ROOT %y = bf16[64,16]{1,0} fusion(%h, %w), kind=kCustom, calls=%gemm",
    )
    assert gelu == Kernel("h", "fusion", products=0, flops=0, bytes_in=X, bytes_out=X, count=1)
    assert gemm == Kernel("y", "fusion", products=1, flops=2 * 64 * 32 * 16, bytes_in=X + W, bytes_out=Y, count=1)
    assert gemm.traffic == X + W + Y


def test_an_operand_is_read_once_and_all_results_are_written():
    """x twice in one fusion; two results."""
    found = main("ROOT %p = (bf16[64,32]{1,0}, f32[64]{0}) fusion(%x, %x, /*index=2*/%w), kind=kInput, calls=%gelu")
    assert sizes(found) == [(X + W, X + 4 * 64, 1)]


def test_a_library_call_without_its_workspace():
    """cuBLAS and cuDNN append one of bytes; a single result of bytes is a result."""
    found = main(
        '%c = (bf16[64,16]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm"',
        'ROOT %q = u8[100]{0} custom-call(%x), custom_call_target="pack"',
    )
    assert sizes(found) == [(X + W, Y, 1), (X, 100, 1)]
    assert [kernel.products for kernel in found] == [1, 0]


def loop(known: str) -> list[Kernel]:
    return main(
        "%t = (s32[], bf16[64,32]{1,0}) tuple(%i, %x)",
        f"%l = (s32[], bf16[64,32]{{1,0}}) while(%t), condition=%limit, body=%body{known}",
        "ROOT %z = bf16[64,32]{1,0} get-tuple-element(%l), index=1",
    )


def test_a_loop_counts_its_rounds():
    """Seven of them; without a number it is refused."""
    found = loop(', backend_config={"known_trip_count":{"n":"7"}}')
    assert sizes(found) == [(X, X, 7)]
    assert found[0].traffic == 7 * 2 * X
    with pytest.raises(NotImplementedError, match="loop l of unknown length"):
        loop("")


def test_a_conditional_counts_its_larger_branch_and_a_call_what_it_calls():
    found = main(
        "%k = bf16[64,32]{1,0} conditional(%i, %x, %x), branch_computations={%small, %large}",
        "ROOT %r = bf16[64,32]{1,0} call(%k), to_apply=%large",
    )
    assert [kernel.name for kernel in found] == ["once", "once"]
    assert sizes(found) == [(X, X, 1)] * 2


def test_asynchronous_work_counts_once_and_collectives_do_not():
    """A copy's start has its operand and its result in its type; its end moves nothing."""
    found = main(
        "%s = (bf16[64,32]{1,0}, bf16[64,32]{1,0}, u32[]) copy-start(%x)",
        "%r = f32[8]{0} all-reduce-start(%w), replica_groups={}, to_apply=%small",
        "%e = f32[8]{0} all-reduce-done(%r)",
        "ROOT %d = bf16[64,32]{1,0} copy-done(%s)",
    )
    assert [kernel.name for kernel in found] == ["s"]
    assert sizes(found) == [(X, X, 1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A clock on which each of 20 calls of a batch takes 1 ms."""
    state = {"now": 0.0, "reads": 0}

    def read() -> float:
        state["reads"] += 1
        state["now"] += 0.02 * (state["reads"] % 2 == 0)  # a batch ends at each second look
        return state["now"]

    monkeypatch.setattr("jax5d.measure.ceilings.time.perf_counter", read)
    return state


def test_ceilings_are_work_over_time(clock):
    """2 n^3 FLOPs and twice the bytes in 1 ms, by a clock that says so; the roof is the best of them."""
    found = measure_ceilings([32, 64], [1024, 4096], dtype="float32", device=jax.devices()[1], seconds=0.05)
    assert found.products == pytest.approx({32: 2 * 32**3 / 1e-3, 64: 2 * 64**3 / 1e-3})
    assert found.copies == pytest.approx({1024: 2 * 1024 / 1e-3, 4096: 2 * 4096 / 1e-3})
    assert (found.roofline.peak, found.roofline.bandwidth) == (found.products[64], found.copies[4096])
    assert clock["reads"] == 4 * 3 * 2  # each runs batches of 20 ms until 50 ms are over


def test_ceilings_of_a_real_clock():
    """On a CPU: finite, above nothing, and it takes about as long as it is asked to."""
    found = measure_ceilings([64], [2**16], dtype="bfloat16", seconds=0.01)
    assert 0 < found.products[64] < 1e15
    assert 0 < found.copies[2**16] < 1e14
