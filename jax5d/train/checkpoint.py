"""Checkpoints through orbax: written in the background, whole or not at all, restored onto any mesh.

One checkpoint holds the state (step, parameters, optimizer) and a record of the run's configuration and data. Batches
and dropout are functions of the seed and the step, so these are the data position and the random state as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jax5d.config import (
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    check_layout,
)
from jax5d.costs.parameters import leaves
from jax5d.mesh import HOST, make_mesh
from jax5d.train.step import Trainer, TrainState

Tree = Any

FREE = {
    "mesh",
    "parallel",
    "train.steps",
    "train.checkpoint_every",
    "train.keep",
    "train.eval_every",
    "train.eval_sequences",
    "train.profile_start",
    "train.profile_steps",
}
"""Options that may differ between a run and the run that goes on from it."""


class SaveError(OSError):
    """A checkpoint could not be written."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: made where it is missing; leftovers of a killed run are removed, whole checkpoints never.
        trainer: gives the layout to restore to.
        record: what the data is, as JSON-able values; a checkpoint with another record is refused.
        read_only: touch nothing there, so that a run which is writing is left alone.
    """

    def __init__(self, folder: Path, trainer: Trainer, record: dict[str, Any], *, read_only: bool = False):
        self.folder, self.trainer = folder.absolute(), trainer
        self.about = {"config": dataclasses.asdict(trainer.config), "data": record}
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        keep = trainer.config.train.keep
        if read_only:
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, state: TrainState) -> None:
        """Begin to write the state of `step`; the arrays are copied before this returns, so they may be donated.

        Arrays in the host's memory are not copied there once more, but on disk before this returns.

        Raises `SaveError`, also for what an earlier write in the background ran into.
        """
        needed, free = sum(x.nbytes for x in jax.tree.leaves(_tree(state))), shutil.disk_usage(self.folder).free
        if free < needed:  # a write that stops half-way would only say so later, and less clearly
            raise SaveError(f"no checkpoint could be written to {self.folder}: {needed} bytes needed, {free} free")
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(_tree(state)), about=ocp.args.JsonSave(self.about))
        with self._naming_failure():
            if not self._manager.save(step, args=items):
                raise SaveError(f"a checkpoint of step {step} or later is already there")
        if any(x.sharding.memory_kind == HOST for x in jax.tree.leaves(state)):
            self.finish()

    def finish(self) -> None:
        """Wait until everything is on disk. Raises `SaveError` where it could not be written."""
        with self._naming_failure():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _naming_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax passes on whatever its threads met
            reason = " ".join(str(error).split())[:300]
            raise SaveError(f"no checkpoint could be written to {self.folder}: {reason}") from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Release orbax's threads, without hiding an error that is on its way."""
        with contextlib.suppress(*((Exception,) if error else ())):
            self._manager.close()

    def restore(self, step: int) -> TrainState:
        """The state of `step`, laid out for this trainer's mesh and ZeRO stage: layers, padding and all.

        Raises:
            ConfigError: a leaf has another shape or dtype than this configuration's; names it and both.
        """
        about = read_about(self.folder, step)
        _check_same(self.about, about, self.folder)
        target = _tree(self.trainer.arguments[0])
        _check_leaves(
            target, _saved(self.folder, step), _unpadded(self.trainer), config_from(about["config"]).mesh.size
        )
        args = jax.tree.map(
            lambda t: ocp.ArrayRestoreArgs(sharding=t.sharding, global_shape=t.shape, dtype=t.dtype, strict=False),
            target,
        )
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(target, args)))
        return self.trainer.completed(TrainState(**restored["state"]))


