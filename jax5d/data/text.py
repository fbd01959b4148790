"""Documents of a text source, read as a stream in an order that is shuffled and yet always the same.

Shuffled, because the tail of the token stream is the validation set and should look like the rest.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax5d.config import ConfigError

PIECE = 2**20
"""Bytes, rounded up to whole lines, that are in memory at one time."""

_FORMS = "stdlib, a FILE, a FOLDER or hf:NAME"
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


class _Undecodable(ConfigError):
    """A file is not UTF-8."""


def documents(source: str) -> Iterator[tuple[str, str]]:
    """Pairs (name, text) of a source; consecutive pairs of one name are the pieces of one document.

    Sources:
        stdlib: the .py files of the running Python's standard library, without its tests and without installed
            packages. Files that are not UTF-8 are left out.
        FILE: one document.
        FOLDER: one document a file, at any depth; hidden files and folders (a leading dot) and empty files are
            left out, everything else must be text.
        hf:NAME: one document a row of the column "text" of the split "train" of a Hugging Face data set (or of a
            local folder that `datasets.load_dataset` reads).

    Text is strict UTF-8 with its line ends as they are; a byte order mark at the start of a file is dropped.

    Raises:
        ConfigError: the source is missing, empty, unreadable or not UTF-8, with its path (and the byte's offset).
    """
    empty = True
    for name, text in _rows(source) if source.startswith("hf:") else _texts(source):
        if text:
            empty = False
            yield name, text
    if empty:
        raise ConfigError(f"data.source={source} holds no text; give a text file, a folder of them, or stdlib")


def fingerprint(source: str) -> str:
    """A string that changes when the source does: names, sizes (bytes) and modification times (ns) of its files.

    The standard library is known by Python's version and path, a data set that is not local by its name alone.

    Raises:
        ConfigError: the source is missing or unreadable.
    """
    if source == "stdlib":
        return f"stdlib {sys.version} {sysconfig.get_path('stdlib')}"
    path = _root(source)
    if source.startswith("hf:") and not path.exists():
        return source
    try:
        stats = [(name, file.stat()) for name, file in _files(path)]
    except OSError as error:
        raise _unreadable(path, error) from error
    kind = "hf" if source.startswith("hf:") else "files"
    return f"{kind} {path.resolve()} {[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}"


def _root(source: str) -> Path:
    """The path of a source; a relative one that need not exist for hf:NAME."""
    if source in ("", "hf:"):
        raise ConfigError(f"data.source={source!r} names nothing; give {_FORMS}")
    return Path(sysconfig.get_path("stdlib") if source == "stdlib" else source.removeprefix("hf:")).expanduser()


def _unreadable(path: Path, error: OSError) -> ConfigError:
    where = error.filename or path
    return ConfigError(f"data.source: {where} cannot be read ({error.strerror}); give {_FORMS}")


def _files(path: Path) -> list[tuple[str, Path]]:
    """Pairs (name, path) of the files under a path, or of the path alone, in the order of the names' hashes."""
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise ConfigError(f"data.source={path} {what}; give {_FORMS}")

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(path, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # What exists and is no regular file (a pipe) is left out; a broken link stays, to be refused when read.
    named = [(file.relative_to(path).as_posix(), file) for file in found if file.is_file() or not file.exists()]
    return sorted(named, key=lambda pair: hashlib.sha256(os.fsencode(pair[0])).digest())


def _texts(source: str) -> Iterator[tuple[str, str]]:
    """Pairs (name, piece) of the files of stdlib, a FILE or a FOLDER."""
    library, path = source == "stdlib", _root(source)
    try:
        for name, file in _files(path):
            if not library:
                yield from ((name, piece) for piece in _pieces(file))
            elif file.suffix == ".py" and not _NOT_LIBRARY.intersection(name.split("/")):
                try:
                    yield name, "".join(_pieces(file))
                except _Undecodable:
                    continue
    except OSError as error:
        raise _unreadable(path, error) from error


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file, about `PIECE` bytes at a time, cut behind a newline."""
    position = 0
    with path.open("rb") as file:
        while lines := file.readlines(PIECE):
            piece = b"".join(lines)
            try:
                text = piece.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _Undecodable(
                    f"{path}: byte 0x{piece[error.start]:02x} at offset {position + error.start} is not UTF-8; "
                    "convert the file to UTF-8 or take it out of data.source"
                ) from None
            yield text if position else text.removeprefix("\ufeff")
            position += len(piece)


def _rows(source: str) -> Iterator[tuple[str, str]]:
    """Pairs (name, text) of the rows of a Hugging Face data set, in a fixed random order."""
    rows = _load(source)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    for start in range(0, len(order), 1000):  # One look-up a thousand rows is many times faster than one a row.
        some = order[start : start + 1000]
        for row, text in zip(some, rows[some]["text"], strict=True):
            if not isinstance(text, str | None):
                raise ConfigError(f"data.source={source}: 'text' of row {row} is no text; give another data set")
            yield f"{source}[{row}]", text or ""


def _load(source: str) -> Any:
    name = str(_root(source))
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data.source={source} needs the package datasets; run: pip install datasets") from None
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # The hub, the network and the parsers raise all kinds.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"data.source={source} cannot be loaded ({reason}); check the name and the network, or give a FILE"
        ) from error
    if "text" not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise ConfigError(f"data.source={source} has no column 'text' but {columns}; give one that has it")
    return rows.select_columns("text")
