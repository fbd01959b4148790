"""What `gpu_anatomy` finds, against calculations by hand.

Letters: b sequences of s tokens, m = b s, d d_model, f d_ff, a heads.
"""

from __future__ import annotations

from experiments.ch00_foundations._block import FLASH, Build, Group, Moved
from experiments.harness import Check
from jax5d.config import MeshConfig, ModelConfig
from jax5d.costs.flops import backward, forward
from jax5d.costs.parameters import leaves
from jax5d.costs.rooflines import Roofline

HALF, FULL = 2, 4
"""Bytes of a bfloat16 and of a float32."""


def check_groups(model: ModelConfig, batch: int, parts: list[Group], roof: Roofline) -> list[Check]:
    """FLOPs of every product by theory, intensities by the sizes of the arrays, and the ridge by trial."""
    theory = {False: forward(model, model.context), True: backward(model, model.context)}
    checks = [
        Check.equal("FLOPs/byte at which compute begins to limit", _ridge(roof), roof.peak / roof.bandwidth, 1e-6)
    ]
    by_hand = _intensities(model, batch)
    for part in parts:
        if part.name in theory[part.backward]:
            checks.append(Check.equal(f"FLOPs of {part.label}", part.flops, batch * theory[part.backward][part.name]))
        if (part.name, part.backward) in by_hand:
            expected = by_hand[part.name, part.backward]
            checks.append(Check.equal(f"FLOPs/byte of {part.label}", part.intensity, expected, 1e-9 * expected))
    # an element that is added up is 2 bytes read for its FLOP; any other is written too
    rest = max(part.intensity for part in parts if not part.product)
    return [*checks, Check.below("FLOPs/byte of anything but a product, at most", rest, 1 / HALF)]


def check_builds(model: ModelConfig, batch: int, builds: list[Build]) -> list[Check]:
    """FLOPs of the compiled products; temporaries, of which plain attention's are s x s."""
    checks = []
    for build in builds:
        once = forward(model, build.seq_len)
        products = batch * (3 * (sum(once.values()) - once["head"]) + (build.attention == "flash") * once["scores"])
        name = f"FLOPs of the compiled products, {build.attention}, s = {build.seq_len}"
        checks.append(Check.equal(name, build.flops, products))
        checks.append(_check_temporaries(model, batch, build))
    return checks


def _check_temporaries(model: ModelConfig, batch: int, build: Build) -> Check:
    """Softmax's backward pass reads the weights and their gradient: 4 a s^2 b bytes. Flash attention has neither.

    Without them a layer keeps 34 s b d (Korthikanti et al., arXiv:2205.05198, eq. 2). With the gradient of each of
    these, and of each weight in float32, at one time: no more than 68 s b d + 4 N. From 2048 tokens on, one s x s array
    beside them would be too much for a GPT-2.
    """
    s, temporaries = build.seq_len, build.memory.temporaries
    if build.attention == "plain":
        square = 2 * HALF * model.heads * s**2 * batch
        return Check.below(f"4 a s^2 b, below temporaries, plain, s = {s}", square, temporaries)
    weights = sum(
        leaf.local_size(MeshConfig()) for leaf in leaves(model, MeshConfig()) if leaf.name.startswith("blocks")
    )
    linear = 2 * 34 * s * batch * model.d_model + FULL * weights
    return Check.below(f"temporaries, flash, s = {s}, below 68 s b d + 4 N", temporaries, linear)


def check_moved(model: ModelConfig, batch: int, alone: Moved, fused: Moved) -> list[Check]:
    """Kernels move fewer bytes than operations one by one, and no fewer than the products with weights alone."""
    least = 3 * HALF * sum(m * k + k * n + m * n for m, k, n in _sizes(model, batch).values())
    return [
        Check.below(f"bytes of kernels, {fused.label}, below one by one", fused.total, alone.total),
        Check.below(f"bytes of products with weights, below {fused.label}", least, fused.total),
    ]


def _sizes(model: ModelConfig, batch: int) -> dict[str, tuple[int, int, int]]:
    """m, k, n of the products with weights, [m, k] x [k, n]. Both backward products have the same three arrays.

    Queries, keys and values are three operations, of which a compiler may make one kernel.
    """
    m, d, f = batch * model.context, model.d_model, model.d_ff
    return {"qkv": (m, d, 3 * d), "output": (m, d, d), "mlp_in": (m, d, f), "mlp_out": (m, f, d)}


def _intensities(model: ModelConfig, batch: int) -> dict[tuple[str, bool], float]:
    """FLOPs/byte by name and whether backward. 2 m k n / 2 (m k + k n + m n) = 1 / (1/m + 1/k + 1/n)."""
    m, s, d, a = batch * model.context, model.context, model.d_model, model.heads
    sizes = _sizes(model, batch) | {"qkv": (m, d, d)}
    found = {(name, back): 1 / sum(1 / side for side in sizes[name]) for name in sizes for back in (False, True)}
    product, two, square = 2 * m * s * d, 2 * HALF * m * d, m * a * s  # two arrays of the stream's size, one of s x s
    found["scores", False] = product / (two + FULL * square)  # float32 leaves the tensor cores
    found["scores", True] = product / (two + HALF * square)
    found["values", False] = found["values", True] = product / (two + HALF * square)
    found["residual", False] = 1 / (3 * HALF)  # two read, one written
    for back, products, arrays, statistics in ((False, 2, 4, 1), (True, 5, 8, 1)):
        # forward q, k, v and the output; backward these, its gradient and theirs; float32 log-sum-exp of each row
        found[FLASH, back] = products * product / (arrays * HALF * m * d + statistics * FULL * m * a)
    return found


def _ridge(roof: Roofline) -> float:
    """Intensity at which what `bound` says changes, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if roof.bound(middle, 1) == "memory" else (low, middle)
    return high
