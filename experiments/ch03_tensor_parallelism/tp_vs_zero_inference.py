"""Serving a model that is shared out: tensor parallelism against weights that ZeRO-3 gathers for every token.

Claim: a new token sends 2 (2 L + 1) (n-1)/n activations of a sequence by tensor parallelism and (n-1)/n of all weights
by ZeRO-3, so a decode step is faster by tensor parallelism at every batch that fits. From about N / (4 L d) tokens at
once on gathering sends less, which is a few prompts: then a prefill with nothing hidden is faster by ZeRO-3.

    python run_experiment.py tp_vs_zero_inference            half a minute on 2 CPU cores: 8 fake devices, no GPU
    python run_experiment.py tp_vs_zero_inference --quick    20 seconds: 4 fake devices

Both hold 1/n of the weights and of the cache of keys and values. Tensor parallelism (Megatron-LM, arXiv:1909.08053;
for inference Pope et al., arXiv:2211.05102, section 3.2, which derive the same turn from activations to gathered
weights) reads 1/n of the weights for a token and sums activations of the whole batch; ZeRO-3 (arXiv:1910.02054) gives
each GPU its own sequences and sends it all weights, however few the sequences are. (Where a whole copy fits beside the
cache, replicas that send nothing are the third way; this is about models that must be shared out.)

Times are given twice, by data sheets: a bound in which all but the longest of products, reads and sends is hidden, and
one with nothing hidden and 3.4 us for each step of a ring. The compiler's schedule says which is nearer: no sum of
tensor parallelism runs under a product, since each waits for the one before; for H100s 91 % of the gathered bytes do.

Expected of llama-9b on 8 H100s: for one sequence 34 to 45 ms a token by ZeRO-3, the wire's, and 0.7 to 4 ms by tensor
parallelism; for 256 sequences of 4096 tokens, which nearly fill the memory, 34 to 65 and 21 to 25 ms. Both send alike
for 16,640 tokens at once: 8 prompts of 2080. A decode step never has as many: 300 sequences fit. The times of prefills
cross there too, at 16,384 tokens with all hidden but the longest and near 18,000 with nothing hidden.

Where models are small and contexts short the order is closer: of gpt2-medium 6728 sequences of 1024 tokens fit, twice
the 3536 that send alike, a decode step of them takes as long either way with nothing hidden, and the claim fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.ch03_tensor_parallelism import _written as written
from experiments.ch03_tensor_parallelism._serving import COSTS, WAYS, Serving, layout
from experiments.ch03_tensor_parallelism._serving_compiled import Compiled, compiled_batch
from experiments.ch03_tensor_parallelism._serving_figures import GB, memory_figure, prompt_lengths, speed_figure
from experiments.harness import Check, Outcome, save_figure
from experiments.options import Options
from experiments.training import wire_total
from jax5d.config import PRESETS, ConfigError, MeshConfig, check_layout
from jax5d.costs.gpus import gpu as find_gpu
from jax5d.measure.aot import check_compiler

CAPSULES = [22]
CLAIM = "Token by token tp beats gathered weights at every batch that fits; N / 4 L d tokens of prompts turn that round"
NEEDS = "8 fake CPU devices, JAX's CUDA plugin but no GPU, and 1 minute on 2 cores"


@dataclass(frozen=True)
class ServingOptions(Options):
    """Options of tp_vs_zero_inference. The mesh only says how many fake devices there are, of which 8 are used."""

    preset: str = "llama-9b"
    """Dense model, in bfloat16; each sequence has room for its whole context."""
    gpu: str = "h100"
    """Kind of GPU: a100-40, a100-80, h100, h200, b200 or rtx4090."""
    gpus: int = 8
    """GPUs of one host that share the model."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Sequences that are written at once."""

    @property
    def serving(self) -> Serving:
        """What is served."""
        return Serving(replace(PRESETS[self.preset], dtype="bfloat16"), self.gpus, find_gpu(self.gpu))


DEFAULTS = ServingOptions(mesh=MeshConfig(tp=8))
QUICK = replace(DEFAULTS, mesh=MeshConfig(tp=4))


