"""Which optimizers may update a shard by itself: optax's, and small ones that break one rule each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import contrib
from tiny import config, trainer

from jax5d.config import ConfigError
from jax5d.mesh import make_mesh
from jax5d.train.elementwise import by_parameter, check_elementwise
from jax5d.train.optimizer import decay_mask, make_optimizer
from jax5d.train.step import Trainer

Tree = Any
RATE = 0.1


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Optax promotes its counts and rates."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def shapes(wte: int = 6, width: int = 4) -> Tree:
    """A tree named as a model's."""
    kind = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    return {
        "outer": {"wte": kind(wte, width), "scale": kind(width)},
        "blocks": {"w_in": kind(3, 2 * width, width), "b_in": kind(3, width)},
    }


def matrices(params: Tree) -> Tree:
    """Labels by name: a matrix or not."""
    return jax.tree.map(lambda yes: "matrix" if yes else "vector", decay_mask(params))


ACCEPTED: dict[str, optax.GradientTransformation] = {
    "acprop": contrib.acprop(RATE),
    "adabelief": optax.adabelief(RATE),
    "adadelta": optax.adadelta(RATE),
    "adagrad": optax.adagrad(RATE),
    "adam": optax.adam(RATE, nesterov=True),
    "adamax": optax.adamax(RATE),
    "adamaxw": optax.adamaxw(RATE),
    "adamw": optax.adamw(RATE, weight_decay=0.1, mask=decay_mask),
    "adamw, bfloat16 moments": optax.adamw(RATE, mu_dtype=jnp.bfloat16),
    "adamw, interpolated rate": optax.adamw(optax.piecewise_interpolate_schedule("cosine", RATE, {1: 0.5, 2: 0.1})),
    "adamw, rate as state": optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "ademamix": contrib.ademamix(RATE),
    "adan": optax.adan(RATE),
    "adopt": contrib.adopt(RATE),
    "amsgrad": optax.amsgrad(RATE),
    "apply_every": optax.chain(optax.sgd(RATE), optax.apply_every(2)),
    "clip by value": optax.chain(optax.clip(0.1), optax.adam(RATE)),
    "cocob": contrib.cocob(RATE),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(RATE)),
    "keep_params_nonnegative": optax.chain(optax.sgd(RATE), optax.keep_params_nonnegative()),
    "lion": optax.lion(RATE),
    "madgrad": contrib.madgrad(RATE),
    "masked": optax.masked(optax.adam(RATE), decay_mask),
    "MultiSteps": optax.MultiSteps(optax.adamw(RATE), 2).gradient_transformation(),
    "nadam": optax.nadam(RATE),
    "optimistic": optax.optimistic_adam_v2(RATE),
    "partition": optax.partition({"matrix": optax.adamw(RATE), "vector": optax.sgd(RATE, 0.9)}, matrices),
    "radam": optax.radam(RATE),
    "rmsprop": optax.rmsprop(RATE, centered=True, momentum=0.9),
    "rprop": optax.rprop(RATE),
    "schedule_free": contrib.schedule_free_adamw(RATE),
    "set_to_zero": optax.set_to_zero(),
    "sgd": optax.sgd(RATE, 0.9, nesterov=True),
    "sign_sgd": optax.sign_sgd(RATE),
    "signum": optax.signum(RATE),
    "yogi": optax.yogi(RATE),
}

