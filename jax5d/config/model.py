"""What a model is, by its numbers; the presets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from jax5d.config.errors import ConfigError, at_least, check_choices, divides


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: GPT-2, with `experts` > 0 an MoE of the same skeleton, or Llama."""

    name: str = "gpt2-tiny"
    """Preset that gives the other model options their defaults."""
    architecture: Literal["gpt2", "llama"] = "gpt2"
    """GPT-2: learned positions, layer norm, GELU, biases. Llama: rotary positions, RMS norm, SwiGLU, no biases."""
    tied: bool = True
    """Share the token table with the head; otherwise the head has a second one."""
    layers: int = 4
    """Transformer blocks."""
    d_model: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; each has d_model / heads dimensions."""
    kv_heads: int = 0
    """Heads of keys and values, each of which serves heads / kv_heads query heads; 0 is as many as heads."""
    d_ff: int = 512
    """Width of the MLP, or of each expert."""
    vocab: int = 257
    """Vocabulary size; any size, the shards are padded and masked."""
    context: int = 128
    """Longest sequence, in tokens; GPT-2 learns as many positions."""
    rope_theta: float = 10000.0
    """Base of the frequencies of Llama's rotary positions."""
    dropout: float = 0.0
    """Dropout rate after the embedding, on attention weights and on both residual branches."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the computation."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stored parameters and of the optimizer's state; bfloat16 is the pure 16-bit run."""
    attention: Literal["flash", "plain"] = "flash"
    """Fused attention, whose scores never exist at once; or the textbook's, which keeps [s, s] of them per head."""
    experts: int = 0
    """Experts per layer; 0 is a dense MLP."""
    top_k: int = 2
    """Experts that each token is sent to."""
    capacity_factor: float = 0.0
    """Slots per expert over the even share of its group; 0 is dropless (every token finds a slot)."""
    group: int = 0
    """Tokens of a sequence that share an expert's capacity; 0, only when dropless, is a context shard's whole part."""
    aux_coef: float = 0.01
    """Weight of the load-balancing loss (Switch Transformer, eq. 4)."""
    z_coef: float = 0.001
    """Weight of the router z-loss (ST-MoE, eq. 5)."""

    @property
    def head_dim(self) -> int:
        """Dimensions of one attention head."""
        return self.d_model // self.heads

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads


def _gpt2(name: str, layers: int, d_model: int, heads: int) -> ModelConfig:
    return ModelConfig(
        name=name, layers=layers, d_model=d_model, heads=heads, d_ff=4 * d_model, vocab=50257, context=1024
    )


def _llama(name: str, layers: int, d_model: int, heads: int, d_ff: int, *, tied: bool) -> ModelConfig:
    """One of the models that the Ultra-Scale Playbook measures."""
    return ModelConfig(
        name=name,
        architecture="llama",
        tied=tied,
        layers=layers,
        d_model=d_model,
        heads=heads,
        d_ff=d_ff,
        vocab=131072,
        context=4096,
    )


PRESETS: dict[str, ModelConfig] = {
    "gpt2-tiny": ModelConfig(),
    "gpt2": _gpt2("gpt2", 12, 768, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 24, 1024, 16),
    "gpt2-large": _gpt2("gpt2-large", 36, 1280, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 48, 1600, 25),
    "moe-tiny": ModelConfig(name="moe-tiny", d_ff=256, experts=4),
    "moe-8x124m": dataclasses.replace(_gpt2("moe-8x124m", 12, 768, 12), experts=8, capacity_factor=1.25, group=256),
    "llama-tiny": ModelConfig(name="llama-tiny", architecture="llama", d_ff=344),
    "llama-1b": _llama("llama-1b", 16, 2048, 32, 8192, tied=True),
    "llama-3b": _llama("llama-3b", 28, 3072, 32, 8192, tied=True),
    "llama-9b": _llama("llama-9b", 32, 4096, 32, 14336, tied=False),
    "llama-80b": _llama("llama-80b", 80, 8192, 64, 28672, tied=False),
}


def check_model(model: ModelConfig) -> None:
    """Raise `ConfigError` where the model's own numbers do not fit together."""
    check_choices("model", model)
    if model.name not in PRESETS:
        raise ConfigError(f"model.name={model.name!r} is no preset; choose one of {', '.join(PRESETS)}")
    at_least(1, model__layers=model.layers, model__d_model=model.d_model, model__heads=model.heads)
    at_least(1, model__d_ff=model.d_ff, model__vocab=model.vocab, model__context=model.context)
    at_least(0, model__experts=model.experts, model__group=model.group, model__aux_coef=model.aux_coef)
    at_least(0, model__capacity_factor=model.capacity_factor, model__z_coef=model.z_coef)
    divides("model.heads", model.heads, "model.d_model", model.d_model, "change one of them")
    at_least(0, model__kv_heads=model.kv_heads)
    divides(
        "model.kv_heads", model.groups, "model.heads", model.heads, "use a number of kv heads that divides the heads"
    )
    if model.architecture == "llama":
        _check_llama(model)
    if not 0 <= model.dropout < 1:
        raise ConfigError(f"model.dropout={model.dropout} is outside [0, 1); give a rate such as 0.1")
    if model.param_dtype == "bfloat16" != model.dtype:
        raise ConfigError(
            f"model.param_dtype=bfloat16 with model.dtype={model.dtype} would compute in more than it stores; use "
            "--model.dtype bfloat16, or --model.param_dtype float32"
        )
    if model.experts and not 1 <= model.top_k <= model.experts:
        raise ConfigError(
            f"model.top_k={model.top_k} is outside 1..{model.experts} (model.experts); a token goes to that many"
        )
    if model.experts and model.capacity_factor and not model.group:
        raise ConfigError(
            f"model.capacity_factor={model.capacity_factor} needs model.group, the tokens that share a "
            "capacity; write for example --model.group 64"
        )


def _check_llama(model: ModelConfig) -> None:
    at_least(1, model__rope_theta=model.rope_theta)
    if model.experts:
        raise ConfigError(
            f"model.experts={model.experts} with model.architecture=llama: experts are GPT-2's MLPs; use "
            "--model.experts 0 or --model.architecture gpt2"
        )
    if model.head_dim % 2:
        raise ConfigError(
            f"model.d_model/heads = {model.d_model}/{model.heads} = {model.head_dim} dims of a head do not pair up for "
            "model.architecture=llama, whose positions turn pairs; change one of the two"
        )
