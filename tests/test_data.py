"""The data floor, against values counted by hand or by brute force."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import time
import types
from collections import Counter
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiktoken
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax5d.config import ConfigError, DataConfig
from jax5d.data import batches as B
from jax5d.data import text as T
from jax5d.data import tokenizer as K
from jax5d.data import tokens as F
from jax5d.data.statistics import bigram_entropy, unigram_entropy

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


# Windows


@pytest.mark.parametrize(("count", "seq", "expected"), [(33, 32, 1), (64, 32, 1), (65, 32, 2), (9, 4, 2), (2, 1, 1)])
def test_window_count(tmp_path, count, seq, expected):
    """B65: 33 tokens are one window of 32."""
    file = token_file(tmp_path / "a.tokens", np.arange(count) % 200, validation=0)
    cut = B.Windows(file, "train", seq, 257)
    assert len(cut) == expected
    for index in range(expected):
        assert cut[index].dtype == np.int32
        assert cut[index].tolist() == [token % 200 for token in range(index * seq, index * seq + seq + 1)]
    for index in (-1, expected):
        with pytest.raises(IndexError):
            cut[index]


def test_short_splits(tmp_path):
    """B65: 20 and 32 tokens with sequences of 32, and a validation split of 10 tokens."""
    for count in (1, 20, 32):
        file = token_file(tmp_path / "a.tokens", np.zeros(count, int), validation=0)
        refusal(
            lambda file=file: B.Windows(file, "train", 32, 257),
            file.path,
            f" {count} tokens",
            33,
            "--train.seq_len",
        )
    file = token_file(tmp_path / "b.tokens", np.zeros(200, int))
    refusal(lambda: B.Windows(file, "validation", 32, 257), file.path, "validation", " 10 tokens", 33)
    assert len(B.Windows(file, "train", 32, 257)) == 5
    file = token_file(tmp_path / "c.tokens", [1, 2])
    refusal(lambda: B.Windows(file, "validation", 32, 257), "validation", " 0 tokens", 33)


def test_vocabulary(tmp_path):
    file = token_file(tmp_path / "a.tokens", np.arange(9), 300, validation=0)
    refusal(lambda: B.Windows(file, "train", 4, 299), file.path, 300, 299, "--model.vocab 300")
    assert len(B.Windows(file, "train", 4, 1000)) == 2
    raw = bytearray(file.path.read_bytes())
    raw[-4:-2] = (5000).to_bytes(2, "little")  # Token 7, in window 1.
    file.path.write_bytes(raw)
    damaged = B.Windows(F.TokenFile(file.path), "train", 4, 300)
    damaged[0]
    refusal(lambda: damaged[1], file.path, 5000, 300, "--model.vocab")
    direct = B.Batches(damaged, 0, 2)
    refusal(lambda: list(B.stream(direct, 0, 3, sharding(P()))), file.path, 5000)


# Batches


def test_each_epoch_takes_each_window_once_in_an_order_of_its_own(tmp_path):
    batches = B.Batches(windows(tmp_path / "a.tokens", 30), 7, 4)
    order = np.concatenate([batches.rows(step) for step in range(30)]).reshape(4, 30)  # 120 rows are 4 epochs.
    for epoch in order:
        assert sorted(epoch.tolist()) == list(range(30))
    assert len({tuple(epoch) for epoch in order.tolist()}) == 4
    assert [batches.epoch(step) for step in (0, 7, 8, 14, 15, 29)] == [0, 0, 1, 1, 2, 3]
    other = B.Batches(batches.windows, 8, 4)
    assert not np.array_equal(other.rows(0), batches.rows(0))
    # Grain's epochs count on from a seed: one seed's second epoch must not be the next one's first.
    assert not np.array_equal(np.concatenate([other.rows(step) for step in range(8)])[:30], order[1])


def test_order_does_not_depend_on_batch_or_microbatches(tmp_path):
    cut = windows(tmp_path / "a.tokens", 30)
    streams = [
        np.concatenate([B.Batches(cut, 3, size, micro).rows(step) for step in range(60 // size)])
        for size, micro in ((1, 1), (4, 2), (6, 3), (60, 5))
    ]
    assert all(np.array_equal(stream, streams[0]) for stream in streams)


def test_start_at_any_step(tmp_path):
    """B38: 40 sequences, batches of 8 in 4 microbatches, 12 steps; starts at 3 and 7 go on as the first run did."""
    cut = windows(tmp_path / "a.tokens", 40)
    first = dict(B.stream(B.Batches(cut, 0, 8, 4), 0, 12, sharding()))
    assert list(first) == list(range(12))
    for start in (3, 7):
        again = dict(B.stream(B.Batches(cut, 0, 8, 4), start, 12, sharding()))
        assert list(again) == list(range(start, 12))
        for step, batch in again.items():
            for name in ("inputs", "labels"):
                assert np.array_equal(batch[name], first[step][name])
    used = [np.asarray(first[step]["inputs"])[..., 0].reshape(-1) // 4 for step in range(12)]  # Token p is p.
    for epoch in (used[:5], used[5:10], used[10:]):
        assert max(Counter(np.concatenate(epoch).tolist()).values()) == 1


def test_data_that_runs_out(tmp_path):
    """B64: 40 sequences are 5 steps of 8; 20 steps are 4 epochs with repeat, and refused without."""
    cut = windows(tmp_path / "a.tokens", 40)
    endless = B.Batches(cut, 0, 8)
    assert endless.steps_available is None
    B.check_enough(endless, 20)
    uses = Counter(np.concatenate([endless.rows(step) for step in range(20)]).tolist())
    assert set(uses.values()) == {4}
    assert endless.epoch(19) == 3

    once = B.Batches(cut, 0, 8, repeat=False)
    assert once.steps_available == 5
    B.check_enough(once, 5)
    refusal(
        lambda: B.check_enough(once, 20),
        "train.steps=20",
        "train.global_batch=8",
        160,
        cut.path,
        " 40 ",
        "steps 5",
        "repeat",
    )
    assert sorted(np.concatenate([once.rows(step) for step in range(5)]).tolist()) == list(range(40))
    for step in (-1, 5):
        with pytest.raises(IndexError):
            once.rows(step)
    assert B.Batches(cut, 0, 16, repeat=False).steps_available == 2  # The last 8 make no whole step.


def test_batches_refusals(tmp_path):
    cut = windows(tmp_path / "a.tokens", 4)
    for seed in (-1, 2**32):
        refusal(lambda seed=seed: B.Batches(cut, seed, 4), seed)
    refusal(lambda: B.Batches(cut, 0, 4, 3), "global_batch=4", "microbatches=3")
    refusal(lambda: B.evaluation_batches(cut, 4, 3, 0, sharding()), 4, 3)


@pytest.mark.parametrize("spec", [P(), P(None, "dp", "cp"), P(None, ("dp", "cp")), P("dp", "cp", "tp")])
def test_device_batch(tmp_path, spec):
    """Microbatch m holds the rows m*B/M to (m+1)*B/M of the global batch, whatever the mesh."""
    batches = B.Batches(windows(tmp_path / "a.tokens", 30), 1, 16, 4)
    for step in (0, 5):
        batch = B.device_batch(batches, step, sharding(spec))
        rows = np.array([[4 * window + offset for offset in range(5)] for window in batches.rows(step)])
        for name, part in (("inputs", rows[:, :-1]), ("labels", rows[:, 1:])):
            assert (batch[name].shape, batch[name].dtype) == ((4, 4, 4), np.int32)
            assert batch[name].sharding == sharding(spec)
            assert np.array_equal(batch[name], part.reshape(4, 4, 4))
            assert np.array_equal(batches.host_batch(step)[name], part)


def test_two_hosts_read_half_each(tmp_path, monkeypatch):
    batches = B.Batches(windows(tmp_path / "a.tokens", 30), 1, 16, 4)
    whole_batch = batches.host_batch(2)
    halves = [batches.host_batch(2, rows) for rows in (slice(0, 8), slice(8, 16))]
    for name in ("inputs", "labels"):
        assert np.array_equal(np.concatenate([half[name] for half in halves]), whole_batch[name])

    reads = []
    read = B.Windows.read
    monkeypatch.setattr(B.Windows, "read", lambda self, *args: reads.append(args) or read(self, *args))
    seen = np.zeros((4, 4, 4), int)
    for low, high in ((0, 2), (2, 4)):
        reads.clear()
        blocks = {((0, 4), (low, high), part) for part in ((0, 2), (2, 4))}
        for (_, (first, last), (start, stop)), block in B._read(batches.windows, batches.grid(2), blocks).items():
            seen[:, first:last, start:stop] = block["inputs"]
        assert sorted({window for window, _, _ in reads}) == sorted(batches.grid(2)[:, low:high].reshape(-1).tolist())
        assert max(Counter(reads).values()) == 1
        assert sum(stop - start for _, start, stop in reads) == 8 * 2 * 3  # 8 rows, 2 parts of 2 tokens and the next.
    assert np.array_equal(seen.reshape(16, 4), whole_batch["inputs"])

    reads.clear()
    B.device_batch(batches, 2, sharding(P()))  # Every device holds all of it; each row is read once.
    assert sorted(window for window, _, _ in reads) == sorted(batches.rows(2).tolist())


def test_stream_equals_direct_batches_and_ends(tmp_path):
    batches = B.Batches(windows(tmp_path / "a.tokens", 30), 5, 8, 2)
    steps = []
    for step, batch in B.stream(batches, 3, 20, sharding()):
        steps.append(step)
        for name, value in B.device_batch(batches, step, sharding()).items():
            assert np.array_equal(batch[name], value)
    assert steps == list(range(3, 20))
    assert list(B.stream(batches, 4, 4, sharding())) == []
    left = B.stream(batches, 0, 10**9, sharding())
    next(left)
    left.close()
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("grain-prefetch") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


EVALUATED = [
    (0, [*range(10)]),
    (10, [*range(10)]),
    (99, [*range(10)]),
    (8, [0, 1, 2, 3, 5, 6, 7, 8]),
    (5, [0, 2, 4, 6, 8]),
    (1, [0]),
]


@pytest.mark.parametrize(("limit", "expected"), EVALUATED)
def test_evaluation_takes_each_window_once(tmp_path, limit, expected):
    found = []
    for batch in B.evaluation_batches(windows(tmp_path / "a.tokens", 10), 4, 2, limit, sharding(P(None, "dp"))):
        inputs, labels = np.asarray(batch["inputs"]), np.asarray(batch["labels"])
        assert inputs.shape == labels.shape == (2, 2, 4)
        real = labels != B.IGNORE
        assert np.array_equal(real.all(-1), real.any(-1))
        assert not inputs[~real].any()
        assert np.array_equal(labels[real], inputs[real] + 1)
        found += (inputs[real.all(-1)][:, 0] // 4).tolist()
    assert found == expected


# Entropies


def brute_force(tokens) -> tuple[float, float]:
    """H(x_t) and H(x_t | x_{t-1}) from their definitions."""
    n, ones, pairs = len(tokens), Counter(tokens), Counter(pairwise(tokens))
    first = Counter(tokens[:-1])
    unigram = -sum(c / n * math.log(c / n) for c in ones.values())
    bigram = -sum(c / (n - 1) * math.log(c / first[pair[0]]) for pair, c in pairs.items())
    return unigram, bigram


def test_entropy_of_rows_has_no_pairs_across_rows():
    assert bigram_entropy(np.array([[0, 1], [1, 0], [0, 1]]), 2) == pytest.approx(0, abs=1e-12)
    assert bigram_entropy(np.array([[0, 1], [0, 0]]), 2) == pytest.approx(math.log(2))


def test_entropies(monkeypatch):
    tokens = np.random.default_rng(0).zipf(1.5, 5000) % 500
    expected = brute_force(tokens.tolist())
    for chunk in (2**24, 777):
        monkeypatch.setattr("jax5d.data.statistics._CHUNK", chunk)
        assert unigram_entropy(tokens.astype(np.uint16), 50257) == pytest.approx(expected[0], rel=1e-12)
        assert bigram_entropy(tokens.astype(np.uint16), 50257) == pytest.approx(expected[1], rel=1e-12)


def test_entropies_in_closed_form():
    cycle = np.tile(np.arange(8), 100)
    assert unigram_entropy(cycle, 8) == pytest.approx(math.log(8))
    assert bigram_entropy(cycle, 8) == pytest.approx(0, abs=1e-12)
    # After 0 come 0 and 1 equally often, after 1 always 0: pairs 00, 01, 10 a third each.
    golden = np.append(np.tile([0, 0, 1], 100), 0)
    assert bigram_entropy(golden, 2) == pytest.approx(2 / 3 * math.log(2))
    with pytest.raises(ValueError, match="too few"):
        bigram_entropy(np.zeros(1, int), 2)
    with pytest.raises(ValueError, match="outside"):
        unigram_entropy(np.array([2]), 2)
