"""Dropout masks are a function of seed, step, layer, site and global position: the same on every mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny import assert_close, assert_shards, batch, config, host, ids, name, put, start, trainer, weights

from jax5d.config import MeshConfig, RunConfig
from jax5d.mesh import make_mesh
from jax5d.parallel import stack
from jax5d.parallel.context import Draw, ring_attention
from jax5d.parallel.data import diverge
from jax5d.parallel.random import keep

MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 2, "cp": 2}, {}),
    ({"tp": 2}, {"sequence": True}),
    ({"pp": 2}, {"microbatches": 4}),
]


def row_losses(run: RunConfig) -> list[float]:
    """The training loss of each of 8 identical rows under dropout: labels of one row at a time."""
    tokens = np.tile(ids(1), (8, 1))
    state, losses = start(run), []
    for row in range(8):
        labels = np.where(np.arange(8)[:, None] == row, tokens[:, 1:], -100).astype(np.int32)
        _, metrics = trainer(run).gradients(state, put(run, batch(run, tokens[:, :-1], labels)))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=[name(mesh) for mesh, _ in MESHES])
def test_masks_differ_by_row_and_not_by_mesh(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """B27: rate 0.5 on 8 identical rows: 8 losses, all different, equal to one device's; replicas stay equal."""
    run = config(mesh, dropout=0.5, **options)
    losses = row_losses(run)
    assert len(set(losses)) == 8
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-5
    chex.assert_trees_all_close(losses, row_losses(config(dropout=0.5)), rtol=1e-5, atol=0)
    grads, _ = trainer(run).gradients(start(run), put(run, batch(run)))
    assert_shards(grads, host(grads))


def test_masks_follow_the_seed_and_the_step() -> None:
    """B27: one seed twice is bitwise the same; another seed, and the next step, are not."""
    run = config(dropout=0.5, learning_rate=1e-30)  # weights stay, so that only the mask can change
    data, step = put(run, batch(run)), trainer(run).step
    state, first = step(start(run), data)
    _, again = step(start(run), data)
    _, following = step(state, data)
    other = config(dropout=0.5, seed=1)
    _, seeded = trainer(other).step(start(other, weights(run.model)), data)
    assert float(first["loss"]) == float(again["loss"])
    assert len({float(x["loss"]) for x in (first, following, seeded)}) == 3


def final_stream(run: RunConfig, params: Any) -> np.ndarray:
    """What the last layer of the training forward pass puts out: [8, 32, d]."""
    proof = trainer(run)

    def body(params: Any, data: dict[str, jax.Array]) -> jax.Array:
        own = proof.zero.opened(diverge(params, proof.model.summed))
        work = proof.model.work(data, jax.random.key(0), 8)
        (y, _), _ = stack.run(work.layer, own["blocks"], work.embed(own["outer"], jnp.int32(0)), jnp.int32(0))
        return lax.psum(y, ("pp", "dp", "ep", "cp"))  # one device

    specs = (proof.specs.params, P())
    mapped = jax.shard_map(body, mesh=proof.mesh, in_specs=specs, out_specs=P())
    return np.asarray(jax.jit(mapped)(start(run, params).params, batch(run)))


def test_layers_and_sites_have_masks_of_their_own() -> None:
    """B28: with weights 0 a site adds its bias times 2 or 0. Biases are powers of 2: the sum tells all 9 masks."""
    run = config(dropout=0.5)
    params = jax.tree.map(np.array, weights(run.model))
    outer, blocks = params["outer"], params["blocks"]
    outer["wte"][:], outer["wpe"][:] = 0, 2**8
    for number, part in enumerate(("attention", "mlp")):
        blocks[part]["w_out"][:] = 0
        for layer in range(4):
            blocks[part]["b_out"][layer] = 2 ** (2 * layer + number)
    bits = final_stream(run, params) / 2
    masks = [(bits.astype(int) >> site) & 1 for site in range(9)]
    assert np.array_equal(sum(mask << site for site, mask in enumerate(masks)), bits)
    for i, mask in enumerate(masks):
        assert mask.mean() == pytest.approx(0.5, abs=0.03)  # 8192 draws: 5 standard deviations
        for other in masks[:i]:
            assert (mask == other).mean() == pytest.approx(0.5, abs=0.03)


def test_attention_weights_have_masks_of_their_own() -> None:
    """B28: uniform attention over values 1 puts out the number of weights kept, another in each layer and head.

    Layer l's head n writes dim 4 l + n, so that later layers do not cover earlier ones.
    """
    run = config(dropout=0.5)
    params = jax.tree.map(np.array, weights(run.model))
    outer, blocks = params["outer"], params["blocks"]
    outer["wte"][:], outer["wpe"][:] = 0, 0
    for weight in (blocks["mlp"]["w_out"], *(blocks["attention"][w] for w in ("w_q", "w_kv", "w_out"))):
        weight[:] = 0
    blocks["attention"]["b_kv"][:, 1] = 1
    for layer in range(4):
        for head in range(4):
            blocks["attention"]["w_out"][layer, head, 0, 4 * layer + head] = 1
    stream = final_stream(run, params)[..., :16]
    assert not np.any(stream[:, 0, :] % 4)  # the first query has one key: 0, or doubled twice
    kept = stream * (np.arange(32) + 1)[None, :, None] / 4  # where the residual's own mask lets it through
    assert np.allclose(kept, np.round(kept), atol=1e-4)
    for i in range(16):
        for j in range(i):
            through = (stream[..., i] > 0) & (stream[..., j] > 0)
            assert through.sum() > 30
            assert (np.round(kept[..., i]) != np.round(kept[..., j]))[through].mean() > 0.5


