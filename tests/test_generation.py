"""Text from a model's own weights: the same on every mesh, never an id that is no token, never a wrong position."""

from __future__ import annotations

import fitting
import jax
import numpy as np
import pytest
import reference

from jax5d.config import ConfigError
from jax5d.train.generate import generate
from jax5d.train.step import Trainer


def greedy(trainer: Trainer, prompt: list[int], count: int) -> list[int]:
    """By the plain model: the likeliest token after the last 32, again and again."""
    params = jax.device_get(trainer.init().params)
    text = list(prompt)
    for _ in range(count):
        logits, _, _ = reference.forward(params, np.array([text[-32:]]), trainer.config.model)
        text.append(int(np.argmax(logits[0, -1])))
    return text


UNTIED_LLAMA = {"architecture": "llama", "tied": False}


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        ({}, {}),
        ({"tp": 2}, {}),
        ({"pp": 2, "cp": 2, "tp": 2}, {}),
        ({"dp": 2, "cp": 2}, {}),
        ({"pp": 2, "cp": 2, "tp": 2}, UNTIED_LLAMA),
    ],
    ids=str,
)
def test_greedy_is_the_plain_models_text(mesh, model):
    """B68: a prompt of 30 and 10 more tokens, past the 32 positions: the window slides."""
    trainer = fitting.trainer(fitting.config(mesh, vocab=97, **model))
    prompt = [int(i) for i in np.random.default_rng(1).integers(0, 97, 30)]
    written = generate(trainer, trainer.init().params, prompt, 10, temperature=0.0)
    assert written.shape == (trainer.config.mesh.batch_shards, 40)
    for row in written:
        assert row.tolist() == greedy(trainer, prompt, 10)


def test_long_prompt():
    """B68: a prompt longer than the window is continued from its last 32 tokens."""
    trainer = fitting.trainer(fitting.config(vocab=97))
    prompt = [int(i) for i in np.random.default_rng(2).integers(0, 97, 40)]
    written = generate(trainer, trainer.init().params, prompt, 2, temperature=0.0)
    assert written[0].tolist() == greedy(trainer, prompt, 2)


def test_padding_is_never_written():
    """B16: the padding rows of the table would win every draw, and are never drawn; the draw is the same on a mesh."""
    texts = []
    for mesh in ({"tp": 4}, {"pp": 2, "tp": 2}):
        trainer = fitting.trainer(fitting.config(mesh, vocab=97))
        params = trainer.init().params
        table = params["outer"]["wte"]
        loud = jax.device_put(np.asarray(table) + 100 * (np.arange(100) >= 97)[:, None], table.sharding)
        params["outer"]["wte"] = loud.astype(table.dtype)
        texts.append(generate(trainer, params, [1, 2, 3], 50, temperature=1.0, seed=3))
        assert texts[-1].max() < 97
    np.testing.assert_array_equal(*texts)
    assert len(set(texts[0][0])) > 10, "a draw at temperature 1 from an untrained model varies"


@pytest.mark.parametrize(("prompt", "temperature", "word"), [([], 1, "prompt"), ([257], 1, "257"), ([1], -1, "-1")])
def test_refusals(prompt, temperature, word):
    trainer = fitting.trainer(fitting.config())
    with pytest.raises(ConfigError, match=word):
        generate(trainer, None, prompt, 1, temperature=temperature)