def check(options: ServingOptions, folder: Path) -> None:
    """Refuse what cannot be served, measured or compiled, before anything is."""
    if options.mesh.size < 2:
        raise ConfigError(
            f"tp_vs_zero_inference shares a model by 2 devices or more, the mesh has {options.mesh.size}; write "
            "--devices 8"
        )
    if options.preset not in PRESETS or PRESETS[options.preset].experts:
        dense = [known for known, model in PRESETS.items() if not model.experts]
        raise ConfigError(f"preset={options.preset!r} is no dense preset; choose one of {', '.join(dense)}")
    chip, batches = find_gpu(options.gpu), options.batches
    if not 2 <= options.gpus <= chip.per_host:
        raise ConfigError(f"gpus={options.gpus} is outside 2..{chip.per_host}, the {chip.name}s of a host")
    check_layout(layout("tp", PRESETS[options.preset], options.gpus))
    if not batches or min(batches) < 1 or sorted(set(batches)) != list(batches):
        given = " ".join(map(str, batches)) or "nothing"
        raise ConfigError(f"batches={given}: give numbers from 1 up, each larger than the one before, such as 1 8 64")
    most = min(options.serving.most(way) for way in WAYS)
    if batches[0] > most:
        raise ConfigError(
            f"batches={batches[0]} sequences of {options.preset} do not fit {options.gpus} {chip.name}s, {most} do; "
            "give fewer, another --preset or more --gpus"
        )
    check_compiler(options.gpu)


def run(options: ServingOptions, folder: Path, console: Console) -> Outcome:
    """Write and measure on fake devices, compile both ways, and compute the rest."""
    shown = {"console": console, "disable": not console.is_terminal}
    serving, counts = options.serving, [n for n in written.COUNTS if n <= options.mesh.size]
    todo = [(way, n) for n in (counts[-1:] if options.quick else counts) for way in WAYS]
    alone = written.alone(options.seed)
    rows = [written.measure(way, n, options.seed) for way, n in track(todo, description="writing", **shown)]
    crossing = written.crossing(counts[-1])
    batch = compiled_batch(serving, options.batches)
    kinds = [(way, size) for size in (batch, None) for way in WAYS]
    compiled = [Compiled.of(serving, way, size) for way, size in track(kinds, description="compiling", **shown)]
    firsts = {name: serving.first(lambda step, cost=cost: cost(step, serving.chip)) for name, cost in COSTS.items()}
    save_figure(speed_figure(serving, options.batches, firsts), folder, "tokens_and_wire")
    save_figure(memory_figure(serving, options.batches, rows, compiled), folder, "memory")
    checks = [check for row in rows for check in row.checks(alone)]
    checks += [_ledger_crossing(rows[-1], crossing), *_formula_checks(serving, options.batches, firsts)]
    checks += [check for one in compiled for check in one.checks()]
    metrics = {
        "measured": [row.metrics() for row in rows],
        "ledger_crossing": crossing,
        "decode": [_decode_metrics(serving, way, size) for size in options.batches for way in WAYS],
        "prefill": [_prefill_metrics(serving, way, s) for s in prompt_lengths(serving) for way in WAYS],
        "crossing_tokens": {name: first * serving.n for name, first in firsts.items()},
        "sequences_that_fit": {way: serving.most(way) for way in WAYS},
        "compiled": [one.metrics() for one in compiled],
    }
    tables = [_measured_table(rows), _compiled_table(compiled), _decode_table(serving, options.batches)]
    return Outcome(checks, metrics, [*tables, _prefill_table(serving)])


