"""Texts are the plain model's on every mesh: with a cache, by recomputing, in batches, past the context."""

from __future__ import annotations

from fractions import Fraction
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny import config, host, name, start, trainer, weights

from jax5d.config import ConfigError, ModelConfig, RunConfig
from jax5d.costs.collectives import Collective
from jax5d.inference.decoder import Decoder, padded_length
from jax5d.inference.generate import generate, write
from jax5d.inference.sample import Sampling
from jax5d.inference.window import Window
from jax5d.measure.ledger import ledger

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 11, 2], [7, 1, 90, 3, 3, 41, 8, 0, 96], [60]]
COUNT = 12


@cache
def params_of(model: ModelConfig) -> Any:
    """Weights large enough that every part of the model counts; fresh ones would repeat the last token."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(x.dtype), weights(model))


@partial(jax.jit, static_argnames="model")
def _logits(params: Any, ids: jax.Array, model: ModelConfig) -> jax.Array:
    return reference.forward(params, ids, model)[0]


def greedy(model: ModelConfig, prompt: list[int], count: int, window: int = 32) -> list[int]:
    """By the plain model: the likeliest token after the last `window` ones, again and again."""
    text = list(prompt)
    for _ in range(count):
        recent = text[-window:]
        ids = np.array([recent + [0] * (32 - len(recent))])
        text.append(int(np.argmax(_logits(params_of(model), ids, model)[0, len(recent) - 1])))
    return text


def written(run: RunConfig, prompts: Any = PROMPTS, count: int = COUNT, **options: Any) -> list[list[int]]:
    """By the library, on the run's mesh; greedy unless `sampling` is given."""
    options = {"sampling": GREEDY} | options
    return [
        text.tolist()
        for text in generate(trainer(run), start(run, params_of(run.model)).params, prompts, count, **options)
    ]


LLAMA = {"architecture": "llama", "tied": False}
MOE = {"moe": True}
CACHED: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {}),
    ({"tp": 2}, {}),
    ({"tp": 4}, {"sequence": True}),
    ({"dp": 2, "tp": 2}, {"kv_heads": 2}),
    ({"tp": 4}, {"kv_heads": 2, "attention": "plain"}),
    ({}, LLAMA),
    ({"tp": 4}, {**LLAMA, "kv_heads": 1}),
    ({"dp": 2, "tp": 2}, {**LLAMA, "kv_heads": 2, "sequence": True, "overlap": True, "remat": "full"}),
    ({}, MOE),
    ({"dp": 2, "ep": 2, "tp": 2}, {**MOE, "group": 8}),
    ({"dp": 2}, {"zero": 1}),
    ({"dp": 4}, {"zero": 3}),
    ({"dp": 2, "tp": 2}, {**LLAMA, "kv_heads": 2, "zero": 3}),
    ({"dp": 2, "ep": 2}, {**MOE, "zero": 3, "regather": False}),
]


@pytest.mark.parametrize(
    ("mesh", "options"), CACHED, ids=[f"{name(m)}-{'-'.join(map(str, o.values()))}" for m, o in CACHED]
)
def test_cached_text_is_the_plain_models(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """B68: prompts of different lengths, in one batch, each as the plain model continues it alone."""
    run = config(mesh, vocab=97, **options)
    want = [greedy(run.model, prompt, COUNT) for prompt in PROMPTS]
    assert written(run) == want
    assert len({i for text in want for i in text}) > 15, "texts that repeat themselves would prove little"


WINDOWS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {}),
    ({"pp": 2, "cp": 2, "tp": 2}, {"sequence": True}),
    ({"dp": 2, "cp": 2}, {"zero": 3}),
    ({"pp": 2, "cp": 2, "tp": 2}, {**LLAMA, "kv_heads": 1}),
    ({"ep": 2, "cp": 2}, MOE),
    ({"pp": 2, "dp": 2}, {"zero": 2}),
]


