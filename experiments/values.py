"""Names and values of options and results: dotted names, the nearest valid one, and plain JSON values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any


def flatten(options: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a dataclass instance under their dotted names, such as `train.steps`."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        name, value = prefix + field.name, getattr(options, field.name)
        flat |= flatten(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return flat


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid dotted name most like `name`: as a whole, by its last part, or by its initials (`lr`)."""
    name = name.replace("-", "_")
    last = name.rpartition(".")[2]

    def likeness(candidate: str) -> tuple[float, bool]:
        option = candidate.rpartition(".")[2]
        initials = "".join(word[:1] for word in option.split("_"))
        pairs = (name, candidate), (last, option), (last, initials)
        ratio = max(SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return ratio, last[:1] == option[:1]

    return max(valid, key=likeness)


def plain(value: Any) -> Any:
    """`value` as strict JSON can hold it.

    Arrays and their scalars become Python numbers, infinities and NaN become "inf", "-inf" and "nan", paths
    become text. Raises TypeError for what has no such form.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} {value!r} has no plain JSON form")
