"""Programs of HLO written by hand, read back: what each collective sends, and what its schedule hides it behind."""

from __future__ import annotations

from fractions import Fraction

import pytest

from jax5d.config import MeshConfig
from jax5d.measure.groups import first_group
from jax5d.measure.timeline import Scheduled, timeline

EIGHT = MeshConfig(pp=2, dp=2, tp=2)
"""Device 4 pp + 2 dp + tp."""


@pytest.mark.parametrize(
    ("form", "group"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", [0, 4]),
        ("{}", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("[2,4]<=[8]", [0, 1, 2, 3]),
        ("[4,2]<=[2,4]T(1,0)", [0, 4]),  # columns of 0..3 over 4..7
        ("[2,4]<=[2,2,2]T(1,0,2)", [0, 1, 4, 5]),
        ("mesh['a'=2,'b'=4] {'b'}", [0, 1, 2, 3]),
        ("mesh['a'=2,'b'=4] {'a'}", [0, 4]),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", [0, 1, 4, 5]),  # b = 2 x 2, the inner 2
        ("mesh['x'=8] {'x':(2)2}", [0, 2]),  # x = 2 x 2 x 2, the middle 2
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", [0, 1, 4, 5]),  # and its outer and inner ones
        ("mesh[x=2,y=2], device_ids=(0,2,1,3) {x}", [0, 1]),  # rows 0 2 and 1 3
        ("mesh['x'=4,'y'=2], device_ids=([4,2]<=[2,4]T(1,0)) {'y'}", [0, 4]),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}", [0, 1, 2, 3]),
    ],
)
def test_forms_of_groups(form: str, group: list[int]) -> None:
    """The first group, by hand."""
    assert first_group(f", channel_id=3, replica_groups={form}, use_global_device_ids=true", 8) == group


def test_unknown_form_of_groups_is_refused() -> None:
    """Rather than counted as nothing."""
    with pytest.raises(NotImplementedError, match="unknown form"):
        first_group("replica_groups=all, dimensions={0}", 8)


REGIONS = """
HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%larger (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %max = f32[] maximum(%c, %d)
}

%gemm (p: bf16[64,32], q: bf16[32,16]) -> bf16[64,16] {
  %p = bf16[64,32]{1,0} parameter(0)
  %q = bf16[32,16]{1,0} parameter(1)
  ROOT %dot = bf16[64,16]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%double (r: f32[64]) -> f32[64] {
  %r = f32[64]{0} parameter(0)
  ROOT %twice = f32[64]{0} add(%r, %r)
}

%scatter (s: f32[64]) -> f32[32] {
  %s = f32[64]{0} parameter(0)
  ROOT %rs = f32[32]{0} reduce-scatter(%s), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}

%less (t: (s32[], bf16[64,32])) -> pred[] {
  %t = (s32[], bf16[64,32]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%layer (u: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %u = (s32[], bf16[64,32]{1,0}) parameter(0)
  %x = bf16[64,32]{1,0} get-tuple-element(%u), index=1
  %shard = bf16[16,16]{1,0} bitcast(%x)
  %gather = (bf16[16,16]{1,0}, bf16[32,16]{1,0}) all-gather-start(%shard), replica_groups={{0,2},{1,3},{4,6},{5,7}}
  %wide = f32[64]{0} fusion(%x), kind=kLoop, calls=%double
  %w = bf16[32,16]{1,0} bitcast(%x)
  %product = bf16[64,16]{1,0} fusion(%x, /*index=1*/%w), kind=kCustom, calls=%gemm
  %gathered = bf16[32,16]{1,0} all-gather-done(%gather)
  %out = (bf16[64,32]{1,0}, bf16[64,32]{1,0}) collective-permute-start(%x), source_target_pairs=ONWARD
  %lesser = f32[64]{0} fusion(%wide), kind=kLoop, calls=%double
  %came = bf16[64,32]{1,0} collective-permute-done(%out)
  ROOT %next = (s32[], bf16[64,32]{1,0}) tuple(%x, %came)
}

%few (e: f32[4]) -> f32[4] {
  %e = f32[4]{0} parameter(0)
  ROOT %less_sent = f32[4]{0} all-reduce(%e), replica_groups=[4,2]<=[8], to_apply=%add
}

%many (f: f32[64]) -> f32[64] {
  %f = f32[64]{0} parameter(0)
  ROOT %more_sent = f32[64]{0} all-reduce(%f), replica_groups=[4,2]<=[8], to_apply=%add
}
""".replace("ONWARD", "{{0,4},{1,5},{2,6},{3,7}}")


def program(*lines: str) -> str:
    """The regions above, and an entry with some arguments and these lines."""
    given = (
        "%v = f32[64]{0} parameter(0)",
        "%m = f32[4]{0} parameter(1)",
        "%n = f32[28]{0} parameter(2)",
        "%state = (s32[], bf16[64,32]{1,0}) parameter(3)",
        "%lhs = bf16[8,32]{1,0} parameter(4)",
        "%heads = bf16[4,128,6,64]{3,2,1,0} parameter(5)",
    )
    return "\n".join([REGIONS, "ENTRY %main (v: f32[64]) -> f32[64] {", *(f"  {line}" for line in given + lines), "}"])


LOOP = (
    "%loop = (s32[], bf16[64,32]{1,0}) while(%state), condition=%less, body=%layer, "
    'backend_config={"known_trip_count":{"n":"3"}}'
)
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'
OVER_TP = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"


