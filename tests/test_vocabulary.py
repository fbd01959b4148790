"""The vocabulary split over (pp, tp): any size, one loss, and logits of one chunk at a time."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import assert_close, check_equivalent, config, gradients, name, put, start, trainer, weights
from tiny import batch as batch_of

from jax5d.config import MeshConfig
from jax5d.mesh import make_mesh
from jax5d.parallel.data import varying
from jax5d.parallel.tensor import VOCAB_AXES, cross_entropy


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}, {"dp": 8}], ids=name)
def test_vocabulary_that_the_mesh_does_not_divide(mesh: dict[str, int]) -> None:
    """B16: 97 ids. A table of zeros gives ln 97, and padding rows get no gradient and stay 0."""
    run = config(mesh, vocab=97)
    state, _ = check_equivalent(run, steps=1)  # with the shards of the padding, which must be 0
    assert not np.any(np.asarray(gradients(state)["outer"]["wte"])[97:])
    params = weights(run.model)
    params = {**params, "outer": {**params["outer"], "wte": np.zeros_like(params["outer"]["wte"])}}
    result = trainer(run).evaluate(start(run, params).params, put(run, batch_of(run)))
    loss = float(result["loss_sum"]) / float(result["tokens"])
    assert loss == pytest.approx(4.574711, abs=5e-6)  # ln 97; ln 100 = 4.605170 would count padding
    assert loss == pytest.approx(math.log(97), abs=5e-6)


def loss_on(mesh: dict[str, int], *, vocab: int, chunks: int) -> Any:
    """Compiled (y, table, labels) -> loss and gradients by y and table; the table is split, the rest is on all."""
    split = MeshConfig(**mesh)

    def body(y: jax.Array, table: jax.Array, labels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss = lambda y, table: cross_entropy(  # noqa: E731
            varying(y, VOCAB_AXES), table, labels, vocab=vocab, chunks=chunks
        )
        return jax.value_and_grad(loss, argnums=(0, 1))(y, table)

    rows = P(VOCAB_AXES)
    specs = {"in_specs": (P(), rows, P()), "out_specs": (P(), (P(), rows))}
    return jax.jit(jax.shard_map(body, mesh=make_mesh(split, jax.devices()[: split.size]), **specs))


def plain_loss(y: np.ndarray, table: np.ndarray, labels: np.ndarray) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
    """The same in float64, token by token, from the definition; `table` has no padding."""
    y, table = y.astype(np.float64), table.astype(np.float64)
    total, d_y, d_table = 0.0, np.zeros_like(y), np.zeros_like(table)
    for i, label in enumerate(labels):
        if label < 0:
            continue
        logits = table @ y[i]
        exps = np.exp(logits - logits.max())
        slope = exps / exps.sum()
        total -= math.log(slope[label])
        slope[label] -= 1
        d_y[i], d_table = slope @ table, d_table + np.outer(slope, y[i])
    return total, (d_y, d_table)


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"pp": 2, "tp": 2}], ids=name)
@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_of_known_logits(mesh: dict[str, int], chunks: int) -> None:
    """B17: logits 0, 1, 2, 3 and label 3, however the vocabulary is split and however many chunks; also thrice."""
    table = jnp.arange(4, dtype=jnp.float32)[:, None]
    slope = np.array([0.0320586, 0.0871443, 0.2368828, -0.3560857], np.float32)
    for times in (1, 3):
        loss, (d_y, d_table) = loss_on(mesh, vocab=4, chunks=chunks)(
            jnp.ones((times, 1)), table, jnp.full(times, 3, jnp.int32)
        )
        assert float(loss) == pytest.approx(0.4401897 * times, abs=1e-6)
        chex.assert_trees_all_close(np.asarray(d_table)[:, 0], slope * times, rtol=0, atol=1e-6)
        # derivative by y: sum of slope times logit, in each row
        want = np.full(times, slope @ np.arange(4, dtype=np.float32))
        chex.assert_trees_all_close(np.asarray(d_y)[:, 0], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mesh", [{}, {"tp": 4}, {"pp": 2, "tp": 2}], ids=name)
@pytest.mark.parametrize("chunks", [1, 4])
def test_masked_labels_and_padding(mesh: dict[str, int], chunks: int) -> None:
    """B17, B57: 13 tokens in 4 chunks, labels ignored (also a whole chunk's), 11 ids padded to 12 rows."""
    draw = np.random.default_rng(0)
    y, table = draw.normal(size=(13, 5)).astype(np.float32), draw.normal(size=(11, 5)).astype(np.float32)
    labels = draw.integers(0, 11, 13).astype(np.int32)
    labels[[0, 4, 5, 6, 7, 11]] = [-100, -1, -100, -100, -100, -1]
    rows = -(-11 // MeshConfig(**mesh).vocab_shards) * MeshConfig(**mesh).vocab_shards
    padded = np.concatenate([table, np.full((rows - 11, 5), 100, np.float32)])
    loss, (d_y, d_table) = loss_on(mesh, vocab=11, chunks=chunks)(y, padded, labels)
    want, slopes = plain_loss(y, table, labels)
    assert float(loss) == pytest.approx(want, rel=1e-6)
    assert not np.any(np.asarray(d_table)[11:])
    assert not np.any(np.asarray(d_y)[labels < 0])
    assert_close((np.asarray(d_y), np.asarray(d_table)[:11]), slopes, 2e-6)


@pytest.mark.parametrize(("tp", "vocab"), [(1, 32768), (4, 32768), (1, 50257), (4, 50257)])
def test_chunks_bound_the_memory_of_logits(tp: int, vocab: int) -> None:
    """B57: 1021 tokens, d 64: 8 chunks need at most 0.3 of the memory of one, for the same numbers.

    Also with GPT-2's odd vocabulary, of which tp 4 pads 3 rows.
    """
    draw = np.random.default_rng(0)
    n, rows = 1021, -(-vocab // tp) * tp
    y, table = (draw.normal(size=(size, 64)).astype(np.float32) * 0.1 for size in (n, rows))
    labels = draw.integers(0, vocab, n).astype(np.int32)
    labels[::7] = -100
    temporary, results = {}, {}
    for chunks in (1, 8):
        compiled = loss_on({"tp": tp}, vocab=vocab, chunks=chunks).lower(y, table, labels).compile()
        temporary[chunks] = compiled.memory_analysis().temp_size_in_bytes
        mesh = make_mesh(MeshConfig(tp=tp), jax.devices()[:tp])
        place = partial(jax.device_put, device=jax.NamedSharding(mesh, P()))
        spread = jax.device_put(table, jax.NamedSharding(mesh, P(VOCAB_AXES)))
        results[chunks] = jax.tree.map(np.asarray, compiled(place(y), spread, place(labels)))
    logits = n * rows // tp * 4
    assert temporary[1] >= logits  # otherwise this measures nothing
    assert temporary[8] <= 0.3 * temporary[1]
    assert float(results[8][0]) == pytest.approx(float(results[1][0]), rel=1e-5)
    assert_close(results[8][1], results[1][1], 2e-5)


@pytest.mark.parametrize(("y_dtype", "table_dtype"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_loss_in_16_bits(y_dtype: str, table_dtype: str) -> None:
    """700 equal tokens in 100 chunks: the table's gradient is a sum in float32, rounded once at its end.

    In bfloat16 the running sum would stop after some 256 equal addends.
    """
    draw = np.random.default_rng(0)
    y = np.tile(draw.normal(size=(1, 5)), (700, 1)).astype(y_dtype)
    table, labels = draw.normal(size=(8, 5)).astype(table_dtype), np.full(700, 2, np.int32)
    loss, (d_y, d_table) = loss_on({"tp": 2}, vocab=8, chunks=100)(y, table, labels)
    assert (str(loss.dtype), str(d_y.dtype), str(d_table.dtype)) == ("float32", y_dtype, table_dtype)
    want, slopes = plain_loss(y, table if y_dtype != "float16" else table.astype(np.float16), labels)
    assert float(loss) == pytest.approx(want, rel=1e-4)
    assert_close(jax.tree.map(lambda x: np.asarray(x, np.float32), (d_y, d_table)), slopes, 2**-7)
