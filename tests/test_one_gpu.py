"""What one GPU holds, against counting by hand, and what the experiments about it refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.ch00_foundations import llama_1b_memory, one_gpu_limit
from experiments.ch00_foundations._one_gpu import OneGpu
from jax5d.config import PRESETS, ConfigError, MeshConfig
from jax5d.costs.gpus import gpu
from jax5d.costs.memory import memory
from jax5d.costs.parameters import count

H100 = OneGpu(gpu("h100"), loss_chunks=16)


@pytest.mark.parametrize(
    ("name", "pure", "fits"),
    [("llama-3b", False, True), ("llama-9b", False, False), ("llama-9b", True, True), ("llama-80b", True, False)],
)
def test_states_decide(name: str, pure: bool, fits: bool) -> None:
    """16 bytes a parameter, in pure bfloat16 8, against 84.9 GB; what fits does so with sequences to spare."""
    states = (8 if pure else 16) * count(PRESETS[name])
    assert (states < 84_942_979_072) == fits
    assert (H100.rows(name, pure=pure) > 1) == fits


def test_the_edge_is_where_one_more_does_not_fit() -> None:
    rows = H100.rows("llama-1b")
    inside, outside = (memory(H100.config("llama-1b", n)).total for n in (rows, rows + 1))
    assert inside <= H100.chip.visible < outside
    assert outside - inside == H100.row_bytes("llama-1b")


def test_fewest_gpus() -> None:
    """N of 80B: 2 h v + L (4 h^2 + 3 h f + 2 h) + h. 16 N are 15.07 H100s, or 127.99 GPUs of 10 GB.

    A GPU that one sequence fills is not helped by others.
    """
    n = 2 * 8192 * 131072 + 80 * (4 * 8192**2 + 3 * 8192 * 28672 + 2 * 8192) + 8192
    assert count(PRESETS["llama-80b"]) == n
    assert 15 < 16 * n / 84_942_979_072 < 16
    assert 127 < 16 * n / 10**10 < 128
    assert H100.gpus("llama-80b", batch=False) == 16
    assert H100.gpus("llama-80b", batch=True) > 16
    assert H100.gpus("gpt2", batch=True) == 1
    small = replace(H100, chip=replace(H100.chip, visible=10 * 10**9))
    assert small.gpus("llama-80b", batch=False) == 128
    assert small.gpus("llama-80b", batch=True) is None


LIMIT_REFUSED = {
    "gpu": ("h10", "did you mean h100"),
    "models": (("gpt3",), "gpt3"),
    "edges": (("llama-tiny",), "llama-tiny is not one of --models"),
    "loss_chunks": (0, "loss_chunks=0"),
    "mfu": (1.5, "mfu=1.5"),
    "tokens_per_parameter": (-1.0, "tokens_per_parameter=-1.0"),
    "cluster": (-3, "cluster=-3"),
    "mesh": (MeshConfig(dp=2), "dp2"),
}


@pytest.mark.parametrize("option", LIMIT_REFUSED)
def test_one_gpu_limit_refuses(option: str) -> None:
    value, said = LIMIT_REFUSED[option]
    refused(one_gpu_limit, {option: value}, said)


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ((), "layouts names 0 meshes"),
        (("",), "no mesh"),
        (("dp8 tp2",), "'dp8 tp2' is no mesh"),
        (("dp2-dp2",), "no mesh"),
        (("xp8",), "no mesh"),
        (("dp0",), "mesh.dp=0"),
        (("tp3",), "mesh.tp=3"),
    ],
)
def test_llama_1b_memory_refuses(layouts: tuple[str, ...], said: str) -> None:
    refused(llama_1b_memory, {"layouts": layouts}, said)


def test_llama_1b_memory_refuses_no_sequences() -> None:
    refused(llama_1b_memory, {"sequences": 0}, "sequences=0")


def refused(experiment: Any, changes: dict[str, Any], said: str) -> None:
    """Before anything is compiled."""
    with pytest.raises(ConfigError, match=said):
        experiment.check(replace(experiment.DEFAULTS, **changes), Path("unused"))