def _ledger_crossing(row: written.Row, found: int) -> Check:
    """Rows come in whole n's."""
    theory = (int(row.by_hand.crossing() // row.n) + 1) * row.n
    return Check.equal(
        f"new tokens at once from which tp sends more than weights, by ledgers, n={row.n}", found, theory
    )


def _formula_checks(serving: Serving, batches: tuple[int, ...], firsts: dict[str, int]) -> list[Check]:
    """The theory by hand; then the claim: decode steps at all batches that fit, and the longest prompts."""
    hand, n, context = serving.by_hand, serving.n, serving.model.context
    passes = [(way, serving.decode(way, b)) for b in batches for way in WAYS]
    passes += [(way, serving.prefill(way, s)) for s in prompt_lengths(serving) for way in WAYS]
    wrong = 0.0
    for way, step in passes:
        parts = zip(step.seconds(serving.chip), hand.seconds(way, step.rows, step.tokens, step.seen), strict=True)
        wrong = max(wrong, *(abs(a / b - 1) for a, b in parts))
    alike, layers = firsts["bytes on the wire"], serving.model.layers
    rule = hand.parameters / (4 * layers * serving.model.d_model)
    tp, zero = (serving.prefill(way, context).seconds(serving.chip).in_turn for way in ("tp", "zero"))
    return [
        Check.equal("relative difference of theory's seconds from those by hand, all passes", wrong, 0, 1e-9),
        *_decode_checks(serving, batches),
        Check.equal(f"shortest of {n} prompts that are more to send than the weights", alike, hand.first()),
        Check.equal("tokens of them, against N / 4 L d", n * alike, rule, rule / (2 * layers + 1) + n),
        Check.below(f"prefill of {n} prompts of {context}, nothing hidden: ZeRO-3's time over tp's", zero / tp, 1),
    ]


def _decode_checks(serving: Serving, batches: tuple[int, ...]) -> list[Check]:
    """At every batch that fits, and the most that do."""
    most = min(serving.most(way) for way in WAYS)
    sizes = [*(b for b in batches if b < most), most]
    tp, zero = ([serving.decode(way, b).seconds(serving.chip) for b in sizes] for way in ("tp", "zero"))
    ratios = {
        "all hidden but the longest": max(a.bound / b.bound for a, b in zip(tp, zero, strict=True)),
        "nothing hidden": max(a.in_turn / b.in_turn for a, b in zip(tp, zero, strict=True)),
    }
    where = f"of {len(sizes)} batches up to {most}"
    return [
        Check.below(f"decode step, {name}: tp's time over ZeRO-3's, most {where}", r, 1) for name, r in ratios.items()
    ]


def _decode_metrics(serving: Serving, way: str, batch: int) -> dict:
    step, found = serving.decode(way, batch), serving.held(way, batch)
    times = step.seconds(serving.chip)
    return {
        "way": way,
        "batch": batch,
        "tokens_per_second": {"most": batch / times.bound, "nothing_hidden": batch / times.in_turn},
        "sent_per_token": step.wire_bytes / batch,
        "flops_per_token": step.flops * serving.n / step.rows,
        "read_per_step": step.read_bytes,
        "seconds": times._asdict(),
        "bytes": found._asdict(),
    }


def _prefill_metrics(serving: Serving, way: str, length: int) -> dict:
    step = serving.prefill(way, length)
    times, tokens = step.seconds(serving.chip), serving.n * length
    return {
        "way": way,
        "tokens": tokens,
        "seconds": times._asdict() | {"bound": times.bound, "nothing_hidden": times.in_turn},
        "sent_per_token": step.wire_bytes / tokens,
    }


def _measured_table(rows: list[written.Row]) -> Table:
    columns = ("way", "n", "weights, kB", "cache, kB", "sent for a token, kB", "for the prompts, kB")
    table = Table(*columns, title=f"Measured: a small Llama writes {written.PROMPTS} texts on fake devices; per device")
    for row in rows:
        sizes = (row.weights, row.cache, wire_total(row.step), wire_total(row.prefill))
        table.add_row(WAYS[row.way], str(row.n), *(f"{size / 1e3:.1f}" for size in sizes))
    return table


def _compiled_table(rows: list[Compiled]) -> Table:
    columns = ("pass", "arguments, GB", "all, GB", "sent under products, %")
    table = Table(*columns, title="Compiled for absent GPUs; per GPU")
    for row in rows:
        sizes = (row.memory.arguments, row.memory.peak)
        table.add_row(row.name, *(f"{size / GB:.2f}" for size in sizes), f"{100 * row.hidden:.1f}")
    return table


def _decode_table(serving: Serving, batches: tuple[int, ...]) -> Table:
    title = f"{serving.model.name} on {serving.n} GPUs ({serving.chip.name}) by formula; from nothing hidden to at most"
    columns = ("tokens/s: tp", "ZeRO-3", "MB sent a token: tp", "ZeRO-3", "GB held: tp", "ZeRO-3")
    table = Table("batch", *columns, title=title)
    for batch in batches:
        found = [_decode_metrics(serving, way, batch) for way in WAYS]
        speeds = [
            f"{f['tokens_per_second']['nothing_hidden']:.0f}, {f['tokens_per_second']['most']:.0f}" for f in found
        ]
        sent = [f"{f['sent_per_token'] / 1e6:.4g}" for f in found]
        held = [f"{sum(f['bytes'].values()) / GB:.1f}" for f in found]
        table.add_row(str(batch), *speeds, *sent, *held)
    return table


def _prefill_table(serving: Serving) -> Table:
    title = f"Prefill of {serving.n} prompts by formula; milliseconds from at least to nothing hidden"
    table = Table("tokens at once", "ms: tp", "ZeRO-3", "MB sent a token: tp", "ZeRO-3", title=title)
    for length in prompt_lengths(serving)[4:]:
        found = [_prefill_metrics(serving, way, length) for way in WAYS]
        times = [f"{1e3 * f['seconds']['bound']:.1f}-{1e3 * f['seconds']['nothing_hidden']:.1f}" for f in found]
        table.add_row(str(serving.n * length), *times, *(f"{f['sent_per_token'] / 1e6:.3g}" for f in found))
    return table
