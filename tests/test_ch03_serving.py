"""The parts of tp_vs_zero_inference: a model's numbers by hand, what fits, where the ways cross, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.ch03_tensor_parallelism import tp_vs_zero_inference as experiment
from experiments.ch03_tensor_parallelism._serving import COSTS, WAYS, ByHand, Serving
from experiments.ch03_tensor_parallelism._serving_compiled import PLAN, compiled_batch
from jax5d.config import PRESETS, ConfigError
from jax5d.costs.gpus import gpu
from jax5d.costs.parameters import count

H100 = gpu("h100")
MODELS = [("llama-9b", 8), ("llama-1b", 4), ("gpt2", 4), ("gpt2-xl", 5), ("gpt2-medium", 8)]


def serving(name: str, n: int) -> Serving:
    return Serving(replace(PRESETS[name], dtype="bfloat16"), n, H100)


@pytest.mark.parametrize(("name", "n"), MODELS)
def test_by_hand_has_the_models_parameters(name: str, n: int) -> None:
    """Biases and norms too, and fewer heads of keys and values."""
    assert ByHand(PRESETS[name], n, 2, H100).parameters == count(PRESETS[name])
    grouped = replace(PRESETS["llama-9b"], kv_heads=8)
    assert ByHand(grouped, 8, 2, H100).parameters == count(grouped)


@pytest.mark.parametrize(("name", "n"), MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_the_most_that_fits(way: str, name: str, n: int) -> None:
    """One more on each GPU does not; and a batch to compile is well below."""
    model = serving(name, n)
    most = model.most(way)
    assert model.held(way, most).total <= H100.visible < model.held(way, most + n).total
    batch = compiled_batch(model, (1, 8, 64, 256, 2**20))
    assert batch % n == 0
    assert model.held(way, batch).total <= PLAN * H100.visible


def test_nothing_fits() -> None:
    """llama-80b on 2 of 85 GB: 80 GB of weights on each leave no room for the first two sequences of 11 GB."""
    model = Serving(replace(PRESETS["llama-80b"], dtype="bfloat16"), 2, H100)
    assert model.most("tp") == 0


@pytest.mark.parametrize("name", COSTS)
def test_ways_cross_once(name: str) -> None:
    """Below the crossing tensor parallelism costs less, from it on gathering does not cost more."""
    model, cost = serving("llama-9b", 8), COSTS[name]
    first = model.first(lambda step: cost(step, H100))
    for length, gathers in ((1, False), (first - 1, False), (first, True), (first + 1, True), (4096, True)):
        tp, zero = (cost(model.prefill(way, length), H100) for way in ("tp", "zero"))
        assert (zero <= tp) == gathers
    assert serving("llama-1b", 2).first(lambda step: step.wire_bytes) == 4097, "beyond the context"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "moe-tiny"}, "preset='moe-tiny'"),
        ({"preset": "gpt3"}, "preset='gpt3'"),
        ({"gpu": "h1000"}, "gpu='h1000'"),
        ({"gpus": 16}, r"gpus=16 is outside 2\.\.8"),
        ({"gpus": 1}, "gpus=1 "),
        ({"preset": "gpt2"}, "model.heads=12 .* mesh.tp=8"),
        ({"batches": ()}, "batches=nothing"),
        ({"batches": (8, 1)}, "batches=8 1"),
        ({"batches": (0, 1)}, "batches=0 1"),
        ({"batches": (512, 1024)}, "batches=512 sequences of llama-9b do not fit 8 h100s, 296 do"),
        ({"mesh": replace(experiment.DEFAULTS.mesh, tp=1)}, "--devices 8"),
    ],
)
def test_refusals(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """In one line, before anything is measured."""
    with pytest.raises(ConfigError, match=words) as caught:
        experiment.check(replace(experiment.DEFAULTS, **options), tmp_path)
    assert "\n" not in str(caught.value)