@pytest.mark.parametrize(("mesh", "options"), WINDOWS, ids=[name(mesh) for mesh, _ in WINDOWS])
def test_window_slides_past_the_context(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """B68: a prompt of 30 and 10 more, past the 32 positions; a longer one; and short ones beside them."""
    run = config(mesh, vocab=97, **options)
    prompts = [np.random.default_rng(n).integers(0, 97, n).tolist() for n in (30, 40, 3)]
    assert written(run, prompts, 10, window=32) == [greedy(run.model, prompt, 10) for prompt in prompts]
    assert written(run, prompts, 2, window=16) == [greedy(run.model, prompt, 2, window=16) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_is_used_to_its_end(dtype: str) -> None:
    """A text that ends at the last of 32 positions, alone and behind a short one; in 16 bits cached or not is the same.

    16 bits round differently where sums are ordered differently, so the first tokens alone are compared.
    """
    run = config({"tp": 2}, vocab=97, dtype=dtype)
    prompts = [np.random.default_rng(4).integers(0, 97, 22).tolist(), [1, 2]]
    cached = written(run, prompts, 10)
    if dtype == "float32":
        assert cached == [greedy(run.model, prompt, 10) for prompt in prompts]
    uncached = written(run, prompts, 2, window=32)
    assert [text[: len(prompt) + 2] for text, prompt in zip(cached, prompts, strict=True)] == uncached


def test_padding_is_never_written() -> None:
    """B16: the padding rows of the table would win every draw, and are never drawn; the draw is the same on a mesh."""
    texts = []
    meshes: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"tp": 4}, {}), ({"dp": 2, "tp": 2}, {}), ({"tp": 4}, {"window": 64}), ({"pp": 2, "tp": 2}, {"window": 64})
    ]  # fmt: skip
    for mesh, options in meshes:
        run = config(mesh, vocab=97, context=64)
        params = start(run).params
        table = params["outer"]["wte"]
        loud = np.asarray(table) + 100 * (np.arange(table.shape[0]) >= 97)[:, None]
        params["outer"]["wte"] = jax.device_put(loud.astype(table.dtype), table.sharding)
        texts.append(generate(trainer(run), params, [[1, 2, 3], [4]], 50, sampling=Sampling(seed=3), **options))
        cut = generate(trainer(run), params, [[1, 2, 3], [4]], 10, sampling=Sampling(seed=3, top_p=0.9999), **options)
        assert max(text.max() for text in texts[-1] + cut) < 97
    for text in texts[1:]:
        np.testing.assert_array_equal(np.concatenate(text), np.concatenate(texts[0]))
    assert len(set(texts[0][0].tolist())) > 10, "a draw at temperature 1 from an untrained model varies"


def test_rows_and_positions_draw_apart() -> None:
    """Equal prompts get texts of their own, the same again for the same seed and others for another."""
    run = config({}, vocab=97)
    one, again, other = (
        written(run, [[1]] * 3, 8, sampling=Sampling(seed=seed, temperature=2.0)) for seed in (0, 0, 1)
    )
    assert one == again != other
    assert len({tuple(text) for text in one}) == 3
    assert written(run, [[1], [2]], 8, sampling=Sampling(top_k=1)) == written(run, [[1], [2]], 8)


def test_stop_ends_a_text() -> None:
    """Each row ends with its first stop, and the whole when all have ended; a prompt may hold the id."""
    run = config({"dp": 2}, vocab=97)
    whole = [greedy(run.model, prompt, COUNT) for prompt in PROMPTS]
    stop = whole[0][len(PROMPTS[0]) + 4]
    want = []
    for prompt, text in zip(PROMPTS, whole, strict=True):
        new = text[len(prompt) :]
        want.append(prompt + new[: new.index(stop) + 1 if stop in new else None])
    assert written(run, stop=stop) == want
    assert len(want[0]) < len(whole[0])


