"""A trace read back: interval arithmetic against sets, hand-made traces against hand-made sums, a real one against
what was run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax5d.config import ConfigError
from jax5d.measure.intervals import intersection, length, union
from jax5d.measure.trace import Share, Step, classify, read_trace, scope_of

Event = tuple[str, int, int, dict[str, Any]]
"""Name, start and end in nanoseconds, stats."""


def write(file: Path, planes: dict[str, dict[str, list[Event]]], *, end: str = "Task Environment") -> Path:
    """A trace of hand-made events by plane and line, its times 1 s after the clock's zero; `end` is the last plane."""
    text = [_plane(name, lines) for name, lines in [*planes.items(), (end, {})]]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(text)))
    return file


def _plane(name: str, lines: dict[str, list[Event]]) -> str:
    names = sorted({event[0] for events in lines.values() for event in events})
    keys = sorted({key for events in lines.values() for event in events for key in event[3]})
    out = [f'planes {{ name: "{name}"']
    for line, events in lines.items():
        out.append(f'lines {{ name: "{line}" timestamp_ns: 1000000000')
        for title, start, end, stats in events:
            values = "".join(
                f" stats {{ metadata_id: {keys.index(key) + 1} "
                + (f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}")
                + " }"
                for key, value in stats.items()
            )
            head = (
                f"metadata_id: {names.index(title) + 1} offset_ps: {start * 1000} duration_ps: {(end - start) * 1000}"
            )
            out.append(f"events {{ {head}{values} }}")
        out.append("}")
    for field, entries in (("event_metadata", names), ("stat_metadata", keys)):
        out += [f'{field} {{ key: {i} value {{ id: {i} name: "{entry}" }} }}' for i, entry in enumerate(entries, 1)]
    return "\n".join([*out, "}"])


def mark(step: int, start: int, end: int) -> Event:
    return ("train", start, end, {"_r": 1, "step_num": step})


def thunk(name: str, device: int, start: int, end: int) -> Event:
    return (name, start, end, {"hlo_op": name, "device_ordinal": device})


def kernel(name: str, start: int, end: int, op: str = "") -> Event:
    return (name, start, end, {"hlo_op": op} if op else {"correlation_id": 7})


