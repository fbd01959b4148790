"""A small Llama that writes on fake devices, each way: its texts, and what a device holds and sends, measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.ch03_tensor_parallelism._serving import WAYS, ByHand, layout
from experiments.harness import Check
from experiments.training import on_first_devices, wire_total
from jax5d.config import ModelConfig, RunConfig
from jax5d.costs.collectives import Collective
from jax5d.costs.gpus import gpu
from jax5d.costs.inference import Pass, held
from jax5d.inference.decoder import ROWS, Decoder
from jax5d.inference.generate import write
from jax5d.inference.sample import Sampling
from jax5d.measure.ledger import ledger
from jax5d.measure.memory import bytes_on_device
from jax5d.mesh import placed

MODEL = ModelConfig(
    name="llama-tiny",
    architecture="llama",
    tied=False,
    layers=4,
    d_model=64,
    heads=8,
    kv_heads=4,
    d_ff=176,
    vocab=250,
    context=64,
)
"""float32, so that equal texts can be asked for; on 8 devices tp keeps each head of keys and values twice."""

PROMPTS, PROMPT, CAPACITY, COUNT = 8, 16, 32, 12
"""Prompts and their longest; tokens of a row's cache, and tokens that are written."""
SCALE = 8.0
"""Of the initial weights: with smaller ones a text would repeat a token."""
GREEDY = Sampling(temperature=0)
COUNTS = (2, 4, 8)


@dataclass(frozen=True)
class Row:
    """One way on n devices. Bytes are the most that any device holds."""

    way: str
    n: int
    texts: list[list[int]]
    weights: int
    cache: int
    step: list[Collective]
    """Of one new token for each prompt."""
    prefill: list[Collective]
    config: RunConfig

    @property
    def name(self) -> str:
        """Of its checks."""
        return f"{WAYS[self.way]}, {self.n} devices"

    @property
    def by_hand(self) -> ByHand:
        """Of the same."""
        return ByHand(MODEL, self.n, 4, gpu("h100"))

    @property
    def held_by_hand(self) -> int:
        """Bytes of weights and cache on a device."""
        return self.by_hand.stored(self.way) + self.by_hand.cache(self.way, PROMPTS, CAPACITY)

    def checks(self, alone: list[list[int]]) -> list[Check]:
        """Against one device's texts, by hand, and every collective by theory."""
        wrong = sum(a != b for a, b in zip(self.texts, alone, strict=True))
        hand, formula = self.by_hand, held(self.config, PROMPTS, CAPACITY)
        theory = (Pass(self.config, PROMPTS, *shape).table() for shape in ((1, CAPACITY), (CAPACITY, CAPACITY)))
        differing = sum(len(set(a) ^ set(b)) for a, b in zip((self.step, self.prefill), theory, strict=True))
        unlike = (self.weights != formula.weights) + (self.cache != formula.cache)
        return [
            Check.equal(f"texts that differ from one device's, {self.name}", wrong, 0),
            Check.equal(f"bytes of weights on a device, {self.name}", self.weights, hand.stored(self.way)),
            Check.equal(f"bytes of the cache, {self.name}", self.cache, hand.cache(self.way, PROMPTS, CAPACITY)),
            Check.equal(f"either of them that differs from the library's theory, {self.name}", unlike, 0),
            Check.equal(
                f"bytes sent for a new token, {self.name}", wire_total(self.step), hand.wire(self.way, PROMPTS, 1), 1e-6
            ),
            Check.equal(f"collectives that differ from theory, prefill and new token, {self.name}", differing, 0),
        ]

    def metrics(self) -> dict[str, Any]:
        """For result.json."""
        sent = {"sent_for_a_token": wire_total(self.step), "sent_for_the_prompts": wire_total(self.prefill)}
        return {"way": self.way, "n": self.n, "weights": self.weights, "cache": self.cache} | sent


def prompts(seed: int) -> list[list[int]]:
    """Of 1 to `PROMPT` tokens, the last one longest."""
    random = np.random.default_rng(seed)
    lengths = [*random.integers(1, PROMPT, PROMPTS - 1), PROMPT]
    return [random.integers(0, MODEL.vocab, length).tolist() for length in lengths]


def alone(seed: int) -> list[list[int]]:
    """The texts of one device."""
    return measure("tp", 1, seed).texts


def measure(way: str, n: int, seed: int) -> Row:
    """Write the texts on n devices, and look at the arrays and programs."""
    config = replace(layout(way, MODEL, n), seed=seed)
    trainer = on_first_devices(config)
    params = jax.tree.map(lambda x: SCALE * x, trainer.init().params)
    decoder = Decoder.create(trainer, CAPACITY)
    texts = write(decoder, params, prompts(seed), COUNT, sampling=GREEDY)
    weights, put = decoder.weights(params), partial(jax.device_put, device=placed(trainer.mesh, ROWS))
    ids, lengths = np.zeros((PROMPTS, CAPACITY), np.int32), np.full(PROMPTS, PROMPT, np.int32)
    _, cache = decoder.prefill(weights, put(ids), put(lengths), {})
    most = lambda tree: max(bytes_on_device(tree, device) for device in trainer.mesh.devices.flat)  # noqa: E731
    shapes, _, row, _, numbers = decoder.arguments(PROMPTS, GREEDY)
    prompt = jax.ShapeDtypeStruct(ids.shape, jnp.int32, sharding=row.sharding)
    filled = ledger(decoder.prefill, shapes, prompt, row, numbers)
    return Row(way, n, [t.tolist() for t in texts], most(weights), most(cache), sent(decoder, PROMPTS), filled, config)


def sent(decoder: Decoder, rows: int) -> list[Collective]:
    """The ledger of a new token for each of `rows` sequences; nothing is computed."""
    return ledger(decoder.step, *decoder.arguments(rows, GREEDY))


def crossing(n: int) -> int:
    """Fewest sequences, in whole n's, for whose new tokens tensor parallelism sends more than the weights, by ledgers.

    What ZeRO-3 sends must not depend on their number.
    """
    tp, zero = (Decoder.create(on_first_devices(layout(way, MODEL, n)), CAPACITY) for way in WAYS)
    gathered = wire_total(sent(zero, n))
    low, high = 0, n
    while wire_total(sent(tp, high)) <= gathered:
        low, high = high, 2 * high
    while high - low > n:
        middle = (low + high) // (2 * n) * n
        more = wire_total(sent(tp, middle)) > gathered
        low, high = (low, middle) if more else (middle, high)
    if wire_total(sent(zero, high)) != gathered:
        raise AssertionError(f"ZeRO-3 sends other bytes for {high} sequences than for {n}")
    return high