def _tree(state: TrainState) -> dict[str, Tree]:
    """What is saved: all but the copy that is made of the parameters."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "replica"}


def newest(folder: Path) -> int | None:
    """The step of the newest whole checkpoint in a folder, or None. Reads only."""
    names = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=None)


def read_about(folder: Path, step: int) -> dict[str, Any]:
    """The record in a checkpoint. Raises `ConfigError` where it cannot be read."""
    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            return reader.restore((folder / str(step) / "about").absolute())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / str(step)} is no whole checkpoint ({error}); move it away") from error


def check_resume(folder: Path, config: RunConfig, record: dict[str, Any]) -> int | None:
    """The step that a run in `folder` would go on from, or None for a new run. Reads only.

    Raises:
        ConfigError: the checkpoints there are of another configuration or other data, or already beyond the last step.
    """
    step = newest(folder)
    if step is None:
        return None
    about = read_about(folder, step)
    _check_same({"config": dataclasses.asdict(config), "data": record}, about, folder)
    if step > config.train.steps:
        raise ConfigError(
            f"{folder} holds a checkpoint of step {step}, beyond train.steps={config.train.steps}; write "
            f"--train.steps {step} or more, or another --out"
        )
    return step


def from_checkpoint(
    folder: Path, mesh: MeshConfig, *, devices: Sequence[Any] | None = None
) -> tuple[Trainer, TrainState]:
    """The newest state in a run's checkpoint folder, on any mesh and devices (default: all).

    The checkpoint knows its configuration.

    Raises:
        ConfigError: there is no checkpoint, or the mesh does not fit the model or the devices.
    """
    step = newest(folder)
    if step is None:
        raise ConfigError(f"{folder} holds no checkpoint; give the checkpoints folder of a run")
    about = read_about(folder, step)
    config = replace(config_from(about["config"]), mesh=mesh)
    check_layout(config)
    trainer = Trainer.create(config, mesh=make_mesh(mesh, devices))
    with Checkpoints(folder, trainer, about["data"], read_only=True) as checkpoints:
        return trainer, checkpoints.restore(step)


def config_from(values: dict[str, Any]) -> RunConfig:
    """A configuration from nested plain values, as `dataclasses.asdict` gives them."""
    groups = {
        "mesh": MeshConfig,
        "model": ModelConfig,
        "parallel": ParallelConfig,
        "train": TrainConfig,
        "data": DataConfig,
    }
    grouped = {k: v for k, v in values.items() if k in groups}
    tupled = {k: {n: tuple(x) if isinstance(x, list) else x for n, x in v.items()} for k, v in grouped.items()}
    return RunConfig(**values | {k: groups[k](**v) for k, v in tupled.items()})


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _check_same(mine: dict[str, Any], theirs: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of another configuration, naming what differs and the first leaf that it reshapes."""
    ours, saved = _flat(mine["config"]), _flat(theirs["config"])
    names = [n for n in ours if not _free(n, ours) and ours[n] != saved.get(n)]
    if names:
        differ = ", ".join(f"{name} is {ours[name]} here and {saved.get(name)} there" for name in names)
        shapes = _reshaped(mine["config"], theirs["config"])
        raise ConfigError(
            f"{folder} holds another configuration: {differ}{shapes}; give another --out or the same options"
        )
    if mine["data"] != theirs["data"]:
        raise ConfigError(
            f"{folder} was trained on other data: {theirs['data']}, here {mine['data']}; give another --out"
        )


def _free(name: str, ours: dict[str, Any]) -> bool:
    """Whether an option may change between a run and its continuation."""
    if name == "parallel.microbatches" and ours["model.experts"]:
        return False  # the router's losses are means over microbatches: another number is another objective
    return name in FREE or name.split(".")[0] in FREE


def _reshaped(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return {x.name: x.shape for x in leaves(ModelConfig(**config["model"]), MeshConfig())}

    mine, saved = shapes(ours), shapes(theirs)
    name = next((n for n in [*mine, *saved] if mine.get(n) != saved.get(n)), None)
    return f" ({name} has shape {mine.get(name)} here and {saved.get(name)} there)" if name else ""


def _saved(folder: Path, step: int) -> dict[str, Any]:
    with ocp.PyTreeCheckpointer() as reader:
        metadata = reader.metadata((folder / str(step) / "state").absolute())
    tree = metadata.item_metadata.tree
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _unpadded(trainer: Trainer) -> dict[str, Tree]:
    """Shapes of the state on one device, where nothing is padded."""
    return _tree(Trainer(replace(trainer.config, mesh=MeshConfig()), trainer.mesh, trainer.optimizer).shapes)


def _check_leaves(target: Tree, saved: dict[str, Any], unpadded: Tree, devices: int) -> None:
    """Every leaf's shape and dtype; only padding may differ, which is less than one row for each of its `devices`."""
    for (path, leaf), true in zip(jax.tree.leaves_with_path(target), jax.tree.leaves(unpadded), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        there = saved.pop(name, None)
        if there is None:
            raise ConfigError(f"the checkpoint has no {name} {true.shape}; it is of another model or optimizer")
        shape = tuple(there.shape)
        same = len(shape) == len(true.shape) and all(
            n <= m < n + devices for n, m in zip(true.shape, shape, strict=True)
        )
        if not same or np.dtype(there.dtype) != leaf.dtype:
            raise ConfigError(f"{name} is {leaf.dtype} {true.shape} here but {there.dtype} {shape} in the checkpoint")
    if saved:
        raise ConfigError(f"the checkpoint has {next(iter(saved))}, which this configuration has not")
