"""A profiler's trace read back: what each device did in each step, in whole nanoseconds.

A trace has planes of lines of events. On GPUs each device has a plane, with its streams as lines and its kernels as
events. Fake CPU devices share the host's plane, whose lines are threads that work for any of them: there an event tells
its device itself. Steps are the host's annotations of `jax5d.train.profile`. The HLO that was traced lies in the same
file, and tells what an operation is and where in the model it was made.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jax.profiler import ProfileData

from jax5d.config import ConfigError
from jax5d.measure.intervals import Interval, intersection, length, union
from jax5d.measure.xplane import Instruction, complaints, programs
from jax5d.train.profile import STEP, trace_files

Kind = Literal["compute", "communication"]

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
"""Opcodes of HLO; each may also end in -start or -done."""

CONTAINERS = ("while", "conditional", "call", "async-start", "async-update", "async-done")
"""Opcodes whose time is that of the operations inside them, which have events of their own."""

KERNELS = (
    (r"nccl.*AllReduce", "all-reduce"),
    (r"nccl.*AllGather", "all-gather"),
    (r"nccl.*ReduceScatter", "reduce-scatter"),
    (r"nccl.*SendRecv", "send-receive"),
    (r"nccl", "other"),
    (r"Memcpy ?P2P", "peer copy"),
)
"""Names of GPU events that communicate whatever their HLO is called, first match first, to the collective's name."""

SCOPES = ("embed", "layers", "head", "optimizer", "reduce_gradients")
"""The named scopes of a step. An operation belongs to the outermost that its path names."""


@dataclass(frozen=True, slots=True)
class Op:
    """One execution of an operation on one device."""

    device: int
    start: int
    """Nanoseconds on the trace's clock."""
    end: int
    name: str
    """The HLO instruction's name, or where there is none the kernel's."""
    kind: Kind
    collective: str
    """Opcode of what it communicates, "" for compute."""
    exchanges: int
    """Arrays exchanged with other devices: where XLA combines collectives, more than 1. GPU traces do not tell: 1."""
    scope: str
    """One of `SCOPES`, or "" outside them or where the trace does not tell."""


@dataclass(frozen=True)
class Step:
    """One annotated step: [start, end) in nanoseconds on the trace's clock."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Share:
    """How one device spent one step, in nanoseconds: compute + communication - overlapped + idle = window, exactly."""

    step: int
    device: int
    window: int
    compute: int
    """Time in which some compute operation runs."""
    communication: int
    """Time in which some collective runs; on CPU and in NCCL that includes waiting for the others."""
    overlapped: int
    """The part of both: communication under compute."""
    idle: int


@dataclass(frozen=True)
class Total:
    """All executions of the operations of one name and scope, inside steps, over devices."""

    name: str
    scope: str
    kind: Kind
    count: int
    time: int
    """Nanoseconds, the sum of the executions'."""


@dataclass(frozen=True)
class Trace:
    """What was read from one trace."""

    file: Path
    steps: list[Step]
    ops: list[Op]
    """By start; those outside the steps (an evaluation, say) are among them."""
    complaints: list[str]
    """What makes the trace less than whole: the profiler's own errors, and steps in which a device did nothing."""

    @cached_property
    def devices(self) -> list[int]:
        """Ordinals of the devices that did anything."""
        return sorted({op.device for op in self.ops})

    @cached_property
    def shares(self) -> list[Share]:
        """One for each step and device, in that order."""
        busy = {(d, k): [] for d in self.devices for k in ("compute", "communication")}
        for op in self.ops:
            busy[op.device, op.kind].append((op.start, op.end))
        merged = {key: union(times) for key, times in busy.items()}
        return [
            _share(step, device, merged[device, "compute"], merged[device, "communication"])
            for step in self.steps
            for device in self.devices
        ]

    def inside(self, step: Step) -> list[Op]:
        """The operations that start in a step."""
        return [op for op in self.ops if step.start <= op.start < step.end]

    def collectives(self) -> dict[tuple[int, int], Counter[str]]:
        """Arrays exchanged, by (step, device) and by the collective's opcode."""
        found = {(step.number, device): Counter[str]() for step in self.steps for device in self.devices}
        for step in self.steps:
            for op in self.inside(step):
                if op.collective:
                    found[step.number, op.device][op.collective] += op.exchanges
        return found

    def totals(self) -> list[Total]:
        """Operations by name (without XLA's number) and scope, the longest time first."""
        counts: Counter[tuple[str, str, Kind]] = Counter()
        times: Counter[tuple[str, str, Kind]] = Counter()
        for step in self.steps:
            for op in self.inside(step):
                key = (re.sub(r"(\.\d+)+$", "", op.name), op.scope, op.kind)
                counts[key] += 1
                times[key] += op.end - op.start
        return [Total(*key, counts[key], time) for key, time in times.most_common()]


