"""Load a rectangular part of one tensor."""

from __future__ import annotations

import numbers
import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes, read_plan
from ckptio.engine.regions import want_region
from ckptio.errors import ConfigError, TargetError
from ckptio.layout import Box
from ckptio.plan.load import plan_load
from ckptio.runtime.streams import caller_streams
from ckptio.staging.copy import Destination, TargetState
from ckptio.state.rebuild import device_of, empty, torch_dtype
from ckptio.state.tree import read_tree, tensor_index, walk

if TYPE_CHECKING:
    import torch

    from ckptio.format.manifest import Manifest, TensorEntry
    from ckptio.plan.load import Wanted
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.drive import Flow
    from ckptio.storage.resolve import PathLike

Index = SupportsIndex | slice | tuple[SupportsIndex | slice, ...]


def slice_flow(
    core: EngineCore,
    path: PathLike,
    name: str,
    index: Index,
    device: torch.device | str | None,
) -> Flow[torch.Tensor]:
    """Load a part of one tensor; see `api.Engine.load_slice`."""
    storage = core.storage(path)
    manifest: Manifest = yield lambda context: context.cache.get(storage)
    entry = find_tensor(storage.path, manifest, name)
    region, shape = region_of(entry, index)
    reading = Reading(storage, manifest)
    files = sorted({chunk.file for chunk in entry.chunks})
    yield lambda context: check_sizes(reading, files, context)
    wanted: list[Wanted] = []
    want_region(entry, region, 0, wanted)
    plan = plan_load(manifest, wanted, core.config)
    stored = torch_dtype(entry.dtype)
    result = empty(region.shape, stored, device_of(device), name)
    target = TargetState(
        [Destination(result, stored)], caller_streams([result], core, saving=False)
    )
    reading.target = target
    yield lambda context: read_plan(plan, reading, context)
    target.mark_written()
    return result.view(shape)


def find_tensor(path: str, manifest: Manifest, name: str) -> TensorEntry:
    """Find a tensor by its name in the state; a tied one by any of its names.

    Raises:
        TargetError: There is none, or it is stored as a part of another.
    """
    for entry in manifest.tensors:
        if entry.name == name:
            return entry
    for fqn, node in walk("", read_tree(manifest)):
        index = tensor_index(node)
        if fqn == name and index is not None and 0 <= index < len(manifest.tensors):
            entry = manifest.tensors[index]
            if "t" not in node:
                return entry
            raise TargetError(
                f"{name!r} is stored as a part of {entry.name!r}; load it whole with select="
            )
    raise TargetError(f"checkpoint {path!r} has no tensor {name!r}; `ckptio show` lists them")


def region_of(entry: TensorEntry, index: Index) -> tuple[Box, tuple[int, ...]]:
    """Turn an index into a box, and the shape of the result (ints drop their dimension).

    Raises:
        TargetError: The index does not fit the tensor.
        ConfigError: It is neither int nor slice, or has a step.
    """
    parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(entry.shape):
        raise TargetError(
            f"{entry.name!r} of shape {entry.shape} does not take {len(parts)} indices"
        )
    parts += (slice(None),) * (len(entry.shape) - len(parts))
    offset, extent, shape = [], [], []
    for part, size in zip(parts, entry.shape, strict=True):
        if isinstance(part, slice):
            _check_slice(part)
            start, stop, _ = part.indices(size)
            count = max(0, stop - start)
            shape.append(count)
        elif not _is_int(part):
            raise ConfigError(f"load_slice takes ints and slices, not {part!r}")
        elif -size <= (number := operator.index(part)) < size:
            start, count = number % size, 1
        else:
            raise TargetError(f"index {part} is outside of {entry.name!r} of shape {entry.shape}")
        offset.append(start)
        extent.append(count)
    return Box(tuple(offset), tuple(extent)), tuple(shape)


def _check_slice(part: slice) -> None:
    """Refuse steps, and bounds that are no ints."""
    bounds = (part.start, part.stop)
    if part.step not in (None, 1) or not all(b is None or _is_int(b) for b in bounds):
        raise ConfigError(f"load_slice takes slices of ints with steps of 1, not {part!r}")


def _is_int(value: object) -> bool:
    """Whether a value is a whole number, Python's or numpy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
