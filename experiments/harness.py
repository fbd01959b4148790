"""Runs an experiment and writes what it leaves: config.yaml, figures, result.json.

An experiment's module has DEFAULTS and QUICK (instances of `Options` or of a subclass) and
`run(options, folder, console) -> Outcome`. It may have `check(options, folder)`, which raises `ConfigError`
before anything is written.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
import traceback
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.config_file import experiment_of, to_dict, to_yaml
from experiments.options import Options, TrainingOptions
from experiments.registry import Entry
from experiments.values import plain
from jax5d.config import AXES, ConfigError
from jax5d.train.signals import Stopped


@dataclass(frozen=True)
class Check:
    """A measurement against a number that was derived some other way."""

    name: str
    measured: float
    expected: float
    tolerance: float | str
    """Largest |measured - expected|, or "below": `expected` is a limit that the measurement stays under."""
    held: bool

    @classmethod
    def equal(cls, name: str, measured: Any, expected: Any, tolerance: Any = 0.0) -> Check:
        """Holds where |measured - expected| <= tolerance (absolute). NaN never holds. Takes any scalars."""
        measured, expected, tolerance = _number(measured), _number(expected), _number(tolerance)
        return cls(name, measured, expected, tolerance, abs(measured - expected) <= tolerance)

    @classmethod
    def below(cls, name: str, measured: Any, limit: Any) -> Check:
        """Holds where measured < limit. NaN never holds. Takes any scalars."""
        measured, limit = _number(measured), _number(limit)
        return cls(name, measured, limit, "below", measured < limit)


def _number(scalar: Any) -> float:
    """A Python number, so that unsigned ones do not wrap and large integers stay exact."""
    return scalar.item() if hasattr(scalar, "item") else scalar


@dataclass(frozen=True)
class Outcome:
    """What an experiment found."""

    checks: list[Check]
    """The claim holds where all of them do; without a check nothing was shown."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """For result.json: numbers, arrays, text, nested lists and dicts."""
    tables: list[Table] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether the claim held."""
        return bool(self.checks) and all(check.held for check in self.checks)


def run(entry: Entry, module: ModuleType, options: Options, console: Console) -> int:
    """Run an experiment and write its folder; 0 where the claim held, 1 where it did not or the run failed.

    Raises `ConfigError` for a folder of another experiment or one that cannot be written, and whatever the module
    refuses. What its `check` refuses leaves the disk as it was.
    """
    folder = options.out or Path("runs", entry.name, time.strftime("%Y%m%d-%H%M%S"))
    config = folder / "config.yaml"
    try:
        taken = config.exists() and experiment_of(config) != entry.name
    except OSError as error:
        raise _unwritable(folder, error) from None
    if taken:
        raise ConfigError(f"--out {folder} has a config.yaml that is not of {entry.name}; give another folder")
    if hasattr(module, "check"):
        module.check(options, folder)
    folder = _open_folder(folder, entry, options)
    console.print(f"{entry.name}: {_summary(options)}\n{folder}", highlight=False, markup=False, soft_wrap=True)
    start, failure = time.perf_counter(), {}
    (folder / "result.json").unlink(missing_ok=True)  # however this run ends, an older verdict is not its own
    try:
        outcome = module.run(options, folder, console)
    except (ConfigError, Stopped):
        raise
    except Exception as error:
        if isinstance(error, (OSError, FloatingPointError)):  # the disk or the numbers, not the program
            console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        else:
            traceback.print_exc()
        outcome, failure = Outcome([]), {"error": f"{type(error).__name__}: {error}"}
    result = {
        "experiment": entry.name,
        "capsules": entry.capsules,
        "claim": entry.claim,
        "held": outcome.held,
        "checks": outcome.checks,
        "metrics": outcome.metrics,
        "config": to_dict(options),
        "environment": environment(),
        "seconds": time.perf_counter() - start,
    }
    _write(folder / "result.json", json.dumps(plain(result | failure), indent=2, allow_nan=False) + "\n")
    for table in [*outcome.tables, *([_check_table(outcome.checks)] if outcome.checks else [])]:
        console.print(table)
    verdict = "the run failed" if failure else "the claim held" if outcome.held else "the claim did NOT hold"
    console.print(f"{verdict}: {entry.claim}\n{folder}", highlight=False, markup=False, soft_wrap=True)
    return 0 if outcome.held else 1


def save_figure(figure: Figure, folder: Path, name: str) -> None:
    """Write NAME.png and NAME.svg. Make the figure with `matplotlib.figure.Figure`, which needs no display."""
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"{name}.{suffix}", dpi=150, bbox_inches="tight")


def environment() -> dict[str, Any]:
    """Versions, devices and commit of this process. Makes JAX look for its devices."""
    import jax

    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "commit": commit,
    }


def _open_folder(folder: Path, entry: Entry, options: Options) -> Path:
    """Make the run's folder and write its config.yaml."""
    try:
        if options.out:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = _make_unique(folder)
        _write(folder / "config.yaml", to_yaml(options, entry.name))
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {folder}: {error.strerror}; give a folder that can be written")


def _make_unique(folder: Path) -> Path:
    """Make `folder`, or where another run has just made it `folder`-2, -3, ..."""
    unique, number = folder, 1
    while True:
        try:
            unique.mkdir(parents=True)
            return unique
        except FileExistsError:
            number += 1
            unique = folder.with_name(f"{folder.name}-{number}")


def _write(path: Path, text: str) -> None:
    """Write all of a file or, where that fails, nothing."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _summary(options: Options) -> str:
    """The resolved mesh, and how a global batch is divided."""
    mesh = options.mesh
    sizes = " ".join(f"{axis}={getattr(mesh, axis)}" for axis in AXES)
    text = f"mesh {sizes}, {mesh.size} devices"
    if isinstance(options, TrainingOptions):
        count, shards = options.parallel.microbatches, mesh.batch_shards
        batch = options.train.global_batch
        text += f"; global batch {batch} = {batch // (count * shards)} sequences"
        text += f" x {count} microbatches x {shards} data shards (dp x ep)"
    return text


def _check_table(checks: list[Check]) -> Table:
    table = Table("check", "measured", "expected", "tolerance", "held", title="Checks")
    for check in checks:
        numbers = (check.measured, check.expected, check.tolerance)
        cells = (f"{number:.6g}" if isinstance(number, float) else str(number) for number in numbers)
        table.add_row(Text(check.name), *cells, "yes" if check.held else "NO")
    return table
