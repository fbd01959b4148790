"""Hugging Face's folders: weights in .safetensors files, one or several, and config.json beside them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from jax5d.config import ConfigError, ModelConfig
from jax5d.models.hf.config import config_json, model_config
from jax5d.models.hf.names import HEAD, to_state_dict

Tree = Any

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Arrays by name from a .safetensors file, or from a folder with one or with several and their index.

    Raises:
        ConfigError: a file is missing, cut off, or no safetensors file (a pickle is never opened), or does not hold
            what the index says. Names it.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return _read_tensors(path)
    if (path / WEIGHTS).exists():
        return _read_tensors(path / WEIGHTS)
    if not (path / INDEX).exists():
        raise ConfigError(
            f"{path} holds neither {WEIGHTS} nor {INDEX}; give a folder with one of them (a pickle such as "
            "pytorch_model.bin is not opened: save it anew with save_pretrained)"
        )
    return _read_shards(path, _read_json(path / INDEX).get("weight_map"))


def _read_shards(folder: Path, files: Any) -> dict[str, np.ndarray]:
    if not isinstance(files, dict) or not all(name == Path(str(name)).name for name in files.values()):
        raise ConfigError(f"{folder / INDEX} has no weight_map from tensors to files beside it; give a whole index")
    state: dict[str, np.ndarray] = {}
    for name in sorted(set(files.values())):
        found = _read_tensors(folder / name)
        lost = [key for key, file in files.items() if file == name and key not in found]
        other = [key for key in found if files.get(key) != name]
        if lost or other:
            raise ConfigError(
                f"{folder / name} and {INDEX} disagree about {(lost + other)[0]} ({len(lost + other)} such tensors); "
                "give files that were saved together"
            )
        state |= found
    return state


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load_file(path)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} is no whole safetensors file ({reason}); give another, or fetch it again") from error
    except AttributeError as error:  # safetensors looks for 8-bit floats in NumPy
        raise ConfigError(f"{path} holds numbers that NumPy lacks ({error}); give 16 or 32 bits") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); give a whole one") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object; give the model's own")
    return values


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The model that a folder's config.json describes; see `model_config`."""
    return model_config(_read_json(Path(folder).expanduser() / CONFIG))


def write(folder: str | os.PathLike[str], params: Tree, model: ModelConfig) -> None:
    """Write model.safetensors and config.json, which `from_pretrained` reads, as `save_pretrained` writes them.

    That is `to_state_dict` without the lm_head.weight of a tied model. Each file appears whole or not at all.

    Raises:
        ConfigError: as `to_state_dict`; the folder holds such files already.
        OSError: the folder cannot be written.
    """
    folder = Path(folder).expanduser()
    if there := [name for name in (WEIGHTS, INDEX, CONFIG) if (folder / name).exists()]:
        raise ConfigError(f"{folder} holds {', '.join(there)} already; give another folder")
    state = to_state_dict(params, model)
    if model.tied:
        del state[HEAD]
    about = json.dumps(config_json(model), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with _appearing(folder / WEIGHTS) as partial:
        safetensors.numpy.save_file(state, partial, metadata={"format": "pt"})
    with _appearing(folder / CONFIG) as partial:
        partial.write_text(about, "utf-8")


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A hidden path beside `path`, which becomes it at the end, or vanishes on a failure."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
