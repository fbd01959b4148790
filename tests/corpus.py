"""Small token files, and refusals, for the tests of the data."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax5d.config import ConfigError
from jax5d.data import batches as B
from jax5d.data import tokenizer as K
from jax5d.data import tokens as F

UNICODE = "naïve 東京 🙂 e\u0301\n\ttab  two  \r\n<|endoftext|> \x00 end\ufeff"


class Plain(K.ByteTokenizer):
    """Ids for themselves, with any vocabulary."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size


def token_file(path: Path, ids, vocab: int = 257, **options) -> F.TokenFile:
    return F.write_tokens(path, [np.asarray(ids)], Plain(vocab), **options)


def windows(path: Path, count: int, seq: int = 4, vocab: int = 70000) -> B.Windows:
    """Windows whose token at position p is p: window i is i*seq ... i*seq + seq."""
    return B.Windows(token_file(path, np.arange(count * seq + 1), vocab, validation=0), "train", seq, vocab)


SPLIT = P(None, "dp", "cp")


def sharding(spec=SPLIT) -> NamedSharding:
    """A mesh of as many of 8 devices as there are, the last axis of which only replicates."""
    count = len(jax.devices())
    dp, cp, tp = 2 if count > 1 else 1, 2 if count > 3 else 1, 2 if count > 7 else 1
    devices = np.array(jax.devices()[: dp * cp * tp]).reshape(dp, cp, tp)
    return NamedSharding(Mesh(devices, ("dp", "cp", "tp")), spec)


def refusal(call, *words) -> str:
    """The one line of the `ConfigError` that `call()` raises; it has all the words."""
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, (word, message)
    return message