def test_intervals_are_sets_of_nanoseconds():
    """Union, intersection and length against sets of integers, on random intervals."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (
            [(int(s), int(s + n)) for s, n in zip(rng.integers(0, 40, 6), rng.integers(0, 9, 6), strict=True)]
            for _ in range(2)
        )
        one, two = ({t for s, e in times for t in range(s, e)} for times in (a, b))
        assert length(union(a)) == len(one)
        assert length(union([*a, *b])) == len(one | two)
        both = intersection(union(a), union(b))
        assert {t for s, e in both for t in range(s, e)} == one & two
        assert length(both) == len(one & two)
        assert all(before[1] < after[0] for before, after in zip(union(a), union(a)[1:], strict=False))


def test_gpu_streams(tmp_path):
    """Two GPUs, kernels on two streams, NCCL beside compute: the shares as summed by hand.

    Step 1 is [0, 1000). Device 0 computes in [100, 500) and [450, 600) on two streams, a union of 500; communicates in
    [400, 800), of which 200 lie under compute; so it is idle for 1000 - 700. Device 1 begins its only kernel before the
    step and ends it behind: only what is inside counts. Lines that xprof derives hold the same time again.
    """
    fusion = "loop_add_fusion"
    gemm = "sm90_xmma_gemm"
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    trace = read_trace(
        write(
            tmp_path / "host.xplane.pb",
            {
                "/device:GPU:0": {
                    "Stream #13(Compute)": [kernel(fusion, 100, 500, "fusion.3"), kernel("MemcpyD2D", 900, 900)],
                    "Stream #14(Compute)": [kernel(gemm, 450, 600, "gemm.1")],
                    "Stream #20(Compute)": [kernel(nccl, 400, 800, "all-reduce-start.2")],
                    "XLA Ops": [kernel("whole", 0, 1000)],
                },
                "/device:GPU:1": {"Stream #13(Compute)": [kernel(gemm, -50, 1100, "gemm.1")]},
                "/host:CPU": {"python": [mark(1, 0, 1000)]},
            },
        )
    )
    assert trace.devices == [0, 1]
    assert trace.shares == [
        Share(1, 0, window=1000, compute=500, communication=400, overlapped=200, idle=300),
        Share(1, 1, window=1000, compute=1000, communication=0, overlapped=0, idle=0),
    ]
    assert trace.collectives() == {(1, 0): {"all-reduce": 1}, (1, 1): {}}
    assert trace.complaints == []


def test_fake_devices_on_threads(tmp_path):
    """Two threads work for two devices in turn; a loop is not counted beside its body, nor a collective of one device.

    Device 0, step 3 = [0, 100): compute [0, 30) and [60, 80); communication [30, 60) with two arrays exchanged; the
    collective in [80, 90) met nobody, which makes it compute. Device 1, step 4 = [100, 150): nothing, a complaint.
    """
    trace = read_trace(
        write(
            tmp_path / "host.xplane.pb",
            {
                "/host:CPU": {
                    "python": [mark(4, 100, 150), mark(3, 0, 100), ("train", 200, 300, {})],
                    "tf_XLAEigen/1": [
                        thunk("while.7", 0, 0, 95),
                        thunk("dot.1", 0, 0, 30),
                        thunk("all-reduce.5", 0, 30, 60),
                        ("Rendezvous", 31, 40, {}),
                        ("Rendezvous", 41, 59, {}),
                        thunk("dot.2", 1, 62, 70),
                    ],
                    "tf_XLAEigen/2": [
                        thunk("dot.2", 0, 60, 80),
                        thunk("all-reduce.6", 0, 80, 90),
                        ("Rendezvous", 91, 92, {}),
                        thunk("fusion", 0, 110, 120),
                        ("end: fusion", 120, 120, {}),
                        ("ThunkExecutor::Execute", 0, 99, {}),
                    ],
                },
            },
        )
    )
    base = 1_000_000_000
    assert trace.steps == [Step(3, base, base + 100), Step(4, base + 100, base + 150)]
    assert trace.shares == [
        Share(3, 0, window=100, compute=60, communication=30, overlapped=0, idle=10),
        Share(3, 1, window=100, compute=8, communication=0, overlapped=0, idle=92),
        Share(4, 0, window=50, compute=10, communication=0, overlapped=0, idle=40),
        Share(4, 1, window=50, compute=0, communication=0, overlapped=0, idle=50),
    ]
    assert trace.collectives()[3, 0] == {"all-reduce": 2}
    assert trace.complaints == ["nothing of device 1 in step 4"]
    totals = {(t.name, t.kind): (t.count, t.time) for t in trace.totals()}
    assert totals["dot", "compute"] == (3, 30 + 20 + 8)
    assert totals["all-reduce", "communication"] == (1, 30)
    assert [t.time for t in trace.totals()] == sorted((t.time for t in trace.totals()), reverse=True)


@pytest.mark.parametrize(
    ("name", "opcode", "collective"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather-start", "all-gather"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float", "fusion", "reduce-scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collective-permute-start", "collective-permute"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all-to-all", "all-to-all"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "unknown", "send-receive"),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL", "unknown", "all-reduce"),
        ("ncclDevKernel_Broadcast_RING_LL", "unknown", "other"),
        ("MemcpyP2P", "copy", "peer copy"),
        ("psum_invariant.3", "all-reduce", "all-reduce"),
        ("loop_add_fusion", "fusion", ""),
        ("input_reduce_fusion", "fusion", ""),
        ("MemcpyD2D", "copy", ""),
        ("cudnn_generated_fort_native_sdpa_sm90", "custom-call", ""),
        ("wrapped_scatter", "fusion", ""),
        ("bitcast_gather_fusion.2", "fusion", ""),
    ],
)
def test_what_communicates(name, opcode, collective):
    """The rules, on names that GPU and CPU traces have."""
    assert classify(name, opcode) == collective


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("jit(_step)/shard_map/while/body/jvp(layers)/while/body/dot_general", "layers"),
        ("jit(_step)/shard_map/transpose(jvp(embed))/scatter-add", "embed"),
        ("jit(_step)/shard_map/reduce_gradients/psum", "reduce_gradients"),
        ("jit(_step)/layers/head/dot_general", "layers"),
        ("jit(_step)/shard_map/multi_head/dot_general", ""),
        ("", ""),
    ],
)
def test_scope_is_the_outermost_of_the_path(path, scope):
    assert scope_of(path) == scope


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two steps of a small program on four devices: in five rounds two psums, one all_gather and a matmul."""
    folder = tmp_path_factory.mktemp("real")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def body(x: jax.Array) -> jax.Array:
        def once(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("layers"):
                x = jnp.tanh(x @ x)
                x = jax.lax.pcast(jax.lax.psum(x, "a"), ("a",), to="varying")
            with jax.named_scope("reduce_gradients"):
                y = jax.lax.psum(x * 0.1, ("a", "b"))
            return x + y + jax.lax.all_gather(x, "b").sum(0), None

        return jax.lax.scan(once, x, length=5)[0]

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b")))
    x = jax.block_until_ready(step(jnp.full((32, 32), 0.01)))
    jax.profiler.start_trace(str(folder))
    for number in (7, 8):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            x = jax.block_until_ready(step(x))
    jax.block_until_ready(jnp.sin(x))  # outside the steps
    jax.profiler.stop_trace()
    return folder


def test_a_real_trace_has_what_was_run(real):
    """Every device in every step exchanges 2 x 5 arrays by psum and 5 by all_gather, in the scopes of the source."""
    trace = read_trace(real)
    assert [step.number for step in trace.steps] == [7, 8]
    assert trace.devices == [0, 1, 2, 3]
    assert trace.complaints == []
    expected = {"all-reduce": 10, "all-gather": 5}
    assert trace.collectives() == {(step, device): expected for step in (7, 8) for device in range(4)}
    for share in trace.shares:
        assert share.compute + share.communication - share.overlapped + share.idle == share.window
        assert min(share.compute, share.communication, share.idle) > 0
    psums = [t for t in trace.totals() if t.kind == "communication" and "gather" not in t.name]
    assert {t.scope: t.count for t in psums} == {"layers": 5 * 8, "reduce_gradients": 5 * 8}
    assert all(op.kind == "compute" for op in trace.ops if "tanh" in op.name)
    assert not [op for op in trace.ops if op.name.startswith("while")]
    assert max(op.end for op in trace.ops) > trace.steps[-1].end


def test_newest_trace_of_a_folder(tmp_path):
    """By time of writing; a file may be named itself."""
    events = {"/host:CPU": {"t": [thunk("dot", 0, 1, 2), mark(1, 0, 9)]}}
    old = write(tmp_path / "a" / "b.xplane.pb", events)
    new = write(tmp_path / "a" / "a.xplane.pb", events)
    os.utime(old, (1, 1))
    assert read_trace(tmp_path).file == new
    assert read_trace(old).file == old


def test_no_trace_is_refused(tmp_path):
    """A folder without one, or that is not there; a trace without steps."""
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"holds no profile .*--train.profile_steps 2"):
            read_trace(folder)
    bare = write(tmp_path / "x.xplane.pb", {"/host:CPU": {"t": [thunk("dot", 0, 1, 2)]}})
    with pytest.raises(ConfigError, match="marks no steps"):
        read_trace(bare)
    idle = write(tmp_path / "y.xplane.pb", {"/host:CPU": {"t": [mark(1, 0, 9)]}})
    assert read_trace(idle).complaints == ["no device did anything"]


