"""`gpu_anatomy`: what it refuses, what it leaves out without CUDA, and that no operation falls between its groups."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import jax
import pytest
from plugin import needs_plugin
from rich.console import Console

from experiments.ch00_foundations import gpu_anatomy
from experiments.ch00_foundations._anatomy_checks import check_builds
from experiments.ch00_foundations._block import COPIES, FLASH, ORDER, Build, block_model, block_step, build, groups
from experiments.values import plain
from jax5d.config import ConfigError
from jax5d.costs.gpus import gpu
from jax5d.measure.aot import Memory, absent_gpu
from jax5d.measure.ceilings import Ceilings
from jax5d.measure.operations import operations

SMALL = replace(gpu_anatomy.QUICK, model="gpt2-tiny", batch=2, seq_len=64, longer=(128,))


def test_groups_hold_every_operation_once():
    """Their bytes add up to the program's, but for marks and views; 2 x 64 tokens, d 128, f 512, 4 heads."""
    step, args = block_step(block_model("gpt2-tiny", 64, "plain"), 2, jax.devices()[0])
    found = operations(step, *args)
    parts = {(part.name, part.backward): part for part in groups(found, gpu("h100"))}
    assert set(parts) == {(name, back) for name in ORDER if name != FLASH for back in (False, True)}
    marks = {"name", "pvary", "psum_invariant", "reshape", "squeeze", "stop_gradient"}
    moved = sum(op.count * (op.bytes_in + op.bytes_out) for op in found if op.name not in marks)
    views = moved - sum(part.bytes for part in parts.values())
    stream, hidden, square = 2 * 2 * 64 * 128, 2 * 2 * 64 * 512, 2 * 2 * 4 * 64 * 64
    assert 0 <= views <= 2 * 3 * stream + 64 * 1024  # q, k, v on their way together; biases with more dims
    assert parts["residual", False].bytes == 2 * 3 * stream
    assert parts["mlp_in", False].bytes == stream + 2 * 128 * 512 + hidden
    assert parts["values", True].bytes == 2 * (2 * stream + square)
    assert parts[COPIES, True].flops == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "h1000"}, "gpu='h1000' is not known; did you mean h100"),
        ({"model": "gpt3"}, "model='gpt3' is no preset; did you mean gpt2"),
        ({"model": "llama-tiny"}, "no dense GPT-2"),
        ({"model": "moe-tiny"}, "no dense GPT-2"),
        ({"batch": 0}, "batch=0 is below 1"),
        ({"seq_len": 1000}, "multiples of 64"),
        ({"seq_len": 0}, "multiples of 64"),
        ({"longer": (512,)}, "does not rise from seq_len=1024"),
        ({"longer": ()}, "does not rise from seq_len=1024"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str, tmp_path):
    with pytest.raises(ConfigError, match=message):
        gpu_anatomy.check(replace(gpu_anatomy.DEFAULTS, **change), tmp_path)
    gpu_anatomy.check(gpu_anatomy.DEFAULTS, tmp_path)


def test_without_cuda_the_rest_is_done(monkeypatch, tmp_path):
    """The compiled part is left out and says why; nothing is measured on a CPU."""

    def absent(name: str) -> None:
        raise ConfigError("no plugin")

    monkeypatch.setattr(gpu_anatomy, "absent_gpu", absent)
    printed = io.StringIO()
    outcome = gpu_anatomy.run(SMALL, tmp_path, Console(file=printed))
    assert outcome.held
    assert "the compiled part is left out: no plugin" in printed.getvalue()
    assert (outcome.metrics["compiled"], outcome.metrics["measured"]) == (None, None)
    assert not any("compiled" in check.name or "temporaries" in check.name for check in outcome.checks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["roofline.png", "roofline.svg"]
    json.dumps(plain(outcome.metrics))


def test_measured_ceilings_are_reported(monkeypatch, tmp_path):
    """As a GPU's would be: in the metrics, the table and the figure."""

    def absent(name: str) -> None:
        raise ConfigError("no plugin")

    monkeypatch.setattr(gpu_anatomy, "absent_gpu", absent)
    monkeypatch.setattr(gpu_anatomy, "_measure", lambda: Ceilings({2048: 600e12}, {2**30: 3e12}))
    outcome = gpu_anatomy.run(SMALL, tmp_path, Console(file=io.StringIO()))
    measured = outcome.metrics["measured"]
    assert (measured["products"], measured["copies"]) == ({2048: 600e12}, {2**30: 3e12})
    assert "2048 x 2048" in list(outcome.tables[1].columns[1].cells)


def test_temporaries_with_an_array_too_many_do_not_pass():
    """GPT-2 at 8 x 2048, s b d = 12.6e6: 34 of it and one bfloat16 array of s x s; plain ones without the gradient."""
    model, stream, square = block_model("gpt2", 1024, "plain"), 8 * 2048 * 768, 8 * 12 * 2048**2

    def held(attention: str, temporaries: int) -> bool:
        build = Build(attention, 2048, Memory(0, 0, 0, temporaries, 0, None, 0), [])
        (check,) = (c for c in check_builds(model, 8, [build]) if "temporaries" in c.name)
        return check.held

    assert held("flash", 34 * stream)
    assert held("flash", 68 * stream + 4 * (12 * 768**2 + 13 * 768) - 1)
    assert not held("flash", 68 * stream + 4 * (12 * 768**2 + 13 * 768))
    assert not held("flash", 34 * stream + 2 * square)
    assert held("plain", 4 * square + 1)
    assert not held("plain", 4 * square)


@needs_plugin
def test_flash_temporaries_grow_with_the_sequence():
    """Twice the tokens, twice the bytes; GPT-2 on an H100, where XLA fuses both alike."""
    sizes = [build(block_model("gpt2", s, "flash"), 8, absent_gpu("h100")).memory.temporaries for s in (1024, 2048)]
    assert sizes[1] / sizes[0] == pytest.approx(2, rel=0.1)
