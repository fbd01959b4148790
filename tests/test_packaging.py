"""The package says the same as the requirements files, and carries its types."""

from __future__ import annotations

import tomllib
from pathlib import Path

import jax5d

ROOT = Path(__file__).parent.parent


def lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "-r"))]


def test_dependencies_are_the_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["dev"] == lines("requirements-dev.txt")
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}
    assert lines("requirements.txt")
    assert (ROOT / "jax5d" / "py.typed").exists()


def test_every_public_name_is_there():
    for name in jax5d.__all__:
        assert getattr(jax5d, name).__doc__ or name == "PRESETS"
