"""What one GPU holds, by formula, in the settings that need least."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from experiments.ch00_foundations._memory_cases import case
from jax5d.config import PRESETS, RunConfig
from jax5d.costs.gpus import Gpu
from jax5d.costs.memory import memory

MOST = 2**16
"""Where a search for sequences or GPUs ends."""


@dataclass(frozen=True)
class OneGpu:
    """A GPU, and the pieces of a microbatch's tokens for which logits exist at one time."""

    chip: Gpu
    loss_chunks: int

    def config(self, name: str, rows: int = 1, *, pure: bool = False, dp: int = 1) -> RunConfig:
        """A preset with `rows` sequences of its context on each GPU: bfloat16 computation, layers recomputed.

        `pure`: parameters, gradients and moments are of 16 bits too.
        """
        states = {"param_dtype": "bfloat16", "accumulate": "bfloat16"} if pure else {}
        length, chunks = PRESETS[name].context, self.loss_chunks
        return case(name, batch=rows * dp, length=length, remat="full", loss_chunks=chunks, dp=dp, **states)

    def rows(self, name: str, *, pure: bool = False) -> int:
        """Most sequences at a time that fit: 0 where one does not."""

        def too_many(rows: int) -> bool:
            return memory(self.config(name, rows, pure=pure)).total > self.chip.visible

        return bisect_left(range(1, MOST), True, key=too_many)

    def row_bytes(self, name: str, *, pure: bool = False) -> int:
        """What one sequence more than fit would add."""
        rows = max(1, self.rows(name, pure=pure))
        more, less = (memory(self.config(name, n, pure=pure)).total for n in (rows + 1, rows))
        return more - less

    def gpus(self, name: str, *, batch: bool) -> int | None:
        """Fewest GPUs that hold the states and gradients of ZeRO-3, or with a `batch` a step of a sequence on each.

        None where no number does.
        """

        def fits(n: int) -> bool:
            config = self.config(name, dp=n)
            found = memory(replace(config, parallel=replace(config.parallel, zero=3)))
            return (found.total if batch else found.state + found.gradients) <= self.chip.visible

        return 1 + bisect_left(range(1, MOST), True, key=fits) if fits(MOST) else None
