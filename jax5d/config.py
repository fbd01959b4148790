"""What a run is: frozen dataclasses, model presets, and every refusal that needs no file and no device.

The dataclasses are the single source of the command line's options, of `config.yaml` and of `result.json`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

PROFILE_LIMIT = 20
"""Most steps of one profile: a trace grows with each, and viewers cut long ones off without a word."""

AXES = ("pp", "dp", "ep", "cp", "tp")
"""Mesh axes, outermost first; tp is innermost so that its devices are neighbours on one host."""


class ConfigError(ValueError):
    """The user's input cannot be run. The message is one line that names the values and the mend."""


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the five mesh axes, outermost first."""

    pp: int = 1
    """Pipeline parallel: stages that split the layers."""
    dp: int = 1
    """Data parallel: replicas that split the batch."""
    ep: int = 1
    """Expert parallel: splits the batch, and the experts of an MoE."""
    cp: int = 1
    """Context parallel: splits the sequence; attention goes round a ring."""
    tp: int = 1
    """Tensor parallel: splits heads, MLP width and vocabulary; innermost, so neighbours share a host."""

    @property
    def size(self) -> int:
        """Devices in the mesh."""
        return self.pp * self.dp * self.ep * self.cp * self.tp

    @property
    def batch_shards(self) -> int:
        """Shards of the batch: dp and ep both split it."""
        return self.dp * self.ep

    @property
    def vocab_shards(self) -> int:
        """Shards of the vocabulary, which is split over (pp, tp)."""
        return self.pp * self.tp


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


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is cut into pieces and in which order the pieces run."""

    sequence: bool = False
    """Sequence parallelism: between the tensor-parallel regions the sequence is split over tp."""
    schedule: Literal["afab", "1f1b"] = "1f1b"
    """Pipeline schedule: all forwards then all backwards, or one forward one backward."""
    microbatches: int = 1
    """Pieces of the global batch that a step accumulates over."""
    remat: Literal["none", "selective", "full"] = "none"
    """Recomputation in the backward pass: of nothing, of attention only, or of whole layers from their inputs."""
    save: tuple[Literal["attention_sum", "qkv", "mlp_in"], ...] = ("attention_sum",)
    """Values of a layer that remat=full saves beside its input: attention's sum over tp (so that it is not sent again),
    queries, keys and values, the MLP's hidden values before the activation."""
    loss_chunks: int = 1
    """Pieces of a microbatch's tokens for which logits exist at one time."""
    reduction: Literal["overlap", "leaf", "bucket", "single"] = "overlap"
    """When and how gradients are summed over replicas: layer by layer under the backward pass; or after it, array by
    array, in buckets, or in one buffer."""
    bucket_mb: float = 25.0
    """Size of a bucket, in 10^6 bytes, for reduction=bucket."""
    all_reduce: Literal["psum", "ring", "two_way_ring", "two_level"] = "psum"
    """XLA's all-reduce, or one written with ppermute: a ring, two rings at once, or rings inside and across hosts."""
    inner: int = 1
    """Devices of a host, for all_reduce=two_level: neighbours along the axes that gradients are summed over."""
    accumulate: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are added up over microbatches and summed over replicas."""


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation and bookkeeping of a training run."""

    steps: int = 300
    """Optimizer steps."""
    global_batch: int = 16
    """Sequences per optimizer step, over all devices and microbatches."""
    seq_len: int = 128
    """Tokens per sequence."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW (b1 0.9, b2 0.95, eps 1e-8), or plain SGD."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup: int = 20
    """Steps of linear warm-up; the first update already has learning_rate / warmup."""
    final_lr: float = 0.1
    """Learning rate at the last step over its peak (cosine decay)."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 3
    """Newest checkpoints kept."""
    eval_every: int = 100
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_sequences: int = 512
    """Validation sequences per evaluation; 0 is all of them."""
    profile_start: int = 2
    """Steps done before the profiled ones; the first steps of a run compile."""
    profile_steps: int = 0
    """Steps that are traced into the run's profile folder, at most 20; 0 profiles nothing."""


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    source: str = "stdlib"
    """stdlib (the Python standard library's sources), a text FILE or FOLDER, a .tokens file, or hf:NAME."""
    tokenizer: str = "byte"
    """byte, bpe:SIZE (trained on the source), or gpt2 (fetched by tiktoken at first use)."""
    repeat: bool = True
    """Begin another epoch when the data ends; without it such a run is refused before it starts."""


