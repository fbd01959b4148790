"""A tiny GPT-2 under ZeRO on fake devices: what each of them holds and sends, measured and by hand.

By hand: a layer of width d has 12 d^2 + 13 d parameters; the outer leaves are (v + s) d + 2 d.
Every leaf divides into 8 pieces. A device holds, in bytes a parameter, over n replicas:

    stage    parameters    gradients    optimizer
    0        4             4            8           float32 weights are their own master: no 16-bit copy stands by
    1        2             4            12 / n      a whole copy in bfloat16; master and moments in pieces
    2        2             4 / n        12 / n
    3        4 / n         4 / n        8 / n       the master in pieces again, cast as it is gathered

Rajbhandari et al., arXiv:1910.02054, figure 1, keep weights and gradients in 16 bits beside k = 12 of the optimizer.
Our sums of gradients are float32, 2 more, unless `parallel.accumulate` is bfloat16: then stages 1 and 2 are theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

import jax
import numpy as np
from rich.table import Table

from experiments.harness import Check
from experiments.training import Traffic, on_first_devices
from jax5d.config import PRESETS, MeshConfig, ParallelConfig, RunConfig, TrainConfig
from jax5d.costs.memory import Memory, memory
from jax5d.costs.textbook import zero_bytes_per_parameter
from jax5d.measure.memory import buckets, kept_by_layer

LAYERS, WIDTH, HEADS, VOCAB, TOKENS, ROWS = 4, 64, 4, 96, 32, 2
"""Of the tiny model; ROWS sequences of TOKENS on each device in each microbatch."""

BLOCKS = LAYERS * (12 * WIDTH**2 + 13 * WIDTH)
OUTER = (VOCAB + TOKENS) * WIDTH + 2 * WIDTH
PARAMETERS = BLOCKS + OUTER

COUNTERS = 3 * 4
"""Bytes of the step, the schedule's count and Adam's."""

PARTS = ("parameters", "gradients", "optimizer", "activations")

SIZES = (1, 2, 4, 8)
"""Numbers of replicas, as far as there are devices."""


def tiny(n: int, stage: Any, *, microbatches: int = 2, regather: bool = True, **changes: Any) -> RunConfig:
    """The tiny run over n replicas; `changes` are fields of the model."""
    shape = {"layers": LAYERS, "d_model": WIDTH, "heads": HEADS, "d_ff": 4 * WIDTH, "vocab": VOCAB, "context": TOKENS}
    model: dict[str, Any] = {"dtype": "bfloat16", **shape, **changes}
    return RunConfig(
        mesh=MeshConfig(dp=n),
        model=replace(PRESETS["gpt2-tiny"], **model),
        parallel=ParallelConfig(zero=stage, microbatches=microbatches, regather=regather),
        train=TrainConfig(global_batch=ROWS * n * microbatches, seq_len=TOKENS, warmup=0),
    )


def bytes_each(stage: int, n: int) -> tuple[Fraction, Fraction, Fraction]:
    """Bytes a parameter of parameters, gradients and optimizer: the table above. One replica shares nothing out."""
    piece = Fraction(1, n)
    table = {
        0: (Fraction(4), Fraction(4), Fraction(8)),
        1: (Fraction(2), Fraction(4), 12 * piece),
        2: (Fraction(2), 4 * piece, 12 * piece),
        3: (4 * piece, 4 * piece, 8 * piece),
    }
    return table[stage if n > 1 else 0]


@dataclass(frozen=True)
class Held:
    """What the first of n devices holds, in bytes."""

    stage: int
    n: int
    measured: dict[str, int]
    """By `PARTS`: arrays of a state; types of the sums and of what layers keep for their backward pass."""
    formula: Memory

    @classmethod
    def of(cls, stage: int, n: int, seed: int) -> Held:
        """Make the state and measure it."""
        config = replace(tiny(n, stage), seed=seed)
        trainer = on_first_devices(config)
        found = buckets(trainer, trainer.init())
        kept = LAYERS * sum(prod(x.shape) * x.dtype.itemsize for x in kept_by_layer(trainer))
        parts = (found.parameters, found.gradients, found.optimizer, kept)
        return cls(stage, n, dict(zip(PARTS, parts, strict=True)), memory(config))

    @property
    def name(self) -> str:
        """Of its row."""
        return f"stage {self.stage}, dp {self.n}"

    @property
    def by_hand(self) -> dict[str, Fraction]:
        """The same from the docstring's table; of each token and layer 12 arrays of d in 16 bits, a float32 a head."""
        parts = [each * PARAMETERS for each in bytes_each(self.stage, self.n)]
        kept = Fraction(LAYERS * ROWS * TOKENS * (12 * 2 * WIDTH + 4 * HEADS))
        return dict(zip(PARTS, (parts[0], parts[1], parts[2] + COUNTERS, kept), strict=True))

    @property
    def states(self) -> float:
        """Bytes a parameter of all but activations, counters left out."""
        return (sum(self.measured[part] for part in PARTS[:3]) - COUNTERS) / PARAMETERS

    @property
    def book(self) -> float:
        """The same by the paper."""
        return zero_bytes_per_parameter(self.stage, self.n)

    def checks(self) -> list[Check]:
        """All of it to the byte, and every part of it by hand and by the formula."""
        by_hand = self.by_hand
        wrong = sum(self.measured[part] != by_hand[part] for part in PARTS)
        wrong += sum(self.measured[part] != getattr(self.formula, part) for part in PARTS[:3])
        total = sum(self.measured.values())
        return [
            Check.equal(f"bytes on a device, tiny, {self.name}", total, int(sum(by_hand.values()))),
            Check.equal(f"parts of them that differ by hand or by formula, {self.name}", wrong, 0),
        ]

    def metrics(self) -> dict[str, Any]:
        """For result.json."""
        return {"stage": self.stage, "dp": self.n, "bytes_a_parameter": self.states, "book": self.book} | self.measured