def test_programs_are_compiled_once() -> None:
    """One step for all positions, one prefill for all lengths that are padded alike."""
    run = config({"dp": 2, "tp": 2}, vocab=97, context=128, seq_len=128)
    decoder = Decoder.create(trainer(run))
    params = start(run).params
    for lengths in ((3, 9), (64, 1), (65, 70)):
        write(decoder, params, [[1] * n for n in lengths], 5, sampling=GREEDY)
    programs: tuple[Any, Any] = decoder.step, decoder.prefill
    assert [program._cache_size() for program in programs] == [1, 2], "prefill of 64 tokens, and of 128"
    assert [padded_length(n, 1000) for n in (1, 64, 65, 129, 999)] == [64, 64, 128, 256, 1000]


@pytest.mark.parametrize(("tp", "kv_heads", "heads"), [(1, 0, 4), (2, 2, 1), (4, 2, 1), (4, 1, 1)])
def test_a_device_keeps_the_heads_that_it_uses(tp: int, kv_heads: int, heads: int) -> None:
    """2 x layers x rows / dp x capacity x heads x width elements of the computation's dtype."""
    run = config({"dp": 2, "tp": tp}, kv_heads=kv_heads, dtype="bfloat16")
    decoder = Decoder.create(trainer(run), capacity=16)
    ids = np.ones((4, 8), np.int32)
    _, kept = decoder.prefill(decoder.weights(start(run).params), ids, np.full(4, 8, np.int32), {})
    shards = [leaf.addressable_shards[0].data for leaf in kept]
    assert sum(shard.nbytes for shard in shards) == 2 * 4 * 2 * 16 * heads * 8 * 2
    assert shards[0].dtype == jnp.bfloat16


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompts": []}, "no prompt"),
    ({"prompts": [[1], []]}, "prompt 1 is empty"),
    ({"prompts": [[1, 97]]}, "97, which is no id of 0..96"),
    ({"prompts": [[-1]]}, "-1, which is no id"),
    ({"prompts": [[1.5]]}, "1.5, which is no id"),
    ({"prompts": [[True, False]]}, "True, which is no id"),
    ({"prompts": [np.array([1, 98])]}, "98, which is no id"),
    ({"prompts": [1, 2]}, r"\[\[1, 2\]\]"),
    ({"count": 0}, "count=0"),
    ({"stop": 97}, "stop=97 is outside 0..96"),
    ({"sampling": Sampling(temperature=-1)}, "temperature=-1"),
    ({"sampling": Sampling(temperature=float("nan"))}, "temperature=nan"),
    ({"sampling": Sampling(temperature=float("inf"))}, "temperature=inf"),
    ({"sampling": Sampling(top_k=-1)}, "top_k=-1"),
    ({"sampling": Sampling(top_k=98)}, "top_k=98 is outside 0..97"),
    ({"sampling": Sampling(top_p=0)}, "top_p=0"),
    ({"sampling": Sampling(top_p=1.1)}, "top_p=1.1"),
    ({"prompts": [[1] * 30], "count": 10}, "30 tokens and count=10 more are 40, beyond the cache of 32"),
    (
        {"prompts": [[1] * 40], "count": 1},
        "count=1 more are 41, beyond the cache of 32.*shorten the prompt to 31",
    ),
    ({"sampling": Sampling(temperature=1e39)}, "temperature=1e\\+39"),
    ({"window": 33}, "window=33 is outside 1..32"),
    ({"window": 0}, "window=0"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(options: dict[str, Any], words: str) -> None:
    """Before anything is compiled, as the parameters are not even there."""
    options = {"prompts": [[1]], "count": 1} | options
    with pytest.raises(ConfigError, match=words) as caught:
        generate(trainer(config(vocab=97)), None, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        ({"pp": 2}, {}, "mesh.pp=2"),
        ({"cp": 2}, {}, "mesh.cp=2"),
        ({}, {"moe": True, "capacity_factor": 1.25, "group": 8}, "model.capacity_factor=1.25"),
    ],
)
def test_meshes_without_a_cache(mesh: dict[str, int], options: dict[str, Any], words: str) -> None:
    """What a cache cannot serve is said, and a window serves it."""
    run = config(mesh, **options)
    with pytest.raises(ConfigError, match=words):
        Decoder.create(trainer(run))
    with pytest.raises(ConfigError, match=r"outside 1\.\.32"):
        Decoder.create(trainer(config()), capacity=33)
    Window.create(trainer(run), 32)


