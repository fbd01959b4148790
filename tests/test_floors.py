"""The floors of the house: an import goes to the same floor or a lower one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS = [
    {"jax5d.config", "jax5d.mesh", "jax5d.program"},
    {"jax5d.costs"},
    {"jax5d.data"},
    {"jax5d.parallel"},
    {"jax5d.layers"},
    {"jax5d.models"},
    {"jax5d.train"},
    {"jax5d.inference"},
    {"jax5d.measure"},
    {"jax5d.plan"},
    {"experiments"},
    {"run_experiment", "benchmarks"},
]
"""Lowest first."""

NARROW = {"jax5d.data": {"jax5d.config"}, "jax5d.costs": {"jax5d.config"}, "jax5d.mesh": {"jax5d.config"}}
"""Parts of the house that may import these alone of it, beside themselves."""

PURE = ("jax5d.config", "jax5d.costs")
"""Plain Python: no array library."""

ARRAYS = {"jax", "jaxlib", "flax", "optax", "chex", "numpy", "orbax"}


def part(module: str) -> str | None:
    """Which part of the house a module belongs to; None for a package from outside, and for jax5d itself."""
    return next((p for floor in FLOORS for p in floor if module == p or module.startswith(p + ".")), None)


def level(name: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if name in floor)


def imported(source: str, module: str) -> list[str]:
    """Every module that a source may import, anywhere in it: `from a import b` may mean a.b."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


def violations(source: str, module: str) -> list[str]:
    """What is wrong with the imports of `module`, one line each."""
    own = part(module)
    if own is None:
        return []
    wrong = []
    for target in imported(source, module):
        other = part(target)
        if target.split(".")[0] in ARRAYS and own in PURE:
            wrong.append(f"{module} is pure Python but imports {target}")
        if other is None or other == own:
            continue
        if level(other) > level(own):
            wrong.append(f"{module} imports {target}, a floor above it")
        elif other not in NARROW.get(own, {other}):
            wrong.append(f"{module} may not import {target}")
    return wrong


def modules() -> dict[str, Path]:
    """The house's modules by dotted name."""
    files = [*ROOT.glob("jax5d/**/*.py"), *ROOT.glob("experiments/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    files.append(ROOT / "run_experiment.py")
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def test_no_import_runs_upward() -> None:
    """All of the house."""
    found = modules()
    assert {part(m) for m in found} >= {
        "jax5d.config",
        "jax5d.costs",
        "jax5d.parallel",
        "jax5d.train",
        "run_experiment",
    }
    wrong = [line for module, file in found.items() for line in violations(file.read_text("utf-8"), module)]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_floor() -> None:
    """A new package must be put on one."""
    assert all(part(module) for module in modules() if module != "jax5d")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jax5d.parallel.tensor", "from jax5d.layers.norm import LayerNorm"),
        ("jax5d.parallel.tensor", "def f():\n    import jax5d.models.build"),
        ("jax5d.parallel.tensor", "from jax5d import train"),
        ("jax5d.parallel.tensor", "from ..layers import norm"),
        ("jax5d.config", "from jax5d.costs.parameters import count"),
        ("jax5d.costs.flops", "import jax.numpy as jnp"),
        ("jax5d.costs.flops", "from jax5d.mesh import AXES"),
        ("jax5d.config", "import numpy"),
        ("jax5d.data.text", "from jax5d.mesh import make_mesh"),
        ("jax5d.train.step", "import experiments.harness"),
        ("experiments.harness", "import run_experiment"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str) -> None:
    """The checker on sources that are wrong."""
    assert len(violations(source, module)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jax5d.parallel.tensor", "from jax5d.mesh import AXES\nimport jax\nfrom jax5d.parallel import data"),
        ("jax5d.train.step", "from jax5d.models.build import Model\nfrom . import optimizer"),
        (
            "jax5d.costs.flops",
            "import math\nfrom jax5d.config import ModelConfig\nfrom jax5d.costs import parameters",
        ),
        ("run_experiment", "from experiments import registry"),
    ],
)
def test_a_downward_import_passes(module: str, source: str) -> None:
    """And on sources that are right."""
    assert violations(source, module) == []


COLLECTIVES = {"psum", "pmax", "pmin", "pmean", "all_gather", "psum_scatter", "ppermute", "pshuffle", "all_to_all"}


def collectives(source: str) -> list[str]:
    """Collectives that a source calls by their names in jax.lax."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [f.attr for f in calls if isinstance(f, ast.Attribute) and f.attr in COLLECTIVES]


def test_collectives_live_in_parallel():
    """Whoever looks for what goes over the wire looks in one folder."""
    found = {name: collectives(path.read_text()) for name, path in modules().items()}
    assert not [name for name, calls in found.items() if calls and part(name) != "jax5d.parallel"]
    assert {call for calls in found.values() for call in calls} >= {"psum", "ppermute", "all_to_all", "psum_scatter"}
    assert collectives("y = lax.psum(x, 'tp')") == ["psum"]
