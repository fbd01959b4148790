"""What a layer keeps of one microbatch, array by array: by the textbook, and here.

Units: bytes for each of the s b h elements of the residual stream, on one device. The textbook is Korthikanti et al.,
arXiv:2205.05198, section 4.1, which counts Megatron's GPT layer: 34 + 5 a s / h in all.

Letters: a heads, m heads of keys and values, h hidden, s sequence, f width of the MLP, t tensor-parallel devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax5d.config import RunConfig


@dataclass(frozen=True)
class Term:
    """One array, in bytes per element of the stream on one device; `textbook` less `saved` is what is kept here."""

    array: str
    split: Literal["stream", "tp"]
    """Whether tensor parallelism splits it, or, as the residual stream, only sequence parallelism."""
    textbook: float
    here: float
    why: str = ""
    """Why the two differ, where they do."""

    @property
    def saved(self) -> float:
        """Kept by the textbook and not here; negative: the other way round."""
        return self.textbook - self.here


def terms(config: RunConfig) -> list[Term]:
    """Every array that either keeps, as the configuration splits it. Flash attention has no term in s^2."""
    m, t = config.model, config.mesh.tp
    streams = t if config.parallel.sequence else 1
    plain = m.attention == "plain"
    square = m.heads * config.train.seq_len / m.d_model
    llama = m.architecture == "llama"

    def stream(array: str, textbook: float, here: float, why: str = "") -> Term:
        return Term(array, "stream", textbook / streams, here / streams, why)

    def tp(array: str, textbook: float, here: float, why: str = "") -> Term:
        return Term(array, "tp", textbook / t, here / t, why)

    groups = max(m.groups, t) / m.heads  # no device has less than one head
    mlp = 2 * m.d_ff / m.d_model * (2 if llama else 1)
    weights = [
        tp("softmax", 2 * square, 2 * square),
        tp("mask on weights", square, 0, "drawn again"),
        tp("dropped weights", 2 * square, 2 * square if m.dropout else 0, "" if m.dropout else "no dropout"),
    ]
    lse = tp("log-sum-exp", 0, 4 * m.heads / m.d_model, "flash attention keeps it instead of the weights")
    mask = "drawn again" if m.dropout else "no dropout"
    return [
        stream("norm 1's input", 2, 2),
        stream("input of q, k, v", 2, 2),
        tp("q", 2, 2),
        tp("k and v", 4, 4 * groups, f"{m.groups} heads, not {m.heads}" if m.groups < m.heads else ""),
        *(weights if plain else [lse]),
        tp("attention's result", 2, 2),
        stream("mask after attention", 1, 0, mask),
        stream("norm 2's input", 2, 2),
        stream("MLP's input", 2, 2),
        tp("activation's input", 8, mlp, f"two of f = {m.d_ff / m.d_model:g} h, not one of 4 h" if llama else ""),
        tp("activation's result", 8, 0, "computed again"),
        stream("mask after MLP", 1, 0, mask),
    ]
