"""Pipeline schedules as data: which microbatch each stage works on at each tick.

A table drives the executor, the pictures and the tests. Ticks are uniform: in one tick every stage does the same kinds
of work (a forward pass, the head, a backward pass). A stage that has nothing of its own in a tick is masked there.

Narayanan et al., arXiv:2104.04473, section 2.2: all forward, all backward (GPipe) and one forward, one backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Tick:
    """One tick: the microbatch of each stage for each kind of work, or None where no stage does that kind.

    Indices run on beyond 0..microbatches-1 where a stage is idle, so that its ring slot stays its own.
    """

    forward: tuple[int, ...] | None
    backward: tuple[int, ...] | None
    head: int | None


@dataclass(frozen=True)
class Table:
    """A whole step: `ticks` for `stages` stages and `microbatches` microbatches."""

    stages: int
    microbatches: int
    ticks: tuple[Tick, ...]

    def slots(self, stages: range) -> int:
        """Fewest ring slots, at m mod slots, that keep a forward pass's result until the backward pass of `stages`."""
        return next(n for n in range(1, len(self.ticks) + 2) if all(self._kept(s, n) for s in stages))

    def _kept(self, stage: int, slots: int) -> bool:
        held: dict[int, int] = {}
        for tick in self.ticks:
            if tick.forward is not None:
                held[tick.forward[stage] % slots] = tick.forward[stage]
            m = -1 if tick.backward is None else tick.backward[stage]
            if 0 <= m < self.microbatches and held.get(m % slots) != m:
                return False
        return True


def phases(ticks: tuple[Tick, ...]) -> Iterator[tuple[Tick, ...]]:
    """Runs of ticks that do the same kinds of work; each is one loop of the executor."""

    def kinds(tick: Tick) -> tuple[bool, ...]:
        return tick.forward is not None, tick.head is not None, tick.backward is not None

    return (tuple(run) for _, run in groupby(ticks, kinds))


def _tick(
    stages: int, microbatches: int, *, forward: int | None = None, head: int | None = None, backward: int | None = None
) -> Tick:
    """A tick from the microbatch of the first stage (forward), of the head and of the last stage (backward)."""
    return Tick(
        forward=None if forward is None else tuple(forward - s for s in range(stages)),
        backward=None if backward is None else tuple(backward - (stages - 1 - s) for s in range(stages)),
        head=head if head is not None and 0 <= head < microbatches else None,
    )


def afab(stages: int, microbatches: int) -> Table:
    """All forward, all backward: every microbatch is in flight at once."""
    span = range(microbatches + stages - 1)
    ticks = [_tick(stages, microbatches, forward=t) for t in span]
    ticks += [_tick(stages, microbatches, head=t, backward=t) for t in span]
    return Table(stages, microbatches, tuple(ticks))


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """One forward, one backward: p-1 ticks of forward, M of both, p-1 of backward; the ideal 1F1B time.

    The uniform tick keeps at most 2p-1 microbatches in flight, where the textbook's staggered tick keeps p.
    """
    lead = stages - 1
    ticks = [
        _tick(
            stages,
            microbatches,
            forward=t if t < microbatches + lead else None,
            head=t - lead,
            backward=t - lead if t >= lead else None,
        )
        for t in range(microbatches + 2 * lead)
    ]
    return Table(stages, microbatches, tuple(ticks))


def forward_only(stages: int, microbatches: int) -> Table:
    """Evaluation: forward passes, and the head as soon as the last stage has a result."""
    lead = stages - 1
    span = range(microbatches + lead)
    return Table(stages, microbatches, tuple(_tick(stages, microbatches, forward=t, head=t - lead) for t in span))


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b}
"""Training schedules by their name in the configuration."""
