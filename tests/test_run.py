"""The main job as a user meets it: what a run leaves, how it ends, how it goes on. Whole processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plugin import PLUGIN, needs_plugin

from experiments import registry

ROOT = Path(__file__).parent.parent
SMALL = ["gpt2", "--quick", "--train.eval_sequences", "16", "--train.seq_len", "64", "--model.layers", "2"]


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path_factory):
    """Token files go to a folder of the session, not to the user's cache."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    cache.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")


def start(*words: str, before: str = "", **options) -> subprocess.Popen:
    """A run of the command line; `before` is what its shell does first."""
    command = [sys.executable, "-W", "error", str(ROOT / "run_experiment.py"), *words]
    if before:
        command = ["bash", "-c", f'{before}; exec "$@"', "bash", *command]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(*words: str, **options) -> tuple[int, str, str]:
    process = start(*words, **options)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Until `path` exists while the process runs."""
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_killed_interrupted_and_on_another_mesh(tmp_path):
    """kill -9, then Ctrl-C, then the rest on another mesh: every step once, in one log, and the claim's own verdict."""
    out = tmp_path / "run"
    command = [*SMALL, "--out", str(out), "--train.steps", "40", "--train.checkpoint_every", "5"]
    process = start(*command)
    wait_for(out / "checkpoints" / "5", process)
    process.kill()
    process.communicate()
    process = start(*command)
    wait_for(out / "checkpoints" / "15", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "SIGINT after step" in err
    assert str(out / "checkpoints") in err
    assert "Traceback" not in err
    stopped = max(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())
    assert [r["step"] for r in records(out)] == [*range(1, stopped + 1)]
    mesh = ["--mesh.dp", "2", "--mesh.tp", "2"]
    status, text, err = run(*command, *mesh)
    assert f"going on from step {stopped}" in text
    assert err == ""
    assert [r["step"] for r in records(out)] == [*range(1, 41)]
    result = json.loads((out / "result.json").read_text())
    assert status == (0 if result["held"] else 1)
    assert result["config"]["mesh"] == {"pp": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}


def test_what_a_run_leaves(tmp_path):
    out = tmp_path / "run"
    status, text, err = run(*SMALL, "--out", str(out))
    assert err == ""
    assert status == 0, text
    result = json.loads((out / "result.json").read_text())
    keys = ["experiment", "capsules", "claim", "held", "checks", "metrics", "config", "environment", "seconds"]
    assert list(result) == keys
    assert (result["experiment"], result["capsules"], result["held"]) == ("gpt2", [38], True)
    assert result["metrics"]["text"].startswith("def ")
    assert result["metrics"]["validation_loss"] < result["metrics"]["unigram_entropy"]
    last = records(out)[-1]
    wanted = "step epoch tokens loss grad_norm learning_rate step_seconds tokens_per_second mfu peak_memory_bytes"
    assert set(wanted.split()) <= set(last)
    assert last["tokens"] == last["step"] * 16 * 64
    assert {p.suffix for p in out.glob("loss.*")} == {".png", ".svg"}
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    assert (out / "checkpoints" / str(last["step"])).is_dir()
    refused_without_a_trace(out, "--model.layers", "4", said="model.layers is 4 here and 2 there")
    (out / "bad.yaml").write_text("experiment: gpt2\ntrian:\n  steps: 3\n")
    refused_without_a_trace(out, "--config", str(out / "bad.yaml"), said="train.steps")


def refused_without_a_trace(out: Path, *words: str, said: str) -> None:
    """Exit 2 with one line, and every file of the run as it was."""
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    status, text, err = run(*SMALL[:-2], "--out", str(out), *words)
    assert (status, text, err.count("\n")) == (2, "", 1), err
    assert said in err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_sigterm_takes_the_old_verdict_away(tmp_path):
    """Saves, says where, leaves with 143; the result.json of an earlier, shorter run is not left beside it."""
    out = tmp_path / "run"
    short = [*SMALL, "--out", str(out), "--train.checkpoint_every", "2"]
    assert run(*short, "--train.steps", "2")[0] in (0, 1)
    assert (out / "result.json").exists()
    process = start(*short, "--train.steps", "500")
    wait_for(out / "checkpoints" / "6", process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "SIGTERM after step" in err
    assert err.count("\n") == 1
    assert not (out / "result.json").exists()


def readme_block(marker: str) -> str:
    """What the README's block of Python with `marker` in it prints."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if marker in block]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_readme_example():
    """The block that trains runs as it stands, and learns."""
    printed = readme_block("trainer.step")
    losses = [float(line) for line in printed.splitlines() if re.fullmatch(r"[0-9.]+", line)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@needs_plugin
def test_readme_compiles_for_absent_gpus():
    """The block that compiles for 64 H100s: formula within 5 % of the compiler, gradients summed under products."""
    printed = readme_block("compile_step")
    formula = sum(int(n) for n in re.findall(r"=(\d+)", printed.splitlines()[0]))
    peak = int(re.search(r"^(\d+) bytes", printed, re.MULTILINE)[1])
    assert abs(formula / peak - 1) < 0.05
    assert re.search(r"psum \('dp',\) 47 .* matmul", printed)


def test_config_file_starts_the_same_run(tmp_path):
    """The run's own config.yaml gives the same losses, to the bit."""
    words = [*SMALL, "--train.steps", "4", "--seed", "7"]
    run(*words, "--out", str(tmp_path / "a"))
    run("gpt2", "--config", str(tmp_path / "a" / "config.yaml"), "--out", str(tmp_path / "b"))
    first, second = (records(tmp_path / name) for name in "ab")
    assert [r["loss"] for r in first] == [r["loss"] for r in second]
    assert len(first) == 4


def test_full_disk(tmp_path):
    """Files may grow to 100 kB: the checkpoint cannot be written, and the run says so and does not end with 0."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    warm = [*SMALL, "--train.steps", "1"]
    run(*warm, "--out", str(tmp_path / "warm"))
    words = [*SMALL, "--train.steps", "3", "--out", str(tmp_path / "run")]
    status, text, err = run(*words, before="ulimit -f 100", env=environment)
    assert status == 1, (text, err)
    assert "no checkpoint could be written" in text + err
    kept = tmp_path / "run" / "checkpoints"
    assert not [p for p in kept.iterdir() if p.name.isdigit()]


REFUSED = {
    "missing text": (["--data.source", "{tmp}/none.txt"], "none.txt"),
    "empty text": (["--data.source", "{tmp}/empty.txt"], "empty.txt"),
    "short text": (["--data.source", "{tmp}/short.txt"], "129"),
    "undecodable text": (["--data.source", "{tmp}/bad.txt"], "offset 5"),
    "ids beyond the vocabulary": (["--model.vocab", "200"], "--model.vocab 257"),
    "unwritable output": (["--out", "/proc/none"], "/proc/none"),
    "heads": (["--mesh.tp", "8", "--mesh.dp", "1", "--mesh.pp", "1", "--mesh.cp", "1"], "model.heads=4"),
    "layers": (["--model.layers", "3"], "model.layers=3"),
    "sequence": (["--train.seq_len", "127"], "127"),
    "batch": (["--train.global_batch", "18"], "train.global_batch=18"),
    "devices": (["--devices", "6", "--mesh.tp", "4"], "6 devices"),
    "experts": (["--model.name", "moe-tiny", "--mesh.ep", "3"], "model.experts=4"),
    "long output path": (["--out", "/tmp/" + "x" * 300], "File name too long"),
    "bucket": (["--parallel.reduction", "bucket", "--parallel.bucket_mb", "99"], "parallel.bucket_mb=99.0"),
    "unknown option": (["--parallel.tpp", "2"], "mesh.tp"),
    "unknown preset": (["--model.name", "gpt3"], "gpt2-xl"),
}


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=REFUSED)
def test_refusals(words, said, tmp_path):
    """Exit 2, one line on stderr, nothing on stdout, no folder."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short to train on")
    (tmp_path / "bad.txt").write_bytes(b"abcde\xff" + b"x" * 9000)
    words = [word.format(tmp=tmp_path) for word in words]
    out = [] if "--out" in words else ["--out", str(tmp_path / "run")]
    status, text, err = run("gpt2", *words, *out)
    assert status == 2, (text, err)
    assert said in err
    assert err.count("\n") == 1
    assert text == ""
    assert not (tmp_path / "run").exists()


COMPILES_FOR_GPUS = {
    "llama_1b_memory",
    "memory_buckets",
    "one_gpu_limit",
    "overlap",
    "recompute",
    "sequence_memory",
    "tensor_parallel",
    "tp_vs_zero_inference",
    "zero_1",
    "zero_2_3",
}


@pytest.mark.parametrize("name", [entry.name for entry in registry.entries() if entry.name != "gpt2"])
def test_experiment_holds(name, tmp_path):
    if name in COMPILES_FOR_GPUS and not PLUGIN:
        pytest.skip("JAX's CUDA plugin is not installed")
    status, text, err = run(name, "--quick", "--out", str(tmp_path / "run"))
    assert err == ""
    assert status == 0, text
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["held"]
    assert all(check["held"] for check in result["checks"])
    assert list((tmp_path / "run").glob("*.png"))
    assert list((tmp_path / "run").glob("*.svg"))
