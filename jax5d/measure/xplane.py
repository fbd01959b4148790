"""What a profiler's file knows and `jax.profiler.ProfileData` does not give: the programs, and what went wrong.

An .xplane.pb is an XSpace message (xplane.proto of openxla/xla) in protobuf's wire format: a sequence of (field number,
value), where a value is a number or a run of bytes that may be a message itself. The compiled programs that were traced
lie in it as HloProto messages (hlo.proto), on a plane of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction, as an event's `hlo_op` names it."""

    opcode: str
    """such as all-reduce, fusion or while."""
    path: str
    """Where the program made it: transformations, named scopes and primitive, joined by slashes; "" where unknown."""


def programs(raw: bytes) -> dict[int, dict[str, Instruction]]:
    """Instructions by name, for each program in a trace by the events' `program_id`."""
    found = {}
    for plane in _messages(raw, 1):
        if _text(plane, 2) != "/host:metadata":
            continue
        for entry in _messages(plane, 4):  # the map of event metadata holds one for each program
            for metadata in _messages(entry, 2):
                for stat in _messages(metadata, 5):
                    for module in (m for program in _messages(stat, 6) for m in _messages(program, 1)):
                        identity = next((value for number, value in _fields(module) if number == 5), 0)
                        found[identity] = dict(_instructions(module))
    return found


def complaints(raw: bytes) -> list[str]:
    """The errors and warnings that the profiler left in the trace, such as events that it dropped."""
    return [text.decode("utf-8", "replace") for number in (2, 3) for text in _messages(raw, number)]


def _instructions(module: bytes) -> Iterator[tuple[str, Instruction]]:
    for computation in _messages(module, 3):
        for instruction in _messages(computation, 2):
            path = "".join(_text(metadata, 2) for metadata in _messages(instruction, 7))
            yield _text(instruction, 1), Instruction(_text(instruction, 2), path)


def _text(message: bytes, number: int) -> str:
    return "".join(part.decode("utf-8", "replace") for part in _messages(message, number))


def _messages(message: bytes, number: int) -> list[bytes]:
    """The values of one field that are runs of bytes: messages or text."""
    return [value for found, value in _fields(message) if found == number and isinstance(value, bytes)]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values: integers for varints, bytes for everything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, least first, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
