"""ZeRO-1: replicas share out the optimizer's state, and send no more than before.

Claim: over N replicas AdamW's state and the weights that it updates take 12/N bytes a parameter on each, so that a
device holds 2 + 4 + 12/N instead of 16, to the byte; a step sends as many elements as an all-reduce does, 2 (N-1)/N a
parameter, and the losses are those of stage 0.

    python run_experiment.py zero_1            about 2 minutes on 2 CPU cores: 8 fake devices, 8 compilations, no GPU
    python run_experiment.py zero_1 --quick    under a minute: 4 fake devices, 2 compilations

The paper (Rajbhandari et al., arXiv:1910.02054, figure 1) has 2 + 2 + 12 and 2 + 2 + 12/N: 16-bit weights and gradients
beside a float32 master and two moments. Here stage 0 has 4 + 4 + 8, as much: its float32 weights are their own master
and are cast as they are used. From stage 1 on the master lies in pieces and a whole bfloat16 copy stands beside it.
Sums of gradients are float32, 2 bytes more than the paper's, unless --parallel.accumulate is bfloat16.

Expected: gpt2-xl (25 GB of states at 16 bytes) holds 18.7 GB of weights and optimizer at stage 0, 5.5 at stage 1 on 8
GPUs and 3.4 on 64. With one microbatch no whole sum of gradients is ever there, since each layer's gradient is
scattered as soon as it is made: stage 1 then has the memory of stage 2. The reduce-scatter is hidden as the all-reduce
was; the gather of the new weights follows the update and is not, but it is of 16 bits, so 6 bytes a parameter are sent
instead of 8.

The losses are compared in float32. In bfloat16 they differ by 1e-4 from the first step on: stage 0 reads norms' scales,
biases and positions in float32, the copy has them rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import track

from experiments.ch02_zero._compiled import (
    Case,
    ZeroOptions,
    check_options,
    compile_all,
    compiled_checks,
    memory_table,
)
from experiments.ch02_zero._figures import compiled_panel, finish, held_panel, sent_panel
from experiments.ch02_zero._sizes import Held, Sent, every, held_table, loss_checks, losses, sent_table, tiny
from experiments.harness import Check, Outcome, save_figure
from jax5d.config import MeshConfig

CAPSULES = [15]
CLAIM = "ZeRO-1 holds 2 + 4 + 12/N bytes a parameter instead of 16, sends what an all-reduce sends, and learns the same"
NEEDS = "8 fake CPU devices, JAX's CUDA plugin but no GPU, and 2 minutes on 2 cores"

STAGES = (0, 1)


@dataclass(frozen=True)
class Zero1Options(ZeroOptions):
    """Options of zero_1."""


DEFAULTS = Zero1Options(mesh=MeshConfig(dp=8))
QUICK = replace(DEFAULTS, mesh=MeshConfig(dp=4), clusters=(8,), microbatches=(1,), steps=8)


def check(options: Zero1Options, folder: Path) -> None:
    """Refuse what cannot be measured or compiled, before anything is."""
    check_options(options, "zero_1")


def run(options: Zero1Options, folder: Path, console: Console) -> Outcome:
    """Measure arrays and traffic on fake devices, train both stages, then compile."""
    todo = every(STAGES, options.mesh.size, few=options.quick)
    largest = todo[-1][1]
    shown = track(todo, description="measuring", console=console, disable=not console.is_terminal)
    held = [Held.of(stage, n, options.seed) for stage, n in shown]
    sent = [Sent.of(tiny(n, stage)) for stage, n in todo if n > 1]
    curves = losses(STAGES, largest, options.steps, options.seed)
    cases = [Case(n, stage, m) for n in options.clusters for m in options.microbatches for stage in STAGES]
    rows = compile_all(cases, options, console)
    save_figure(_figure(held, sent, curves, largest), folder, "zero_1")
    figure = Figure(figsize=(max(7, 1.4 * len(rows)), 4.8), layout="constrained")
    title = f"{options.preset} in bfloat16, {options.rows} x 1024 tokens a microbatch on each {options.gpu}, compiled"
    compiled_panel(figure.subplots(), rows, title)
    save_figure(figure, folder, "compiled")
    checks: list[Check] = [c for found in (*held, *sent) for c in found.checks()]
    checks += [*loss_checks(curves), *compiled_checks(rows)]
    metrics = {
        "held": [found.metrics() for found in held],
        "sent": {found.name: found.metrics() for found in sent},
        "losses": {f"stage {stage}": curve for stage, curve in curves.items()},
        "compiled": {row.case.name: row.metrics() for row in rows},
    }
    return Outcome(checks, metrics, [held_table(held), sent_table(sent), memory_table(rows, options)])


def _figure(held: list[Held], sent: list[Sent], curves: dict[int, list[float]], n: int) -> Figure:
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.3, 1.1, 1))
    held_panel(left, held)
    sent_panel(middle, sent, [f"Z{s.config.parallel.zero}\ndp {s.config.mesh.dp}" for s in sent])
    middle.set_title("On the wire in a step, by the ledger")
    _curves(right, curves, n)
    figure.suptitle("ZeRO-1 (Z1) against plain data parallelism (Z0)")
    return figure


def _curves(axes: Axes, curves: dict[int, list[float]], n: int) -> None:
    for (stage, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(curve) + 1), curve, style, linewidth=3 - stage, label=f"stage {stage}")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=f"The same losses, dp {n}, float32")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(axes, 1)
