"""A compiled program read from its HLO text: instructions in the order of the schedule, loops, and matrix multiplies.

HLO is printed one instruction a line, `%name = type opcode(operands), attribute=value, ...`, computation after
computation; in a module with `is_scheduled=true` the lines of a computation stand in the order in which they are
issued.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

WIDTHS = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "s16": 2,
    "u16": 2,
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
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]m[0-9](?:fn)?)?)\[([0-9,]*)\]")
_NAME = re.compile(r"%?([\w.\-]+)$")
_CALLED = re.compile(r"\b(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONTRACTED = re.compile(r'lhs_contracting_(?:dims=\{|dimensions"?:\s*\[)([\d,"\s]*)')
_KERNEL = re.compile(r'custom_call_target="(__cublas|__cudnn|__cutlass|__gpu\$xla\.gpu\.triton|triton_kernel)')
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([\d,"\s]*)\]')


@dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    kind: str
    """Type of the result."""
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    attributes: str

    @property
    def called(self) -> list[str]:
        """Computations that it runs; a loop's body without its condition."""
        branches = [
            name.strip().lstrip("%") for found in _BRANCHES.findall(self.attributes) for name in found.split(",")
        ]
        return _CALLED.findall(self.attributes) + branches

    @property
    def trips(self) -> int | None:
        """How often a loop runs, where the compiler knows."""
        known = _TRIPS.search(self.attributes)
        return int(known.group(1)) if known else None


Computation = dict[str, Instruction]
"""By name, in the order of the text."""


@dataclass(frozen=True)
class Program:
    """One device's program."""

    computations: dict[str, Computation]
    entry: str

    def kernels(self, computation: Computation, line: Instruction) -> tuple[int, int]:
        """Matrix multiplies and attention kernels that one instruction runs, and their FLOPs.

        FLOPs are 0 where the text does not give the shapes; of a conditional the branch with most kernels counts; a
        loop of unknown length counts once.
        """
        if line.opcode in ("dot", "convolution") or (line.opcode == "custom-call" and _KERNEL.search(line.attributes)):
            return 1, _flops(computation, line)
        inner = [self._kernels(self.computations[name]) for name in line.called if name in self.computations]
        if line.opcode == "conditional":
            return max(inner, default=(0, 0))
        repeat = (line.trips or 1) if line.opcode == "while" else 1
        return repeat * sum(n for n, _ in inner), repeat * sum(f for _, f in inner)

    def _kernels(self, computation: Computation) -> tuple[int, int]:
        found = [self.kernels(computation, line) for line in computation.values()]
        return sum(n for n, _ in found), sum(f for _, f in found)


def parse(text: str) -> Program:
    """`compiled.as_text()` as a program."""
    computations: dict[str, Computation] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = head.group(2)
            computations[current] = {}
            entry = current if head.group(1) else entry
        elif current and (match := _LINE.match(line)):
            computations[current][match.group(1)] = _instruction(*match.groups())
    return Program(computations, entry)


def _instruction(name: str, right: str) -> Instruction:
    """The opcode is the first word directly before an opening parenthesis; a tuple type's has none before it."""
    match = _OPCODE.search(right)
    if match is None:
        return Instruction(name, right, "", (), "")
    operands, _, attributes = right[match.end() :].partition(")")
    names = [_NAME.search(word) for word in operands.split(",")]
    return Instruction(name, right[: match.start()], match.group(1), tuple(n.group(1) for n in names if n), attributes)


def arrays(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dims of each array of a type."""
    return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(kind)]


def size(kind: str) -> int:
    """Bytes of a type."""
    return sum(WIDTHS[dtype] * math.prod(dims) for dtype, dims in arrays(kind))


def _flops(computation: Computation, line: Instruction) -> int:
    """2 m n k of a matrix multiply; of cuDNN's attention 2 of them forward and 5 backward, without causal savings."""
    first = computation.get(line.operands[0]) if line.operands else None
    if first is None:
        return 0
    left, result = arrays(first.kind)[0][1], arrays(line.kind)[0][1]
    if scores := _SCORES.search(line.attributes):
        matmuls = 5 if "Backward" in line.attributes else 2
        return 2 * matmuls * math.prod(_numbers(scores.group(1))) * left[-1]
    contracted = _CONTRACTED.search(line.attributes)
    return 2 * math.prod(result) * math.prod(left[d] for d in _numbers(contracted.group(1))) if contracted else 0


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