@pytest.mark.parametrize("cp", [1, 4])
def test_ring_with_dropout_is_dense_attention_with_that_mask(cp: int) -> None:
    """B29: values and gradients of attention, with the mask that `keep` gives by global ids."""
    q, k, v, d_out = (jax.random.normal(key, (2, 16, 2, 4)) for key in jax.random.split(jax.random.key(1), 4))
    key, rate = jnp.array([1, 2], jnp.uint32), 0.4
    queries = jnp.arange(2 * 2 * 16, dtype=jnp.uint32).reshape(2, 2, 16)

    def ring(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, queries: jax.Array) -> Any:
        out, vjp = jax.vjp(partial(ring_attention, draw=Draw(key, queries), rate=rate), q, k, v)
        return out, vjp(d_out)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bsnh,btnh->bnst", q, k) / 2
        probabilities = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((1, 1, 16, 16), bool)), scores, -jnp.inf))
        mask = keep(key, rate, queries[..., None], jnp.arange(16, dtype=jnp.uint32)[None, None, None])
        return jnp.einsum("bnst,btnh->bsnh", probabilities * mask.astype(jnp.float32) / (1 - rate), v)

    x, over = P(None, "cp"), P(None, None, "cp")
    mesh = make_mesh(MeshConfig(cp=cp), jax.devices()[:cp])
    mapped = jax.shard_map(ring, mesh=mesh, in_specs=(x, x, x, x, over), out_specs=(x, (x, x, x)))
    out, vjp = jax.vjp(jax.jit(dense), q, k, v)
    assert_close(jax.tree.map(np.asarray, jax.jit(mapped)(q, k, v, d_out, queries)), host((out, vjp(d_out))), 2e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_keep_has_its_rate_and_no_pattern(rate: float) -> None:
    """A share of 1 - rate survives, independent of either counter's neighbours; other keys give other masks."""
    counter = jnp.arange(256, dtype=jnp.uint32)
    first, second = (
        np.asarray(keep(jnp.array([0, k], jnp.uint32), rate, counter[:, None], counter[None])) for k in (0, 1)
    )
    alike = rate**2 + (1 - rate) ** 2
    assert first.mean() == pytest.approx(1 - rate, abs=0.01)  # 65536 draws: 5 standard deviations
    for other in (second, np.roll(first, 1, 0), np.roll(first, 1, 1), first.T):
        assert (first == other).mean() == pytest.approx(alike, abs=0.012)


POLICIES: dict[str, dict[str, Any]] = {
    "selective": {"remat": "selective"},
    "full": {"remat": "full"},
    "inputs only": {"remat": "full", "save": ()},
    "named": {"remat": "full", "save": ("qkv", "mlp_in")},
}


@pytest.mark.parametrize(
    ("mesh", "policies"),
    [({}, list(POLICIES)), ({"pp": 2}, ["full", "named"]), ({"cp": 2}, ["selective", "inputs only"])],
    ids=["one", "pp2", "cp2"],
)
def test_recomputation_draws_the_same_mask(mesh: dict[str, int], policies: list[str]) -> None:
    """B29: rate 0.1, gradients with recomputation equal those without, whatever it saves."""

    def gradients(**options: Any) -> Any:
        run = config(mesh, dropout=0.1, microbatches=2, **options)
        return host(trainer(run).gradients(start(run), put(run, batch(run)))[0])

    wanted = gradients()
    for policy in policies:
        assert_close(gradients(**POLICIES[policy]), wanted, 1e-6)


def test_recomputation_saves_no_masks() -> None:
    """B29: a further layer's gradients, input and saved attention sum fit in 3 B T d floats of temporary memory."""
    temporary = {}
    for layers in (4, 16):
        run = config(dropout=0.1, remat="full", layers=layers, global_batch=32)
        compiled = trainer(run).gradients.lower(*trainer(run).arguments).compile()
        temporary[layers] = compiled.memory_analysis().temp_size_in_bytes
    extra = (temporary[16] - temporary[4]) / 12
    assert extra <= 3 * 32 * 32 * 32 * 4
    assert extra >= 32 * 32 * 32 * 4  # its input is kept, so the measure sees it


def test_evaluation_ignores_dropout() -> None:
    """B31 (a): twice the same bits, and those of the model without dropout."""
    run, plain = config({"dp": 2}, dropout=0.2), config({"dp": 2})
    params, data = start(run).params, put(run, batch(run))
    first, second = (float(trainer(run).evaluate(params, data)["loss_sum"]) for _ in range(2))
    assert first == second == float(trainer(plain).evaluate(params, data)["loss_sum"])
    _, metrics = trainer(run).gradients(start(run), data)
    assert abs(float(metrics["loss"]) - first / 256) > 1e-4  # training does drop
