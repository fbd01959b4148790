"""config.json of `GPT2LMHeadModel` and `LlamaForCausalLM`, and the model that it describes.

What changes what the model computes, and what ours does not do, is refused. What does not (token ids, initialisation,
caching, in which dtype softmax is computed) is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax5d.config import PRESETS, ConfigError, ModelConfig, check_model
from jax5d.layers.norm import EPS
from jax5d.models.hf.names import naming

CLASSES = {"GPT2LMHeadModel": "gpt2", "GPT2Model": "gpt2", "LlamaForCausalLM": "llama", "LlamaModel": "llama"}
"""Our architecture by the name of Hugging Face's class; the bare models differ in their weights' names alone."""

SIZES = {
    "gpt2": {
        "layers": "n_layer",
        "d_model": "n_embd",
        "heads": "n_head",
        "vocab": "vocab_size",
        "context": "n_positions",
    },
    "llama": {
        "layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab": "vocab_size",
        "context": "max_position_embeddings",
    },
}
"""Names of our options there."""

DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")

COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (EPS,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({},),
        "quantization_config": (None,),
    },
    "llama": {
        "hidden_act": ("silu", "swish"),
        "rms_norm_eps": (EPS,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attention_dropout": (0.0,),
        "partial_rotary_factor": (1.0,),
        "quantization_config": (None,),
    },
}
"""Values with which our model computes the same. The first is what a file that does not name it means."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"tie_word_embeddings": True, **dict.fromkeys(DROPOUTS, 0.1)},
    "llama": {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
}
"""What else it then means."""


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The model of a config.json's values. Its name is a preset's, of which no number is left; dtypes are defaults.

    Raises:
        ConfigError: another class, a size that is missing, or a value with which our model would not compute the same.
    """
    architecture = _architecture(values)
    values = DEFAULTS[architecture] | dict(values)
    for key, computed in COMPUTED[architecture].items():
        if values.get(key, computed[0]) not in computed:
            raise _refusal(key, values[key], " or ".join(repr(value) for value in computed))
    sizes = {option: _number(values, key, int) for option, key in SIZES[architecture].items()}
    base = replace(PRESETS["gpt2-tiny"], architecture=architecture, tied=bool(values["tie_word_embeddings"]), **sizes)
    model = _gpt2(base, values) if architecture == "gpt2" else _llama(base, values)
    check_model(model)
    return model


def _architecture(values: Mapping[str, Any]) -> Any:
    named = values.get("architectures") or [values.get("model_type")]
    known = CLASSES | {kind: kind for kind in SIZES}
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in known:
        raise _refusal("architectures", named, "GPT2LMHeadModel or LlamaForCausalLM")
    return known[named[0]]


def _refusal(key: str, value: Any, computed: str) -> ConfigError:
    return ConfigError(f"config.json has {key}={value!r}, which is not computed here; give a model with {computed}")


def _number(values: Mapping[str, Any], key: str, *kinds: type) -> Any:
    if type(values.get(key)) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"config.json has {key}={values.get(key)!r}, which is no {names}; give a whole config.json")
    return values[key]


def _gpt2(base: ModelConfig, values: dict[str, Any]) -> ModelConfig:
    rates = {key: _number(values, key, int, float) for key in DROPOUTS}
    if len(set(rates.values())) != 1:
        raise _refusal("dropout", rates, "one rate for all three")
    d_ff = 4 * base.d_model if values.get("n_inner") is None else _number(values, "n_inner", int)
    return replace(base, d_ff=d_ff, dropout=float(rates["embd_pdrop"]))


def _llama(base: ModelConfig, values: dict[str, Any]) -> ModelConfig:
    scaling = [values.get(key) or {} for key in ("rope_scaling", "rope_parameters")]  # the latter is the newer name
    if not all(isinstance(part, dict) for part in scaling):
        raise _refusal("rope_scaling", scaling, "none")
    rope = scaling[0] | scaling[1]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refusal("rope_scaling", rope, "none")
    width = values.get("head_dim")
    if width is not None and width * base.heads != base.d_model:
        raise _refusal("head_dim", width, f"hidden_size / num_attention_heads = {base.d_model}/{base.heads} of them")
    groups = values.get("num_key_value_heads")
    groups = base.heads if groups is None else _number(values, "num_key_value_heads", int)
    theta = float(_number(values | rope, "rope_theta", int, float))
    return replace(base, kv_heads=0 if groups == base.heads else groups, rope_theta=theta)


def config_json(model: ModelConfig) -> dict[str, Any]:
    """The values of a config.json that describe a model to `from_pretrained`.

    Raises `ConfigError` for a model that neither class computes.
    """
    naming(model)
    values: dict[str, Any] = {"model_type": model.architecture, "torch_dtype": model.param_dtype}
    values |= {key: getattr(model, option) for option, key in SIZES[model.architecture].items()}
    values |= {"tie_word_embeddings": model.tied, "bos_token_id": None, "eos_token_id": None}
    if model.architecture == "gpt2":
        own = {"n_inner": model.d_ff, "activation_function": "gelu_new", "layer_norm_epsilon": EPS}
        return {"architectures": ["GPT2LMHeadModel"], **values, **own, **dict.fromkeys(DROPOUTS, model.dropout)}
    own = {"num_key_value_heads": model.groups, "rope_theta": model.rope_theta, "attention_bias": False}
    return {"architectures": ["LlamaForCausalLM"], **values, **own, "hidden_act": "silu", "rms_norm_eps": EPS}