def test_timeline_by_hand() -> None:
    """A loop of 3 with two collectives, inside the window of a third, which is wrapped; and the synchronous forms.

    The gather's operand is 16 x 16 x 2 bytes; 64 x 32 by 32 x 16 is 2 x 64 x 32 x 16 FLOPs. Half of the devices send
    64 x 32 x 2 bytes over pp.
    """
    flops = 3 * 2 * 64 * 32 * 16
    read = timeline(
        program(
            "%wrapped = ((f32[64]{0}), f32[32]{0}, u32[]) async-start(%v), calls=%scatter",
            LOOP,
            "%waits = ((f32[64]{0}), f32[32]{0}, u32[]) async-update(%wrapped)",
            "%scattered = f32[32]{0} async-done(%waits)",
            f"%both = (f32[4]{{0}}, f32[28]{{0}}) all-reduce-start(%m, %n), {OVER_TP}, to_apply=%add, {SYNC}",
            "%idle = f32[4]{0} copy(%m)",
            "%both_done = (f32[4]{0}, f32[28]{0}) all-reduce-done(%both)",
            "%top = f32[4]{0} all-reduce(%m), replica_groups=[2,4]<=[8], to_apply=%larger",
            f"%swap = (f32[4]{{0}}, f32[28]{{0}}) all-to-all(%m, %n), {OVER_TP}",
            "%alone = f32[4]{0} all-reduce(%m), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
            "%still = f32[4]{0} collective-permute(%m), source_target_pairs={{0,0},{1,1}}",
            "%fork = f32[64]{0} conditional(%m, %m, %v), true_computation=%few, false_computation=%many",
        ),
        EIGHT,
    )
    assert read == [
        Scheduled("rs", "psum_scatter", ("tp",), 2, "f32", 1, 256, Fraction(128), "matmul", flops),
        Scheduled("gather", "all_gather", ("dp",), 2, "bf16", 3, 3 * 512, Fraction(3 * 512), "matmul", flops),
        Scheduled("out", "ppermute", ("pp",), 2, "bf16", 3, 3 * 4096, Fraction(3 * 2048), "light"),
        Scheduled("both", "psum", ("tp",), 2, "f32", 1, 128, Fraction(128)),
        Scheduled("top", "pmax", ("dp", "tp"), 4, "f32", 1, 16, Fraction(24)),
        Scheduled("swap", "all_to_all", ("tp",), 2, "f32", 1, 128, Fraction(64)),
        Scheduled("more_sent", "psum", ("tp",), 2, "f32", 1, 256, Fraction(256)),
    ]
    assert [entry.name for entry in read if entry.hidden] == ["rs", "gather"]


def test_branches_are_read_in_either_form() -> None:
    """Whichever is first, the one that sends more counts."""
    fork = "%fork = f32[64]{0} conditional(%m, %v, %m), branch_computations={%many, %few}"
    assert [entry.name for entry in timeline(program(fork), EIGHT)] == ["more_sent"]


FMHA = (
    'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": '
    '{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["4", "6", "128", "128"]}}}'
)
SCORES = 4 * 6 * 128 * 128 * 64


@pytest.mark.parametrize(
    ("between", "cover", "flops"),
    [
        ("", "nothing", 0),
        ("%b = f32[64]{0} bitcast(%v)", "nothing", 0),
        ("%o = (f32[4]{0}, f32[4]{0}) collective-permute-start(%m), source_target_pairs={{0,1}}", "nothing", 0),
        ("%k = f32[64]{0} copy(%v)", "light", 0),
        ("%c = f32[4]{0} convolution(%m, %m), dim_labels=b0f_0io->b0f", "matmul", 0),
        (
            '%g = (bf16[8,16]{1,0}, s8[1024]{0}) custom-call(%lhs, %lhs), custom_call_target="__cublas$gemm", '
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
            "matmul",
            2 * 8 * 32 * 16,
        ),
        (
            f"%f = bf16[4,6,128,64]{{3,2,1,0}} custom-call(%heads), {FMHA}",
            "matmul",
            2 * 2 * SCORES,
        ),
        (
            f"%f = bf16[4,6,128,64]{{3,2,1,0}} custom-call(%heads), {FMHA.replace('Softmax', 'SoftmaxBackward')}",
            "matmul",
            5 * 2 * SCORES,
        ),
        ('%h = f32[4]{0} custom-call(%m), custom_call_target="Sharding"', "light", 0),
    ],
)
def test_what_a_collective_hides_behind(between: str, cover: str, flops: int) -> None:
    """A sum with something between its start and its done."""
    ends = ("%o_done = f32[4]{0} collective-permute-done(%o)",) if "%o =" in between else ()
    text = program(
        f"%start = f32[64]{{0}} all-reduce-start(%v), {OVER_TP}, to_apply=%add",
        between,
        "%done = f32[64]{0} all-reduce-done(%start)",
        *ends,
    )
    (entry,) = [e for e in timeline(text, EIGHT) if e.name == "start"]
    assert (entry.cover, entry.cover_flops) == (cover, flops)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([LOOP.replace("known_trip_count", "unknown")], "the loop loop of unknown length"),
        ([f"%lost = f32[64]{{0}} all-reduce-start(%v), {OVER_TP}, to_apply=%add"], "lost has no end"),
        (["%far = (f32[64]{0}, u32[]) send(%v), channel_id=1"], "send of far"),
        ([f"%odd = f32[64]{{0}} all-reduce(%v), {OVER_TP}, to_apply=%less"], "odd reduces by"),
    ],
    ids=["loop", "end", "send", "reducer"],
)
def test_what_cannot_be_counted_is_refused(lines: list[str], complaint: str) -> None:
    """Rather than counted as nothing."""
    with pytest.raises(NotImplementedError, match=complaint):
        timeline(program(*lines), EIGHT)
