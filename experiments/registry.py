"""The experiments: files `experiments/chNN_*/NAME.py`, listed without importing them.

An experiment's file has a docstring and the literals CAPSULES (numbers), CLAIM and NEEDS (devices and time).
Files whose name begins with an underscore are helpers.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from experiments.values import nearest
from jax5d.config import ConfigError

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Entry:
    """What is known of an experiment before it is imported."""

    name: str
    capsules: list[int]
    chapter: str
    """Number and words of the folder, such as "07 together"."""
    claim: str
    needs: str
    """Devices and time."""
    doc: str
    """The file's docstring."""
    path: Path


def entries(root: Path = ROOT) -> list[Entry]:
    """Every experiment below `root`, by chapter, capsule and name."""
    files = (path for path in root.glob("ch[0-9][0-9]_*/*.py") if not path.name.startswith("_"))
    return sorted(map(_read, files), key=lambda entry: (entry.chapter, entry.capsules, entry.name))


def find(name: str, root: Path = ROOT) -> Entry:
    """The experiment of that name. Raises `ConfigError` where there is none."""
    known = {entry.name: entry for entry in entries(root)}
    if name in known:
        return known[name]
    near = f"the nearest name is {nearest(name, known)}" if known else "there are none"
    raise ConfigError(f"unknown experiment {name}; {near}")


def load(entry: Entry) -> ModuleType:
    """Import the experiment's module, under the name that an import statement would give it."""
    name = f"experiments.{entry.path.parent.name}.{entry.name}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, entry.path)
    assert spec and spec.loader, entry.path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it runs
    spec.loader.exec_module(module)
    return module


def _read(path: Path) -> Entry:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    chapter = re.match(r"ch(\d\d)_(.+)", path.parent.name)
    literals = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    missing = {"CAPSULES", "CLAIM", "NEEDS"} - literals.keys()
    if missing or not chapter:
        raise ValueError(f"{path} is no experiment: it lacks {', '.join(sorted(missing))}")
    return Entry(
        name=path.stem,
        capsules=ast.literal_eval(literals["CAPSULES"]),
        chapter=f"{chapter[1]} {chapter[2].replace('_', ' ')}",
        claim=ast.literal_eval(literals["CLAIM"]),
        needs=ast.literal_eval(literals["NEEDS"]),
        doc=ast.get_docstring(tree) or "",
        path=path,
    )
