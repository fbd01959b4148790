"""Windows, batches, evaluation, and the entropies that a validation loss is held against."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from corpus import refusal, sharding, token_file, windows
from jax.sharding import PartitionSpec as P

from jax5d.data import batches as B
from jax5d.data import tokens as F
from jax5d.data.statistics import bigram_entropy, unigram_entropy

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


def test_two_hosts_read_half_each(tmp_path, monkeypatch):
    batches = B.Batches(windows(tmp_path / "a.tokens", 30), 1, 16, 4)
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
    whole = np.stack([batches.windows[int(window)][:-1] for window in batches.rows(2)])
    assert np.array_equal(seen.reshape(16, 4), whole)

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
