"""Layers over stages, and microbatches through them: run exactly, or refused with the numbers."""

from __future__ import annotations

import jax
import pytest
from tiny import check_equivalent, config, host, trainer

from jax5d.config import ConfigError


@pytest.mark.parametrize(("layers", "pp"), [(6, 4), (5, 2)])
def test_layers_that_stages_do_not_divide_are_refused(layers: int, pp: int) -> None:
    """B13: before compilation, naming both numbers."""
    with pytest.raises(ConfigError, match=rf"model\.layers={layers} .*mesh\.pp={pp}"):
        config({"pp": pp}, layers=layers)


@pytest.mark.parametrize(("layers", "pp", "parameters"), [(6, 3, 80384), (6, 2, 80384), (5, 5, 67680)])
def test_every_layer_is_somewhere(layers: int, pp: int, parameters: int) -> None:
    """B13: where stages divide the layers, all are there and all are trained as on one device."""
    run = config({"pp": pp}, layers=layers, microbatches=2)
    state, _ = check_equivalent(run, steps=1)
    assert sum(x.size for x in jax.tree.leaves(host(state.params, run.model))) == parameters


@pytest.mark.parametrize("schedule", ["afab", "1f1b"])
@pytest.mark.parametrize(("pp", "microbatches"), [(4, 1), (4, 2), (4, 4), (2, 8)])
def test_fewer_and_more_microbatches_than_stages(pp: int, microbatches: int, schedule: str) -> None:
    """B14: no hang, no wrong shape, no lost microbatch."""
    check_equivalent(config({"pp": pp}, microbatches=microbatches, schedule=schedule), steps=1)


@pytest.mark.parametrize(
    ("mesh", "microbatches", "said"),
    [({"pp": 2}, 3, "1 x 1 x 3 = 3"), ({"pp": 4, "dp": 2}, 8, "2 x 1 x 8 = 16")],
)
def test_microbatches_that_do_not_divide_the_batch_are_refused(
    mesh: dict[str, int], microbatches: int, said: str
) -> None:
    """B14: 8 rows in 3 microbatches, or 16 pieces: the message has the batch, M, and what they must divide into."""
    with pytest.raises(ConfigError, match=rf"train\.global_batch=8 .*{said}"):
        config(mesh, microbatches=microbatches)


def test_microbatches_do_not_run_at_once() -> None:
    """Two microbatches need the memory of one: the loop of one tick is unrolled, and the last tick still waits for it.

    Else collectives of both would be under way in any order, which ends a process with CPU devices.
    """
    temporary = []
    for microbatches in (1, 2):
        run = config(layers=8, microbatches=microbatches, global_batch=16 * microbatches)
        compiled = trainer(run).gradients.lower(*trainer(run).arguments).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporary[1] < 1.1 * temporary[0]
