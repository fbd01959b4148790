"""The token file: one memory-mapped array of ids that carries its dtype, vocabulary and tokenizer.

A `.tokens` file is a safetensors file (https://github.com/huggingface/safetensors#format) with one tensor
"tokens", uint16 or uint32 [N], and in its metadata: format, source, tokenizer (JSON), vocab_size, max_id,
digest (SHA-256 of the ids), and train, the number of leading tokens that are for training; those behind them are
for validation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from jax5d.config import ConfigError, DataConfig
from jax5d.data.text import documents, fingerprint
from jax5d.data.tokenizer import Tokenizer, from_json, make_tokenizer, parse

VALIDATION_FRACTION = 0.05
"""Share of the tokens, the last ones, that is kept for validation."""

FORMAT = "jax5d-tokens-1"
SUFFIX = ".tokens"
_DTYPES = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}

Split = Literal["train", "validation"]


class TokenFile:
    """An open token file; its ids stay on disk until they are indexed.

    Raises:
        ConfigError: the file is missing, truncated, of another format, or contradicts itself; with its path.
    """

    path: Path
    dtype: np.dtype
    """uint16 or uint32, little-endian."""
    vocab_size: int
    """Every id is below it."""
    max_id: int
    """Largest id in the file."""
    source: str
    """The data.source that it was made from."""
    digest: str
    """SHA-256 of the ids, so that a run does not go on with other text."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            # safetensors checks the header, and that the file is exactly as long as the header says.
            with safe_open(self.path, framework="numpy") as file:
                metadata = file.metadata() or {}
                tensor = file.get_slice("tokens")
                code, shape = tensor.get_dtype(), tensor.get_shape()
        except (OSError, SafetensorError) as error:
            raise self._refusal(str(error)) from error
        if metadata.get("format") != FORMAT:
            raise self._refusal(f"format {metadata.get('format')!r} instead of {FORMAT!r}")
        try:
            self.source, self.digest = metadata["source"], metadata["digest"]
            self.vocab_size, self.max_id = int(metadata["vocab_size"]), int(metadata["max_id"])
            self._tokenizer_json, self._train = metadata["tokenizer"], int(metadata["train"])
        except (KeyError, ValueError) as error:
            raise self._refusal(f"metadata without a good {error}") from error
        if len(shape) != 1 or not 0 <= self._train <= shape[0] or not shape[0]:
            raise self._refusal(f"shape {shape} with {self._train} training tokens")
        if code not in _DTYPES or _DTYPES[code] != token_dtype(self.vocab_size):
            raise self._refusal(f"dtype {code} with a vocabulary of {self.vocab_size}")
        if not 0 <= self.max_id < self.vocab_size:
            raise self._refusal(f"largest id {self.max_id} with a vocabulary of {self.vocab_size}")
        self.dtype = _DTYPES[code]
        with self.path.open("rb") as raw:
            offset = 8 + int.from_bytes(raw.read(8), "little")
        self._tokens = np.memmap(self.path, self.dtype, "r", offset, tuple(shape))

    def tokens(self, split: Split) -> np.ndarray:
        """Ids uint16 or uint32 [tokens of the split], memory-mapped and read-only."""
        return self._tokens[: self._train] if split == "train" else self._tokens[self._train :]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the file; made at first use, since gpt2 may have to be fetched."""
        return from_json(self._tokenizer_json)

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path} is no whole token file ({why}); give the text that it was made from")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds the ids below `vocab_size`."""
    return _DTYPES["U16" if vocab_size <= 2**16 else "U32"]


