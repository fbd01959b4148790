"""How long the step of gpt2-xl takes to compile for H100s, and the memory that takes, on this machine.

    python benchmarks/compile_time.py            about 4 minutes on 2 CPU cores; writes docs/compile_time.svg and .png

One thing changes at a time: layers, microbatches, devices. The program is a loop over each, so none should matter.
Each point is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
BASE = {"layers": 48, "microbatches": 4, "devices": 64}
SERIES = {
    "layers": (12, 24, 48, 96),
    "microbatches": (1, 4, 16, 64),
    "devices": (8, 64, 512),
}


def measure(layers: int, microbatches: int, devices: int) -> dict[str, float]:
    """Compile once, in this process."""
    from jax5d.config import PRESETS, MeshConfig, ParallelConfig, RunConfig, TrainConfig
    from jax5d.measure.aot import compile_step
    from jax5d.mesh import use_cpu_devices

    use_cpu_devices(1)
    config = RunConfig(
        mesh=MeshConfig(dp=devices),
        model=replace(PRESETS["gpt2-xl"], dtype="bfloat16", layers=layers),
        parallel=ParallelConfig(remat="full", loss_chunks=8, microbatches=microbatches),
        train=TrainConfig(global_batch=8 * devices * microbatches, seq_len=1024),
    )
    compiled = compile_step(config, "h100")
    return {
        "trace_seconds": compiled.trace_seconds,
        "compile_seconds": compiled.compile_seconds,
        "process_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "peak_gb": compiled.memory.peak / 1e9,
    }


def apart(**sizes: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    words = [sys.executable, __file__, json.dumps(sizes)]
    return json.loads(subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure every point and draw them."""
    done: dict[tuple[int, ...], dict[str, float]] = {}
    figure = Figure(figsize=(11, 3.6))
    for axes, (name, values) in zip(figure.subplots(1, 3, sharey=True), SERIES.items(), strict=True):
        points = []
        for value in values:
            sizes = BASE | {name: value}
            key = tuple(sizes.values())
            if key not in done:
                done[key] = apart(**sizes)
                print(sizes, {k: round(v, 2) for k, v in done[key].items()}, flush=True)
            points.append(done[key])
        total = [p["trace_seconds"] + p["compile_seconds"] for p in points]
        axes.plot(values, total, "o-", label="trace and compile")
        axes.plot(values, [p["trace_seconds"] for p in points], "s--", label="of it, trace")
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(v) for v in values])
        axes.set(xlabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("seconds")
    figure.axes[0].legend()
    rest = ", ".join(f"{v} {k}" for k, v in BASE.items())
    figure.suptitle(f"Compiling the step of gpt2-xl's layers for H100s; {rest} unless varied")
    figure.tight_layout()
    for suffix in ("svg", "png"):
        figure.savefig(ROOT / "docs" / f"compile_time.{suffix}", dpi=150)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(**json.loads(sys.argv[1]))))
    else:
        main()
