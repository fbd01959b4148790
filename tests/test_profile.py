"""A run profiles the steps that were asked for, whatever ends it, and trains as if it had not."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import fitting
import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from experiments.ch01_data_parallelism.profiling import for_perfetto
from jax5d.config import PROFILE_LIMIT, ConfigError, RunConfig, check
from jax5d.costs.communication import StepTraffic
from jax5d.measure.trace import read_trace
from jax5d.train import profile
from jax5d.train.loop import Run, fit, open_data
from jax5d.train.profile import trace_files
from jax5d.train.signals import Stopped
from jax5d.train.step import TrainState

TEN = {"steps": 10, "eval_every": 4, "checkpoint_every": 4, "layers": 2, "microbatches": 2, "final_lr": 1.0}


class Setting:
    """One compiled step on pp2 dp2 tp2, which runs with other numbers of steps and other profiles share."""

    def __init__(self, folder: Path):
        self.file = fitting.token_file(folder)
        self.built = fitting.trainer(fitting.config({"pp": 2, "dp": 2, "tp": 2}, **TEN))
        self.first = jax.device_get(self.built.init())

    def init(self) -> TrainState:
        return jax.device_put(self.first, self.built.shardings)

    def config(self, **train: int) -> RunConfig:
        run = replace(self.built.config, train=replace(self.built.config.train, **train))
        check(run)
        return run

    def fit(self, folder: Path, step=None, **train: int) -> tuple[Run, str]:
        """A run, and what it said. `step` stands in for the compiled one."""
        run = self.config(**train)
        trainer = replace(self.built, config=run)
        trainer.__dict__.update(step=step or self.built.step, evaluate=self.built.evaluate, init=self.init)
        folder.mkdir(exist_ok=True)
        said = io.StringIO()
        result = fit(trainer, open_data(run, self.file), folder, Console(file=said, width=500))
        return result, said.getvalue()

    def step_that(self, number: int, act):
        """The compiled step, whose results `act` changes or keeps back in step `number`."""

        def step(state, batch):
            now = int(state.step) + 1
            result = self.built.step(state, batch)
            return act(*result) if now == number else result

        return step


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    return Setting(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def plain(setting, tmp_path_factory) -> tuple[list[float], Path]:
    """Losses of ten steps, and the run's folder: a window is set, but of no steps."""
    folder = tmp_path_factory.mktemp("plain")
    run, said = setting.fit(folder, profile_start=2)
    assert "profile" not in said
    return fitting.losses(run), folder


@pytest.fixture(scope="module")
def profiled(setting, tmp_path_factory) -> tuple[list[float], Path, str]:
    """The same run with steps 3 to 5 profiled; an evaluation and a checkpoint lie between them."""
    folder = tmp_path_factory.mktemp("profiled")
    run, said = setting.fit(folder, profile_start=2, profile_steps=3)
    return fitting.losses(run), folder, said


def steps(folder: Path) -> list[int]:
    """The steps marked in the newest profile of a run, which must be whole."""
    trace = read_trace(folder / "profile")
    assert trace.complaints == []
    return [step.number for step in trace.steps]


def test_no_steps_no_folder(plain):
    """B59 (e): without profiled steps nothing is traced, whatever the window's start."""
    assert sorted(p.name for p in plain[1].iterdir()) == ["checkpoints", "metrics.jsonl", "tensorboard"]


def test_window(plain, profiled):
    """B59 (a): steps 3 to 5 of 10, said so; the losses are those of a run without a profile, to the bit."""
    losses, folder, said = profiled
    assert losses == plain[0]
    assert steps(folder) == [3, 4, 5]
    assert "profiled steps 3 to 5: " in said
    assert len(trace_files(folder)) == 1