@dataclass(frozen=True)
class RunConfig:
    """A whole training run."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0
    """Seed of weights, batches and dropout."""


def _divides(part: str, n: int, whole: str, m: int, mend: str) -> None:
    if m % n:
        raise ConfigError(f"{whole}={m} is not divisible by {part}={n}; {mend}")


def _at_least(low: float, **values: float) -> None:
    for name, value in values.items():
        if not low <= value < math.inf:  # nan is in no range
            raise ConfigError(f"{name.replace('__', '.')}={value} is below {low} or not finite; give {low} or more")


def _check_choices(part: str, options: Any) -> None:
    """Every value that must be one of a few is."""
    for name, kind in get_type_hints(type(options)).items():
        several = get_origin(kind) is tuple
        choices = get_args(get_args(kind)[0] if several else kind)
        for value in getattr(options, name) if several else (getattr(options, name),):
            if choices and value not in choices:
                raise ConfigError(f"{part}.{name}={value!r} is not known; choose of {', '.join(choices)}")


def check_model(model: ModelConfig) -> None:
    """Raise `ConfigError` where the model's own numbers do not fit together."""
    _check_choices("model", model)
    if model.name not in PRESETS:
        raise ConfigError(f"model.name={model.name!r} is no preset; choose one of {', '.join(PRESETS)}")
    _at_least(1, model__layers=model.layers, model__d_model=model.d_model, model__heads=model.heads)
    _at_least(1, model__d_ff=model.d_ff, model__vocab=model.vocab, model__context=model.context)
    _at_least(0, model__experts=model.experts, model__group=model.group, model__aux_coef=model.aux_coef)
    _at_least(0, model__capacity_factor=model.capacity_factor, model__z_coef=model.z_coef)
    _divides("model.heads", model.heads, "model.d_model", model.d_model, "change one of them")
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
    _at_least(1, model__rope_theta=model.rope_theta)
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


def check(config: RunConfig) -> None:
    """Raise `ConfigError` where a run cannot be, before any file is read or device used."""
    mesh, model, parallel, train = config.mesh, config.model, config.parallel, config.train
    for axis in AXES:
        _at_least(1, **{f"mesh__{axis}": getattr(mesh, axis)})
    check_model(model)
    _check_choices("parallel", parallel)
    _check_choices("train", train)
    _at_least(1, parallel__microbatches=parallel.microbatches, parallel__loss_chunks=parallel.loss_chunks)
    _at_least(1, train__steps=train.steps, train__global_batch=train.global_batch, train__seq_len=train.seq_len)
    _at_least(0, train__warmup=train.warmup, train__weight_decay=train.weight_decay, train__clip=train.clip)
    _at_least(0, train__checkpoint_every=train.checkpoint_every, train__eval_every=train.eval_every)
    _at_least(1, train__keep=train.keep)
    _at_least(0, train__eval_sequences=train.eval_sequences, train__final_lr=train.final_lr)
    if not 0 < train.learning_rate < math.inf:
        raise ConfigError(
            f"train.learning_rate={train.learning_rate} is not a number above 0; give a rate such as 1e-3"
        )
    if train.seq_len > model.context:
        raise ConfigError(
            f"train.seq_len={train.seq_len} is longer than model.context={model.context}; lower the first or "
            "raise the second"
        )
    _check_profile(train.profile_steps, train.profile_start, train.steps)
    check_layout(config)
    _check_batch(config)
    _check_reduction(config)


