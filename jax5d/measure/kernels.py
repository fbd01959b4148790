"""The kernels of a compiled program, and the bytes that each reads and writes.

A kernel reads its operands once and writes its results once: what is fused inside it never reaches memory. So the sum
over kernels is what a program moves, but for three things: arrays are counted whole, even where a kernel reads a part
of one; caches may serve what has just been written; what a library keeps in a workspace of its own is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax5d.measure.hlo import WIDTHS, Computation, Instruction, Program, arrays, parse, size
from jax5d.measure.timeline import FREE, OPS, UNREAD

CONTROL = ("while", "conditional", "call", "async-start")
"""Opcodes that run other computations and nothing themselves; a fusion is one kernel."""

WORKSPACE = ("u8", "s8")
"""Dtypes of a custom call's workspace, the last of its results."""


@dataclass(frozen=True)
class Kernel:
    """One kernel; bytes are those of one execution."""

    name: str
    """Of its instruction."""
    opcode: str
    products: int
    """Matrix multiplies and attention kernels in it."""
    flops: int
    """Of those products; see `jax5d.measure.hlo.Program.kernels`."""
    bytes_in: int
    bytes_out: int
    count: int
    """Executions in one call of the program."""

    @property
    def traffic(self) -> int:
        """Bytes read and written in one call of the program."""
        return self.count * (self.bytes_in + self.bytes_out)


def kernels(text: str) -> list[Kernel]:
    """The kernels of one call of a scheduled program, in its order.

    Collectives are left out: `jax5d.measure.timeline` reads those. Of a conditional the branch that moves most counts.

    Args:
        text: `compiled.as_text()`.

    Raises:
        NotImplementedError: a loop of unknown length.
    """
    program = parse(text)
    return list(_walk(program, program.computations[program.entry], 1))


def _walk(program: Program, computation: Computation, times: int) -> Iterator[Kernel]:
    for line in computation.values():
        if line.opcode in CONTROL:
            yield from _inside(program, line, times)
        elif _runs(line):
            yield _kernel(program, computation, line, times)


def _runs(line: Instruction) -> bool:
    """Whether it is a kernel; the two ends of something asynchronous are counted at its start."""
    opcode = line.opcode.removesuffix("-start").removesuffix("-done")
    return not (line.opcode in FREE or opcode in OPS or opcode in UNREAD or line.opcode.endswith(("-done", "-update")))


def _inside(program: Program, line: Instruction, times: int) -> list[Kernel]:
    """Kernels of the computations that an instruction runs."""
    if line.opcode == "while" and line.trips is None:
        raise NotImplementedError(f"kernels in the loop {line.name} of unknown length")
    repeat = times * (line.trips or 1) if line.opcode == "while" else times
    found = [list(_walk(program, program.computations[name], repeat)) for name in line.called]
    if line.opcode == "conditional":
        return max(found, key=lambda branch: sum(kernel.traffic for kernel in branch), default=[])
    return [kernel for body in found for kernel in body]


def _kernel(program: Program, computation: Computation, line: Instruction, times: int) -> Kernel:
    read = sum(size(computation[name].kind) for name in dict.fromkeys(line.operands))
    products, flops = program.kernels(computation, line)
    return Kernel(line.name, line.opcode, products, flops, read, _written(line, read), times)


def _written(line: Instruction, read: int) -> int:
    """Bytes of the results: of an asynchronous copy as many as it reads, of a custom call all but its workspace."""
    if line.opcode == "copy-start":
        return read
    results = arrays(line.kind)
    dtype, dims = results[-1] if results else ("", ())
    workspace = line.opcode == "custom-call" and len(results) > 1 and dtype in WORKSPACE
    return size(line.kind) - (WIDTHS[dtype] * math.prod(dims) if workspace else 0)
