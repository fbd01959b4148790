"""Pipeline bubbles and how many microbatches are in flight, by schedule.

p stages, m microbatches, V chunks of layers a stage. A forward pass F and the backward pass's halves, B of activations
and W of weights, take equally long. GPipe, 1F1B, interleaved: Narayanan et al., arXiv:2104.04473, section 2.2. Zero
bubble (ZB-H1 is zb1p, ZB-H2 zb2p): Qi et al., arXiv:2401.10241. ZB-V and V-half: Qi et al., arXiv:2405.15362.
"""

from __future__ import annotations

from fractions import Fraction

from jax5d.config import ConfigError

SCHEDULES = ("afab", "1f1b", "uniform-1f1b", "interleaved", "zb1p", "zb2p", "zbv", "v-half")
"""uniform-1f1b is what `jax5d.parallel.schedules` calls 1f1b: every stage does the same kinds of work in a tick."""


def _of(table: dict[str, Fraction], schedule: str) -> Fraction:
    if schedule not in table:
        raise ConfigError(f"schedule={schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
    return table[schedule]


def bubble(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Fraction:
    """Idle time over the ideal time of the step, the same on each stage.

    zb1p is idle for (p-1)(F + B - W), a third of 1F1B's (p-1)(F + B + W); zb2p and zbv not at all, with microbatches
    enough; v-half for half of 1F1B's. `chunks` counts for interleaved alone.
    """
    plain = Fraction(stages - 1, microbatches)
    same = dict.fromkeys(("afab", "1f1b", "uniform-1f1b"), plain)
    none = dict.fromkeys(("zb2p", "zbv"), Fraction(0))
    table = {**same, **none, "interleaved": plain / chunks, "zb1p": plain / 3, "v-half": plain / 2}
    return _of(table, schedule)


def idle_share(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Fraction:
    """Idle time over the whole time of the step: b / (1 + b) of a bubble b over ideal; (p-1)/(m+p-1) of 1F1B."""
    over_ideal = bubble(schedule, stages, microbatches, chunks)
    return over_ideal / (1 + over_ideal)


def in_flight(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Fraction:
    """Most microbatches whose activations a stage holds at once, each counted for all of the stage's layers.

    afab m; 1f1b and zb1p p; uniform-1f1b 2p - 1; zb2p 2p; zbv p; v-half p/2; interleaved p (1 + (p-1)/(p V))
    (Korthikanti et al., arXiv:2205.05198, section 4.2.3). Never more than m. The executor of `jax5d.parallel.pipeline`
    gives a slot to what its idle ticks compute, too: it has m + p - 1 for afab, and at most so many for uniform-1f1b.
    """
    p = Fraction(stages)
    table = {
        "afab": Fraction(microbatches),
        "1f1b": p,
        "uniform-1f1b": 2 * p - 1,
        "interleaved": p + (p - 1) / chunks,
        "zb1p": p,
        "zb2p": 2 * p,
        "zbv": p,
        "v-half": p / 2,
    }
    return min(_of(table, schedule), Fraction(microbatches))
