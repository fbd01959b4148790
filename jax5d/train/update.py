"""The update of parameters by an optimizer whose state is on the device, or in the host's memory.

Adam's moments are two thirds of float32 training state, and a step needs them only at its end. From the host's memory
(Ren et al., ZeRO-Offload, arXiv:2101.06840, but with the arithmetic left on the device) they come to the device a layer
at a time and go back changed. Two things make this work: an elementwise optimizer updates a layer as it updates all of
them, and XLA writes a loop's carry in place, in the host's memory too. To copy all moments to the device, update, and
copy them back would save nothing, as XLA starts such copies together; as inputs and outputs of the loop they would be
in the host's memory twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jax5d.mesh import DEVICE, HOST
from jax5d.train.elementwise import by_parameter

Tree = Any


@dataclass(frozen=True)
class Step:
    """What a step makes of gradients and of an update, elementwise."""

    norm: jax.Array
    """Of the gradients, the same on every device: float32 []."""
    clip: Callable[[Tree], Tree]
    """Gradients to gradients."""
    choose: Callable[[Tree, Tree], Tree]
    """(new, old) to one of them."""


class Update(Protocol):
    """An optimizer's update of this device's parameters."""

    memory: ClassVar[str]
    """Kind of memory in which the part of the optimizer's state lies that belongs to parameters."""
    parts: ClassVar[bool]
    """Whether it takes parameters apart, as only an elementwise optimizer allows."""

    def __call__(self, step: Step, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """The next parameters and state.

        Args:
            grads: of any dtype, in the shapes of `params`.
            state: the optimizer's.
            params: {"outer": ..., "blocks": ...}, with a leading layers dim in "blocks".
        """
        ...


@dataclass(frozen=True)
class OnDevice:
    """All at once."""

    optimizer: optax.GradientTransformation
    memory: ClassVar[str] = DEVICE
    parts: ClassVar[bool] = False

    def __call__(self, step: Step, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """As the optimizer does it."""
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), step.clip(grads), params)
        updates, new = self.optimizer.update(grads, state, params)
        return step.choose((optax.apply_updates(params, updates), new), (params, state))


@dataclass(frozen=True)
class FromHost:
    """A layer at a time, then what is outside the layers, each with its state brought here and sent back."""

    optimizer: optax.GradientTransformation
    memory: ClassVar[str] = HOST
    parts: ClassVar[bool] = True

    def __call__(self, step: Step, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """Bytes to the device, and as many back: those of the state that belongs to parameters."""
        parts = {part: jax.tree.map(lambda _, part=part: part, tree) for part, tree in params.items()}
        owners = by_parameter(self.optimizer, state, parts, "")
        layers, rest = _split(owners, state)

        def one(at: Any, blocks: Tree, layers: Tree, rest: Tree) -> tuple[Tree, Tree, Tree]:
            """The next parameters, layers' state and rest, with one layer in place of all; XLA drops what is unused."""
            near = _moved(owners, _merged(owners, _at(layers, at), rest), jax.memory.Space.Device)
            old, slopes = params | {"blocks": _at(blocks, at)}, grads | {"blocks": _at(grads["blocks"], at)}
            new, state = OnDevice(self.optimizer)(step, slopes, near, old)
            return new, *_split(owners, _moved(owners, state, jax.memory.Space.Host))

        def body(carry: tuple[Tree, Tree, jax.Array], at: jax.Array) -> tuple[tuple[Tree, Tree, jax.Array], None]:
            blocks, layers, norm = carry
            new, state, _ = one(at, blocks, layers, rest)
            return (_put(blocks, new["blocks"], at), _put(layers, state, at), lax.optimization_barrier(norm)), None

        count = jax.tree.leaves(params["blocks"])[0].shape[0]
        # the norm goes through the loop, and the rest waits for it: then the layers' gradients have made room
        (blocks, layers, norm), _ = lax.scan(body, (params["blocks"], layers, step.norm), jnp.arange(count))
        rest = jax.tree.map(lambda x: lax.optimization_barrier((x, norm))[0], rest)
        new, _, rest = one(0, blocks, layers, rest)
        return new | {"blocks": blocks}, _merged(owners, layers, rest)


def make_update(offload: Literal["none", "optimizer"], optimizer: optax.GradientTransformation) -> Update:
    """The update for `parallel.offload`."""
    return {"none": OnDevice, "optimizer": FromHost}[offload](optimizer)


def _split(owners: Tree, state: Tree) -> tuple[Tree, Tree]:
    """A state's leaves that belong to layers, and the others; None in place of what is missing."""
    inside = jax.tree.map(lambda owner, x: x if owner == "blocks" else None, owners, state)
    return inside, jax.tree.map(lambda owner, x: None if owner == "blocks" else x, owners, state)


def _merged(owners: Tree, layers: Tree, rest: Tree) -> Tree:
    """What `_split` has split."""
    return jax.tree.map(lambda owner, a, b: a if owner == "blocks" else b, owners, layers, rest)


def _moved(owners: Tree, state: Tree, space: Any) -> Tree:
    """The leaves that belong to parameters in another memory."""
    return jax.tree.map(lambda owner, x: jax.device_put(x, space) if owner else x, owners, state)


def _at(stacked: Tree, at: Any) -> Tree:
    """One layer of a stack, as a stack of one."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, 1), stacked)


def _put(stacked: Tree, layer: Tree, at: Any) -> Tree:
    """A stack with one of its layers replaced."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, at, 0), stacked, layer)
