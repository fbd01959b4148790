"""What a run is: the mesh, how work is cut, training, data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jax5d.config.model import ModelConfig

PROFILE_LIMIT = 20
"""Most steps of one profile: a trace grows with each, and viewers cut long ones off without a word."""

AXES = ("pp", "dp", "ep", "cp", "tp")
"""Mesh axes, outermost first; tp is innermost so that its devices are neighbours on one host."""


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
class ParallelConfig:
    """How the work is cut into pieces and in which order the pieces run."""

    sequence: bool = False
    """Sequence parallelism: between the tensor-parallel regions the sequence is split over tp."""
    overlap: bool = False
    """With sequence: send a tensor-parallel region's tokens piece by piece, under the products of other pieces."""
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
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO: what replicas share out. 1: optimizer state and the parameters that it updates; 2: also sums of gradients;
    3: also the parameters computed with, gathered layer by layer."""
    zero_axes: tuple[Literal["dp", "ep", "cp"], ...] = ("dp", "ep", "cp")
    """Data axes over which ZeRO shares out; with fewer, replicas along the others hold the same (hybrid sharding)."""
    regather: bool = True
    """ZeRO-3: gather a layer's parameters again for the backward pass; otherwise keep them from the forward pass."""
    offload: Literal["none", "optimizer"] = "none"
    """What lies in the host's memory. optimizer: AdamW's moments, brought to the device a layer at a time to update."""


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
