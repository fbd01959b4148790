"""Collectives of a compiled program, counted from its HLO text.

`jax5d.measure.ledger` reads a jaxpr, where a program for the automatic partitioner has no collectives yet; after
compilation every program has, so two of them can be counted by one rule. Loops count as often as the compiler knows
that they run, and groups of one device are left out, as they move nothing.

HLO is printed one instruction a line, `%name = type opcode(operands), attribute=value, ...`, computation after
computation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from jax5d.costs.collectives import wire_bytes

OPS = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "collective-permute": "ppermute",
    "all-to-all": "all_to_all",
}
"""Opcodes of HLO to the field's names, as `wire_bytes` knows them."""

WIDTHS = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
"""Bytes of an element."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"\b(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Moved:
    """One collective instruction of a program, with all its repetitions in a step."""

    op: str
    """Field's name: psum, all_gather, psum_scatter, ppermute or all_to_all."""
    devices: int
    """Devices in a group."""
    count: int
    """How often it runs in a step."""
    payload_bytes: int
    """Operand bytes on one device, summed over the step."""
    wire_bytes: Fraction
    """Bytes that one device sends, summed over the step, by the ring algorithm."""
    shapes: str
    """Result type, as HLO prints it."""


def collectives(text: str) -> list[Moved]:
    """Every collective of one call of the program.

    Args:
        text: `compiled.as_text()`; one device's program.

    Raises:
        NotImplementedError: a collective in a loop of unknown length.
    """
    bodies, entry = _computations(text)
    return list(_walk(bodies, entry, 1))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Instructions (right-hand sides) of each computation, and the entry's name."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = head.group(2)
            bodies[current] = []
            entry = current if head.group(1) else entry
        elif current and (match := _LINE.match(line)):
            bodies[current].append(match.group(1))
    return bodies, entry


def _walk(bodies: dict[str, list[str]], name: str, times: int) -> Iterator[Moved]:
    for line in bodies[name]:
        kind, opcode = _split(line)
        base = opcode.removesuffix("-start")
        if base in OPS:
            yield from _moved(line, kind, base, started=opcode != base, times=times)
            continue
        trips = _TRIPS.search(line) if opcode == "while" else None
        repeat = times * int(trips.group(1)) if trips else times
        called = [list(_walk(bodies, body, repeat)) for body in _called(line)]
        if opcode == "while" and trips is None and any(called):
            raise NotImplementedError(f"a collective in a loop of unknown length: {line[:200]}")
        yield from called[0] if opcode == "conditional" and called else (m for inner in called for m in inner)


def _split(line: str) -> tuple[str, str]:
    """Type and opcode: the first word directly before an opening parenthesis; a tuple type's has none before it."""
    match = _OPCODE.search(line)
    return (line[: match.start()], match.group(1)) if match else (line, "")


def _called(line: str) -> list[str]:
    branches = [name.strip().lstrip("%") for found in _BRANCHES.findall(line) for name in found.split(",")]
    return _CALLED.findall(line) + branches


def _moved(line: str, kind: str, opcode: str, *, started: bool, times: int) -> Iterator[Moved]:
    arrays = [_bytes(*found) for found in _ARRAY.findall(kind)]
    if started and len(arrays) > 1 and opcode != "all-reduce":  # (operands, results): keep the results
        arrays = arrays[len(arrays) // 2 :]
    total, op = sum(arrays), OPS[opcode]
    n, pairs = _group(line, op)
    payload = {"all_gather": total // n, "psum_scatter": total * n}.get(op, total)
    if n > 1:
        wire = times * wire_bytes(op, payload, n, pairs)
        yield Moved(op, n, times, payload * times, wire, kind)


def _bytes(dtype: str, dims: str) -> int:
    return WIDTHS[dtype] * math.prod(int(d) for d in dims.split(",") if d)


def _group(line: str, op: str) -> tuple[int, int | None]:
    """Devices of a group; for a permutation all that are named, and how many of its pairs leave their device."""
    if op == "ppermute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", line.split("source_target_pairs=")[1].split("}}")[0] + "}")
        return len({d for pair in pairs for d in pair}), sum(a != b for a, b in pairs)
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed.group(1).split(",")), None
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(iota.group(2)), None
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\))? \{([^}]*)\}", line):
        return _mesh_group(*mesh.groups()), None
    raise NotImplementedError(f"replica groups of an unknown form: {line[-600:]}")


def _mesh_group(mesh: str, axes: str) -> int:
    """Devices of a group that names axes of a mesh: `'x'=4,'y'=2` and `'x','y':(1)2`, the latter a part of y."""
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
    parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes)
    return math.prod(int(part or sizes[name]) for name, part in parts)
