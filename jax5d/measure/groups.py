"""Which devices take part in a collective: the forms in which HLO writes it.

Device ids are positions in the device order of the mesh. Groups of one collective are all alike, so the first tells.
"""

from __future__ import annotations

import math
import re

import numpy as np

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_EVERYONE = re.compile(r"replica_groups=\{\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=@?mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_SIZE = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


def first_group(attributes: str, devices: int) -> list[int]:
    """Device ids of the first of a collective's groups, in increasing order.

    The forms are `{{0,1},{2,3}}`; `{}`, all devices; `[2,4]<=[4,2]T(1,0)`, the ids 0..7 as a 4 x 2 array, transposed
    and cut into 2 groups of 4; and `mesh['x'=4,'y'=2] {'x'}`, groups along axes of a mesh of its own, where `'x':(2)2`
    is the part of x of size 2 behind one of size 2.

    Raises:
        NotImplementedError: another form.
    """
    if listed := _LISTED.search(attributes):
        return sorted(_numbers(listed.group(1)))
    if _EVERYONE.search(attributes):
        return list(range(devices))
    if iota := _IOTA.search(attributes):
        size = int(iota.group(2))
        return sorted(_iota(iota.group(3), iota.group(4)).ravel()[:size].tolist())
    if mesh := _MESH.search(attributes):
        return _along(*mesh.groups())
    raise NotImplementedError(f"replica groups of an unknown form: {attributes[:300]}")


def source_target_pairs(attributes: str) -> list[tuple[int, int]]:
    """Who sends to whom in a collective-permute."""
    listed = attributes.split("source_target_pairs={")[1].split("}}")[0] + "}"
    return [(int(a), int(b)) for a, b in _PAIR.findall(listed)]


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _numbers(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(order)) if order else ids


def _along(mesh: str, device_ids: str | None, axes: str) -> list[int]:
    """The group of the mesh's first device along the named axes or parts of them."""
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh)}
    wanted = {name: np.zeros(1, int) for name in sizes}
    for name, before, part in _AXIS.findall(axes):
        steps = np.arange(int(part or sizes[name]))
        stride = sizes[name] // (int(before or 1) * len(steps))
        wanted[name] = (wanted[name][:, None] + stride * steps[None]).ravel()
    shape = tuple(sizes.values())
    return sorted(_ids(device_ids, math.prod(shape)).reshape(shape)[np.ix_(*wanted.values())].ravel().tolist())


def _ids(text: str | None, devices: int) -> np.ndarray:
    """The order of a mesh's devices: as they are, a list, or an iota."""
    if text is None:
        return np.arange(devices)
    order = _ORDER.search(text)
    return _iota(*order.groups()).ravel() if order else np.array(_numbers(text))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
