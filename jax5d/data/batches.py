"""Global batches as a pure function of (seed, step), the same on every mesh and number of hosts.

M microbatches, B sequences in a global batch, S tokens in a sequence. A batch is {"inputs", "labels"}, each
int32 [M, B/M, S], and labels[m, b, s] is the token that follows inputs[m, b, s].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from jax5d.config import ConfigError
from jax5d.data.tokens import Split, TokenFile

IGNORE = -100
"""Label of a position that the loss leaves out."""

PADDING = -1
"""Number that stands for a row that is no window: its inputs are 0, its labels `IGNORE`."""

_PREFETCH = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)

Block = tuple[tuple[int, int], ...]
Batch = dict[str, jax.Array]


class Windows:
    """The sequences of a split: window i is tokens [i*S, i*S + S], S + 1 of them, so N tokens make (N-1)//S.

    Neighbours share one token, the last label of the one and the first input of the next.

    Raises:
        ConfigError: the split is shorter than one window, or an id is not below `vocab` (the model's).
    """

    def __init__(self, file: TokenFile, split: Split, seq_len: int, vocab: int):
        self.path, self.split, self.seq_len, self.vocab = file.path, split, seq_len, vocab
        self.digest = file.digest
        self._tokens = file.tokens(split)
        if file.vocab_size > vocab:
            raise ConfigError(
                f"{file.path} has a vocabulary of {file.vocab_size} but model.vocab={vocab}; write --model.vocab "
                f"{file.vocab_size}"
            )
        if not len(self):
            raise ConfigError(
                f"{file.path}: the {split} split has {len(self._tokens)} tokens and one window needs {seq_len + 1} "
                f"(train.seq_len={seq_len}, and the next token); give more text or lower --train.seq_len"
            )

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self.seq_len

    def __getitem__(self, window: int) -> np.ndarray:
        """Ids int32 [S + 1] of one window.

        Raises:
            ConfigError: an id is not below the model's vocabulary, which a damaged file can hold.
        """
        return self.read(window, 0, self.seq_len + 1)

    def sample(self, limit: int) -> np.ndarray:
        """Numbers int64 [count] of `limit` windows (0, or more than there are: all), evenly spaced over the split."""
        count = min(limit or len(self), len(self))
        return np.arange(count) * len(self) // count

    def read(self, window: int, start: int, stop: int) -> np.ndarray:
        """Ids int32 [stop - start] of a part of one window; raises as `__getitem__` does."""
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        base = window * self.seq_len
        ids = self._tokens[base + start : base + stop]
        if ids.max() >= self.vocab:
            raise ConfigError(
                f"{self.path}: id {ids.max()} in window {window} is not below model.vocab={self.vocab}; make the "
                "file again or raise --model.vocab"
            )
        return ids.astype(np.int32)


class Batches:
    """Which windows make which batch: each epoch takes every window once, in an order of its own.

    Row r of step t is element t*B + r of the endless stream of shuffled epochs, so a batch may lie across the end
    of an epoch. There is no other state: to resume at a step is to ask for it.

    Raises:
        ConfigError: `seed` is outside [0, 2**32), or microbatches do not divide the batch.
    """

    def __init__(self, windows: Windows, seed: int, global_batch: int, microbatches: int = 1, repeat: bool = True):
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed={seed} is outside [0, 2**32); write a seed such as --seed 0")
        _check_microbatches(global_batch, microbatches)
        self.windows, self.global_batch, self.microbatches = windows, global_batch, microbatches
        self._order = grain.MapDataset.range(len(windows)).seed(seed).shuffle().repeat()
        self.steps_available = None if repeat else len(windows) // global_batch
        """Whole steps in the data; None where it repeats."""

    def rows(self, step: int) -> np.ndarray:
        """Windows int64 [B] of a step.

        Raises:
            IndexError: the step is below 0, or beyond `steps_available`.
        """
        if step < 0 or (self.steps_available is not None and step >= self.steps_available):
            raise IndexError(f"step {step} of {self.steps_available}")
        first = step * self.global_batch
        return np.array([self._order[first + row] for row in range(self.global_batch)], np.int64)

    def epoch(self, step: int) -> int:
        """Epoch, from 0, of the first row of a step."""
        return step * self.global_batch // len(self.windows)

    def grid(self, step: int) -> np.ndarray:
        """Windows int64 [M, B/M] of a step: microbatch m has the rows m*B/M to (m+1)*B/M."""
        return self.rows(step).reshape(self.microbatches, -1)


def check_enough(batches: Batches, steps: int) -> None:
    """Raise `ConfigError` where the data does not repeat and ends before `steps` steps."""
    if batches.steps_available is not None and steps > batches.steps_available:
        windows = batches.windows
        raise ConfigError(
            f"train.steps={steps} x train.global_batch={batches.global_batch} = {steps * batches.global_batch} "
            f"sequences but {windows.path} has {len(windows)} of {windows.seq_len} tokens, enough for "
            f"{batches.steps_available} steps; write --train.steps {batches.steps_available}, or leave out "
            "--data.no_repeat"
        )


def device_batch(batches: Batches, step: int, sharding: jax.sharding.Sharding) -> Batch:
    """The batch of a step as global arrays int32 [M, B/M, S]; this host reads only what its devices hold."""
    grid = batches.grid(step)
    shape = (*grid.shape, batches.windows.seq_len)
    return _place(_read(batches.windows, grid, _blocks(sharding, shape)), shape, sharding)


def stream(batches: Batches, start: int, stop: int, sharding: jax.sharding.Sharding) -> Iterator[tuple[int, Batch]]:
    """Pairs (step, batch) for the steps [start, stop), as `device_batch` makes them, read a few steps ahead."""
    rows = batches.global_batch // batches.microbatches
    shape = (batches.microbatches, rows, batches.windows.seq_len)
    return _stream(batches.windows, batches.grid, range(start, stop), shape, sharding)


def evaluation_batches(
    windows: Windows, batch_rows: int, microbatches: int, limit: int, sharding: jax.sharding.Sharding
) -> Iterator[Batch]:
    """Batches int32 [M, batch_rows/M, S] that hold each of `windows.sample(limit)` once, in order.

    All have one shape: the last is filled up with rows whose inputs are 0 and whose labels are all `IGNORE`.

    Raises:
        ConfigError: microbatches do not divide `batch_rows`.
    """
    _check_microbatches(batch_rows, microbatches)
    chosen = windows.sample(limit)
    steps = range(-(-len(chosen) // batch_rows))
    padded = np.pad(chosen, (0, len(steps) * batch_rows - len(chosen)), constant_values=PADDING)
    grids = padded.reshape(len(steps), microbatches, -1)

    def grid(batch: int) -> np.ndarray:
        return grids[batch]

    shape = (microbatches, batch_rows // microbatches, windows.seq_len)
    return (batch for _, batch in _stream(windows, grid, steps, shape, sharding))


def _stream(
    windows: Windows,
    grid: Callable[[int], np.ndarray],
    steps: range,
    shape: tuple[int, int, int],
    sharding: jax.sharding.Sharding,
) -> Iterator[tuple[int, Batch]]:
    """Batches of a contiguous range of steps. The threads only read; JAX is called from the caller's alone."""
    blocks = _blocks(sharding, shape)
    ahead = grain.MapDataset.range(steps.start, steps.stop).map(lambda step: _read(windows, grid(step), blocks))
    reads = iter(ahead.to_iter_dataset(_PREFETCH))
    try:
        for step in steps:
            yield step, _place(next(reads), shape, sharding)
    finally:
        reads.close()


def _block(index: Any, shape: tuple[int, ...]) -> Block:
    """Bounds (start, stop) of an index, a tuple of slices, along each dim; slices are no dict keys before 3.12."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _blocks(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> set[Block]:
    """The distinct parts of a global array that this host's devices hold; replicas share one."""
    return {_block(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}


def _read(windows: Windows, grid: np.ndarray, blocks: Iterable[Block]) -> dict[Block, dict[str, np.ndarray]]:
    """Inputs and labels, int32 [m, b, s], of each block of a batch whose windows are `grid` [M, B/M]."""
    return {block: _read_block(windows, grid, block) for block in blocks}


def _read_block(windows: Windows, grid: np.ndarray, block: Block) -> dict[str, np.ndarray]:
    (first, last), (low, high), (start, stop) = block
    part = grid[first:last, low:high]
    inputs = np.zeros((*part.shape, stop - start), np.int32)
    labels = np.full_like(inputs, IGNORE)
    for place in zip(*np.nonzero(part != PADDING), strict=True):
        ids = windows.read(int(part[place]), start, stop + 1)
        inputs[place], labels[place] = ids[:-1], ids[1:]
    return {"inputs": inputs, "labels": labels}


def _place(
    blocks: dict[Block, dict[str, np.ndarray]], shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> Batch:
    """Global arrays int32 [M, B/M, S] of the blocks that this host has."""

    def array(name: str) -> jax.Array:
        return jax.make_array_from_callback(shape, sharding, lambda index: blocks[_block(index, shape)][name])

    return {name: array(name) for name in ("inputs", "labels")}


def _check_microbatches(rows: int, microbatches: int) -> None:
    if rows < 1 or microbatches < 1 or rows % microbatches:
        raise ConfigError(
            f"train.global_batch={rows} is not a multiple of parallel.microbatches={microbatches}; change one"
        )
