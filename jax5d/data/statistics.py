"""Entropies of a token stream: what a model that looks at no token, or at one token, can reach at best."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

_CHUNK = 2**24


def unigram_entropy(tokens: np.ndarray, vocab: int) -> float:
    """Empirical entropy H(x_t) of integer ids [..., N] below `vocab`, in nats per token.

    Raises:
        ValueError: there is no token, or an id is outside [0, vocab).
    """
    counts = np.zeros(vocab, np.int64)
    for ids in _chunks(tokens, vocab, overlap=0):
        counts += np.bincount(ids.ravel(), minlength=vocab)
    return _entropy(counts)


def bigram_entropy(tokens: np.ndarray, vocab: int) -> float:
    """Empirical conditional entropy H(x_t | x_{t-1}) of integer ids [..., N], in nats per token; pairs within a row.

    By the chain rule it is H(x_{t-1}, x_t) - H(x_{t-1}). Only pairs that occur are stored.

    Raises:
        ValueError: there is no pair, or an id is outside [0, vocab).
    """
    pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for ids in _chunks(tokens, vocab, overlap=1):
        new, times = np.unique(ids[..., :-1] * vocab + ids[..., 1:], return_counts=True)
        merged, places = np.unique(np.concatenate([pairs, new]), return_inverse=True)
        total = np.zeros(len(merged), np.int64)
        np.add.at(total, places, np.concatenate([counts, times]))
        pairs, counts = merged, total
    first = np.zeros(vocab, np.int64)
    np.add.at(first, pairs // vocab, counts)
    return _entropy(counts) - _entropy(first)


def _chunks(tokens: np.ndarray, vocab: int, overlap: int) -> Iterator[np.ndarray]:
    """Pieces int64 [..., n + overlap] along the last dim, so that a memory-mapped stream is never whole in memory."""
    size = max(1, _CHUNK // max(1, math.prod(tokens.shape[:-1])))
    for start in range(0, tokens.shape[-1] - overlap, size):
        ids = tokens[..., start : start + size + overlap].astype(np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
            raise ValueError(f"ids {ids.min()}..{ids.max()} are outside [0, {vocab}); give the vocabulary they have")
        yield ids


def _entropy(counts: np.ndarray) -> float:
    """Entropy of the distribution counts / sum(counts), in nats."""
    counts = counts[counts > 0]
    if not counts.size:
        raise ValueError("too few tokens for an entropy; give at least two")
    total = counts.sum()
    return float(np.log(total) - (counts * np.log(counts)).sum() / total)
