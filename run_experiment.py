"""python run_experiment.py              list the experiments
python run_experiment.py list --json  the same as JSON
python run_experiment.py NAME         run one
python run_experiment.py NAME --help  its options
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from experiments import registry
from jax5d.config import ConfigError, check, check_devices
from jax5d.costs.parameter_traffic import check_bucket
from jax5d.train.signals import Stopped


def main(argv: Sequence[str], root: Path = registry.ROOT) -> int:
    """Run a command line (without the program's name); the exit status."""
    try:
        status = _command(argv, root)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"run_experiment.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"run_experiment.py: {stop}", file=sys.stderr)
        return 128 + stop.number
    except OSError as error:
        if isinstance(
            error, BrokenPipeError
        ):  # the reader of a pipe has had enough; flush nothing more into it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            print(f"run_experiment.py: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("run_experiment.py: interrupted", file=sys.stderr)
        return 130


def _command(argv: Sequence[str], root: Path) -> int:
    name, *words = argv or ["list"]
    if name in ("-h", "--help"):
        print(__doc__, end="")
    elif name != "list":
        return _run(registry.find(name, root), words)
    elif not words:
        Console().print(_listing(registry.entries(root)))
    elif words == ["--json"]:
        keys = ("name", "capsules", "chapter", "claim", "needs")
        listed = [{key: getattr(entry, key) for key in keys} for entry in registry.entries(root)]
        print(json.dumps(listed, indent=2))
    else:
        raise ConfigError(f"list takes no {' '.join(words)}; write list, or list --json")
    return 0


def _listing(entries: list[registry.Entry]) -> Table:
    table = Table(Column("experiment", overflow="fold"), "capsule", "claim", expand=True)
    for chapter, group in groupby(entries, key=lambda entry: entry.chapter):
        table.add_section()
        table.add_row(Text(chapter, style="bold"))
        for entry in group:
            table.add_row(Text(entry.name), ", ".join(map(str, entry.capsules)), Text(entry.claim))
    return table


def _run(entry: registry.Entry, words: Sequence[str]) -> int:
    """Refuse or run one experiment. Devices are chosen before anything makes JAX look for them."""
    from experiments import harness
    from experiments.options import TrainingOptions, parse

    module = registry.load(entry)
    gpus = visible_gpus(Path("/dev"), os.environ)
    options = parse(module.DEFAULTS, module.QUICK, words, entry.name, description=entry.doc, gpus=gpus)
    if isinstance(options, TrainingOptions):
        check(options.run_config)
        check_bucket(options.run_config)

    import jax

    from jax5d.mesh import use_cpu_devices, use_gpus

    if options.devices is not None or not gpus:
        use_cpu_devices(options.mesh.size)
    else:
        use_gpus(options.parallel.reduction if isinstance(options, TrainingOptions) else "overlap")
    check_devices(options.mesh, jax.device_count())
    return harness.run(entry, module, options, Console())


def visible_gpus(dev: Path, environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that this process may use, counted in the folder of device files without asking a driver."""
    if environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    cards = len(list(dev.glob("nvidia[0-9]*")))
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return cards
    # CUDA stops reading at the first number that is no device
    listed = allowed.replace(" ", "").split(",")
    stop = next((i for i, card in enumerate(listed) if card in ("", "-1")), len(listed))
    return min(cards, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