def test_each_step_is_whole(setting, profiled):
    """B60: on each of 8 devices each step has its collectives, those of theory; the trace is small.

    XLA drops sends that nobody reads, so there are at most as many as were written. Evaluation is in no step.
    """
    theory: dict[str, int] = {"all-reduce": 0, "collective-permute": 0}
    for entry in StepTraffic(setting.built.config).table():
        theory[{"psum": "all-reduce", "pmax": "all-reduce", "ppermute": "collective-permute"}[entry.op]] += entry.count
    trace = read_trace(profiled[1] / "profile")
    assert trace.devices == list(range(8))
    found = trace.collectives()
    assert len(found) == 3 * 8
    for counts in found.values():
        assert counts.keys() == theory.keys()
        assert counts["all-reduce"] == theory["all-reduce"]
        assert 0 < counts["collective-permute"] <= theory["collective-permute"]
    assert len({counts["collective-permute"] for counts in found.values()}) == 1
    assert 0 < trace.file.stat().st_size < 100e6


def test_device_work_is_inside_its_step(profiled):
    """B60: the devices finish within the step that asked for it, though dispatch returns at once."""
    trace = read_trace(profiled[1] / "profile")
    work = [op for op in trace.ops if trace.steps[0].start <= op.start]
    for before, after in zip(trace.steps, trace.steps[1:], strict=False):
        assert before.end <= after.start
        assert all(op.end <= before.end for op in work if before.start <= op.start < before.end)
    per_step = [len(trace.inside(step)) for step in trace.steps]
    assert per_step[0] == per_step[1] == per_step[2] > 100


def test_beyond_the_end(setting, plain, tmp_path):
    """B59 (b): a run of 4 steps ends inside its window."""
    run, said = setting.fit(tmp_path, steps=4, profile_start=2, profile_steps=3)
    assert steps(tmp_path) == [3, 4]
    assert "profiled steps 3 to 4: " in said
    assert fitting.losses(run) == plain[0][:4]


def test_a_run_that_goes_on(setting, plain, tmp_path):
    """B59 (c): from step 4 the rest of the window, step 5; from step 8 nothing. The profile may differ on the way."""
    setting.fit(tmp_path, steps=4)
    run, said = setting.fit(tmp_path, steps=8, profile_start=2, profile_steps=3)
    assert steps(tmp_path) == [5]
    assert "profiled step 5: " in said
    run, said = setting.fit(tmp_path, profile_start=2, profile_steps=3)
    assert "nothing is profiled: steps 3 to 5 came before step 8, from which this run goes on" in said
    assert len(trace_files(tmp_path)) == 1
    assert fitting.losses(run) == plain[0]


def test_not_finite(setting, tmp_path):
    """B59 (d): the loss of step 5 is NaN, which ends the run; steps 3 to 5 are in the trace."""
    nan = setting.step_that(5, lambda state, metrics: (state, metrics | {"loss": jnp.float32(jnp.nan)}))
    with pytest.raises(FloatingPointError, match="step 5"):
        setting.fit(tmp_path, step=nan, profile_start=2, profile_steps=4)
    assert steps(tmp_path) == [3, 4, 5]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception(setting, tmp_path, error):
    """B59 (f): an exception in step 4. It comes out as itself, and the profiler is free for the next run."""

    def fail(state, metrics):
        jax.block_until_ready(state)
        raise error("as it was")

    with pytest.raises(error, match="as it was"):
        setting.fit(tmp_path, step=setting.step_that(4, fail), profile_start=2, profile_steps=3)
    assert steps(tmp_path) == [3, 4]


def test_a_signal(setting, tmp_path):
    """Ctrl-C in step 3: the run saves and stops after it, and the trace has it."""

    def interrupt(state, metrics):
        os.kill(os.getpid(), signal.SIGINT)
        return state, metrics

    with pytest.raises(Stopped, match="SIGINT after step 3"):
        setting.fit(tmp_path, step=setting.step_that(3, interrupt), profile_start=1, profile_steps=3)
    assert steps(tmp_path) == [2, 3]


