"""What a run logs: one JSON object a step, and the same to TensorBoard."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class MetricsLog:
    """Appends to metrics.jsonl and to TensorBoard event files in a run's folder.

    Args:
        folder: the run's folder.
        step: the step that the run goes on from; what an earlier, killed run logged beyond it is dropped.
    """

    def __init__(self, folder: Path, step: int):
        path = folder / "metrics.jsonl"
        _keep_until(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Log one step. `record` has "step" and JSON-able values; None is left out of TensorBoard."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._board.add_scalar(name, value, record["step"])

    def flush(self) -> None:
        """Bring TensorBoard's file up to the last record; a killed run then lacks nothing that a checkpoint covers."""
        self._board.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        """Write out what is buffered."""
        self._file.close()
        self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, in order of steps; a torn last line (a run killed while writing) is left out."""
    path = folder / "metrics.jsonl"
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read_metrics(path.parent) if record["step"] <= step]
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    draft.replace(path)


def jsonable(value: Any) -> Any:
    """A metric as a JSON-able number or list; what is not finite becomes None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
