"""Weights under Hugging Face's names: `GPT2LMHeadModel` and `LlamaForCausalLM`.

For each architecture one table says which parts of our parameters a tensor is made of. The parts are NumPy views, so
that the table is read in both directions: import writes into them, export reads from them. GPT-2's Conv1D stores a
matrix (in, out), as we do; Llama's Linear stores (out, in). Rotary positions pair dims as ours do, so nothing is
permuted.

Dims: d d_model, n heads, h head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jax5d.config import ConfigError, ModelConfig
from jax5d.models.weights import host_shapes, on_host

Tree = Any
State = Mapping[str, np.ndarray]
Parts = dict[str, list[np.ndarray]]
"""The views that a tensor consists of, side by side along its last dim, by the tensor's name."""

HEAD = "lm_head.weight"
DTYPES = ("float32", "bfloat16", "float16")


def _columns(w: np.ndarray) -> np.ndarray:
    """[d, n, h] -> [d, n h], and a bias [n, h] -> [n h]; a view."""
    return w.reshape(*w.shape[:-2], -1, copy=False)


def _rows(w: np.ndarray) -> np.ndarray:
    """[n, h, d] -> [n h, d], a view."""
    return w.reshape(-1, w.shape[-1], copy=False)


def _gpt2_outer(p: Tree) -> Parts:
    norm = p["norm_f"]
    return {
        "wte.weight": [p["wte"]],
        "wpe.weight": [p["wpe"]],
        "ln_f.weight": [norm["scale"]],
        "ln_f.bias": [norm["bias"]],
    }


def _gpt2_block(p: Tree) -> Parts:
    a, mlp = p["attention"], p["mlp"]
    return {
        "ln_1.weight": [p["norm_1"]["scale"]],
        "ln_1.bias": [p["norm_1"]["bias"]],
        "attn.c_attn.weight": [_columns(w) for w in (a["w_q"], a["w_kv"][0], a["w_kv"][1])],
        "attn.c_attn.bias": [_columns(b) for b in (a["b_q"], a["b_kv"][0], a["b_kv"][1])],
        "attn.c_proj.weight": [_rows(a["w_out"])],
        "attn.c_proj.bias": [a["b_out"]],
        "ln_2.weight": [p["norm_2"]["scale"]],
        "ln_2.bias": [p["norm_2"]["bias"]],
        "mlp.c_fc.weight": [mlp["w_in"]],
        "mlp.c_fc.bias": [mlp["b_in"]],
        "mlp.c_proj.weight": [mlp["w_out"]],
        "mlp.c_proj.bias": [mlp["b_out"]],
    }


def _llama_outer(p: Tree) -> Parts:
    return {"embed_tokens.weight": [p["wte"]], "norm.weight": [p["norm_f"]["scale"]]}


def _llama_block(p: Tree) -> Parts:
    a, mlp = p["attention"], p["mlp"]
    return {
        "input_layernorm.weight": [p["norm_1"]["scale"]],
        "self_attn.q_proj.weight": [_columns(a["w_q"]).T],
        "self_attn.k_proj.weight": [_columns(a["w_kv"][0]).T],
        "self_attn.v_proj.weight": [_columns(a["w_kv"][1]).T],
        "self_attn.o_proj.weight": [_rows(a["w_out"]).T],
        "post_attention_layernorm.weight": [p["norm_2"]["scale"]],
        "mlp.gate_proj.weight": [mlp["w_gate"].T],
        "mlp.up_proj.weight": [mlp["w_up"].T],
        "mlp.down_proj.weight": [mlp["w_out"].T],
    }


class Naming(NamedTuple):
    """How an architecture's tensors are called."""

    prefix: str
    """Before every name but the head's; the bare model's weights are saved without it."""
    blocks: str
    """Before a layer's number."""
    outer: Callable[[Tree], Parts]
    block: Callable[[Tree], Parts]
    buffers: str
    """Pattern of what some versions save besides, and which is no weight."""
    table: str
    """The token table."""
    sizes: dict[str, tuple[str, int]]
    """Where the model's sizes are seen: tensor and dim, by option."""


NAMINGS = {
    "gpt2": Naming(
        prefix="transformer.",
        blocks="h",
        outer=_gpt2_outer,
        block=_gpt2_block,
        buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
        table="wte.weight",
        sizes={
            "vocab": ("wte.weight", 0),
            "d_model": ("wte.weight", 1),
            "context": ("wpe.weight", 0),
            "d_ff": ("h.0.mlp.c_fc.bias", 0),
        },
    ),
    "llama": Naming(
        prefix="model.",
        blocks="layers",
        outer=_llama_outer,
        block=_llama_block,
        buffers=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
        table="embed_tokens.weight",
        sizes={"vocab": ("embed_tokens.weight", 0), "d_model": ("embed_tokens.weight", 1)},
    ),
}
"""By the architecture's name in the configuration."""


def naming(model: ModelConfig) -> Naming:
    """The naming of a model. Raises `ConfigError` for one that Hugging Face's two classes do not compute."""
    if model.experts:
        raise ConfigError(
            f"model.experts={model.experts}: weights of Hugging Face are of dense models; write --model.experts 0"
        )
    if model.architecture == "gpt2" and model.groups != model.heads:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads} with model.architecture=gpt2: Hugging Face's GPT-2 has as many as "
            f"model.heads={model.heads}; write --model.kv_heads 0"
        )
    return NAMINGS[model.architecture]


