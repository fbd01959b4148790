"""Weights of Hugging Face's GPT-2 and Llama: what the model computes with them, and that they come back to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import reference_hf
from hf_models import CONTEXT, HEADS, LAYERS, MODELS, TIED, VOCAB, D, State, same, state
from jax.sharding import PartitionSpec as P
from tiny import config, host, ids, trainer

from jax5d.config import ConfigError, RunConfig
from jax5d.models import hf
from jax5d.models.build import BATCH_SPEC
from jax5d.models.weights import on_host, on_mesh
from jax5d.parallel import pipeline
from jax5d.parallel.schedules import forward_only
from jax5d.train.step import TrainState


def imported(run: RunConfig, weights: State) -> TrainState:
    """The state before the first step on the run's mesh."""
    proof = trainer(run)
    params = hf.from_state_dict(weights, run.model)
    return proof.begin(on_mesh(params, proof.shapes.params, proof.shardings.params))


def logits(run: RunConfig, params: Any) -> np.ndarray:
    """Float32 [8, 32, vocab] of `tiny.ids` on the run's mesh."""
    proof = trainer(run)
    model = proof.model

    def head(outer: Any, y: jax.Array, m: jax.Array) -> jax.Array:
        del m
        return model.logits(outer, y)

    def body(params: Any, inputs: jax.Array) -> jax.Array:
        batch = {"inputs": inputs}
        work = replace(model.work(batch, jax.random.key(0), 8), head=head)
        stage = forward_only(run.mesh.pp, 1)
        return pipeline.evaluate(stage, work, proof.zero.opened(params), model.stream_zeros(batch)).head

    specs = (proof.specs.params, BATCH_SPEC)
    out = P(("dp", "ep"), "cp", ("pp", "tp"))
    mapped = jax.shard_map(body, mesh=proof.mesh, in_specs=specs, out_specs=out, check_vma=True)
    return np.asarray(jax.jit(mapped)(params, ids()[None, :, :-1]))[..., : run.model.vocab]


def expected(run: RunConfig, weights: State, **options: Any) -> np.ndarray:
    """The same from `reference_hf`, in float64."""
    if run.model.architecture == "llama":
        options["theta"] = run.model.rope_theta
    return getattr(reference_hf, run.model.architecture)(weights, ids()[:, :-1], HEADS, **options)


