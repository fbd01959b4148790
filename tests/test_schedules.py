"""Schedules as tables, walked tick by tick as the executor walks them: registers between stages hold one value."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jax5d.parallel.schedules import SCHEDULES, Table, forward_only, phases

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 17)]


class Times:
    """The tick of each piece of work: forward and backward by (stage, microbatch), head by microbatch."""

    def __init__(self, table: Table):
        self.forward: dict[tuple[int, int], int] = {}
        self.backward: dict[tuple[int, int], int] = {}
        self.head: dict[int, int] = {}
        for t, tick in enumerate(table.ticks):
            for row, times in ((tick.forward, self.forward), (tick.backward, self.backward)):
                for stage, m in enumerate(row or ()):
                    if 0 <= m < table.microbatches:
                        assert (stage, m) not in times, "done twice"
                        times[stage, m] = t
            if tick.head is not None:
                assert tick.head not in self.head, "done twice"
                self.head[tick.head] = t


def check_order(table: Table, times: Times, training: bool) -> None:
    """Each piece of work once, and its input arrives just before it: the next forward pass overwrites it."""
    stages, microbatches = range(table.stages), range(table.microbatches)
    every = {(s, m) for s in stages for m in microbatches}
    assert set(times.forward) == every
    assert set(times.head) == set(microbatches)
    assert set(times.backward) == (every if training else set())
    for s, m in every:
        if s:
            assert times.forward[s, m] == times.forward[s - 1, m] + 1
        if training:
            assert times.backward[s, m] >= times.forward[s, m]
            following = times.head[m] if s == table.stages - 1 else times.backward[s + 1, m] + 1
            assert times.backward[s, m] == following
    for m in microbatches:
        assert times.head[m] >= times.forward[table.stages - 1, m]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_order_and_time(schedule: Callable[[int, int], Table]) -> None:
    """Dependencies, and the ideal time: M + p - 1 ticks with a forward pass, as many with a backward pass."""
    for p, m in SIZES:
        table = schedule(p, m)
        check_order(table, Times(table), training=True)
        assert sum(tick.forward is not None for tick in table.ticks) == m + p - 1
        assert sum(tick.backward is not None for tick in table.ticks) == m + p - 1
        assert sum(tick.head is not None for tick in table.ticks) == m


def test_phases() -> None:
    """1F1B warms up for p - 1 ticks, does both for M and drains for p - 1; AFAB never does both in one tick."""
    for p, m in SIZES:
        both = [tick.forward is not None and tick.backward is not None for tick in SCHEDULES["1f1b"](p, m).ticks]
        assert both == [False] * (p - 1) + [True] * m + [False] * (p - 1)
        afab = SCHEDULES["afab"](p, m)
        assert not any(tick.forward is not None and tick.backward is not None for tick in afab.ticks)
        for table in (SCHEDULES["1f1b"](p, m), afab):
            assert tuple(tick for phase in phases(table.ticks) for tick in phase) == table.ticks
            for phase in phases(table.ticks):
                assert len({(t.forward is None, t.head is None, t.backward is None) for t in phase}) == 1


def test_forward_only() -> None:
    """Evaluation: M + p - 1 ticks, the head at the very tick of the last stage's forward pass."""
    for p, m in SIZES:
        table = forward_only(p, m)
        times = Times(table)
        check_order(table, times, training=False)
        assert len(table.ticks) == m + p - 1
        assert all(times.head[i] == times.forward[p - 1, i] for i in range(m))


def survives(table: Table, stage: int, slots: int) -> bool:
    """Brute force: write every forward pass, idle ones too, at m mod slots; is each real one there when needed?"""
    ring: dict[int, int] = {}
    for tick in table.ticks:
        if tick.forward is not None:
            ring[tick.forward[stage] % slots] = tick.forward[stage]
        m = tick.backward[stage] if tick.backward is not None else -1
        if 0 <= m < table.microbatches and ring[m % slots] != m:
            return False
    return True


@pytest.mark.parametrize(
    ("schedule", "saved", "outputs"),
    [
        # stage 0 writes m at tick m and needs it at tick m + 2 (p-1); it writes M+p-1 times in all
        ("1f1b", lambda p, m: min(2 * p - 1, m + p - 1), lambda p, m: 1),
        # stage 0 writes M+p-1 times before the first backward pass, the last p-1 of them idle
        ("afab", lambda p, m: m + p - 1, lambda p, m: m),
    ],
)
def test_slots(schedule: str, saved: Callable, outputs: Callable) -> None:
    """Ring sizes, by formula and by brute force: for what all stages save, and for the last stage's outputs."""
    for p, m in SIZES:
        table = SCHEDULES[schedule](p, m)
        for stages, want in ((range(p), saved(p, m)), (range(p - 1, p), outputs(p, m))):
            assert table.slots(stages) == want, (p, m)
            assert all(survives(table, s, want) for s in stages)
            assert not any(all(survives(table, s, fewer) for s in stages) for fewer in range(1, want))
