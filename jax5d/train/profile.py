"""A profile of a few steps of a run, by JAX's profiler, beside what else the run leaves.

JAX dispatches work and returns, so a trace that starts and stops with the Python lines around a step would miss what
the devices do. Here results are awaited before the trace opens and at the end of each step in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jax5d.config import TrainConfig

Tree = Any

STEP = "train"
"""Name of the annotation around each profiled step; its `step_num` is the step as metrics.jsonl numbers it."""

SHOWN = 1_000_000
"""Events that a viewer is given: of a longer trace the trace.json.gz beside it holds only some, without saying so."""


class Profile:
    """The window of a run that is profiled: steps `profile_start` + 1 to `profile_start` + `profile_steps`.

    A run that goes on inside the window profiles the rest of it, one that ends inside it what there is. Leaving the
    context closes an open trace, whatever ended the run. A profile that cannot be made does not end it.

    Args:
        folder: of the trace; made when there is something to write.
        train: gives the window, in steps of the whole run.
        done: the step that this part of the run goes on from.
        say: shows a line to the user.
    """

    def __init__(self, folder: Path, train: TrainConfig, done: int, say: Callable[[str], None]):
        first, stop = train.profile_start, min(train.profile_start + train.profile_steps, train.steps)
        self._folder, self._say = folder, say
        self._window = range(first, stop)
        self._steps: list[int] = []
        self._open = False
        if train.profile_steps and done >= stop:
            say(f"nothing is profiled: {_span(first + 1, stop)} came before step {done}, from which this run goes on")

    def between(self, done: int, state: Tree) -> None:
        """Called between steps: opens the trace where the window begins and closes it where it ends.

        Args:
            done: steps done.
            state: their result, awaited before the trace opens.
        """
        if self._open and done not in self._window:
            self._close()
        elif not self._open and done in self._window:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # each Python call would be an event, and drown those of the devices
            try:
                jax.profiler.start_trace(str(self._folder), profiler_options=options)
                self._open = True
            except RuntimeError as error:  # someone else has a trace open, and JAX makes one at a time
                self._window = range(0)
                self._say(f"nothing is profiled: {error}")

    def step(self, number: int, function: Callable[..., Tree], *args: Tree) -> Tree:
        """`function(*args)`; inside the window marked as step `number`, with its results awaited."""
        if not self._open:
            return function(*args)
        self._steps.append(number)
        with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
            return jax.block_until_ready(function(*args))

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open:
            self._close()

    def _close(self) -> None:
        """Write the trace and say where."""
        self._open = False
        try:
            jax.profiler.stop_trace()
            file = trace_files(self._folder)[-1]
            events = count_events(file)
        except Exception as error:  # the profiler's own, of several kinds
            self._say(f"no profile could be written to {self._folder}: {' '.join(str(error).split())[:300]}")
            return
        steps = _span(self._steps[0], self._steps[-1]) if self._steps else "no step"
        self._say(f"profiled {steps}: {file}")
        if events > SHOWN:
            self._say(
                f"that is {events} events: trace.json.gz beside it shows only {SHOWN} of them, the .xplane.pb has all; "
                "lower --train.profile_steps to see them in a viewer"
            )


def trace_files(folder: Path) -> list[Path]:
    """The traces below a folder, oldest first."""
    return sorted(folder.glob("**/*.xplane.pb"), key=lambda file: (file.stat().st_mtime_ns, file))


def count_events(file: Path) -> int:
    """Events of a trace, on all lines."""
    data = jax.profiler.ProfileData.from_file(str(file))
    return sum(1 for plane in data.planes for line in plane.lines for _ in line.events)


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
