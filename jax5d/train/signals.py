"""Ctrl-C and SIGTERM end a run at the next step, so that it can save."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Stopped(Exception):
    """The run was asked to end by a signal and has saved. The message says where."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


class StopRequest:
    """Within `with`: `number` is the signal that asked for an end, or 0. A second signal acts at once."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
