"""Every collective of a compiled program, and what its schedule puts between a collective's start and its end.

`jax5d.measure.ledger` reads a jaxpr: what the program asks for. This reads what the compiler made of it: collectives
are combined, some vanish, and each that is asynchronous has a start and a done with other work in between, or none.
Groups of one device are left out, as they move nothing; loops count as often as the compiler knows that they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from jax5d.config import AXES, MeshConfig
from jax5d.costs.collectives import Collective, wire_bytes
from jax5d.measure.groups import first_group, source_target_pairs
from jax5d.measure.hlo import Computation, Instruction, Program, arrays, parse, size

OPS = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "collective-permute": "ppermute",
    "all-to-all": "all_to_all",
}
"""Opcodes of HLO to the field's names."""

REDUCERS = {"add": "psum", "maximum": "pmax"}
"""What an all-reduce computes, to the field's names."""

UNREAD = {"send", "recv", "ragged-all-to-all", "collective-broadcast", "partial-reduce"}
"""Opcodes that move bytes in ways that nobody counts here."""

FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
"""Opcodes that run no kernel."""

Cover = Literal["matmul", "light", "nothing"]


@dataclass(frozen=True)
class Scheduled:
    """One collective instruction, with all its repetitions in a step."""

    name: str
    """Of the instruction, unique in the program."""
    op: str
    """Field's name: psum, pmax, all_gather, psum_scatter, ppermute or all_to_all."""
    axes: tuple[str, ...]
    """Mesh axes along which the devices of a group differ, in mesh order."""
    devices: int
    """Devices in a group; for ppermute the product of the axes."""
    dtype: str
    """Of its first operand, as HLO writes it."""
    count: int
    """How often it runs in a step."""
    payload_bytes: int
    """Operand bytes on one device, summed over the step."""
    wire_bytes: Fraction
    """Bytes that one device sends, summed over the step, by the ring algorithm."""
    cover: Cover = "nothing"
    """The most that runs between its start and its done: a matrix multiply or attention kernel, lesser kernels alone,
    or nothing. A synchronous collective has nothing."""
    cover_flops: int = 0
    """FLOPs of the matrix multiplies in between, summed over the step. Collectives that are under way together see the
    same ones."""

    @property
    def hidden(self) -> bool:
        """Whether it has a matrix multiply or attention kernel to hide behind; lesser kernels do not count."""
        return self.cover == "matmul"

    @property
    def collective(self) -> Collective:
        """As an entry of a ledger."""
        return Collective(self.op, self.axes, self.count, self.payload_bytes, self.wire_bytes)


def timeline(text: str, mesh: MeshConfig) -> list[Scheduled]:
    """Every collective of one call of the program, in the order of the schedule.

    Of a conditional the branch that sends most is counted (of equals, the first).

    Args:
        text: `compiled.as_text()`; one device's program.
        mesh: the mesh that it was compiled for, devices in the order of the mesh.

    Raises:
        NotImplementedError: a collective in a loop of unknown length, of an unknown kind or form, or without an end.
    """
    program = parse(text)
    return list(_walk(program, program.entry, 1, mesh))


def _walk(program: Program, name: str, times: int, mesh: MeshConfig) -> Iterator[Scheduled]:
    computation = program.computations[name]
    order = list(computation.values())
    for i, line in enumerate(order):
        if line.opcode.removesuffix("-done") in UNREAD:
            raise NotImplementedError(f"{line.opcode} of {line.name} is a transfer that is not read")
        if line.opcode.removesuffix("-start") in OPS:
            found = _entry(program, computation, line, times, mesh)
        else:
            found = _called(program, line, times, mesh)
        if found and line.opcode.endswith("-start"):
            kind, flops = _cover(program, computation, line, order[i + 1 :])
            found = [replace(e, cover=kind, cover_flops=flops * times) for e in found]
        yield from found


def _called(program: Program, line: Instruction, times: int, mesh: MeshConfig) -> list[Scheduled]:
    """Collectives of the computations that an instruction runs."""
    repeat = times * (line.trips or 1) if line.opcode == "while" else times
    inner = [list(_walk(program, body, repeat, mesh)) for body in line.called if body in program.computations]
    if line.opcode == "while" and line.trips is None and any(inner):
        raise NotImplementedError(f"a collective in the loop {line.name} of unknown length")
    if line.opcode == "conditional":
        return max(inner, key=lambda entries: sum(e.wire_bytes for e in entries), default=[])
    return [entry for entries in inner for entry in entries]


def _entry(
    program: Program, computation: Computation, line: Instruction, times: int, mesh: MeshConfig
) -> list[Scheduled]:
    op = OPS[line.opcode.removesuffix("-start")]
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    if op == "ppermute":
        pairs = source_target_pairs(line.attributes)
        axes = _spanned(pairs, sizes)
        n, part = math.prod(sizes[a] for a in axes), Fraction(sum(a != b for a, b in pairs), mesh.size)
    else:
        group = first_group(line.attributes, mesh.size)
        axes, n, part = _spanned([group], sizes), len(group), None
    if n == 1 or part == 0:
        return []
    operands = [computation[operand].kind for operand in line.operands]
    payload = sum(map(size, operands))
    if op == "psum":
        op = _reducer(program, line)
    wire = wire_bytes(op, payload, n) if part is None else part * payload
    dtype = arrays(operands[0])[0][0]
    return [Scheduled(line.name, op, axes, n, dtype, times, payload * times, times * wire)]


def _spanned(groups: Sequence[Sequence[int]], sizes: dict[str, int]) -> tuple[str, ...]:
    """Axes along which devices of one group differ; device ids count through the mesh, tp fastest."""
    axes, stride = [], 1
    for axis in reversed(AXES):
        if any(len({device // stride % sizes[axis] for device in group}) > 1 for group in groups):
            axes.append(axis)
        stride *= sizes[axis]
    return tuple(reversed(axes))


def _reducer(program: Program, line: Instruction) -> str:
    """psum or pmax: the last operation of the computation that an all-reduce applies."""
    opcodes = {inner.opcode for name in line.called for inner in program.computations[name].values()}
    known = [name for opcode, name in REDUCERS.items() if opcode in opcodes]
    if len(known) != 1:
        raise NotImplementedError(f"{line.name} reduces by {', '.join(sorted(opcodes))}, neither sum nor maximum")
    return known[0]


def _cover(
    program: Program, computation: Computation, start: Instruction, after: Sequence[Instruction]
) -> tuple[Cover, int]:
    """What stands in the schedule between a start and its done, and the FLOPs of its matrix multiplies."""
    between = _until_done(start, after)
    if '"is_sync":true' in start.attributes:
        return "nothing", 0
    own = [line for line in between if line.opcode.removesuffix("-start") not in OPS]
    work = [program.kernels(computation, line) for line in own]
    if any(kernels for kernels, _ in work):
        return "matmul", sum(flops for _, flops in work)
    return ("light" if any(_runs(line) for line in own) else "nothing"), 0


def _runs(line: Instruction) -> bool:
    """Whether a kernel runs for it; the two ends of something asynchronous are counted at its start."""
    return line.opcode not in FREE and not line.opcode.endswith(("-done", "-update"))


def _until_done(start: Instruction, after: Sequence[Instruction]) -> Sequence[Instruction]:
    name = start.name
    for i, line in enumerate(after):
        if name in line.operands and line.opcode.endswith("-update"):
            name = line.name
        elif name in line.operands and line.opcode.endswith("-done"):
            return after[:i]
    raise NotImplementedError(f"{start.name} has no end in its own computation")
