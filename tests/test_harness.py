"""What a run leaves in its folder, and what it leaves alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments import harness
from experiments.harness import Check, Outcome
from experiments.options import Options
from experiments.registry import Entry
from experiments.values import plain
from jax5d.config import ConfigError, MeshConfig

ENTRY = Entry("fake", [91], "91 made up", "two [and] two is four", "1 s", "", Path("fake.py"))
HELD = Outcome([Check.equal("sum [1]", 4, 4)])


def experiment(outcome: Outcome | BaseException, check: Any = None) -> ModuleType:
    """A module whose run gives the outcome, or raises it."""

    def run(options: Options, folder: Path, console: Console) -> Outcome:
        assert (folder / "config.yaml").exists()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module: Any = ModuleType("fake")
    module.run = run
    if check:
        module.check = check
    return module


def run(outcome: Outcome | BaseException, out: Path | None, check: Any = None) -> tuple[int, str]:
    """Exit status and what was printed."""
    screen = io.StringIO()
    options = Options(mesh=MeshConfig(tp=2), out=out, seed=5)
    status = harness.run(ENTRY, experiment(outcome, check), options, Console(file=screen, width=80))
    return status, screen.getvalue()


def result(folder: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((folder / "result.json").read_text(), parse_constant=refuse)


def test_a_run_leaves_its_configuration_and_its_result(tmp_path: Path) -> None:
    metrics = {
        "loss": np.float32(0.5),
        "count": np.int64(3),
        "curve": jnp.array([1.0, 2.0]),
        "worst": float("inf"),
        "lost": [np.float64("nan"), -np.inf],
        "half": jnp.bfloat16(1.5),
        7: (True, None, Path("a/b")),
    }
    table = Table("loss", title="A table")
    status, printed = run(Outcome(HELD.checks, metrics, [table]), tmp_path / "a" / "b")
    assert status == 0
    for part in ("A table", "sum [1]", "the claim held: two [and] two is four", "tp=2", str(tmp_path)):
        assert part in printed
    config = {"mesh": {"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 2}, "devices": None, "quick": False, "seed": 5}
    left = result(tmp_path / "a" / "b")
    environment, seconds = left.pop("environment"), left.pop("seconds")
    assert left == {
        "experiment": "fake",
        "capsules": [91],
        "claim": "two [and] two is four",
        "held": True,
        "checks": [{"name": "sum [1]", "measured": 4, "expected": 4, "tolerance": 0.0, "held": True}],
        "metrics": {
            "loss": 0.5,
            "count": 3,
            "curve": [1.0, 2.0],
            "worst": "inf",
            "lost": ["nan", "-inf"],
            "half": 1.5,
            "7": [True, None, "a/b"],
        },
        "config": config,
    }
    assert 0 <= seconds < 60
    assert set(environment) == {
        "jax", "jaxlib", "python", "platform", "device_kind", "devices", "processes", "commit",
    }  # fmt: skip
    assert (environment["jax"], environment["devices"]) == (jax.__version__, len(jax.devices()))
    assert yaml.safe_load((tmp_path / "a" / "b" / "config.yaml").read_text()) == {"experiment": "fake", **config}
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["config.yaml", "result.json"]


@pytest.mark.parametrize("outcome", [Outcome([*HELD.checks, Check.equal("sum", 4, 5)]), Outcome([])])
def test_a_claim_that_does_not_hold_exits_1(tmp_path: Path, outcome: Outcome) -> None:
    status, printed = run(outcome, tmp_path)
    assert status == 1
    assert "did NOT hold" in printed
    assert result(tmp_path)["held"] is False
    assert "error" not in result(tmp_path)


def test_a_failed_run_says_so_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(HELD, tmp_path)[0] == 0
    status, printed = run(RuntimeError("out of\nmemory"), tmp_path)
    assert status == 1
    assert "the run failed" in printed
    assert "Traceback" in capsys.readouterr().err
    assert (result(tmp_path)["held"], result(tmp_path)["error"]) == (False, "RuntimeError: out of\nmemory")


@pytest.mark.parametrize("error", [ConfigError("other checkpoints"), KeyboardInterrupt()])
def test_a_run_that_stops_on_purpose_leaves_no_result(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        run(error, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_runs_of_the_same_second_have_their_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20300102-030405")
    assert [run(HELD, None)[0] for _ in range(3)] == [0, 0, 0]
    names = sorted(path.parent.name for path in tmp_path.glob("runs/fake/*/result.json"))
    assert names == ["20300102-030405", "20300102-030405-2", "20300102-030405-3"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("text", ["experiment: other\nseed: 1\n", "seed: 1\n", "a: [", "- 1", ""])
def test_a_folder_of_something_else_is_left_as_it_was(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "result.json").write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="not of fake; give another folder"):
        run(HELD, tmp_path)
    assert contents(tmp_path) == before


def test_what_check_refuses_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(options: Options, folder: Path) -> None:
        raise ConfigError(f"{folder} holds checkpoints of seed 4, not {options.seed}")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="seed 4, not 5"):
        run(HELD, None, check)
    assert not list(tmp_path.iterdir())
    run(HELD, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="seed 4, not 5"):
        run(HELD, tmp_path, check)
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder" / "config.yaml").mkdir(parents=True)
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "folder"):
        with pytest.raises(ConfigError, match=f"^--out {out}[^\n]*; give a"):
            run(HELD, out)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["config.yaml"]


def test_a_result_that_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with pytest.raises(OSError):
        run(HELD, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "result.json"]


@pytest.mark.parametrize(
    ("check", "held"),
    [
        (Check.equal("c", 1.5, 1.0, 0.5), True),
        (Check.equal("c", 1.5, 1.0, 0.25), False),
        (Check.equal("c", -1, 1, 1), False),
        (Check.equal("c", 2**60 + 1, 2**60), False),
        (Check.equal("c", np.uint8(3), np.uint8(5), 2), True),
        (Check.equal("c", jnp.float32(2), 2), True),
        (Check.equal("c", float("nan"), float("nan"), 9), False),
        (Check.equal("c", float("inf"), 1.0, 9), False),
        (Check.below("c", 1, 2), True),
        (Check.below("c", 2, 2), False),
        (Check.below("c", float("nan"), 2), False),
        (Check.below("c", np.float32(1), np.int64(2)), True),
    ],
)
def test_a_check_compares_numbers(check: Check, held: bool) -> None:
    assert check.held is held
    assert type(check.measured) in (int, float) and type(check.expected) in (int, float)


def test_a_figure_is_saved_twice(tmp_path: Path) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2])
    harness.save_figure(figure, tmp_path, "curve")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_plain_refuses_what_json_cannot_hold() -> None:
    with pytest.raises(TypeError, match="object"):
        plain({"a": [object()]})
