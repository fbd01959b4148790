"""From prompts to texts, by either way of writing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from jax5d.config import ConfigError
from jax5d.inference.decoder import Decoder
from jax5d.inference.sample import Sampling
from jax5d.inference.window import Window
from jax5d.train.step import Trainer

Tree = Any
PIECE = 64
"""A cache is a multiple of this many tokens, so that few programs are compiled."""


class Writer(Protocol):
    """`Decoder` or `Window`."""

    @property
    def trainer(self) -> Trainer:
        """Whose model writes."""
        ...

    def check(self, longest: int, count: int) -> None:
        """Raise `ConfigError` where `count` tokens behind a prompt of `longest` are too many."""
        ...

    def weights(self, params: Tree) -> Tree:
        """What it computes with, from a state's parameters."""
        ...

    def tokens(self, weights: Tree, prompts: list[np.ndarray], sampling: Sampling) -> Iterator[np.ndarray]:
        """The next token of every prompt int32 [b], and so on."""
        ...


def generate(
    trainer: Trainer,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008
    stop: int | None = None,
    window: int | None = None,
) -> list[np.ndarray]:
    """Continue prompts with a trained model. To continue more of them later, keep a `Decoder` and use `write`.

    Args:
        trainer: the model and mesh that `params` belong to.
        params: of a state of the trainer, at any stage of ZeRO.
        prompts: any number of prompts of one or more token ids each.
        count: most tokens to add to each, 1 or more.
        sampling: how tokens are chosen.
        stop: an id that ends a text, such as the tokenizer's end of text.
        window: without it keys and values are cached, which needs a mesh of dp, ep and tp, and texts within the model's
            context. With it the last `window` tokens are computed anew for each token, on any mesh and for any length.

    Returns:
        The texts, int32, each its prompt and what follows, with the `stop` that ended it. Ids are always below the
        vocabulary size. Greedy texts are those of one device on every mesh, up to ties that rounding breaks.

    Raises:
        ConfigError: what cannot be continued or sampled, before anything is compiled.
        FloatingPointError: logits that are not finite.
    """
    if window is not None:
        return write(Window.create(trainer, window), params, prompts, count, sampling=sampling, stop=stop)
    model = trainer.config.model
    longest = max(len(prompt) for prompt in _checked(prompts, model.vocab))
    capacity = min(-(-(longest + max(count, 1)) // PIECE) * PIECE, model.context)
    return write(Decoder.create(trainer, capacity), params, prompts, count, sampling=sampling, stop=stop)


def write(
    writer: Writer,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008
    stop: int | None = None,
) -> list[np.ndarray]:
    """The same with a writer whose programs are compiled once. Arguments: see `generate`."""
    config = writer.trainer.config
    texts = _checked(prompts, config.model.vocab)
    sampling.check(config.model.vocab)
    if count < 1:
        raise ConfigError(f"count={count} is below 1, the fewest tokens to add")
    if stop is not None and not 0 <= stop < config.model.vocab:
        raise ConfigError(f"stop={stop} is outside 0..{config.model.vocab - 1} (model.vocab), so no text would end")
    writer.check(max(len(text) for text in texts), count)
    idle = [np.zeros(1, np.int32)] * (-len(texts) % config.mesh.batch_shards)
    tokens = writer.tokens(writer.weights(params), texts + idle, sampling)
    new = _collect(islice(tokens, count), len(texts), stop, config.model.vocab)
    return [np.concatenate([text, np.array(more, np.int32)]) for text, more in zip(texts, new, strict=True)]


def _collect(tokens: Iterator[np.ndarray], rows: int, stop: int | None, vocab: int) -> list[list[int]]:
    """Each row's tokens, up to and with its first `stop`."""
    new: list[list[int]] = [[] for _ in range(rows)]
    for token in tokens:
        going = [row for row in range(rows) if not new[row] or new[row][-1] != stop]
        for row in going:
            if token[row] >= vocab:  # nothing is the largest of logits that are no numbers
                raise FloatingPointError(f"the logits after token {len(new[row])} of prompt {row} are not finite")
            new[row].append(int(token[row]))
        if all(row[-1] == stop for row in new):
            break
    return new


def _checked(prompts: Sequence[Sequence[int]], vocab: int) -> list[np.ndarray]:
    """Prompts as int32 arrays; `ConfigError` where one is none."""
    if not len(prompts):
        raise ConfigError("there is no prompt to continue; give one or more, each with one or more token ids")
    for number, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1:
            raise ConfigError(
                f"prompt {number} is {prompt!r}, not a list of ids; give a list of prompts, such as [[1, 2]]"
            )
        if not len(ids):
            raise ConfigError(f"prompt {number} is empty; give one or more token ids")
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab:
            raise ConfigError(
                f"prompt {number} has {_wrong(prompt, vocab)}, which is no id of 0..{vocab - 1} (model.vocab)"
            )
    return [np.asarray(prompt, np.int32) for prompt in prompts]


def _wrong(prompt: Sequence[int], vocab: int) -> Any:
    """The first entry that is no token id."""
    ids = np.asarray(prompt).tolist()
    return next(i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab)
