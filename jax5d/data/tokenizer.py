"""Text to token ids and back: bytes, a byte-level BPE trained on the source, or GPT-2's own BPE.

All three cover every Unicode text without an unknown token, and keep one id that no text encodes to, the
end of text, which stands behind every document. A literal "<|endoftext|>" in a text is ordinary text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jax5d.config import ConfigError

BYTES = 256


class Tokenizer(Protocol):
    """Text to ids in [0, vocab_size) and back."""

    name: str
    """The spec that makes it: byte, bpe:SIZE or gpt2."""
    vocab_size: int
    """Ids, the end of text included."""
    end_of_text: int
    """Id that follows every document."""

    def encode(self, text: str) -> np.ndarray:
        """Ids int32 [tokens] of a text, with no end of text."""
        ...

    def decode(self, ids: Any) -> str:
        """Text of integer ids [tokens].

        The end of text reads as a newline, bytes that are not UTF-8 as U+FFFD; ids that are no token (a model's
        vocabulary may be larger) are left out.
        """
        ...

    def to_json(self) -> str:
        """All that `from_json` needs."""
        ...


def _tokens_only(ids: Any, tokenizer: Tokenizer, newline: int) -> np.ndarray:
    """Ids [tokens] that have a text: the end of text as a newline, strangers left out."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    ids = ids[(ids >= 0) & (ids < tokenizer.vocab_size)]
    return np.where(ids == tokenizer.end_of_text, newline, ids)


class ByteTokenizer:
    """The 256 values of a UTF-8 byte, and the end of text."""

    name = "byte"
    vocab_size = BYTES + 1
    end_of_text = BYTES

    def encode(self, text: str) -> np.ndarray:
        """Ids int32 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Any) -> str:
        """Text of integer ids [tokens]; see `Tokenizer.decode`."""
        return _tokens_only(ids, self, ord("\n")).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """All that `from_json` needs."""
        return json.dumps({"name": self.name})


class BpeTokenizer:
    """Byte-level byte-pair encoding (GPT-2, section 2.2), trained by `train`."""

    def __init__(self, name: str, model: tokenizers.Tokenizer):
        self.name = name
        self._model = model
        # Outside the trained model, so that no text can spell it.
        self.end_of_text = model.get_vocab_size()
        self.vocab_size = self.end_of_text + 1
        self._newline = int(self.encode("\n")[0])

    @classmethod
    def train(cls, size: int, texts: Iterable[str]) -> BpeTokenizer:
        """Train on texts, one pass; `vocab_size` is below `size` where the texts have too few pairs to merge.

        Raises:
            ConfigError: `size` does not hold the 256 bytes and the end of text.
        """
        if size < BYTES + 1:
            raise ConfigError(
                f"data.tokenizer=bpe:{size} is below {BYTES + 1} (256 bytes and the end of text); write "
                f"bpe:{BYTES + 1} or more"
            )
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
        model.train_from_iterator(texts, trainer)
        return cls(f"bpe:{size}", model)

    def encode(self, text: str) -> np.ndarray:
        """Ids int32 [tokens]."""
        return np.array(self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def decode(self, ids: Any) -> str:
        """Text of integer ids [tokens]; see `Tokenizer.decode`."""
        return self._model.decode(_tokens_only(ids, self, self._newline).tolist(), skip_special_tokens=False)

    def to_json(self) -> str:
        """All that `from_json` needs."""
        return json.dumps({"name": self.name, "model": json.loads(self._model.to_str())})


class Gpt2Tokenizer:
    """GPT-2's 50257 tokens, through tiktoken, which fetches them at first use and keeps them.

    Raises:
        ConfigError: they cannot be fetched.
    """

    name = "gpt2"

    def __init__(self) -> None:
        try:
            import tiktoken

            self._model = tiktoken.get_encoding("gpt2")
        except Exception as error:  # Whatever the network, the proxy or the disk raises.
            raise ConfigError(
                f"data.tokenizer=gpt2 is fetched at first use, which failed ({type(error).__name__}); connect to "
                "the network once, or write byte or bpe:SIZE"
            ) from error
        self.vocab_size = self._model.n_vocab
        self.end_of_text = self._model.eot_token
        self._newline = int(self.encode("\n")[0])

    def encode(self, text: str) -> np.ndarray:
        """Ids int32 [tokens]."""
        return np.array(self._model.encode_ordinary(text), np.int32)

    def decode(self, ids: Any) -> str:
        """Text of integer ids [tokens]; see `Tokenizer.decode`."""
        return self._model.decode(_tokens_only(ids, self, self._newline).tolist())

    def to_json(self) -> str:
        """All that `from_json` needs."""
        return json.dumps({"name": self.name})


def parse(spec: str) -> int | None:
    """The SIZE of bpe:SIZE; None for byte and gpt2.

    Raises:
        ConfigError: `spec` is none of byte, bpe:SIZE and gpt2.
    """
    kind, _, size = spec.partition(":")
    if kind == "bpe" and size.isascii() and size.isdecimal():
        return int(size)
    if spec not in ("byte", "gpt2"):
        raise ConfigError(f"data.tokenizer={spec!r} is unknown; write byte, bpe:SIZE (such as bpe:4096) or gpt2")
    return None


def make_tokenizer(spec: str, documents: Iterable[str]) -> Tokenizer:
    """The tokenizer that `spec` names; only bpe:SIZE reads the documents, once.

    Raises:
        ConfigError: `spec` is none of byte, bpe:SIZE and gpt2; SIZE is below 257; gpt2 cannot be fetched.
    """
    size = parse(spec)
    if size is not None:
        return BpeTokenizer.train(size, documents)
    return ByteTokenizer() if spec == "byte" else Gpt2Tokenizer()


def from_json(text: str) -> Tokenizer:
    """The tokenizer that wrote `text` with `to_json`.

    Raises:
        ConfigError: `text` is no tokenizer, or gpt2 cannot be fetched.
    """
    try:
        values = json.loads(text)
        name = values["name"]
        if parse(name) is not None:
            return BpeTokenizer(name, tokenizers.Tokenizer.from_str(json.dumps(values["model"])))
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises bare Exception.
        raise ConfigError(f"the tokenizer of a token file cannot be read ({error}); make the file again") from error
    return make_tokenizer(name, ())
