"""What the library does on one GPU, in under four minutes: the right loss, then speed, beside PyTorch.

    python benchmarks/gpu.py [--out FILE] [--cpu-smoke]

1. The tiny model's loss over a few steps, on the GPU against this machine's CPU: float32, and bfloat16 with cuDNN's
   attention.
2. Step time, tokens a second and MFU of gpt2 and gpt2-medium: bfloat16, 1024 tokens, no recomputation, AdamW.
3. The same models in PyTorch (torch.compile, scaled_dot_product_attention, bf16 autocast, fused AdamW), where torch
   finds the GPU.

MFU counts 6 N + 12 L h s FLOPs a token: N all parameters, embeddings too, and attention in full, not half of it for
causality. Each part is a process of its own (`benchmarks/gpu_parts.py`), so that no allocator holds another's
memory; none begins after 200 seconds and none outlives 230. A table comes out, and one line of JSON. Exit status 0,
1 where the losses differ or a part failed, 2 without a GPU. `--cpu-smoke` runs the whole flow on the CPU with the
tiny model, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from jax5d.costs.flops import peak_flops

ROOT = Path(__file__).resolve().parents[1]
BEGIN_SECONDS, END_SECONDS = 200.0, 230.0
"""No part begins after the first; every part is stopped at the second."""

Part = dict[str, Any]


@dataclass
class Runner:
    """Starts parts while there is time, and keeps what they say."""

    smoke: bool
    start: float = field(default_factory=time.monotonic)
    parts: list[Part] = field(default_factory=list)

    def run(self, name: str, *args: str) -> Part:
        """The part's own JSON object; or {"part", "skipped" or "error": reason}."""
        used = time.monotonic() - self.start
        label = " ".join((name, *args))
        if used > BEGIN_SECONDS:
            return self._keep(
                {"part": label, "skipped": f"{used:.0f} s used; nothing begins after {BEGIN_SECONDS:.0f}"}
            )
        print(f"[{used:5.0f} s] {label}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu_parts", name, *args, *(["--cpu"] if self.smoke else [])]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=END_SECONDS - used,
            )
        except subprocess.TimeoutExpired:
            return self._keep({"part": label, "skipped": f"stopped at {END_SECONDS:.0f} s"})
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
            return self._keep({"part": label, "error": reason})
        return self._keep({"part": label} | json.loads(done.stdout.strip().splitlines()[-1]))

    def _keep(self, part: Part) -> Part:
        self.parts.append(part)
        return part

    def _environment(self) -> dict[str, str]:
        own = {"TF_CPP_MIN_LOG_LEVEL": "2", **({"JAX_PLATFORMS": "cpu"} if self.smoke else {})}
        return os.environ | own


def measure(runner: Runner) -> Iterator[tuple[str, Part]]:
    """(who, part) of every speed measurement."""
    models = ("gpt2-tiny",) if runner.smoke else ("gpt2", "gpt2-medium")
    ours = {model: runner.run("speed", model) for model in models}
    for model in models:
        yield f"jax5d {model}", ours[model]
    for model in models:
        batch = ours[model].get("batch")
        if batch is not None:
            yield f"torch {model}", runner.run("torch", model, str(batch))


def with_mfu(part: Part, device: str) -> Part:
    """A part with its model-FLOPs utilisation, where the device's peak is known."""
    peak = peak_flops(device)
    if peak is not None and "tokens_per_second" in part:
        part["mfu"] = part["tokens_per_second"] * part["flops_per_token"] / peak
    return part


def show(device: str, loss: Part, rows: list[tuple[str, Part]]) -> None:
    """Print the tables."""
    console = Console()
    console.print(f"{device}. Losses, against float32 on the CPU: {_loss_line(loss)}", soft_wrap=True)
    table = Table(title="One training step, bfloat16")
    table.add_column("", no_wrap=True)
    for column in ("batch", "step, ms", "tokens/s", "MFU, %", "memory, GB", "compile, s"):
        table.add_column(column, justify="right")
    for name, part in rows:
        cells = (
            _cell(part, "batch", 1, "d"),
            _cell(part, "step_seconds", 1e-3, ".2f"),
            _cell(part, "tokens_per_second", 1, ",.0f"),
            _cell(part, "mfu", 1e-2, ".1f"),
            _cell(part, "peak_bytes", 1e9, ".2f"),
            _cell(part, "compile_seconds", 1, ".1f"),
        )
        table.add_row(name, *cells)
    console.print(table)
    for name, part in rows:
        if remark := part.get("skipped") or part.get("error"):
            console.print(f"{name}: {remark}", soft_wrap=True)


def _cell(part: Part, key: str, unit: float, form: str) -> str:
    value = part.get(key)
    return "" if value is None else format(value if form == "d" else value / unit, form)


def _loss_line(loss: Part) -> str:
    if "held" not in loss:
        return loss.get("skipped") or loss.get("error") or "no answer"
    return "; ".join(
        f"{c['name']} within {c['difference']:.1e} (limit {c['limit']:.0e}){'' if c['held'] else ' FAILED'}"
        for c in loss["checks"]
    )


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON line to FILE")
    parser.add_argument("--cpu-smoke", action="store_true", help="run it all on the CPU with the tiny model")
    options = parser.parse_args()
    runner = Runner(options.cpu_smoke)
    found = runner.run("probe")
    if "device" not in found:
        print(f"gpu.py: no GPU that JAX can use ({found.get('error', found.get('skipped'))})", file=sys.stderr)
        return 2
    loss = runner.run("loss")
    rows = [(name, with_mfu(part, found["device"])) for name, part in measure(runner)]
    show(found["device"], loss, rows)
    line = json.dumps({"device": found, "seconds": time.monotonic() - runner.start, "parts": runner.parts[1:]})
    print(line)
    if options.out:
        options.out.write_text(line + "\n")
    return int(not loss.get("held", False) or any("error" in part for part in runner.parts))


if __name__ == "__main__":
    sys.exit(main())