def write_tokens(
    path: str | os.PathLike[str],
    chunks: Iterable[np.ndarray],
    tokenizer: Tokenizer,
    *,
    source: str = "",
    validation: float = VALIDATION_FRACTION,
) -> TokenFile:
    """Write integer arrays [any] as one token file, one in memory at a time, and open it.

    `path` appears whole or not at all: until then the ids go to a hidden file beside it, which is removed on any
    failure. `validation` is the share of the tokens, the last ones, that is kept for validation.

    Raises:
        ConfigError: an id is outside [0, tokenizer.vocab_size), or there are no tokens.
        TypeError: a chunk does not hold integers.
        OSError: the disk is full or the folder cannot be written.
    """
    path = Path(path)
    _remove_leftovers(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            _write(file, path, chunks, tokenizer, source, validation)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return TokenFile(path)


def _remove_leftovers(path: Path) -> None:
    """Remove what a killed process left half-written; a day old, so that no builder that still runs is disturbed."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        with contextlib.suppress(FileNotFoundError):
            if partial.stat().st_mtime < time.time() - 86_400:
                partial.unlink()


def _write(
    file: BinaryIO, path: Path, chunks: Iterable[np.ndarray], tokenizer: Tokenizer, source: str, validation: float
) -> None:
    vocab = tokenizer.vocab_size
    dtype = token_dtype(vocab)
    about = {"format": FORMAT, "source": source, "tokenizer": tokenizer.to_json(), "vocab_size": str(vocab)}
    digest = hashlib.sha256()
    about["digest"] = digest.hexdigest()
    # The header stands first but is known last: keep room for the longest one; JSON may end in spaces.
    room = -(-len(_header(about, dtype, 2**60, 2**60, 2**60)) // 8) * 8
    file.write(bytes(8 + room))
    count, max_id = 0, 0
    for chunk in chunks:
        ids = np.asarray(chunk).reshape(-1)
        if not ids.size:
            continue
        if ids.dtype.kind not in "iu":
            raise TypeError(f"{path}: ids are {ids.dtype}, not integers")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise ConfigError(f"{path}: id {bad} is outside the tokenizer's [0, {vocab}); use its own tokenizer")
        data = ids.astype(dtype).tobytes()
        file.write(data)
        digest.update(data)
        count, max_id = count + ids.size, max(max_id, high)
    if not count:
        raise ConfigError(f"{path}: there are no tokens to write; give a data.source that holds text")
    file.seek(0)
    about["digest"] = digest.hexdigest()
    header = _header(about, dtype, count, count - round(count * validation), max_id)
    file.write(room.to_bytes(8, "little") + header.ljust(room))


def _header(about: dict[str, str], dtype: np.dtype, count: int, train: int, max_id: int) -> bytes:
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    tensor = {"dtype": code, "shape": [count], "data_offsets": [0, count * dtype.itemsize]}
    metadata = {**about, "train": str(train), "max_id": str(max_id)}
    return json.dumps({"__metadata__": metadata, "tokens": tensor}).encode()


def cache_folder() -> Path:
    """The default folder of prepared token files: `$XDG_CACHE_HOME/jax5d`, or `~/.cache/jax5d`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax5d"


def prepare(data: DataConfig, cache: Path) -> TokenFile:
    """The token file of a data source: itself one, or in `cache`, or made there now.

    A source that ends in .tokens brings its own tokenizer; `data.tokenizer` is not looked at. Else the name in the
    cache follows the source's files, sizes and times and the tokenizer, so a change of any makes another file; a
    damaged one is made again. Builders that run at the same time do not harm each other.

    Raises:
        ConfigError: the source or the tokenizer is refused, with its path or value; no folder for the cache.
        OSError: the disk is full; no half file is left.
    """
    if data.source.endswith(SUFFIX):
        return TokenFile(Path(data.source).expanduser())
    parse(data.tokenizer)
    key = repr((FORMAT, VALIDATION_FRACTION, data.tokenizer, fingerprint(data.source)))
    stem = re.sub(r"[^\w.]+", "-", f"{Path(data.source).name} {data.tokenizer}")[-80:]
    path = cache / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{SUFFIX}"
    if path.exists():
        try:
            return TokenFile(path)
        except ConfigError:
            pass  # Damaged; it is only a copy, so make it again.
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"no cache folder {cache} ({error.strerror}); set XDG_CACHE_HOME to a folder") from error
    tokenizer = make_tokenizer(data.tokenizer, (text for _, text in documents(data.source)))
    return write_tokens(path, _encode(data.source, tokenizer), tokenizer, source=data.source)


def _encode(source: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids of every document, each followed by the end of text."""
    for _, pieces in groupby(documents(source), key=itemgetter(0)):
        for _, text in pieces:
            yield tokenizer.encode(text)
        yield np.array([tokenizer.end_of_text])