def test_16_bits_are_cast_once() -> None:
    """Weights in the computation's dtype, at every stage of ZeRO; and the parameters themselves where they have it."""
    for zero in (0, 1, 3):
        run = config({"dp": 2}, dtype="bfloat16", zero=zero)
        cast = Decoder.create(trainer(run)).weights(start(run).params)
        assert {leaf.dtype for leaf in jax.tree.leaves(cast)} == {jnp.dtype(jnp.bfloat16)}
    run = config({"dp": 2}, zero=3)
    params = start(run).params
    assert Decoder.create(trainer(run)).weights(params)["outer"]["wte"] is params["outer"]["wte"]
    assert host(params)["outer"]["wte"].shape == (96, 32)


def of_step(run: RunConfig, rows: int, sampling: Sampling = GREEDY) -> list[Collective]:
    """The ledger of a decode step; nothing is computed."""
    decoder = Decoder.create(trainer(run))
    return ledger(decoder.step, *decoder.arguments(rows, sampling))


@pytest.mark.parametrize("options", [{}, LLAMA, {**LLAMA, "kv_heads": 1, "sequence": True, "overlap": True}], ids=str)
def test_wire_of_a_new_token(options: dict[str, Any]) -> None:
    """tp 4, dp 2, 8 rows, bfloat16: what travels does not depend on the vocabulary or on how much is cached.

    Sums over tp of 4 rows x 32 x 2 bytes: 1 of the embedding, 2 a layer. The likeliest token is two maxima of 4 bytes a
    row. A cut takes 8 sums of 16 floats a row; the nucleus's shares a maximum and a sum of 4 bytes a row before it.
    """
    run = config({"dp": 2, "tp": 4}, dtype="bfloat16", vocab=97, **options)
    stream, row = (1 + 2 * 4) * 4 * 32 * 2, 4 * 4
    sent = lambda op, count, payload: Collective(op, ("tp",), count, payload, Fraction(payload * 2 * 3, 4))  # noqa: E731
    assert of_step(run, 8) == [sent("pmax", 2, 2 * row), sent("psum", 9, stream)]
    top_k, top_p = Sampling(top_k=5), Sampling(top_k=5, top_p=0.9)
    assert of_step(run, 8, Sampling()) == of_step(run, 8)
    assert of_step(run, 8, top_k) == [sent("pmax", 2, 2 * row), sent("psum", 9 + 8, stream + 8 * 16 * row)]
    assert of_step(run, 8, top_p) == [sent("pmax", 3, 3 * row), sent("psum", 9 + 17, stream + 16 * 16 * row + row)]


def test_wire_of_zero_and_of_experts() -> None:
    """ZeRO-3 gathers all leaves once a token, and stages 1 and 2 nothing; ep sends slots.

    A layer comes in 6 messages, its 5 matrices and all else together; the table, positions and final norm in 3.

    12 d^2 + 13 d parameters a layer, V + 32 + 2 rows of d beside them. Experts' slots, one a row, go and come.
    """
    d, layers, vocab = 32, 4, 96
    elements = layers * (12 * d * d + 13 * d) + (vocab + 32 + 2) * d
    found = of_step(config({"dp": 4}, zero=3), 8)
    assert found == [Collective("all_gather", ("dp",), layers * 6 + 3, elements, Fraction(3 * elements))]
    assert of_step(config({"dp": 4}, zero=1), 8) == of_step(config({"dp": 4}, zero=2), 8) == []
    slots = layers * 2 * (2 * 4 * 1 * d * 4)
    assert of_step(config({"dp": 2, "ep": 2}, moe=True), 8) == [
        Collective("all_to_all", ("ep",), layers * 2, slots, Fraction(slots, 2))
    ]
