"""Options of an experiment: dataclasses in, one resolved instance out.

Layers, each over the one before: the experiment's defaults (its quick ones with --quick), the preset that
--model.name asks for, the file of --config, the command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TypeVar

import tyro

from experiments import config_file
from experiments.values import flatten, nearest
from jax5d.config import (
    PRESETS,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    check_devices,
    check_model,
)

FILL_ORDER = ("dp", "tp", "pp", "cp", "ep")
"""The first of these axes that is left out takes the devices that the given ones leave."""


@dataclass(frozen=True)
class Options:
    """Options that every experiment takes."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Sizes of the five mesh axes, outermost first. Where some are left out, the first of dp, tp, pp, cp, ep that
    is left out takes the devices that remain, the others are 1."""
    devices: int | None = None
    """Fake CPU devices, even beside a GPU; None is all GPUs, or without one as many as the mesh needs."""
    out: Path | None = None
    """Folder of the run's files; None is runs/NAME/TIME."""
    quick: bool = False
    """Smaller defaults: at most 60 seconds on 2 CPU cores."""
    seed: int = 0
    """Seed of everything random, 0 to 4294967295."""
    config: Path | None = None
    """A run's config.yaml, which starts the same run again; the command line overrides it."""


@dataclass(frozen=True)
class TrainingOptions(Options):
    """Options of an experiment that trains."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)

    @property
    def run_config(self) -> RunConfig:
        """What the library needs to know of the run."""
        return RunConfig(self.mesh, self.model, self.parallel, self.train, self.data, self.seed)


AnyOptions = TypeVar("AnyOptions", bound=Options)


def parse(
    defaults: AnyOptions,
    quick_defaults: AnyOptions,
    argv: Sequence[str],
    experiment: str,
    *,
    description: str = "",
    gpus: int = 0,
) -> AnyOptions:
    """The options of one run, its mesh resolved.

    `--help` prints the options and raises SystemExit(0). Raises `ConfigError`, whose message is one line, for all
    that cannot be read: see `config_file.read` for the file; on the command line unknown and repeated options,
    values that are missing or of another type, and words that belong to no option; numbers that are not finite.
    """
    if {"-h", "--help"} & set(argv):
        base = quick_defaults if "--quick" in argv else defaults
        return _read_words(base, ["--help"], experiment, description)
    named = _check_names(argv, flatten(defaults))
    words = list(argv)
    path = _read_words(defaults, argv, experiment).config
    if path is not None:
        for setting in config_file.read(path, defaults, experiment):
            try:
                _read_words(defaults, setting.words, experiment)
            except ConfigError as error:
                raise ConfigError(f"{setting.where}: {error}") from None
            named |= _check_names(setting.words, flatten(defaults))
            words = [*setting.words, *words]  # the last of two wins, and that is the command line's
    asked = _read_words(defaults, words, experiment)
    base = quick_defaults if asked.quick else defaults
    if "model.name" in named and isinstance(asked, TrainingOptions):
        check_model(dataclasses.replace(ModelConfig(), name=asked.model.name))
        base = dataclasses.replace(base, model=PRESETS[asked.model.name])
    options = _read_words(base, words, experiment)
    _check_values(options)
    given = {axis: getattr(options.mesh, axis) for axis in FILL_ORDER if f"mesh.{axis}" in named}
    return dataclasses.replace(options, mesh=resolve_mesh(given, base.mesh, options.devices, gpus))


def resolve_mesh(given: Mapping[str, int], default: MeshConfig, devices: int | None, gpus: int) -> MeshConfig:
    """The mesh of a run that names the sizes `given` and may ask for a number of fake `devices`.

    The devices to use are `devices`, or else all GPUs, or else as many as the given sizes need. Without given
    sizes the default mesh is taken where it fits them. Otherwise the first axis of `FILL_ORDER` that is left out
    takes what remains. Raises `ConfigError` for sizes below 1 and where the mesh does not use every device.
    """
    sizes = {f"mesh.{axis}": size for axis, size in given.items()}
    for name, size in {**sizes, "devices": 1 if devices is None else devices}.items():
        if size < 1:
            raise ConfigError(f"{name}={size} is below 1; give 1 or more")
    mesh = MeshConfig(**given)
    total = devices or gpus or (mesh if given else default).size
    if not given and default.size == total:
        return default
    left_out = [axis for axis in FILL_ORDER if axis not in given]
    if left_out and total % mesh.size == 0:
        mesh = dataclasses.replace(mesh, **{left_out[0]: total // mesh.size})
    check_devices(mesh, total)
    return mesh


def _check_names(words: Sequence[str], values: Mapping[str, object]) -> set[str]:
    """The options that the words name. Raises `ConfigError` for unknown and repeated ones: tyro's last one wins."""
    flags = {name: name for name in values}
    flags |= {config_file.negated(name): name for name, value in values.items() if isinstance(value, bool)}
    named: set[str] = set()
    for word in words:
        if not word.startswith("--"):
            continue
        spelled, equals, _ = word.removeprefix("--").partition("=")
        flag = spelled.replace("-", "_")
        if flag not in flags:
            raise ConfigError(f"unknown option {word}; the nearest valid option is --{nearest(flag, flags)}")
        name = flags[flag]
        if equals and isinstance(values[name], bool):
            raise ConfigError(f"{word}: a switch takes no value; write --{name} or --{config_file.negated(name)}")
        if name in named:
            raise ConfigError(f"--{name} is given twice; keep one")
        named.add(name)
    return named


def _read_words(base: AnyOptions, words: Sequence[str], experiment: str, description: str = "") -> AnyOptions:
    """`base` with the options that the words give."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                type(base),
                default=base,
                args=words,
                prog=f"run_experiment.py {experiment}",
                description=description,
                use_underscores=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(_first_paragraph(printed.getvalue(), flatten(base))) from None


def _first_paragraph(box: str, values: Mapping[str, object]) -> str:
    """What tyro's box of an error says under its title, in one line and with an example.

    A title is in the box's frame, or where that cannot be encoded, above a rule.
    """
    lines = [line.strip("│| ") for line in box.splitlines()[1:]]
    is_rule = lambda line: not line.strip("─-")  # noqa: E731
    paragraph = takewhile(lambda line: not is_rule(line), dropwhile(is_rule, lines))
    text = " ".join(paragraph).removeprefix("Error parsing ").rstrip(".")
    option = re.search(r"--([a-z_.]+)", text)
    example = values.get(option[1]) if option else None
    if option and example is not None:
        words = " ".join(map(str, example)) if isinstance(example, tuple) else example
        return f"{text}; write for example --{option[1]} {words}"
    return f"{text}; see --help"


def _check_values(options: Options) -> None:
    for name, value in flatten(options).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}={value} is not a finite number; give one")
    if not 0 <= options.seed < 2**32:
        raise ConfigError(f"seed={options.seed} is outside 0..{2**32 - 1}; give one inside")