REFUSED: dict[str, tuple[optax.GradientTransformation, str]] = {
    "adafactor": (optax.adafactor(RATE), r"its state 0\.v_row\.\S+ is \["),
    "adaptive_grad_clip": (optax.adaptive_grad_clip(0.1), "in adaptive_grad_clip"),
    "add_noise": (optax.noisy_sgd(RATE, key=0), "differs from place to place"),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(RATE), 3), "in apply_if_finite"),
    "centralize": (optax.centralize(), "in centralize"),
    "clip_by_block_rms": (optax.clip_by_block_rms(1.0), "in clip_by_block_rms"),
    "clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)),
        "reduce_sum in clip_by_global_norm",
    ),
    "dadapt_adamw": (contrib.dadapt_adamw(RATE), "in dadapt_adamw"),
    "dog": (contrib.dog(RATE), "in scale_by_dog"),
    "flatten": (optax.flatten(optax.adam(RATE)), "does not lie as the parameters do"),
    "fromage": (optax.fromage(RATE), "in scale_by_trust_ratio"),
    "galore": (contrib.galore(RATE), "its state"),
    "lamb": (optax.lamb(RATE), "in scale_by_trust_ratio"),
    "lars": (optax.lars(RATE), "in scale_by_trust_ratio"),
    "lbfgs": (optax.lbfgs(), "does not lie as the parameters do"),
    "mechanize": (contrib.mechanize(optax.adam(RATE)), "in mechanize"),
    "momo": (contrib.momo(), "fails on .*'value'"),
    "MultiSteps that skips": (
        optax.MultiSteps(optax.sgd(RATE), 2, should_skip_update_fn=optax.skip_not_finite).gradient_transformation(),
        "comes of reduce_sum",
    ),
    "muon": (contrib.muon(RATE), "its update .* of"),
    "normalize": (contrib.normalize(), "in normalize"),
    "novograd": (optax.novograd(RATE), r"its state 0\.nu\.\S+ is \[\] for a parameter of \["),
    "polyak_sgd": (optax.polyak_sgd(), "fails on .*'value'"),
    "prodigy": (contrib.prodigy(RATE), "in prodigy"),
    "sm3": (optax.sm3(RATE), "does not lie as the parameters do"),
    "snapshot of a norm": (optax.snapshot("norm", optax.tree.norm), r"its state measurement\.norm"),
    "zero_nans": (optax.zero_nans(), "its state found_nan"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_elementwise_optimizers_are_accepted_and_are(name: str) -> None:
    """They commute with cutting: 4 updates of a piece, cut off the first or the last dim, are those of the whole."""
    optimizer, kinds = ACCEPTED[name], shapes()
    check_elementwise(optimizer, kinds)
    values = np.random.default_rng(0)
    draw = lambda x: values.normal(size=x.shape).astype(np.float32)  # noqa: E731
    params, *grads = [jax.tree.map(draw, kinds) for _ in range(5)]
    whole = run(optimizer, params, grads)
    for axis, half in ((0, 1), (-1, 0)):
        cut = lambda tree, axis=axis, half=half: jax.tree.map(  # noqa: E731
            lambda x: np.split(x, [x.shape[axis] // 3], axis)[half], tree
        )
        chex.assert_trees_all_close(
            run(optimizer, cut(params), [cut(g) for g in grads]), cut(whole), rtol=1e-6, atol=1e-7
        )


def run(optimizer: optax.GradientTransformation, params: Tree, grads: list[Tree]) -> Tree:
    """Parameters after an update with each of `grads`."""
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_reason(name: str) -> None:
    """One line: what mixes, where, and the mend."""
    optimizer, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason) as caught:
        check_elementwise(optimizer, shapes())
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(
        "leave clipping by norm to train.clip, or keep parameters whole by parallel.zero=0 on dp and cp alone, without "
        "parallel.offload"
    )


def leafwise(rule: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
    """An update of each gradient by `rule`."""
    return optax.stateless(lambda grads, params: jax.tree.map(rule, grads))


def test_sizes_are_the_parameters_own() -> None:
    """Mixing that begins at 128 rows is found at 128 rows, and shards of 64 of them would not have it."""
    rows = leafwise(lambda g: g - g.mean(0, keepdims=True) if g.shape[0] >= 128 else g)
    check_elementwise(rows, shapes(wte=64))
    with pytest.raises(ConfigError, match=r"reduce_sum .* of outer\.wte"):
        check_elementwise(rows, shapes(wte=128))
    doubled = leafwise(lambda g: 2 * g if g.shape[0] >= 128 else g)
    check_elementwise(doubled, shapes(wte=64))
    with pytest.raises(ConfigError, match="depends on the parameters' shapes"):
        check_elementwise(doubled, shapes(wte=128))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda g: g / jnp.sqrt(g.shape[-1]), "depends on the parameters' shapes"),
        (lambda g: jnp.cumsum(g, 0), "cumsum"),
        (lambda g: jnp.flip(g, 0), "rev"),
        (lambda g: jnp.sort(g, 0), "sort"),
        (lambda g: g * (1 + jax.lax.broadcasted_iota(g.dtype, g.shape, 0)), "differs from place to place"),
        (lambda g: jax.lax.cond(g.reshape(-1)[0] > 0, lambda: g, lambda: -g), "of"),
    ],
    ids=["width", "cumsum", "rev", "sort", "place", "cond"],
)
def test_what_keeps_shapes_but_is_not_elementwise(rule: Callable[[jax.Array], jax.Array], reason: str) -> None:
    """Each result has its parameter's shape."""
    with pytest.raises(ConfigError, match=reason):
        check_elementwise(leafwise(rule), shapes())


def test_leaves_stay_apart() -> None:
    """Two leaves of one shape may lie differently, so one must not enter the other."""
    kind = jax.ShapeDtypeStruct((4,), jnp.float32)

    def crossed(rule: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
        update: Any = lambda grads, params: {"a": rule(grads["a"], grads["b"]), "b": grads["b"]}  # noqa: E731
        return optax.stateless(update)

    with pytest.raises(ConfigError, match=r"update a comes of add .*of a and b"):
        check_elementwise(crossed(lambda a, b: a + b), {"a": kind, "b": kind})
    with pytest.raises(ConfigError, match="update a comes of b"):
        check_elementwise(crossed(lambda a, b: b), {"a": kind, "b": kind})


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_own_optimizers_on_a_model(kind: str) -> None:
    """What a run makes of its configuration, for a model's parameters."""
    run = config(optimizer=kind, weight_decay=0.1, warmup=2)
    check_elementwise(make_optimizer(run.train), trainer(run).model.shapes)


def test_state_by_parameter() -> None:
    """A spec for each leaf of the state, also where some parameters have none of it."""
    kinds, specs = shapes(), {"outer": {"wte": 1, "scale": 2}, "blocks": {"w_in": 3, "b_in": 4}}
    for name, want in (("adamw", [0, 4, 3, 2, 1, 4, 3, 2, 1]), ("masked", [0, 3, 1, 3, 1])):
        optimizer = ACCEPTED[name]
        state = jax.eval_shape(optimizer.init, kinds)
        found = by_parameter(optimizer, state, jax.tree.map(lambda n: P(f"axis{n}"), specs), P("axis0"))
        assert jax.tree.leaves(found)[: len(want)] == [P(f"axis{n}") for n in want]


@pytest.mark.parametrize(
    ("mesh", "zero", "refused"), [({"dp": 2}, 0, False), ({"dp": 2}, 1, True), ({"tp": 2}, 0, True)]
)
def test_a_trainer_asks_where_a_device_holds_parts(mesh: dict[str, int], zero: int, refused: bool) -> None:
    """Muon's matrices are whole on replicas, and in pieces under ZeRO or tensor parallelism."""
    run = config(mesh, zero=zero)
    make = lambda: Trainer.create(run, mesh=make_mesh(run.mesh, jax.devices()[:2]), optimizer=contrib.muon(RATE))  # noqa: E731
    if not refused:
        assert make().zero.stage == 0
        return
    with pytest.raises(ConfigError, match="not elementwise"):
        make()
