"""Tokenizers and sources of text."""

from __future__ import annotations

import errno
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from corpus import UNICODE, refusal

from jax5d.config import DataConfig
from jax5d.data import text as T
from jax5d.data import tokenizer as K
from jax5d.data import tokens as F

# Tokenizers


def fake_gpt2(monkeypatch) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256}
    special = {"<|endoftext|>": 257}
    encoding = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)


@pytest.mark.parametrize("spec", ["byte", "bpe:257", "bpe:300", "gpt2"])
def test_tokenizer_round_trip(spec, monkeypatch):
    fake_gpt2(monkeypatch)
    made = K.make_tokenizer(spec, ["the theme of the thing " * 20, UNICODE])
    for tokenizer in (made, K.from_json(made.to_json())):
        ids = tokenizer.encode(UNICODE)
        assert (tokenizer.name, ids.dtype, ids.ndim) == (spec, np.int32, 1)
        assert 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert tokenizer.end_of_text not in ids  # Although the text spells it.
        assert tokenizer.end_of_text == tokenizer.vocab_size - 1
        assert tokenizer.decode(ids) == UNICODE
        assert np.array_equal(ids, made.encode(UNICODE))
        framed = [*tokenizer.encode("a"), tokenizer.end_of_text, 99999, -1, *tokenizer.encode("b")]
        assert tokenizer.decode(framed) == "a\nb"
        assert tokenizer.encode("").shape == (0,)
        assert tokenizer.decode([]) == ""


def test_byte_ids():
    tokenizer = K.ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 0xC3, 98]) == "a\ufffdb"
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)


def test_bpe_learns_and_size_includes_the_end_of_text():
    tokenizer = K.make_tokenizer("bpe:258", ["ab ab ab ab xy"])  # Room for one merge, and "ab" is the commonest pair.
    assert tokenizer.vocab_size == 258
    assert len(tokenizer.encode("abab")) == 2
    assert len(tokenizer.encode("xy")) == 2
    small = K.make_tokenizer("bpe:5000", ["aa"])  # One pair only.
    assert small.vocab_size == 256 + 1 + 1


@pytest.mark.parametrize("spec", ["", "bytes", "bpe", "bpe:", "bpe:x", "bpe:-4", "bpe:1e3", "gpt2:9", "byte:3"])
def test_tokenizer_spec_refused(spec):
    refusal(lambda: K.make_tokenizer(spec, []), repr(spec), "byte", "bpe:SIZE", "gpt2")


def test_tokenizer_refusals(monkeypatch):
    refusal(lambda: K.make_tokenizer("bpe:256", []), "bpe:256", 257)

    def unreachable(name):
        raise ConnectionError("a long\nstory")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    refusal(lambda: K.make_tokenizer("gpt2", []), "gpt2", "fetched at first use", "bpe:SIZE")
    for text in ("", "{}", "[]", '{"name": "bpe:300", "model": {}}', '{"name": "what"}'):
        refusal(lambda text=text: K.from_json(text))


# Documents


def whole(source) -> dict[str, str]:
    """Documents by name, their pieces joined; a name's pieces are consecutive."""
    out, last = {}, None
    for name, piece in T.documents(str(source)):
        assert name == last or name not in out
        out[name], last = out.get(name, "") + piece, name
    return out


