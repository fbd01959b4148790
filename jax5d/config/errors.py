"""What a refusal is, and the ones that many options share."""

from __future__ import annotations

import math
from typing import Any, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """The user's input cannot be run. The message is one line that names the values and the mend."""


def divides(part: str, n: int, whole: str, m: int, mend: str) -> None:
    """Raise `ConfigError` unless n, the value of `part`, divides m, that of `whole`."""
    if m % n:
        raise ConfigError(f"{whole}={m} is not divisible by {part}={n}; {mend}")


def at_least(low: float, **values: float) -> None:
    """Raise `ConfigError` for a value below `low` or not finite; a name's __ stands for the option's dot."""
    for name, value in values.items():
        if not low <= value < math.inf:  # nan is in no range
            raise ConfigError(f"{name.replace('__', '.')}={value} is below {low} or not finite; give {low} or more")


def check_choices(part: str, options: Any) -> None:
    """Raise `ConfigError` unless every value that must be one of a few is."""
    for name, kind in get_type_hints(type(options)).items():
        several = get_origin(kind) is tuple
        choices = get_args(get_args(kind)[0] if several else kind)
        for value in getattr(options, name) if several else (getattr(options, name),):
            if choices and value not in choices:
                raise ConfigError(f"{part}.{name}={value!r} is not known; choose of {', '.join(map(str, choices))}")
