"""Operations read from programs, against counts by hand and the theory of `jax5d.costs.flops`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny import config, trainer

from jax5d.config import MeshConfig
from jax5d.costs.flops import step_flops
from jax5d.measure.operations import Operation, operations, total_flops
from jax5d.mesh import make_mesh


def named(found: list[Operation], name: str) -> list[Operation]:
    return [op for op in found if op.name == name]


def test_mlp_counted_by_hand():
    """relu(x w) v on [8, 32] x [32, 64] x [64, 16]; FLOPs 2 m n k, bytes of float32."""

    def mlp(x, w, v):
        with jax.named_scope("mlp"):
            return jnp.maximum(x @ w, 0.0) @ v

    first, relu, last = operations(mlp, jnp.ones((8, 32)), jnp.ones((32, 64)), jnp.ones((64, 16)))
    assert first == Operation(
        name="dot_general",
        where="mlp",
        dtype="float32",
        flops=2 * 8 * 64 * 32,
        bytes_in=4 * (8 * 32 + 32 * 64),
        bytes_out=4 * 8 * 64,
        count=1,
    )
    assert (relu.name, relu.flops, relu.bytes_in, relu.bytes_out) == ("max", 8 * 64, 4 * 8 * 64 + 4, 4 * 8 * 64)
    assert (last.flops, last.bytes_out) == (2 * 8 * 16 * 64, 4 * 8 * 16)


def test_gradient_has_three_products():
    """Of x w alone: one forward, and one each for x and w."""
    x, w = jnp.ones((8, 32)), jnp.ones((32, 64))
    loss = lambda x, w: jnp.sum(jnp.sin(x @ w))  # noqa: E731
    found = operations(jax.grad(loss, argnums=(0, 1)), x, w)
    assert [op.flops for op in named(found, "dot_general")] == [2 * 8 * 32 * 64] * 3


def test_batched_product_and_convolution():
    """3 products of 4 x 5 x 6. A 3 x 3 kernel from 8 to 16 channels: 2 x 9 x 8 for each of 2 x 16 x 10 x 10 outputs."""
    product = lambda a, b: jnp.einsum("bik,bkj->bij", a, b)  # noqa: E731
    assert total_flops(product, jnp.ones((3, 4, 6)), jnp.ones((3, 6, 5))) == 3 * 2 * 4 * 5 * 6
    kernel = jnp.ones((16, 8, 3, 3))
    assert total_flops(lambda x: lax.conv(x, kernel, (1, 1), "SAME"), jnp.ones((2, 8, 10, 10))) == 2 * 9 * 8 * 3200


def test_what_counts_for_other_primitives():
    """A sum: its operand; a scattered sum: its updates; an exponential: 1; moves, casts, integers: 0."""
    x, at = jnp.ones((6, 7)), jnp.array([0, 3])
    assert total_flops(lambda x: jnp.sum(x, axis=1), x) == 42
    assert total_flops(lambda x: jnp.argmax(x, axis=1), x) == 42
    assert total_flops(jnp.exp, x) == 42
    assert total_flops(lambda x: x.at[at].add(1.0, mode="promise_in_bounds"), x) == 14
    assert total_flops(lambda x: x.T.reshape(-1)[3:].astype(jnp.bfloat16), x) == 0
    assert total_flops(lambda x: jnp.take(x, at, axis=0, mode="clip"), x) == 0
    assert total_flops(lambda n: n * n + 1, jnp.arange(5)) == 0


def test_loops_branches_and_calls():
    """3 x 4 products of 2 x 5 x 5 in nested loops, jitted and recomputed; a branch with two of them beats one."""
    w = jnp.ones((5, 5))
    one = 2 * 2 * 5 * 5

    @jax.jit
    def inner(x):
        return lax.scan(lambda x, _: (x @ w, None), x, length=4)[0]

    loops = lambda x: lax.scan(lambda x, _: (jax.checkpoint(inner)(x), None), x, length=3)[0]  # noqa: E731
    (found,) = named(operations(loops, jnp.ones((2, 5))), "dot_general")
    assert (found.flops, found.count) == (one, 12)
    fork = lambda x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)  # noqa: E731
    assert [op.flops for op in named(operations(fork, jnp.ones((2, 5))), "dot_general")] == [one, one]
    unused = lambda x: (x @ w, x)[1]  # noqa: E731
    assert total_flops(unused, jnp.ones((2, 5))) == 0


def test_local_work_in_a_shard_map():
    """Two devices, half of the rows each: what one of them computes."""
    mesh = make_mesh(MeshConfig(dp=2), jax.devices()[:2])
    body = lambda x: lax.psum(x @ jnp.ones((8, 8)), "dp")  # noqa: E731
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P())
    assert total_flops(mapped, jnp.ones((4, 8))) == 2 * 2 * 8 * 8


def test_what_cannot_be_counted_is_refused():
    """Arithmetic in a loop that ends when it likes; one that only counts is none."""
    endless = lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: x * 2, x)  # noqa: E731
    with pytest.raises(NotImplementedError, match="unknown length"):
        operations(endless, jnp.ones(2))
    assert total_flops(lambda n: lax.while_loop(lambda n: n < 9, lambda n: n + 1, n), jnp.int32(0)) == 0
    with pytest.raises(NotImplementedError, match="reduce_window"):
        operations(lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "VALID"), jnp.ones(4))


def test_fused_attention(monkeypatch):
    """cuDNN's: 2 queries' batches, 64 queries, 128 keys, 4 heads of 32: 4 b s t n h forward, 10 backward."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)

    def loss(q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    q, k = (jax.ShapeDtypeStruct((2, s, 4, 32), jnp.bfloat16) for s in (64, 128))
    found = operations(jax.grad(loss, argnums=(0, 1, 2)), q, k, k)
    square = 2 * 64 * 128 * 4 * 32
    attention = [op.flops for op in found if op.name.startswith("dot_product_attention")]
    assert attention == [4 * square, 10 * square]


EINSUMS = {
    "bsd,dnh->bsnh": "qkv",
    "bsd,dmh->bsmh": "qkv",
    "bsnh,btnh->bnst": "core",
    "bnst,btnh->bsnh": "core",
    "bnst,bsnh->btnh": "core",
    "bsnh,nhd->bsd": "output",
    "bsd,de->bse": "router",
    "bsd,df->bsf": "mlp_in",
    "gecd,edf->gecf": "mlp_in",
    "bsf,fd->bsd": "mlp_out",
    "gecf,efd->gecd": "mlp_out",
    "nd,vd->nv": "head",
    "nv,vd->nd": "head",
    "nv,nd->vd": "head",
    "bsnh,bsnh->bns": "softmax",
    "gtkd,gtk->gtd": "combine",
}
"""The model's products by the part of `jax5d.costs.flops`; the last two are sums that are spelled as products."""


def products(mesh: dict[str, int] | None = None, **options: Any) -> tuple[Counter, Counter]:
    """FLOPs of the products of a tiny step by part: counted on one device, times devices, and by theory."""
    run = config(mesh, d_model=40, d_ff=144, layers=3, **options)
    proof = trainer(run)
    counted = Counter()
    for op in named(operations(proof.gradients, *proof.arguments), "dot_general"):
        *_, einsum = re.findall(r"[a-z]+,[a-z]+->[a-z]+", op.where)  # jvp and transpose may stand around it
        counted[EINSUMS[einsum]] += op.flops * op.count * run.mesh.size
    theory = Counter(step_flops(run))
    theory["core"] = theory.pop("scores") + theory.pop("values")
    return counted, theory


FOUR = {"microbatches": 4, "loss_chunks": 2, "dtype": "bfloat16"}
SPLIT = {"mesh": {"dp": 2, "tp": 2}, "microbatches": 2, "sequence": True}


MODELS = {"gpt2": {}, "moe": {"moe": True}, "llama": {"architecture": "llama"}}
REMATS = {
    "none": {},
    "selective": {"remat": "selective"},
    "full": {"remat": "full"},
    "bare": {"remat": "full", "save": ()},
    "rich": {"remat": "full", "save": ("qkv", "mlp_in", "attention_sum")},
}
PLACES = {"one": {}, "four": FOUR, "split": SPLIT, "plain": {"attention": "plain"}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("place", PLACES)
def test_step_equals_theory(model, remat, place):
    """Every product of a step, part by part; 3 layers of 8 x 32 tokens, 4 heads of 10.

    Beside them: the row sums of flash attention's backward pass, and an MoE's sums of two experts' results and their
    gradients (three of 2 x 2 x 40 a token), which each tp device makes of its partial sums.
    """
    counted, theory = products(**MODELS[model], **REMATS[remat], **PLACES[place])
    assert counted.pop("softmax", 0) == 3 * 8 * 32 * 2 * 40 * (place != "plain")
    devices = 2 if place == "split" else 1  # tp
    assert counted.pop("combine", 0) == 3 * 8 * 32 * 3 * 2 * 2 * 40 * devices * (model == "moe")
    assert counted == theory


def test_experts_with_capacity_equal_theory():
    """ceil(1.0 x 8 x 2 / 4) = 4 slots of an expert for 8 tokens instead of 8."""
    counted, theory = products(moe=True, remat="full", capacity_factor=1.0, group=8)
    assert {part: counted[part] for part in theory} == theory


def test_full_recomputation_by_hand():
    """Of a layer's seven products four are made again: qkv, scores, values and the MLP's first; not the two last.

    3 layers, 256 tokens, d 40, f 144, sequences of 32.
    """
    more = Counter(products(remat="full")[0])
    more.subtract(products()[0])
    tokens = 3 * 8 * 32
    square = tokens * 2 * 32 * 40
    assert +more == {"qkv": tokens * 2 * 3 * 40 * 40, "core": 2 * square, "mlp_in": tokens * 2 * 40 * 144}


@pytest.mark.parametrize(("attention", "squares"), [("flash", 2), ("plain", 1)])
def test_selective_recomputation_by_hand(attention, squares):
    """Flash attention needs its own result in the backward pass, so scores and values are made again; plain attention
    needs its weights only, so values are not. 3 layers, 256 tokens, d 40, sequences of 32."""
    more = Counter(products(attention=attention, remat="selective")[0])
    more.subtract(products(attention=attention)[0])
    assert +more == {"core": squares * 3 * 8 * 32 * 2 * 32 * 40}
