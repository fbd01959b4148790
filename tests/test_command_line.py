"""The commands: list, run, refuse, and their exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import run_experiment
from experiments import registry
from jax5d.config import ConfigError

PROJECT = Path(run_experiment.__file__).parent

FAKE = '''"""A sum, run on every device."""
from experiments.harness import Check, Outcome
from experiments.options import TrainingOptions

CAPSULES = [91, 92]
CLAIM = "two [and] two is four"
NEEDS = "any devices, 1 s"
DEFAULTS = TrainingOptions()
QUICK = TrainingOptions(quick=True)


def run(options, folder, console):
    if options.seed == 1:
        raise KeyboardInterrupt
    return Outcome([Check.equal("sum", 2 + 2, 4)])
'''


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder of experiments that holds one fake."""
    folder = tmp_path / "experiments" / "ch91_made_up"
    folder.mkdir(parents=True)
    (folder / "fake_sum.py").write_text(FAKE)
    (folder / "_helper.py").write_text("raise RuntimeError('not an experiment')")
    yield folder.parent
    sys.modules.pop("experiments.ch91_made_up.fake_sum", None)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("fake_sun", ["fake_sun", "fake_sum"]),
        ("--quick fake_sum", ["--quick"]),
        ("list --jsn", ["--jsn", "--json"]),
        ("fake_sum --train.steps=-1", ["train.steps=-1", "below 1"]),
        ("fake_sum --train.learning_rate=0", ["train.learning_rate=0.0"]),
        ("fake_sum --parallel.tpp=2", ["--parallel.tpp=2", "--mesh.tp"]),
        ("fake_sum --mesh.dp=2 --mesh.tp=2 --mesh.pp=3 --devices=8", ["3*2*1*1*2=12 but 8 devices"]),
        ("fake_sum --mesh.dp=-1 --mesh.tp=3", ["mesh.dp=-1"]),
        (
            "fake_sum --train.global_batch=8 --parallel.microbatches=3 --mesh.dp=2 --mesh.tp=2 --mesh.pp=2",
            ["train.global_batch=8", "2 x 1 x 3 = 6"],
        ),
        ("fake_sum --model.name=moe-tiny --mesh.ep=3 --train.global_batch=6", ["mesh.ep=3", "model.experts=4"]),
        ("fake_sum --mesh.cp=3 --train.seq_len=32", ["mesh.cp=3", "train.seq_len=32"]),
    ],
)
def test_a_refused_command_prints_one_line_and_exits_2(
    root: Path, words: str, parts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert run_experiment.main(words.split(), root) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("run_experiment.py: error: ") and err.count("\n") == 1
    assert all(part in err for part in parts), err
    assert not Path("runs").exists()


def test_list_names_every_experiment(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_experiment.main(["list", "--json"], root) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "fake_sum",
            "capsules": [91, 92],
            "chapter": "91 made up",
            "claim": "two [and] two is four",
            "needs": "any devices, 1 s",
        }
    ]
    for words in ([], ["list"]):
        assert run_experiment.main(words, root) == 0
        printed = capsys.readouterr().out
        assert all(part in printed for part in ("fake_sum", "91, 92", "91 made up", "two [and] two is four"))
    assert run_experiment.main(["--help"], root) == 0
    assert "list --json" in capsys.readouterr().out


def test_an_experiment_without_its_literals_is_named(tmp_path: Path) -> None:
    (tmp_path / "ch01_x").mkdir()
    (tmp_path / "ch01_x" / "bare.py").write_text('CLAIM = "c"\nCAPSULES = [1]\n')
    with pytest.raises(ValueError, match=r"bare\.py.*NEEDS"):
        registry.entries(tmp_path)
    with pytest.raises(ConfigError, match="unknown experiment gpt2; there are none"):
        registry.find("gpt2", tmp_path / "ch01_x")


def test_listing_does_not_import_jax() -> None:
    code = "import sys, run_experiment; assert run_experiment.main([]) == 0; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("words", [["list"], ["list", "--json"]])
def test_a_closed_pipe_is_quiet(words: list[str]) -> None:
    code = f"import sys, run_experiment; input(); sys.exit(run_experiment.main({words}))"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()  # before anything is written
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


def test_a_run_makes_its_fake_devices_and_an_interrupt_is_quiet(root: Path) -> None:
    code = (
        "import sys, pathlib, shutil, run_experiment\n"
        "words = ['fake_sum', '--out', 'here', '--devices', '6', '--mesh.tp', '1', '--train.global_batch', '12']\n"
        f"root = pathlib.Path({str(root)!r})\n"
        "assert run_experiment.main(words, root) == 0\n"
        "shutil.copy('here/result.json', 'kept.json')\n"
        "sys.exit(run_experiment.main([*words, '--seed', '1'], root))"
    )
    command = [sys.executable, "-c", code]
    environ = {"PYTHONPATH": str(PROJECT), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "run_experiment.py: interrupted\n"
    assert "mesh pp=1 dp=6 ep=1 cp=1 tp=1, 6 devices" in done.stdout
    assert "global batch 12 = 2 sequences x 1 microbatches x 6 data shards" in done.stdout
    assert not (root / "here" / "result.json").exists(), "an interrupted run has no verdict, and not an older one's"
    result = json.loads((root / "kept.json").read_text())
    assert (result["held"], result["environment"]["devices"]) == (True, 6)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, 3),
        ({"JAX_PLATFORMS": "cpu"}, 0),
    ],
)
def test_gpus_are_counted_without_a_driver(tmp_path: Path, environ: dict[str, str], expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert run_experiment.visible_gpus(tmp_path, environ) == expected
    assert run_experiment.visible_gpus(tmp_path / "empty", environ) == 0