def test_a_torn_trace_is_refused(real, tmp_path):
    """B60: cut anywhere, even between two planes, or of another kind: refused, never half read."""
    (file,) = real.glob("**/*.xplane.pb")
    raw = file.read_bytes()
    torn = tmp_path / "torn.xplane.pb"
    for size in (0, 1, 1000, len(raw) // 2, len(raw) - 1):
        torn.write_bytes(raw[:size])
        with pytest.raises(ConfigError, match=rf"cut off or no profile \({size} bytes\)"):
            read_trace(torn)
    whole_planes = write(torn, {"/host:CPU": {"t": [mark(1, 0, 9)]}}, end="/host:metadata")
    with pytest.raises(ConfigError, match="cut off"):
        read_trace(whole_planes)
    torn.write_bytes(b"no protobuf at all")
    with pytest.raises(ConfigError, match="cut off or no profile"):
        read_trace(torn)


def test_what_the_profiler_complains_of_is_passed_on(tmp_path):
    """Dropped events are an error message inside the trace itself."""
    file = write(tmp_path / "x.xplane.pb", {"/host:CPU": {"t": [thunk("dot", 0, 1, 2), mark(1, 0, 9)]}})
    said = ProfileData.text_proto_to_serialized_xspace('errors: "dropped 5 events" warnings: "late"')
    file.write_bytes(file.read_bytes() + said)
    assert read_trace(file).complaints == ["dropped 5 events", "late"]