def _check_profile(steps: int, first: int, of: int) -> None:
    _at_least(0, train__profile_start=first, train__profile_steps=steps)
    if steps > PROFILE_LIMIT:
        raise ConfigError(f"train.profile_steps={steps} is above {PROFILE_LIMIT}; write {PROFILE_LIMIT} or less")
    if steps and first >= of:
        raise ConfigError(f"train.profile_start={first} is not below train.steps={of}; write {of - 1} or less")


def _check_batch(config: RunConfig) -> None:
    """The global batch against the devices and microbatches that share it."""
    mesh, parallel, train = config.mesh, config.parallel, config.train
    pieces = mesh.batch_shards * parallel.microbatches
    if train.global_batch % pieces:
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not a multiple of dp x ep x microbatches = "
            f"{mesh.dp} x {mesh.ep} x {parallel.microbatches} = {pieces}; use {_near(train.global_batch, pieces)}, or "
            "other mesh.dp, mesh.ep or parallel.microbatches"
        )


def _check_reduction(config: RunConfig) -> None:
    """The pieces and rings of the gradients' sum."""
    mesh, parallel = config.mesh, config.parallel
    _at_least(1, parallel__inner=parallel.inner)
    if not 0 < parallel.bucket_mb < math.inf:
        raise ConfigError(f"parallel.bucket_mb={parallel.bucket_mb} is not a size above 0; give one such as 25")
    if parallel.all_reduce == "two_level":
        replicas = {"dp x cp": mesh.dp * mesh.cp} if config.model.experts else {}
        for axes, size in {"dp x ep x cp": mesh.dp * mesh.ep * mesh.cp, **replicas}.items():
            _divides("parallel.inner", parallel.inner, axes, size, "give a divisor of it")


def check_layout(config: RunConfig) -> None:
    """Raise `ConfigError` where a dim of the model or the sequence does not divide over the axis that splits it."""
    mesh, model, parallel, train = config.mesh, config.model, config.parallel, config.train
    _divides("mesh.tp", mesh.tp, "model.heads", model.heads, "use a tp that divides the heads")
    _divides("mesh.tp", mesh.tp, "model.d_ff", model.d_ff, "use a tp that divides d_ff")
    _divides("mesh.pp", mesh.pp, "model.layers", model.layers, "use a pp that divides the layers")
    if model.experts:
        _divides("mesh.ep", mesh.ep, "model.experts", model.experts, "use an ep that divides the experts")
    _divides("mesh.cp", mesh.cp, "train.seq_len", train.seq_len, "use a cp that divides the sequence")
    if model.attention == "plain" and mesh.cp > 1:
        raise ConfigError(
            f"model.attention='plain' needs whole sequences, but mesh.cp={mesh.cp} splits train.seq_len="
            f"{train.seq_len} into pieces of {train.seq_len // mesh.cp}; use --model.attention flash or --mesh.cp 1"
        )
    local = train.seq_len // mesh.cp
    if parallel.sequence and local % mesh.tp:
        raise ConfigError(
            f"parallel.sequence splits train.seq_len/cp = {train.seq_len}/{mesh.cp} = {local} tokens over "
            f"mesh.tp={mesh.tp}, which does not divide them; change one of the three"
        )
    if model.experts and model.group and local % model.group:
        raise ConfigError(
            f"model.group={model.group} does not divide the {local} tokens of a sequence on one context shard "
            f"(train.seq_len/cp = {train.seq_len}/{mesh.cp}); change one of the three"
        )


def _near(value: int, multiple: int) -> int:
    """The multiple nearest to `value`, at least one of it."""
    return max(1, round(value / multiple)) * multiple


def check_devices(mesh: MeshConfig, devices: int) -> None:
    """Raise `ConfigError` unless the mesh uses exactly the given devices."""
    if mesh.size != devices:
        product = f"{mesh.pp}*{mesh.dp}*{mesh.ep}*{mesh.cp}*{mesh.tp}={mesh.size}"
        raise ConfigError(
            f"mesh pp*dp*ep*cp*tp = {product} but {devices} devices; change a size, or ask for --devices {mesh.size}"
        )