def test_stdlib_is_the_library_and_nothing_else():
    names = [name for name, _ in T.documents("stdlib")]
    assert {"json/decoder.py", "os.py", "asyncio/tasks.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "idle_test"} & set(name.split("/"))]
    assert all(name.endswith(".py") for name in names)
    assert len(names) == len(set(names)) > 400
    assert names != sorted(names)
    assert names == [name for name, _ in T.documents("stdlib")]
    assert T.fingerprint("stdlib") == T.fingerprint("stdlib")


def test_folder(tmp_path):
    for name, content in {
        "a.txt": "one",
        "sub/b": "two\r\n",
        "sub/c.py": "",
        ".hid": "\xff",
        ".git/x": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    os.mkfifo(tmp_path / "pipe")  # Reading it would wait for ever.
    assert whole(tmp_path) == {"a.txt": "one", "sub/b": "two\r\n"}
    before = T.fingerprint(str(tmp_path))
    (tmp_path / "a.txt").write_text("three")
    assert T.fingerprint(str(tmp_path)) != before
    (tmp_path / "sub/bad").write_bytes(b"abc\xff")
    refusal(lambda: whole(tmp_path), tmp_path / "sub/bad", "0xff", "offset 3")


def test_long_file_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(T, "PIECE", 10)
    path = tmp_path / "long"
    content = "".join(f"\ufefflínea {n}\n" for n in range(50)) + "no line end"
    path.write_text(content, encoding="utf-8")
    assert len(list(T.documents(str(path)))) > 20
    assert whole(path) == {"long": content[1:]}  # Only the first is a byte order mark.
    data = path.read_bytes()
    path.write_bytes(data[:300] + b"\xff" + data[301:])
    refusal(lambda: whole(path), path, "offset 300")


def test_bytes_that_are_not_text(tmp_path):
    """B65: a bad byte is named with path and offset; a byte order mark is dropped."""
    path = tmp_path / "bad.txt"
    path.write_bytes(b"\xef\xbb\xbfab\xffcd")
    refusal(lambda: whole(path), path, "0xff", "offset 5")
    path.write_bytes(b"\xef\xbb\xbfab")
    assert whole(path) == {"bad.txt": "ab"}
    path.write_bytes(b"ab\xe6\x9d")  # Ends inside a character.
    refusal(lambda: whole(path), path, "0xe6", "offset 2")


def test_empty_and_missing_sources(tmp_path):
    """B65: 0 bytes, and what is not there."""
    empty, folder = tmp_path / "empty.txt", tmp_path / "folder"
    empty.write_bytes(b"")
    folder.mkdir()
    cache = tmp_path / "cache"
    for path in (empty, folder, tmp_path / "missing", tmp_path / "missing.tokens"):
        refusal(lambda path=path: F.prepare(DataConfig(str(path)), cache), path)
    assert not list(cache.glob("*")) + list(cache.glob(".*"))
    for source in ("", "hf:"):
        refusal(lambda source=source: F.prepare(DataConfig(source), cache), repr(source))
    (folder / "link").symlink_to(tmp_path / "nowhere")
    refusal(lambda: whole(folder), folder / "link")
    refusal(lambda: T.fingerprint(str(folder)), folder / "link")
    refusal(lambda: whole("/dev/null"), "/dev/null")
    empty.write_text("x")
    refusal(lambda: F.prepare(DataConfig(str(empty)), empty / "cache"), empty / "cache", "XDG_CACHE_HOME")


def test_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text("x")

    def denied(self, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)
    refusal(lambda: whole(path), path, "Permission denied")


def test_hub(monkeypatch):
    class Rows(list):
        column_names = ("text", "n")

        def select_columns(self, name):
            return self

        def __getitem__(self, rows):
            return {"text": [list.__getitem__(self, row) for row in rows]}

    def serve(rows):
        module = types.SimpleNamespace(load_dataset=lambda name, split: rows(name, split))
        monkeypatch.setitem(sys.modules, "datasets", module)

    asked = []
    serve(lambda *ask: asked.append(ask) or Rows(["a", None, "c"]))
    assert whole("hf:some/name") == {"hf:some/name[0]": "a", "hf:some/name[2]": "c"}
    assert asked == [("some/name", "train")]
    serve(lambda *ask: Rows(["a", 3]))
    refusal(lambda: whole("hf:x"), "hf:x", "row 1")
    Rows.column_names = ("body",)
    refusal(lambda: whole("hf:x"), "hf:x", "text", "body")
    serve(lambda *ask: 1 / 0)
    refusal(lambda: whole("hf:x"), "hf:x", "ZeroDivisionError")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refusal(lambda: whole("hf:x"), "pip install datasets")
