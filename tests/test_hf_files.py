"""Hugging Face's folders: files of weights, config.json, and what is refused of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hf_models import MODELS, State, same, state
from tiny import config

from jax5d.config import ConfigError
from jax5d.models import hf

GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
"""As the published GPT-2's."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 32000,
}
"""As a published Llama's of 1.1e9 parameters."""


def split(folder: Path, weights: State) -> dict[str, str]:
    """Two files and their index, as a large model is saved."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = {key: names[i % 2] for i, key in enumerate(weights)}
    for name in names:
        safetensors.numpy.save_file({key: weights[key] for key, file in files.items() if file == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


@pytest.mark.parametrize("name", MODELS)
def test_written_and_read(name: str, tmp_path: Path) -> None:
    """Each bit, from the folder and from the file alone; a tied head is in neither; config.json gives the model."""
    model = config(**MODELS[name]).model
    params = hf.from_state_dict(state(name), model)
    hf.write(tmp_path / "made" / "here", params, model)
    folder = tmp_path / "made" / "here"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert same(hf.read(folder), state(name)) and same(hf.read(folder / "model.safetensors"), state(name))
    assert hf.read_config(folder) == model
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}  # without it some versions refuse the file
    with pytest.raises(ConfigError, match=r"holds model.safetensors, config.json already; give another"):
        hf.write(folder, params, model)


def test_several_files(tmp_path: Path) -> None:
    """B66's weights from two files; one that is gone, cut off, or lacks or adds a tensor is named."""
    files = split(tmp_path, state("gpt2"))
    assert same(hf.read(tmp_path), state("gpt2"))
    key, second = list(files)[1], tmp_path / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    held = hf.read(second)
    for damage in (
        lambda: second.write_bytes(whole[:-4]),
        lambda: safetensors.numpy.save_file({k: x for k, x in held.items() if k != key}, second),
        lambda: safetensors.numpy.save_file(held | {"added": np.ones(2)}, second),
        second.unlink,
    ):
        damage()
        with pytest.raises(ConfigError, match="model-00002-of-00002") as error:
            hf.read(tmp_path)
        assert "\n" not in str(error.value)
    for index in ("{}", '{"weight_map": {"a": "../a"}}', '{"weight_map": {"a": 1}}', "[]", "{"):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
            hf.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"PK\x03\x04" + bytes(100), b"\xff" * 64])
def test_no_safetensors_file(content: bytes, tmp_path: Path) -> None:
    """An empty file, pickles old and new, noise: one line, nothing is run."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is no whole safetensors file") as error:
        hf.read(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        hf.read(tmp_path)
    with pytest.raises(ConfigError, match=r"absent is no whole safetensors file"):
        hf.read(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        hf.read_config(tmp_path)


def test_8_bit_floats(tmp_path: Path) -> None:
    """NumPy has none; the file is whole."""
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(ConfigError, match=r"model\.safetensors holds numbers.*float8_e4m3fn"):
        hf.read(tmp_path)


def test_published_configurations() -> None:
    """What the two say in words, in our options; d_ff of GPT-2 is 4 x 768 where the file says nothing."""
    gpt2, llama = hf.model_config(GPT2), hf.model_config(LLAMA)
    sizes = lambda m: (m.architecture, m.layers, m.d_model, m.heads, m.d_ff, m.vocab, m.context)  # noqa: E731
    assert sizes(gpt2) == ("gpt2", 12, 768, 12, 3072, 50257, 1024)
    assert (gpt2.tied, gpt2.dropout, gpt2.experts) == (True, 0.1, 0)
    assert sizes(llama) == ("llama", 22, 2048, 32, 5632, 32000, 2048)
    assert (llama.tied, llama.dropout, llama.kv_heads, llama.rope_theta) == (False, 0.0, 4, 10000.0)
    assert hf.model_config(GPT2 | {"n_inner": 1000, "tie_word_embeddings": False}).d_ff == 1000
    assert hf.model_config(LLAMA | {"rope_theta": 500000}).rope_theta == 5e5
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "head_dim": 64}
    assert hf.model_config(LLAMA | newer).rope_theta == 5e5
    assert hf.model_config(LLAMA | {"num_key_value_heads": None}).groups == 32


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer_norm_epsilon=1e-06": (GPT2, {"layer_norm_epsilon": 1e-6}),
    "activation_function='gelu'": (GPT2, {"activation_function": "gelu"}),
    "scale_attn_weights=False": (GPT2, {"scale_attn_weights": False}),
    "scale_attn_by_inverse_layer_idx=True": (GPT2, {"scale_attn_by_inverse_layer_idx": True}),
    "add_cross_attention=True": (GPT2, {"add_cross_attention": True}),
    "'attn_pdrop': 0.0": (GPT2, {"attn_pdrop": 0.0}),
    "n_layer=None": (GPT2, {"n_layer": None}),
    "n_embd='768'": (GPT2, {"n_embd": "768"}),
    "model.heads=7": (GPT2, {"n_head": 7}),
    "GPT2ForSequenceClassification": (GPT2, {"architectures": ["GPT2ForSequenceClassification"]}),
    "MistralForCausalLM": (LLAMA, {"architectures": ["MistralForCausalLM"]}),
    "rms_norm_eps=1e-06": (LLAMA, {"rms_norm_eps": 1e-6}),
    "hidden_act='gelu'": (LLAMA, {"hidden_act": "gelu"}),
    "attention_bias=True": (LLAMA, {"attention_bias": True}),
    "mlp_bias=True": (LLAMA, {"mlp_bias": True}),
    "attention_dropout=0.1": (LLAMA, {"attention_dropout": 0.1}),
    "head_dim=128": (LLAMA, {"head_dim": 128}),
    "model.kv_heads=5": (LLAMA, {"num_key_value_heads": 5}),
    "'type': 'linear'": (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "'rope_type': 'llama3'": (LLAMA, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}),
    "partial_rotary_factor=0.5": (LLAMA, {"partial_rotary_factor": 0.5}),
    "quantization_config=": (LLAMA, {"quantization_config": {"quant_method": "gptq"}}),
}
"""What the refusal names, the file, and what was changed in it."""


@pytest.mark.parametrize(("says", "case"), REFUSED.items(), ids=REFUSED)
def test_refused_configurations(says: str, case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Whatever would be computed otherwise than by Hugging Face's class."""
    values, change = case
    with pytest.raises(ConfigError) as error:
        hf.model_config(values | change)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_epsilon_that_is_not_named() -> None:
    """Hugging Face's Llama then takes 1e-6."""
    with pytest.raises(ConfigError, match="rms_norm_eps=1e-06"):
        hf.model_config({key: value for key, value in LLAMA.items() if key != "rms_norm_eps"})
