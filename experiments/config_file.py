"""A run's config.yaml: written in full, and read back as strictly as a command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.values import flatten, nearest, plain
from jax5d.config import ConfigError

COMMAND_LINE_ONLY = ("config", "out")
"""Options that say where a run is kept, not what it is."""


@dataclass(frozen=True)
class Setting:
    """One option of a file, as words of a command line."""

    words: list[str]
    where: str
    """File and line, for a refusal."""


def to_dict(options: Any) -> dict[str, Any]:
    """The options as nested plain values, without those that belong to the command line only."""
    return {name: value for name, value in plain(options).items() if name not in COMMAND_LINE_ONLY}


def to_yaml(options: Any, experiment: str) -> str:
    """The text of a config.yaml that starts the same run of `experiment` again."""
    config = {"experiment": experiment} | to_dict(options)
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def experiment_of(path: Path) -> str | None:
    """The experiment that a config.yaml names; None where it names none or cannot be read."""
    try:
        config = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, OSError):
        return None
    return config.get("experiment") if isinstance(config, dict) else None


def read(path: Path, defaults: Any, experiment: str) -> list[Setting]:
    """The settings of a YAML file whose keys are the options of `defaults`, nested or dotted.

    Raises `ConfigError` with file and line for what is not YAML, for unknown, misplaced and repeated keys, for a
    value of another type, and for a file that another experiment wrote.
    """
    root = _compose(path)
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{_where(path, root.start_mark)}: not a mapping; write lines such as seed: 0")
    values = flatten(defaults)
    sections = {name.rpartition(".")[0] for name in values if "." in name}
    settings = []
    for name, where, node in _leaves(root, path, sections, "", {}):
        if name == "experiment":
            if node.value != experiment:
                raise ConfigError(f"{where}: this configures {node.value}, not {experiment}; run that instead")
        elif name in COMMAND_LINE_ONLY:
            raise ConfigError(f"{where}: {name} has no place in a file; write --{name} on the command line")
        elif name not in values:
            near = nearest(name, [key for key in values if key not in COMMAND_LINE_ONLY])
            raise ConfigError(f"{where}: unknown key {name}; the nearest valid key is {near}")
        else:
            settings.append(Setting(_words(name, values[name], _construct(node, where), where), where))
    return settings


def _where(path: Path, mark: yaml.Mark | None) -> str:
    return f"{path} line {mark.line + 1}" if mark else str(path)


def _one_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _compose(path: Path) -> yaml.Node | None:
    """The file's tree of nodes, which know their lines."""
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a run's config.yaml") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is not UTF-8 text; give a run's config.yaml") from None
    except yaml.YAMLError as error:
        where = _where(path, getattr(error, "problem_mark", None))
        raise ConfigError(f"{where}: not valid YAML: {_one_line(error)}; mend that line") from None


def _leaves(
    mapping: yaml.MappingNode, path: Path, sections: set[str], prefix: str, seen: dict[str, str]
) -> Iterator[tuple[str, str, yaml.Node]]:
    """Dotted name, file and line, and node of each value. Only sections are entered, so an alias cycle ends.

    `seen` collects the names and where they are.
    """
    for key, node in mapping.value:
        name, where = prefix + _text(key), _where(path, key.start_mark)
        if name in seen:
            raise ConfigError(f"{where}: {name} is given twice, first at {seen[name]}; keep one")
        seen[name] = where
        if name not in sections:
            inner = isinstance(node, yaml.MappingNode) and node.value
            yield f"{name}.{_text(node.value[0][0])}" if inner else name, where, node
        elif isinstance(node, yaml.MappingNode):
            yield from _leaves(node, path, sections, f"{name}.", seen)
        else:
            raise ConfigError(f"{where}: {name} is a section; indent its keys below it")


def _text(key: yaml.Node) -> str:
    return key.value if isinstance(key, yaml.ScalarNode) else "[...]"


def _construct(node: yaml.Node, where: str) -> Any:
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not a value: {_one_line(error)}; mend that line") from None


def _words(name: str, default: Any, value: Any, where: str) -> list[str]:
    """A value as words of the command line, where its type has the kind of the default's.

    Numbers are left to the command line's own reading: YAML 1.1 takes 1e-3 for text.
    """
    kinds = ((bool, bool, "true or false"), (tuple, list, "a list"), (str, str, "text; put quotes round it"))
    for kind, written, meaning in kinds:
        wanted = isinstance(default, kind)
        if wanted != isinstance(value, written) and (wanted or written is not str):
            expected = meaning if wanted else f"of the kind of {default!r}"
            raise ConfigError(f"{where}: {name}={value!r} is not {expected}; its default is {default!r}")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--{negated(name)}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def negated(name: str) -> str:
    """The flag that switches a boolean option off: `parallel.no_sequence` for `parallel.sequence`."""
    section, dot, option = name.rpartition(".")
    return f"{section}{dot}no_{option}"
