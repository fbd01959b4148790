"""Layers of options, and the one line with which a bad command line or file is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from experiments.config_file import to_yaml
from experiments.options import Options, TrainingOptions, parse, resolve_mesh
from experiments.values import flatten, nearest
from jax5d.config import PRESETS, ConfigError, MeshConfig, TrainConfig

DEFAULTS = TrainingOptions(mesh=MeshConfig(dp=2, tp=2))
QUICK = dataclasses.replace(DEFAULTS, quick=True, train=TrainConfig(steps=7))


def options(*words: str, gpus: int = 0) -> TrainingOptions:
    return parse(DEFAULTS, QUICK, words, "gpt2", gpus=gpus)


def from_file(path: Path, text: str, *words: str) -> TrainingOptions:
    path.write_text(text)
    return options("--config", str(path), *words)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        options(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--parallel.tpp=2", ["--parallel.tpp=2", "nearest", "--mesh.tp"]),
        ("--train.lr=abc", ["--train.lr=abc", "--train.learning_rate"]),
        ("--trian.steps 3", ["--trian.steps", "--train.steps"]),
        ("--no_quik", ["--no_quik", "--no_quick"]),
        ("--train.steps=abc", ["--train.steps", "'abc'", "--train.steps 300"]),
        ("--train.steps 1.5", ["--train.steps", "'1.5'"]),
        ("--devices many", ["--devices", "INT", "'many'"]),
        ("--parallel.schedule zigzag", ["--parallel.schedule", "'zigzag'", "afab", "1f1b"]),
        ("--train.learning_rate nan", ["train.learning_rate=nan", "finite"]),
        ("--seed=-1", ["seed=-1", "0..4294967295"]),
        ("--seed 4294967296", ["seed=4294967296", "0..4294967295"]),
        ("--train.steps", ["--train.steps", "Missing value"]),
        ("--train.steps 1 --train.steps=2", ["--train.steps", "twice"]),
        ("--train.seq_len 1 --train.seq-len 2", ["--train.seq_len", "twice"]),
        ("--quick --no_quick", ["--quick", "twice"]),
        ("--parallel.sequence=3", ["--parallel.sequence=3", "--parallel.no_sequence"]),
        ("junk", ["junk"]),
        ("--seed 1 junk", ["junk"]),
        ("-x", ["-x"]),
        ("--", ["--"]),
        ("--model.name gpt3", ["model.name='gpt3'", "gpt2-tiny"]),
        ("--config nowhere.yaml", ["nowhere.yaml", "No such file"]),
        ("--mesh.dp=-1 --mesh.tp=3", ["mesh.dp=-1", "below 1"]),
        ("--mesh.pp 0", ["mesh.pp=0", "below 1"]),
        ("--devices 0", ["devices=0", "below 1"]),
        ("--devices 8 --mesh.dp 2 --mesh.tp 2 --mesh.pp 3", ["3*2*1*1*2=12 but 8 devices", "--devices 12"]),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(words: str, parts: list[str]) -> None:
    message = refusal(*words.split())
    assert all(part in message for part in parts), message
    assert "│" not in message


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_a_refusal_does_not_depend_on_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    message = refusal("--train.learning_rate=fast")
    assert message.startswith("--train.learning_rate: could not convert string to float: 'fast'; ")
    assert message.endswith("write for example --train.learning_rate 0.001")


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("seed: 3\ntrian.lr: 1", 2, ["trian.lr", "train.learning_rate"]),
        ("trian:\n  lr: 1", 1, ["trian.lr", "train.learning_rate"]),
        ("parallel: {tpp: 2}", 1, ["parallel.tpp", "mesh.tp"]),
        ("seed: 3\nlr: 1", 2, ["unknown key lr", "train.learning_rate"]),
        ("model:\n  num-heads: 3", 2, ["model.num-heads", "model.heads"]),
        ("model:\n  steps: 3", 2, ["model.steps", "train.steps"]),
        ("train:\n  learning-rate: 1", 2, ["train.learning-rate", "train.learning_rate"]),
        ("seed: {a: 1}", 1, ["seed.a", "nearest"]),
        ("a: &a {a: *a}", 1, ["unknown key a.a"]),
        ("? [1, 2]\n: 3", 1, ["unknown key"]),
        ("train:\n  steps: 3\n  clip: 1\n  steps: 4", 4, ["train.steps", "twice", "line 2"]),
        ("train: {steps: 3}\ntrain: {clip: 1}", 2, ["train", "twice", "line 1"]),
        ("train: {steps: 3}\ntrain.steps: 3", 2, ["train.steps", "twice"]),
        ("train: 3", 1, ["train is a section"]),
        ("- 3", 1, ["not a mapping"]),
        ("seed: 1\n\ntrain:\n  steps: abc", 4, ["train.steps", "'abc'"]),
        ("train: {steps: 3.0}", 1, ["train.steps", "'3.0'"]),
        ("train: {steps: [1, 2]}", 1, ["train.steps=[1, 2]"]),
        ("seed: true", 1, ["seed=True"]),
        ("seed:", 1, ["seed", "None"]),
        ("seed: 2020-13-13", 1, ["month"]),
        ("parallel:\n  sequence: 1", 2, ["parallel.sequence=1", "true or false"]),
        ("data: {source: 5}", 1, ["data.source=5", "text"]),
        ("model:\n  dtype: float8", 2, ["model.dtype", "float8", "bfloat16"]),
        ("out: elsewhere", 1, ["out", "--out"]),
        ("experiment: slm_5d", 1, ["slm_5d", "gpt2"]),
        ("train:\n  steps: 1\n   clip: 2", 3, ["not valid YAML"]),
        ("seed: 1\nmesh: {dp: 2", 2, ["not valid YAML"]),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, parts: list[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    message = refusal("--config", str(path))
    assert message.startswith(f"{path} line {line}: ")
    assert all(part in message for part in parts), message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal("--config", str(tmp_path / "binary"))
    (tmp_path / "binary").write_bytes(b"\x01")
    assert "not valid YAML" in refusal("--config", str(tmp_path / "binary"))


def test_layers_lie_over_one_another(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert options().train.steps == 300
    assert options("--quick").train.steps == 7
    assert options("--quick", "--train.steps", "5").train.steps == 5
    assert from_file(path, "quick: true").train.steps == 7
    assert from_file(path, "quick: true", "--no_quick").train.steps == 300
    assert from_file(path, "train: {steps: 9}", "--quick").train.steps == 9
    both = from_file(path, "train: {steps: 9, clip: 2}", "--train.steps=11")
    assert (both.train.steps, both.train.clip) == (11, 2.0)
    assert from_file(path, "").train.steps == 300


def test_a_preset_lies_below_the_file_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert options("--model.name", "gpt2").model == PRESETS["gpt2"]
    assert options("--model.name=gpt2", "--model.layers=3").model == dataclasses.replace(PRESETS["gpt2"], layers=3)
    mixed = from_file(path, "model: {name: gpt2, layers: 3, heads: 6}", "--model.heads=4").model
    assert mixed == dataclasses.replace(PRESETS["gpt2"], layers=3, heads=4)
    switched = from_file(path, "model: {name: gpt2, layers: 3}", "--model.name=gpt2-medium").model
    assert switched == dataclasses.replace(PRESETS["gpt2-medium"], layers=3)


def test_numbers_of_a_file_are_read_as_numbers(tmp_path: Path) -> None:
    train = from_file(tmp_path / "config.yaml", "train: {learning_rate: 1e-3, clip: 2, weight_decay: 1e-8}").train
    assert (train.learning_rate, train.clip, train.weight_decay) == (0.001, 2.0, 1e-8)
    assert type(train.clip) is float


def test_hyphens_and_underscores_are_the_same_on_the_command_line() -> None:
    assert options("--train.global-batch=4").train.global_batch == 4
    assert options("--parallel.sequence").parallel.sequence
    assert not options("--data.no-repeat").data.repeat


@dataclasses.dataclass(frozen=True)
class SweepOptions(Options):
    sizes: tuple[int, ...] = (1, 2)
    note: str = "a"
    folder: Path = Path("data")


def test_a_written_file_starts_the_same_run_again(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    words = "--quick --model.name moe-tiny --train.learning_rate 1e-5 --mesh.ep 2 --devices 8 --seed 3"
    first = options(*words.split(), "--out", "here", "--parallel.sequence", "--data.no_repeat")
    again = from_file(path, to_yaml(first, "gpt2"))
    assert again == dataclasses.replace(first, out=None, config=path)
    assert to_yaml(again, "gpt2") == path.read_text()

    defaults = SweepOptions()
    sweep = parse(defaults, defaults, ["--sizes", "4", "-8", "--note", "no: 1 #", "--folder", "x y"], "sweep")
    path.write_text(to_yaml(sweep, "sweep"))
    assert sweep.sizes == (4, -8)
    assert parse(defaults, defaults, ["--config", str(path)], "sweep") == dataclasses.replace(sweep, config=path)


@pytest.mark.parametrize(
    ("given", "devices", "gpus", "sizes"),
    [
        ({}, None, 0, (1, 2, 1, 1, 2)),  # the default
        ({}, 4, 0, (1, 2, 1, 1, 2)),  # the default fits
        ({}, 8, 0, (1, 8, 1, 1, 1)),
        ({}, None, 1, (1, 1, 1, 1, 1)),
        ({"pp": 2}, None, 0, (2, 1, 1, 1, 1)),
        ({"pp": 2}, 8, 0, (2, 4, 1, 1, 1)),
        ({"dp": 2}, 8, 0, (1, 2, 1, 1, 4)),
        ({"dp": 2, "tp": 2}, 8, 0, (2, 2, 1, 1, 2)),
        ({"dp": 1, "tp": 1, "pp": 1}, 8, 0, (1, 1, 1, 8, 1)),
        ({"dp": 1, "tp": 1, "pp": 1, "cp": 2}, None, 8, (1, 1, 4, 2, 1)),
        ({"tp": 2}, 2, 8, (1, 1, 1, 1, 2)),  # asked for fake devices
        ({"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 2}, 2, 8, (1, 1, 1, 1, 2)),
    ],
)
def test_axes_left_out_use_the_devices_that_remain(
    given: dict[str, int], devices: int | None, gpus: int, sizes: tuple[int, ...]
) -> None:
    assert resolve_mesh(given, DEFAULTS.mesh, devices, gpus) == MeshConfig(*sizes)  # pp, dp, ep, cp, tp


@pytest.mark.parametrize(
    ("given", "devices", "gpus", "numbers"),
    [
        ({"dp": 2, "tp": 2, "pp": 2}, 6, 0, "2*2*1*1*2=8 but 6 devices"),
        ({"dp": 2, "tp": 2, "pp": 3}, 8, 0, "3*2*1*1*2=12 but 8 devices"),
        ({"tp": 3}, None, 8, "1*1*1*1*3=3 but 8 devices"),
        ({"pp": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}, None, 8, "1*2*1*1*2=4 but 8 devices"),
        ({"pp": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}, 8, 0, "1*2*1*1*2=4 but 8 devices"),
    ],
)
def test_a_mesh_that_does_not_use_every_device_is_refused(
    given: dict[str, int], devices: int | None, gpus: int, numbers: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_mesh(given, DEFAULTS.mesh, devices, gpus)
    assert f"mesh pp*dp*ep*cp*tp = {numbers}" in str(caught.value)


def test_sizes_in_a_file_count_as_given(tmp_path: Path) -> None:
    mesh = from_file(tmp_path / "config.yaml", "mesh: {tp: 4}", "--mesh.pp=2", "--devices=16").mesh
    assert mesh == MeshConfig(pp=2, dp=2, tp=4)


@pytest.mark.parametrize("columns", [40, 80])
def test_help_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        parse(DEFAULTS, QUICK, ["--quick", "--help"], "gpt2", description="Trains a GPT-2.")
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[1:])) <= columns  # the first is the command itself
    words = " ".join(printed.replace("│", " ").split())
    for part in ("Trains a GPT-2.", "--train.steps INT Optimizer steps. (default: 7)", "--model.d_model INT"):
        assert part in words
    assert all(f"--{name} " in words.replace(",", " ") for name in flatten(DEFAULTS))


def test_the_nearest_name_is_found_by_spelling_part_or_initials() -> None:
    names = list(flatten(DEFAULTS))
    near = {"train.stpes": "train.steps", "heads": "model.heads", "wd": "train.weight_decay", "tp_": "mesh.tp"}
    assert {name: nearest(name, names) for name in near} == near