def test_a_trace_longer_than_viewers_show(setting, tmp_path, monkeypatch):
    """B60: then the run says how much of it they show."""
    monkeypatch.setattr(profile, "SHOWN", 100)
    _, said = setting.fit(tmp_path, steps=2, profile_start=1, profile_steps=1)
    assert "events: trace.json.gz beside it shows only 100 of them" in said
    assert "lower --train.profile_steps" in said


def test_a_profile_that_cannot_be_made_does_not_end_the_run(setting, plain, tmp_path, monkeypatch):
    """Another trace is open; the disk is full."""
    jax.profiler.start_trace(str(tmp_path / "other"))
    run, said = setting.fit(tmp_path / "a", steps=4, profile_start=1, profile_steps=2)
    jax.profiler.stop_trace()
    assert "nothing is profiled: Profile has already been started" in said
    assert fitting.losses(run) == plain[0][:4]

    def stop():
        whole()
        raise OSError("no space\nleft")

    whole = jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    run, said = setting.fit(tmp_path / "b", steps=4, profile_start=1, profile_steps=2)
    assert f"no profile could be written to {tmp_path / 'b' / 'profile'}: no space left" in said
    assert fitting.losses(run) == plain[0][:4]


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        ({"profile_steps": -1}, ["train.profile_steps=-1", "0 or more"]),
        ({"profile_steps": 1, "profile_start": -1}, ["train.profile_start=-1", "0 or more"]),
        ({"profile_steps": 50}, ["train.profile_steps=50", f"write {PROFILE_LIMIT} or less"]),
        ({"profile_steps": 1, "profile_start": 10}, ["train.profile_start=10", "train.steps=10", "write 9 or less"]),
    ],
)
def test_refusals(setting, train, parts):
    """B60: 50 steps are too many for one trace. B59: a window that begins behind the end."""
    with pytest.raises(ConfigError) as refusal:
        setting.config(**train)
    for part in parts:
        assert part in str(refusal.value)


def test_the_largest_window_passes(setting):
    """Its end may lie behind the run's, and a start without steps means nothing."""
    setting.config(profile_start=9, profile_steps=PROFILE_LIMIT)
    setting.config(profile_start=99)


def test_perfetto_file(profiled):
    """The file for Perfetto holds the same steps."""
    (file,) = trace_files(profiled[1])
    events = json.loads(gzip.decompress(for_perfetto(file).read_bytes()))
    assert [e["args"]["step_num"] for e in events["traceEvents"] if e.get("name") == "train"] == ["3", "4", "5"]
    assert "metadata" not in events


def test_tensorboard_serves_the_run(profiled, tmp_path):
    """TensorBoard with the xprof plugin, as its own process: the scalars, and the profile with its tools."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "tensorboard.main", "--logdir", str(profiled[1]), "--host", "127.0.0.1", "--port", str(port)]
    log = (tmp_path / "log").open("w+")
    with log, subprocess.Popen([sys.executable, *words], stdout=log, stderr=log) as server:
        try:
            tags = _ask(server, port, "plugin/scalars/tags", lambda tags: tags.get("tensorboard"))
            assert {"loss", "grad_norm", "tokens_per_second"} <= set(tags["tensorboard"])
            (run,) = _ask(server, port, "plugin/profile/runs", bool)
            assert run == f"profile/{trace_files(profiled[1])[0].parent.name}"
            tools = _ask(server, port, f"plugin/profile/run_tools?run={quote(run, safe='')}", bool)
            assert "trace_viewer@" in tools
            assert "overview_page" in tools
        finally:
            server.terminate()


def _ask(server: subprocess.Popen, port: int, path: str, ready) -> object:
    """TensorBoard's answer, once it is up and has read the folder."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/{path}", timeout=30) as response:
                body = response.read()
            zipped = response.headers.get("Content-Encoding") == "gzip"
            answer = json.loads(gzip.decompress(body) if zipped else body)
            if ready(answer):
                return answer
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert server.poll() is None, "TensorBoard ended"
        assert time.monotonic() < deadline, f"TensorBoard has no {path}"
        time.sleep(0.2)
