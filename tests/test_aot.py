"""A step compiled for GPUs that are not there: what is read of it against theory, and what is refused."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import jax
import pytest
from plugin import needs_plugin
from tiny import config

from jax5d.config import ConfigError, RunConfig
from jax5d.costs.collectives import merge
from jax5d.costs.communication import StepTraffic
from jax5d.costs.memory import state_bytes
from jax5d.measure import aot
from jax5d.measure.aot import Compiled, cluster, compile_step
from jax5d.measure.targets import CHIPS, target_config
from jax5d.mesh import gpu_options, use_gpus


def run(**mesh: int) -> RunConfig:
    """A tiny GPT-2 in bfloat16 with AdamW: 8 rows of 32 tokens in 2 microbatches."""
    return config(mesh, dtype="bfloat16", layers=2, microbatches=2, optimizer="adamw")


CUBE = run(pp=2, dp=2, tp=2)
FLAT = run(dp=2, tp=4)


def compiled(which: RunConfig) -> Compiled:
    """For 2 hosts of 4 H100s; sums are not combined into one."""
    return compile_step(which, "h100", hosts=2, compiler_options={"xla_gpu_all_reduce_combine_threshold_bytes": 0})


@needs_plugin
def test_without_a_pipeline_the_compiler_keeps_every_collective() -> None:
    """Op by op, count by count, byte by byte what theory says, and so what the program asks for.

    After a compilation the fake CPU devices are as they were.
    """
    step = compiled(FLAT)
    assert step.ledger == StepTraffic(FLAT).table()
    assert merge(entry.collective for entry in step.timeline) == StepTraffic(FLAT).table()
    assert (step.hosts, step.gpus_per_host) == (2, 4)
    assert {device.platform for device in jax.devices()} == {"cpu"}
    assert float(jax.jit(lambda x: x + 1)(jax.numpy.float32(1))) == 2


@needs_plugin
def test_a_step_on_three_axes() -> None:
    """One compilation, three readings: memory, collectives, and what hides."""
    step = compiled(CUBE)
    check_memory(step)
    check_merged_sums(step)
    check_hiding(step)


def check_memory(step: Compiled) -> None:
    """Arguments: parameters, moments, counters, and a batch of 2 arrays of 2 x 2 x 32 int32. The state is donated."""
    memory = step.memory
    assert memory.arguments == state_bytes(CUBE) + 2 * (2 * 2 * 32) * 4
    assert memory.aliased == state_bytes(CUBE)
    assert memory.peak == memory.arguments + (memory.outputs - memory.aliased) + memory.temporaries
    assert memory.temporaries > 0


def check_merged_sums(step: Compiled) -> None:
    """A sum over tp and then pp becomes one over both, and a send whose result nobody reads goes. Gradients stay."""
    theory = {(e.op, e.axes): e for e in StepTraffic(CUBE).table()}
    made = {(e.op, e.axes): e for e in merge(entry.collective for entry in step.timeline)}
    for kept in (("psum", ("dp",)), ("psum", ("pp", "dp")), ("pmax", ("pp", "tp"))):
        assert made[kept] == theory[kept]
    assert set(made) == set(theory)
    assert sum(e.wire_bytes for e in made.values()) <= sum(e.wire_bytes for e in theory.values())


def check_hiding(step: Compiled) -> None:
    """Every byte is hidden or exposed, by its axes; some are hidden, behind matrix multiplies of known size."""
    totals: dict[tuple[str, ...], Fraction] = {}
    for entry in step.timeline:
        totals[entry.axes] = totals.get(entry.axes, Fraction(0)) + entry.wire_bytes
    exposed, hidden = step.exposed_bytes, step.hidden_bytes
    assert {axes: exposed.get(axes, 0) + hidden.get(axes, 0) for axes in exposed | hidden} == totals
    assert sum(hidden.values()) == sum(e.wire_bytes for e in step.timeline if e.cover_flops) > 0


def test_cluster_shapes() -> None:
    """What is not given follows from the mesh: 8 GPUs a host, or as many as the hosts need."""
    assert cluster(512) == (64, 8)
    assert cluster(4) == (1, 4)
    assert cluster(8, hosts=2) == (2, 4)
    assert cluster(8, gpus_per_host=1) == (8, 1)
    assert cluster(8, 4, 2) == (4, 2)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ((12,), "hosts x gpus_per_host = 1 x 8 = 8 but the mesh has 12 devices"),
        ((8, 3), "3 x 2 = 6 but the mesh has 8"),
        ((8, 2, 8), "2 x 8 = 16 but the mesh has 8"),
        ((8, 0), "0 x 8 = 0 but"),
        ((8, 16), "16 x 1 = 16 but"),
    ],
)
def test_a_cluster_of_another_size_is_refused(sizes: tuple[int, ...], complaint: str) -> None:
    """With the numbers."""
    with pytest.raises(ConfigError, match=complaint):
        cluster(*sizes)


@pytest.mark.parametrize(
    ("name", "nearest"), [("h10", "h100"), ("H200", "h200"), ("a100", "a100-40"), ("4090", "rtx4090")]
)
def test_an_unknown_gpu_is_refused(name: str, nearest: str) -> None:
    """With the nearest one that is known."""
    with pytest.raises(ConfigError, match=f"did you mean {nearest}"):
        compile_step(CUBE, name)


def test_target_config_of_an_h100() -> None:
    """Its own numbers and those of compute capability 9.0, as the text format writes them."""
    text = " ".join(target_config("h100").split())
    for field in (
        "core_count: 132",
        "shared_memory_per_core: 233472",
        "shared_memory_per_block_optin: 232448",
        "l2_cache_size: 52428800",
        "memory_bandwidth: 3352320000000",
        "device_memory_size: 84942979072",
        "clock_rate_ghz: 1.98",
        "cuda_compute_capability { major: 9 minor: 0",
    ):
        assert field in text
    assert "device_memory_size: 1000" in target_config("h100", memory=1000)
    assert list(CHIPS) == ["a100-40", "a100-80", "h100", "h200", "b200", "rtx4090"]
    capabilities = {name: (gpu.limits.major, gpu.limits.minor) for name, gpu in CHIPS.items()}
    assert set(capabilities.values()) == {(8, 0), (9, 0), (10, 0), (8, 9)}
    assert capabilities["rtx4090"] == (8, 9)


@needs_plugin
@pytest.mark.parametrize("name", CHIPS)
def test_every_target_is_one_that_xla_reads(name: str) -> None:
    """A device for each, under its own name, on the cluster asked for."""
    devices = aot._devices(target_config(name), 2, 4)
    assert {device.device_kind for device in devices} == {CHIPS[name].description}
    assert [device.process_index for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]


@needs_plugin
def test_an_unknown_option_of_the_compiler_is_refused() -> None:
    """In one line."""
    with pytest.raises(ConfigError, match="xla_gpu_none_such"):
        compile_step(FLAT, "h100", hosts=2, compiler_options={"xla_gpu_none_such": 1})


def test_a_machine_that_cannot_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin, a JAX that has started without it, another system."""

    def absent(platform: str, **_: Any) -> Any:
        raise NotImplementedError(f"topology not implemented for {platform}")

    with monkeypatch.context() as patch:
        patch.setattr(aot, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r'pip install "jax\[cuda12\]"'):
            compile_step(CUBE, "a100-40")
        with pytest.raises(ConfigError, match=r'pip install "jax\[cuda12\]"'):
            aot.check_compiler("a100-80")
    with monkeypatch.context() as patch:
        patch.setattr(aot, "find_spec", lambda name: True)
        patch.setattr(aot.topologies, "get_topology_desc", absent)
        with pytest.raises(ConfigError, match="use_cpu_devices"):
            compile_step(CUBE, "a100-40")
    monkeypatch.setattr(aot.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="darwin"):
        compile_step(CUBE, "a100-40")


def test_gpu_options_reach_a_real_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step is compiled with here is what a process on GPUs sets, unless its user has."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    use_gpus("leaf")
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=0"
    use_gpus()
    assert os.environ["XLA_FLAGS"].split()[1:] == [f"--{k}={v}" for k, v in gpu_options("overlap").items()]
    own = [f"--{name}=1" for name in gpu_options("overlap")]
    monkeypatch.setenv("XLA_FLAGS", " ".join(own))
    use_gpus()
    assert os.environ["XLA_FLAGS"].split() == own