@pytest.mark.parametrize("mesh", [{}, {"pp": 2, "tp": 2}], ids=["one", "pp2tp2"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, mesh: dict[str, int]) -> None:
    """B66: every logit within 1e-5 of the plain model's, of up to 20 in size."""
    run = config(mesh, **MODELS[name])
    want = expected(run, state(name))
    assert 2 < np.abs(want).max() < 20
    np.testing.assert_allclose(logits(run, imported(run, state(name)).params), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("key", ["transformer.h.0.attn.c_proj.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_transposed_square_matrix_would_be_seen(key: str) -> None:
    """It has the right shape, and moves the plain model's logits by 10 000 times what `test_logits` allows."""
    name = "gpt2" if "attn.c_proj" in key else "llama"
    run, weights = config(**MODELS[name]), state(name)
    turned = weights | {key: weights[key].T}
    assert np.abs(expected(run, turned) - expected(run, weights)).max() > 0.1


@pytest.mark.parametrize("name", ["gpt2-untied", "llama"])
def test_epsilon(name: str) -> None:
    """B66: tokens of variance 1e-6. The first norm's gain is 0.3015; with an epsilon of 1e-6 it would be 0.7071."""
    run, weights = config(**MODELS[name]), state(name)
    tables = [key for key in weights if key.split(".")[1] in ("wte", "wpe", "embed_tokens")]
    weights |= {key: weights[key] * np.float32(1e-3 / weights[key].std() / len(tables) ** 0.5) for key in tables}
    want = expected(run, weights)
    np.testing.assert_allclose(logits(run, imported(run, weights).params), want, rtol=0, atol=1e-5)
    assert np.abs(expected(run, weights, eps=1e-6) - want).max() > 0.1


def test_gain_of_the_first_norm() -> None:
    """What those tokens meet: sqrt(1e-6 / (1e-6 + 1e-5)) = 0.3015 of rows 1e-3 (1, -1, 1, ...)."""
    row = 1e-3 * np.tile([1.0, -1.0], 16)
    for centred in (True, False):
        assert reference_hf.normalised(row, 1e-5, centred)[0] == pytest.approx(0.3015, abs=5e-5)
        assert reference_hf.normalised(row, 1e-6, centred)[0] == pytest.approx(0.7071, abs=5e-5)


def variants(name: str) -> dict[str, State]:
    """All the ways in which one model's weights are met."""
    weights, gpt2 = state(name), name.startswith("gpt2")
    prefix, table = ("transformer.", "wte.weight") if gpt2 else ("model.", "embed_tokens.weight")
    found = {}
    for bare in (False, True):
        start = "" if bare else prefix
        plain = {start + key.removeprefix(prefix) if key != "lm_head.weight" else key: x for key, x in weights.items()}
        mask = np.tril(np.ones((1, 1, CONTEXT, CONTEXT), bool))
        buffers = {f"{start}h.{i}.attn.bias": mask for i in range(LAYERS)}
        buffers |= {f"{start}h.{i}.attn.masked_bias": np.float32(-1e4) for i in range(LAYERS)}
        if not gpt2:
            inverse = np.ones(D // HEADS // 2, np.float32)
            buffers = {f"{start}layers.{i}.self_attn.rotary_emb.inv_freq": inverse for i in range(LAYERS)}
            buffers |= {f"{start}rotary_emb.inv_freq": inverse}
        for with_buffers in (False, True):
            for head in (False, True):
                tied = {"lm_head.weight": plain[start + table].copy()} if "lm_head.weight" not in weights else {}
                key = f"{'bare' if bare else 'prefix'}{'+buffers' * with_buffers}{'+head' * head}"
                found[key] = plain | (buffers if with_buffers else {}) | (tied if head else {})
    return found


@pytest.mark.parametrize("name", MODELS)
def test_variants_and_the_way_back(name: str) -> None:
    """B66: prefix, buffers and a tied head or not: the same parameters; and out again every bit, the head included."""
    model = config(**MODELS[name]).model
    prefix, table = ("transformer.", "wte.weight") if "gpt2" in name else ("model.", "embed_tokens.weight")
    odd = state(name) | {prefix + table: state(name)[prefix + table].copy()}
    odd[prefix + table][0, :4] = [-0.0, np.nan, np.inf, 1e-42]  # bits that arithmetic would lose
    params = hf.from_state_dict(odd, model)
    back = hf.to_state_dict(params, model)
    head = odd[prefix + table] if model.tied else odd["lm_head.weight"]
    assert same(back, odd | {"lm_head.weight": head})
    assert (back["lm_head.weight"] is back[prefix + table]) == model.tied
    assert all(x.flags.c_contiguous for x in back.values())
    assert same(hf.from_state_dict(back, model), params)
    canonical = hf.from_state_dict(state(name), model)
    assert all(same(hf.from_state_dict(given, model), canonical) for given in variants(name).values())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_16_bits(name: str, dtype: Any) -> None:
    """Widened exactly to float32; a model that stores bfloat16 keeps bfloat16 as it is, there and back."""
    model = config(**MODELS[name]).model
    short = {key: x.astype(dtype) for key, x in state(name).items()}
    wide = {key: x.astype(np.float32) for key, x in short.items()}
    assert same(hf.from_state_dict(short, model), hf.from_state_dict(wide, model))
    if dtype is ml_dtypes.bfloat16:
        model = replace(model, dtype="bfloat16", param_dtype="bfloat16")
        back = hf.to_state_dict(hf.from_state_dict(short, model), model)
        assert same({key: x for key, x in back.items() if key in short}, short)


@pytest.mark.parametrize("tied", [True, False])
def test_shards_after_import(tied: bool) -> None:
    """B12: tp 4, 96 rows: each device is given 24 of them, begins with them, and has no whole table."""
    run = config({"tp": 4}, layers=LAYERS, tied=tied)
    weights = {
        key: x[:96] if x.shape == (VOCAB, D) else x for key, x in state("gpt2" if tied else "gpt2-untied").items()
    }
    proof = trainer(run)
    placed = on_mesh(hf.from_state_dict(weights, run.model), proof.shapes.params, proof.shardings.params)
    begun = proof.begin(placed)
    for params in (placed, begun.params):
        for leaf in ("wte",) if tied else ("wte", "head"):
            shards = params["outer"][leaf].addressable_shards
            assert [shard.data.shape for shard in shards] == [(24, D)] * 4
            whole = weights["transformer.wte.weight" if leaf == "wte" else "lm_head.weight"]
            assert all(np.array_equal(shard.data, whole[shard.index]) for shard in shards)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"tp": 4}, {}),
        ({"pp": 2, "tp": 2}, {}),
        ({"dp": 3}, {"zero": 3, "global_batch": 6}),
        ({"dp": 3}, {"zero": 1, "global_batch": 6}),
    ],
    ids=["tp4", "pp2tp2", "zero3", "zero1"],
)
@pytest.mark.parametrize("name", ["gpt2-untied", "llama"])
def test_export_from_a_mesh(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Whatever the padding: 97 rows, each bit. 100 or 98 rows lie on the mesh, and under ZeRO d_model's 32 are 33."""
    run = config(mesh, **MODELS[name], **options)
    begun = imported(run, state(name))
    padded = host(begun.params)
    assert same(hf.to_state_dict(begun.params, run.model), state(name))
    assert same(hf.to_state_dict(padded, run.model), state(name))
    if "tp" in mesh:
        padded["outer"]["head"][VOCAB:] = 100  # what padding holds is of no concern
        assert same(hf.to_state_dict(padded, run.model), state(name))


def without(key: str) -> Any:
    return lambda weights: {k: x for k, x in weights.items() if k != key}


def changed(key: str, change: Any) -> Any:
    return lambda weights: weights | {key: change(weights.get(key))}


C_FC, WTE, Q = "transformer.h.1.mlp.c_fc.weight", "transformer.wte.weight", "model.layers.0.self_attn.q_proj.weight"

REFUSED: dict[str, tuple[str, Any, list[str]]] = {
    "missing": ("gpt2", without(C_FC), [f"lack {C_FC}"]),
    "unknown": (
        "gpt2",
        changed("transformer.score.weight", lambda x: np.ones(2)),
        ["unknown transformer.score"],
    ),
    "another prefix": ("gpt2", lambda w: {f"_orig_mod.{k}": x for k, x in w.items()}, ["wte.weight", "(28 in all)"]),
    "some prefixed": ("gpt2", lambda w: {k.removeprefix("transformer.h.0."): x for k, x in w.items()}, ["ln_1.weight"]),
    "twice": ("gpt2", lambda w: w | {"wte.weight": w[WTE]}, ["have unknown wte.weight"]),
    "of llama": (
        "gpt2",
        lambda w: state("llama"),
        ["lack wte.weight", "unknown model.layers.0.input_"],
    ),
    "layers": ("gpt2", lambda w: {k: x for k, x in w.items() if ".h.1." not in k}, ["layers is 1", "model.layers=2"]),
    "vocab": ("gpt2", changed(WTE, lambda x: x[:96]), ["vocab is 96", "model.vocab=97", "--model.vocab 96"]),
    "context": ("gpt2", changed("transformer.wpe.weight", lambda x: x[:16]), ["context is 16", "model.context=32"]),
    "width": ("gpt2", changed(WTE, lambda x: x[:, :16]), ["d_model is 16", "model.d_model=32"]),
    "d_ff": ("gpt2", changed("transformer.h.0.mlp.c_fc.bias", lambda x: x[:64]), ["d_ff is 64", "model.d_ff=128"]),
    "transposed": ("gpt2", changed(C_FC, np.transpose), [C_FC, "(128, 32)", "(32, 128)", "transpose it"]),
    "shape": ("gpt2", changed("transformer.ln_f.bias", lambda x: x[:31]), ["transformer.ln_f.bias", "(31,)", "(32,)"]),
    "integers": ("gpt2", changed(C_FC, lambda x: x.astype(np.int8)), [C_FC, "int8", "float32"]),
    "doubles": ("gpt2", changed(C_FC, lambda x: x.astype(np.float64)), [C_FC, "float64", "float32"]),
    "head": ("gpt2", changed("lm_head.weight", lambda x: state("gpt2")[WTE] + 1), ["lm_head.weight", WTE, "tied=True"]),
    "headless": ("llama", without("lm_head.weight"), ["no lm_head.weight", "tied=False"]),
    "kv heads": ("llama", lambda w: w | {Q.replace("q", "k"): w[Q]}, ["k_proj.weight", "(32, 32)", "(16, 32)"]),
    "bias": (
        "llama",
        changed(Q.replace("weight", "bias"), lambda x: np.ones(D)),
        ["unknown model.layers.0.self_"],
    ),
    "nothing": ("llama", lambda w: {}, ["lack embed_tokens.weight", "(21 in all)"]),
}
"""Model, what is done to its weights, and what the refusal says."""


@pytest.mark.parametrize(("name", "change", "says"), REFUSED.values(), ids=REFUSED)
def test_refused_weights(name: str, change: Any, says: list[str]) -> None:
    """B66: in one line, by name and by both values."""
    with pytest.raises(ConfigError) as error:
        hf.from_state_dict(change(dict(state(name))), config(**MODELS[name]).model)
    assert all(part in str(error.value) for part in says) and "\n" not in str(error.value)


def test_refused_models() -> None:
    """Hugging Face's two classes have no experts, and GPT-2 no groups of heads; other parameters are not cut to fit."""
    for options in ({"moe": True}, {"kv_heads": 2}):
        model = config(**options).model
        for ask in (lambda m: hf.from_state_dict({}, m), hf.config_json, lambda m: hf.to_state_dict({}, m)):
            with pytest.raises(ConfigError, match=r"model\.(experts=4|kv_heads=2)"):
                ask(model)
    model = config(**TIED).model
    params = hf.from_state_dict(state("gpt2"), model)
    for other in ({"layers": 1}, {"d_ff": 64}, {"context": 16}, {"tied": False}, {"vocab": 98}):
        with pytest.raises(ConfigError, match="give the model that"):
            hf.to_state_dict(params, replace(model, **other))
    proof = trainer(config({"tp": 4}, **TIED | {"layers": 4}))
    with pytest.raises(ConfigError, match=r"blocks\.attention\.b_kv has shape \(2, 2, 4, 8\).*\(4, 2, 4, 8\)"):
        on_mesh(params, proof.shapes.params, proof.shardings.params)
    assert same(on_host(params, model), params)