def from_state_dict(state: State, model: ModelConfig) -> Tree:
    """Parameters on the host, at full shape without padding, in `model.param_dtype`: float32, or bfloat16.

    Names may come with or without their prefix ("transformer.", "model."), with or without buffers (GPT-2's attn.bias
    and attn.masked_bias, Llama's inv_freq), which are not read, and with or without a tied model's lm_head.weight. How
    many heads GPT-2 has, Llama's context and the base of its rotary positions cannot be seen in the weights: take them
    from config.json (`hf.read_config`).

    Args:
        state: arrays by name, float32, bfloat16 or float16; widening is exact.
        model: what the weights belong to.

    Raises:
        ConfigError: a name is missing or unknown, a size, shape or dtype differs, or the head of a tied model is not
            its token table. Names and both values.
    """
    names = naming(model)
    prefix = names.prefix if any(key.startswith(names.prefix) for key in state) else ""
    params = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), host_shapes(model))
    wanted = {key if key == HEAD else prefix + key: parts for key, parts in _parts(params, model).items()}
    given = {
        key: np.asarray(x) for key, x in state.items() if not re.fullmatch(names.buffers, key.removeprefix(prefix))
    }
    _check_sizes({key.removeprefix(prefix): x.shape for key, x in given.items()}, names, model)
    _check_names(given, wanted, model)
    for key, parts in wanted.items():
        _check_tensor(key, given[key], parts)
        for columns, part in _beside(given[key], parts):
            part[...] = columns
    if model.tied and HEAD in given:
        _check_tied(given[HEAD], params["outer"]["wte"], prefix + names.table)
    return params


def to_state_dict(params: Tree, model: ModelConfig) -> dict[str, np.ndarray]:
    """Arrays by name as `state_dict()` of Hugging Face's class has them, in the dtype of the parameters.

    With prefix and without buffers. lm_head.weight is always there; a tied model's is the very array of the token
    table. The way back from `from_state_dict` is exact to the bit.

    Args:
        params: of any mesh, or on the host; what padding they have is left out, so there are `model.vocab` rows.
        model: what they belong to.

    Raises:
        ConfigError: the parameters are of another model, or of one that Hugging Face does not have.
    """
    names = naming(model)
    state = {}
    for key, parts in _parts(on_host(params, model), model).items():
        whole = np.empty((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)), parts[0].dtype)
        for columns, part in _beside(whole, parts):
            columns[...] = part
        state[key if key == HEAD else names.prefix + key] = whole
    if model.tied:
        state[HEAD] = state[names.prefix + names.table]
    return state


def _parts(params: Tree, model: ModelConfig) -> Parts:
    """The views into host parameters that each tensor consists of, by its name without prefix."""
    names, outer = naming(model), params["outer"]
    parts = names.outer(outer)
    for i in range(model.layers):
        block = names.block(jax.tree.map(lambda x: x[i], params["blocks"]))  # noqa: B023
        parts |= {f"{names.blocks}.{i}.{key}": views for key, views in block.items()}
    return parts if model.tied else parts | {HEAD: [outer["head"]]}


def _beside(whole: np.ndarray, parts: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each part, behind its columns of the whole."""
    ends = np.cumsum([part.shape[-1] for part in parts])
    return zip(np.split(whole, ends[:-1], axis=-1), parts, strict=True)


def _check_sizes(shapes: dict[str, tuple[int, ...]], names: Naming, model: ModelConfig) -> None:
    """Name the options that differ, before the names and shapes that follow from them."""
    found = {option: shapes[key][dim] for option, (key, dim) in names.sizes.items() if len(shapes.get(key, ())) > dim}
    if numbers := [int(m[1]) for key in shapes if (m := re.match(rf"{names.blocks}\.(\d+)\.", key))]:
        found["layers"] = max(numbers) + 1
    other = {option: size for option, size in found.items() if size != getattr(model, option)}
    if other:
        differ = ", ".join(
            f"{option} is {size}, model.{option}={getattr(model, option)}" for option, size in other.items()
        )
        mend = " ".join(f"--model.{name} {size}" for name, size in other.items())
        raise ConfigError(f"the weights are of another model: {differ}; write {mend}")


def _check_names(given: State, wanted: Parts, model: ModelConfig) -> None:
    missing = [key for key in wanted if key not in given]
    unknown = [key for key in given if key not in wanted and not (model.tied and key == HEAD)]
    if missing == [HEAD]:
        raise ConfigError(f"the weights have no {HEAD}, but model.tied=False needs it; write --model.tied True")
    problems = [f"{what} {_listed(keys)}" for what, keys in (("lack", missing), ("have unknown", unknown)) if keys]
    if problems:
        raise ConfigError(
            f"the weights {' and '.join(problems)}; give weights of model.architecture={model.architecture}, whole"
        )


def _listed(keys: Iterable[str], most: int = 8) -> str:
    keys = list(keys)
    return ", ".join(keys[:most]) + (f", ... ({len(keys)} in all)" if len(keys) > most else "")


def _check_tensor(key: str, x: np.ndarray, parts: list[np.ndarray]) -> None:
    shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    if x.dtype.name not in DTYPES:
        raise ConfigError(f"{key} is {x.dtype.name}; give weights in {' or '.join(DTYPES)}")
    if x.shape != shape:
        mend = "transpose it" if x.shape == shape[::-1] else "give weights of this model"
        raise ConfigError(f"{key} has shape {x.shape}, but the model's is {shape}; {mend}")


def _check_tied(head: np.ndarray, table: np.ndarray, key: str) -> None:
    if head.shape != table.shape or not np.array_equal(head.astype(table.dtype), table, equal_nan=True):
        raise ConfigError(
            f"{HEAD} {head.shape} is not {key} {table.shape}, but model.tied=True; write --model.tied False"
        )