@dataclass(frozen=True)
class Sent:
    """What a device of n sends in a step."""

    config: RunConfig
    traffic: Traffic

    @classmethod
    def of(cls, config: RunConfig) -> Sent:
        """Trace a tiny run's step."""
        return cls(config, Traffic.of(on_first_devices(config)))

    @property
    def name(self) -> str:
        """Of its row."""
        parallel = self.config.parallel
        kept = "" if parallel.regather else " kept"
        return f"stage {parallel.zero}{kept}, dp {self.config.mesh.dp}, M = {parallel.microbatches}"

    @property
    def elements(self) -> dict[str, float]:
        """By op: elements that a device sends for each parameter, times n / (n-1): what it would over many replicas."""
        n, widths = self.config.mesh.dp, {"psum": 4, "psum_scatter": 4, "all_gather": 2}
        share = Fraction(n - 1, n) * PARAMETERS
        sent = {e.op: e.wire_bytes for e in self.traffic.measured}
        return {op: float(sent.get(op, 0) / width / share) for op, width in widths.items()}

    @property
    def by_hand(self) -> dict[str, float]:
        """Microbatches M: 2 N summed once; or N scattered once, from stage 2 on M times; N gathered once, or at stage 3
        the outer leaves once, the layers M times, and again for M backward passes."""
        parallel = self.config.parallel
        m = parallel.microbatches
        again = BLOCKS if parallel.regather else 0
        scattered, gathered = {
            0: (0, 0),
            1: (PARAMETERS, PARAMETERS),
            2: (m * PARAMETERS, PARAMETERS),
            3: (m * PARAMETERS, OUTER + m * (BLOCKS + again)),
        }[parallel.zero]
        summed = 0 if parallel.zero else 2 * PARAMETERS
        found = {"psum": summed, "psum_scatter": scattered, "all_gather": gathered}
        return {op: count / PARAMETERS for op, count in found.items()}

    @property
    def book(self) -> int:
        """Elements a parameter by the paper's section 7, with what each microbatch repeats."""
        parallel = self.config.parallel
        m = parallel.microbatches
        return {0: 2, 1: 2, 2: m + 1, 3: (3 if parallel.regather else 2) * m}[parallel.zero]

    def checks(self) -> list[Check]:
        """Elements by hand, sums of scalars apart; and the whole ledger against theory."""
        found = [
            Check.equal(
                f"elements a parameter by {op}, {self.name}",
                self.elements[op],
                want,
                1e-3 if op == "psum" else 1e-12 * want,
            )
            for op, want in self.by_hand.items()
            if want
        ]
        return [*found, self.traffic.checks(self.name)[0]]

    def metrics(self) -> dict[str, Any]:
        """For result.json."""
        return {"bytes": self.traffic.bytes, "elements_a_parameter": self.elements, "book": self.book}