def _share(step: Step, device: int, compute: list[Interval], communication: list[Interval]) -> Share:
    window = [(step.start, step.end)]
    compute, communication = intersection(compute, window), intersection(communication, window)
    return Share(
        step.number,
        device,
        window=length(window),
        compute=length(compute),
        communication=length(communication),
        overlapped=length(intersection(compute, communication)),
        idle=length(window) - length(union([*compute, *communication])),
    )


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Args:
        path: an .xplane.pb, or a folder: the newest below it.

    Raises:
        ConfigError: there is no trace, it is not whole, or no step is marked in it.
    """
    files = [path] if path.is_file() else trace_files(path)
    if not files:
        raise ConfigError(f"{path} holds no profile (*.xplane.pb); make one with --train.profile_steps 2")
    file = files[-1]
    raw = file.read_bytes()
    try:
        planes = {plane.name: plane for plane in ProfileData.from_serialized_xspace(raw).planes}
    except RuntimeError:
        planes = {}
    if "Task Environment" not in planes:  # written last
        raise ConfigError(f"{file} is cut off or no profile ({len(raw)} bytes); profile the run again")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 of the type of an event's stats
        steps, ops = _read(planes, programs(raw))
    if not steps:
        raise ConfigError(f"{file} marks no steps; profile a run with --train.profile_steps 2")
    trace = Trace(file, steps, ops, complaints(raw))
    gaps = [f"nothing of device {s.device} in step {s.step}" for s in trace.shares if s.idle == s.window]
    return replace(trace, complaints=trace.complaints + (gaps if ops else ["no device did anything"]))


def _read(planes: dict[str, Any], code: dict[int, dict[str, Instruction]]) -> tuple[list[Step], list[Op]]:
    steps: list[Step] = []
    ops: list[Op] = []
    for name, plane in planes.items():
        device = re.fullmatch(r"/device:GPU:(\d+)", name)
        for line in plane.lines:
            if device and line.name.startswith("Stream"):
                ops += _on_stream(line, int(device[1]), code)
            elif name == "/host:CPU":
                marks, found = _on_thread(line, code)
                steps += marks
                ops += found
    return sorted(steps, key=lambda s: s.start), sorted(ops, key=lambda op: op.start)


def _on_stream(line: Any, device: int, code: dict[int, dict[str, Instruction]]) -> Iterator[Op]:
    """The kernels and copies of one stream of a GPU."""
    for event in line.events:
        stats = dict(event.stats)
        if op := _op(event, stats, device, code, exchanges=1):
            yield op


def _on_thread(line: Any, code: dict[int, dict[str, Instruction]]) -> tuple[list[Step], list[Op]]:
    """Steps marked by a thread of the host, and what it did for fake devices.

    A collective's event holds one rendezvous for each array that it exchanges, and none if its group is one device:
    then it copies its operand.
    """
    steps, events, meetings = [], [], []
    for event in line.events:
        if event.name == "Rendezvous":
            meetings.append(event.start_ns)
        elif event.name == STEP:
            number = dict(event.stats).get("step_num")
            steps += [Step(int(number), *_span(event))] if number is not None else []
        elif event.duration_ns and "hlo_op" in (stats := dict(event.stats)) and "device_ordinal" in stats:
            events.append((event, stats))
    meetings.sort()
    ops = []
    for event, stats in events:
        met = bisect_left(meetings, event.start_ns + event.duration_ns) - bisect_left(meetings, event.start_ns)
        if op := _op(event, stats, stats["device_ordinal"], code, exchanges=met):
            ops.append(op)
    return steps, ops


def _op(event: Any, stats: dict[str, Any], device: int, code: dict[int, dict], exchanges: int) -> Op | None:
    """An event as an operation; None for one that only holds others."""
    name = stats.get("hlo_op", event.name)
    instruction = code.get(stats.get("program_id", -1), {}).get(name)
    opcode = instruction.opcode if instruction else re.sub(r"(\.\d+)+$", "", name)
    if opcode in CONTAINERS:
        return None
    collective = classify(event.name, opcode) if exchanges else ""
    kind = "communication" if collective else "compute"
    scope = scope_of(instruction.path) if instruction else ""
    return Op(device, *_span(event), name, kind, collective, exchanges if collective else 0, scope)


def classify(name: str, opcode: str) -> str:
    """What an event communicates, by its HLO's opcode or else its own name: the collective's opcode, or ""."""
    family = re.sub(r"-(start|done)$", "", opcode)
    if family in COLLECTIVES:
        return family
    return next((collective for pattern, collective in KERNELS if re.search(pattern, name)), "")


def scope_of(path: str) -> str:
    """The outermost of `SCOPES` in an instruction's path; transformations may stand around it, as in jvp(embed)."""
    return next((word for word in re.findall(r"\w+", path) if word in SCOPES), "")


def _span(event: Any) -> Interval:
    start = round(event.start_ns)
    return start, start + round(event.duration_ns)
