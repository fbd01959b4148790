"""The token file: what it carries, what it refuses, how it is made."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from corpus import Plain, refusal, token_file

from jax5d.config import DataConfig
from jax5d.data import tokens as F

# Token files


@pytest.mark.parametrize(("vocab", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32"), (70000, "uint32")])
def test_dtype_holds_every_id(tmp_path, vocab, dtype):
    """B62: the round trip is exact and the file carries its dtype; a plain safetensors reader agrees."""
    ids = [0, 255, vocab - 1] + [65535, 65536, 69999] * (vocab == 70000)
    file = token_file(tmp_path / "a.tokens", ids, vocab, validation=0)
    assert (file.dtype, file.vocab_size, file.max_id) == (np.dtype(dtype), vocab, vocab - 1)
    assert file.tokens("train").tolist() == ids
    assert isinstance(file.tokens("train"), np.memmap)
    assert safetensors.numpy.load_file(file.path)["tokens"].tolist() == ids


def test_ids_outside_the_vocabulary(tmp_path):
    """B62: nothing wraps."""
    path = tmp_path / "a.tokens"
    for bad in (257, 65536, 70000, 2**40, -1):
        refusal(lambda bad=bad: token_file(path, [0, bad]), path, bad, 257)
    refusal(lambda: token_file(path, []), path)
    with pytest.raises(TypeError):
        token_file(path, [0.5])
    assert not list(tmp_path.iterdir())


def edited(file: F.TokenFile, change) -> None:
    """Rewrite the header of a token file."""
    raw = file.path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["tokens"].update(dtype="U16"),
        lambda head: head["tokens"].update(dtype="U16", shape=[8]),
        lambda head: head["tokens"].update(dtype="I32"),
        lambda head: head["tokens"].update(shape=[2, 2]),
        lambda head: head["__metadata__"].update(max_id="70000"),
        lambda head: head["__metadata__"].update(vocab_size="69999"),
        lambda head: head["__metadata__"].update(vocab_size="257", max_id="256"),
        lambda head: head["__metadata__"].update(vocab_size="many"),
        lambda head: head["__metadata__"].update(train="5"),
        lambda head: head["__metadata__"].update(format="jax5d-tokens-0"),
        lambda head: head["__metadata__"].pop("tokenizer"),
        lambda head: head.pop("__metadata__"),
    ],
)
def test_header_that_contradicts_itself(tmp_path, change):
    """B62: a uint32 file declared as uint16, and its kin."""
    file = token_file(tmp_path / "a.tokens", [0, 65535, 65536, 69999], 70000)
    edited(file, lambda head: None)
    F.TokenFile(file.path)  # The edit itself is harmless.
    edited(file, change)
    refusal(lambda: F.TokenFile(file.path), file.path)


def test_damaged_and_foreign_files(tmp_path):
    """B62, B65: odd length, truncated, longer, empty, not ours, a folder."""
    path = tmp_path / "a.tokens"
    whole_file = token_file(path, range(100)).path.read_bytes()
    foreign = safetensors.numpy.save({"tokens": np.arange(4, dtype=np.uint16)})
    other = safetensors.numpy.save({"weights": np.zeros(4, np.float32)})
    for raw in (
        whole_file[:-1],
        whole_file[:-2],
        whole_file[:20],
        whole_file[:4],
        whole_file + b"x",
        b"",
        b"\x01" * 999,
        foreign,
        other,
    ):
        path.write_bytes(raw)
        refusal(lambda: F.prepare(DataConfig(str(path)), tmp_path), path)
        assert path.read_bytes() == raw
    refusal(lambda: F.TokenFile(tmp_path), tmp_path)


def test_last_twentieth_is_for_validation(tmp_path):
    file = token_file(tmp_path / "a.tokens", range(200))
    assert file.tokens("train").tolist() == list(range(190))
    assert file.tokens("validation").tolist() == list(range(190, 200))


def everything(file: F.TokenFile) -> np.ndarray:
    return np.concatenate([file.tokens("train"), file.tokens("validation")])


def test_prepare(tmp_path, monkeypatch):
    """Every document has one end of text behind it, even where it spells it (B65); only changes are read anew."""
    folder, cache = tmp_path / "text", tmp_path / "cache"
    folder.mkdir()
    (folder / "a").write_text("aaa" * 50)
    (folder / "b").write_text("b<|endoftext|>b" * 50)
    source = str(folder)
    file = F.prepare(DataConfig(source), cache)
    ends = np.nonzero(everything(file) == 256)[0]
    documents = [bytes(part[part != 256].tolist()).decode() for part in np.split(everything(file), ends)]
    assert documents in (
        [a, b, ""] for a, b in (("aaa" * 50, "b<|endoftext|>b" * 50), ("b<|endoftext|>b" * 50, "aaa" * 50))
    )
    assert (file.source, file.tokenizer.name, len(file.tokens("validation"))) == (source, "byte", 45)  # Of 902.

    bpe = F.prepare(DataConfig(source, "bpe:300"), cache)
    assert bpe.path != file.path
    assert bpe.tokenizer.decode(everything(bpe)) == "".join(document + "\n" for document in documents[:2])

    monkeypatch.setattr(F, "write_tokens", lambda *args, **options: pytest.fail("written again"))
    assert F.prepare(DataConfig(source), cache).path == file.path
    assert F.prepare(DataConfig(str(file.path), "bpe:300"), cache).tokenizer.name == "byte"
    monkeypatch.undo()

    expected = everything(file)
    file.path.write_bytes(b"")  # As a crash may leave it.
    assert np.array_equal(everything(F.prepare(DataConfig(source), cache)), expected)
    (folder / "a").write_text("aaa")
    assert F.prepare(DataConfig(source), cache).path != file.path


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert F.cache_folder() == Path("/elsewhere/jax5d")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert F.cache_folder() == Path.home() / ".cache" / "jax5d"


def test_builders_at_one_time(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("words and words\n" * 2000)
    files: list[F.TokenFile] = []
    threads = [
        threading.Thread(target=lambda: files.append(F.prepare(DataConfig(str(source)), tmp_path / "cache")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files) == 6
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [files[0].path.name]
    for file in files:  # Also those whose file another builder replaced.
        assert len(file.tokens("train")) + len(file.tokens("validation")) == 16 * 2000 + 1


def test_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.tokens"
    before = token_file(path, range(50)).path.read_bytes()

    def chunks():
        yield np.arange(100)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        F.write_tokens(path, chunks(), Plain(257))

    def interrupted(number):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        token_file(path, range(60))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tokens"]
    assert path.read_bytes() == before