def every(stages: tuple[int, ...], devices: int, *, few: bool) -> list[tuple[int, int]]:
    """Stages and numbers of replicas that the devices allow, or a `few`: one and most. On one all stages are one."""
    sizes = [n for n in SIZES if n <= devices]
    sizes = [sizes[0], sizes[-1]] if few else sizes
    return [(stage, n) for n in sizes for stage in (stages if n > 1 else stages[:1])]


def losses(stages: tuple[int, ...], n: int, steps: int, seed: int) -> dict[int, list[float]]:
    """Loss curves on the same random tokens, in float32."""
    return {stage: _curve(replace(tiny(n, stage, dtype="float32"), seed=seed), steps) for stage in stages}


def _curve(config: RunConfig, steps: int) -> list[float]:
    trainer, train = on_first_devices(config), config.train
    state, random, found = trainer.init(), np.random.default_rng(config.seed), []
    pieces = config.parallel.microbatches
    shape = pieces, train.global_batch // pieces, train.seq_len + 1
    for _ in range(steps):
        # of 8 following numbers each, so that there is something to learn
        tokens = (random.integers(0, VOCAB, shape) // 8 * 8 + np.arange(shape[-1]) % 8).astype(np.int32)
        batch = {"inputs": tokens[..., :-1], "labels": tokens[..., 1:]}
        state, metrics = trainer.step(state, jax.device_put(batch, trainer.batch_sharding))
        found.append(float(metrics["loss"]))
    return found


def loss_checks(curves: dict[int, list[float]]) -> list[Check]:
    """Every stage against stage 0, and that something was learned."""
    base = curves[0]
    found = [
        Check.below(
            f"largest difference of a loss from stage 0, relative, stage {stage}",
            max(abs(a / b - 1) for a, b in zip(curve, base, strict=True)),
            1e-6,
        )
        for stage, curve in curves.items()
        if stage
    ]
    return [*found, Check.below("last loss over the first, stage 0", base[-1] / base[0], 0.99)]


def held_table(rows: list[Held]) -> Table:
    """Bytes a parameter, and activations."""
    heads = ("param.", "grad.", "optim.", "all", "paper", "activ., kB")
    title = f"Bytes a parameter on a device, measured: tiny GPT-2, {PARAMETERS} parameters; activations of a microbatch"
    table = Table("stage", "dp", *heads, title=title)
    for row in rows:
        found = row.measured
        states = [found["parameters"], found["gradients"], found["optimizer"] - COUNTERS]
        cells = [f"{x:.4g}" for x in (*(part / PARAMETERS for part in states), row.states, row.book)]
        table.add_row(str(row.stage), str(row.n), *cells, f"{found['activations'] / 1e3:.1f}")
    return table


def sent_table(rows: list[Sent]) -> Table:
    """Elements a parameter, and kB."""
    title = "A step on the wire, by the ledger, with M microbatches: elements a parameter, times n / (n-1)"
    table = Table("stage", "dp", "M", "summed", "scattered", "gathered", "paper", "kB sent", title=title)
    for row in rows:
        parallel = row.config.parallel
        stage = f"{parallel.zero}{'' if parallel.regather else ' kept'}"
        which = (stage, str(row.config.mesh.dp), str(parallel.microbatches))
        cells = [f"{x:.3f}" for x in row.elements.values()]
        table.add_row(*which, *cells, str(row.book), f"{row.traffic.bytes / 1e3:.0f}")
    return table
