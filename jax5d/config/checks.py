"""Every refusal of a run that needs no file and no device."""

from __future__ import annotations

import math

from jax5d.config.errors import ConfigError, at_least, check_choices, divides
from jax5d.config.model import check_model
from jax5d.config.run import AXES, PROFILE_LIMIT, MeshConfig, ParallelConfig, RunConfig


def check(config: RunConfig) -> None:
    """Raise `ConfigError` where a run cannot be, before any file is read or device used."""
    mesh, model, parallel, train = config.mesh, config.model, config.parallel, config.train
    for axis in AXES:
        at_least(1, **{f"mesh__{axis}": getattr(mesh, axis)})
    check_model(model)
    check_choices("parallel", parallel)
    check_choices("train", train)
    at_least(1, parallel__microbatches=parallel.microbatches, parallel__loss_chunks=parallel.loss_chunks)
    at_least(1, train__steps=train.steps, train__global_batch=train.global_batch, train__seq_len=train.seq_len)
    at_least(0, train__warmup=train.warmup, train__weight_decay=train.weight_decay, train__clip=train.clip)
    at_least(0, train__checkpoint_every=train.checkpoint_every, train__eval_every=train.eval_every)
    at_least(1, train__keep=train.keep)
    at_least(0, train__eval_sequences=train.eval_sequences, train__final_lr=train.final_lr)
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
    _check_zero(config.parallel)


def _check_profile(steps: int, first: int, of: int) -> None:
    at_least(0, train__profile_start=first, train__profile_steps=steps)
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
    at_least(1, parallel__inner=parallel.inner)
    if not 0 < parallel.bucket_mb < math.inf:
        raise ConfigError(f"parallel.bucket_mb={parallel.bucket_mb} is not a size above 0; give one such as 25")
    if parallel.all_reduce == "two_level":
        replicas = {"dp x cp": mesh.dp * mesh.cp} if config.model.experts else {}
        for axes, size in {"dp x ep x cp": mesh.dp * mesh.ep * mesh.cp, **replicas}.items():
            divides("parallel.inner", parallel.inner, axes, size, "give a divisor of it")


def _check_zero(parallel: ParallelConfig) -> None:
    """ZeRO has a group to share out over, and sums of its own."""
    axes = parallel.zero_axes
    if not axes or len(set(axes)) < len(axes):
        raise ConfigError(
            f"parallel.zero_axes={' '.join(axes) or 'none'} is no group of data axes; give one or more of dp, ep, cp, "
            "each once, or --parallel.zero 0 to share nothing out"
        )
    for name, needed in {"reduction": "overlap", "all_reduce": "psum"}.items():
        value = getattr(parallel, name)
        if parallel.zero and value != needed:
            raise ConfigError(
                f"parallel.{name}={value} sums whole gradients, but with parallel.zero={parallel.zero} a device keeps "
                f"pieces of the sum; use --parallel.{name} {needed} or --parallel.zero 0"
            )


def check_layout(config: RunConfig) -> None:
    """Raise `ConfigError` where a dim of the model or the sequence does not divide over the axis that splits it."""
    mesh, model, parallel, train = config.mesh, config.model, config.parallel, config.train
    divides("mesh.tp", mesh.tp, "model.heads", model.heads, "use a tp that divides the heads")
    if model.groups % mesh.tp and mesh.tp % model.groups:
        raise ConfigError(
            f"model.kv_heads={model.groups} is neither a multiple nor a divisor of mesh.tp={mesh.tp}, so that devices "
            "would need parts of a head; change one of them"
        )
    divides("mesh.tp", mesh.tp, "model.d_ff", model.d_ff, "use a tp that divides d_ff")
    divides("mesh.pp", mesh.pp, "model.layers", model.layers, "use a pp that divides the layers")
    if model.experts:
        divides("mesh.ep", mesh.ep, "model.experts", model.experts, "use an ep that divides the experts")
    divides("mesh.cp", mesh.cp, "train.seq_len", train.seq_len, "use a cp that divides the sequence")
    if model.attention == "plain" and mesh.cp > 1:
        raise ConfigError(
            f"model.attention='plain' needs whole sequences, but mesh.cp={mesh.cp} splits train.seq_len="
            f"{train.seq_len} into pieces of {train.seq_len // mesh.cp}; use --model.attention flash or --mesh.cp 1"
        )
    if parallel.overlap and not parallel.sequence:
        raise ConfigError(
            "parallel.overlap=True sends tokens piece by piece, but with parallel.sequence=False every tp device has "
            "them all; add --parallel.sequence, or write --parallel.no_overlap"
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
