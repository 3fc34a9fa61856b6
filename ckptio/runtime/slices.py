"""Load a rectangular part of one tensor."""

from __future__ import annotations

import numbers
import operator
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from ckptio._texts import shown
from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes, read_plan
from ckptio.engine.names import Named
from ckptio.engine.regions import Need, want_region
from ckptio.errors import CheckpointChangedError, ConfigError, TargetError
from ckptio.layout import DTYPES, Box, numel
from ckptio.plan.load import plan_load
from ckptio.runtime.streams import caller_streams, devices_of
from ckptio.staging.copy import Destination, TargetState
from ckptio.state.leaves import as_integers
from ckptio.state.rebuild import device_of, empty, torch_dtype, view_of
from ckptio.state.references import check_view

if TYPE_CHECKING:
    import torch

    from ckptio.engine.context import EngineContext
    from ckptio.format.encode import Json
    from ckptio.format.manifest import TensorEntry
    from ckptio.plan.load import Wanted
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.drive import Flow
    from ckptio.storage.interface import Storage
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
    if not isinstance(name, str):
        raise ConfigError(
            f"load_slice takes the name of a tensor before the index, not {shown(name)}"
        )
    storage = core.storage(path)
    named: Named = yield lambda context: _named(storage, context)
    manifest = named.manifest
    entry, view = named.find(storage.path, name)
    region, shape = region_of(name, entry.shape if view is None else tuple(view["s"]), index)
    part = None if view is None else _part_of(view, region, entry)
    reading = Reading(storage, manifest)
    near = entry.chunks if part is not None else Need(entry, 0, region=region).chunks()
    files = sorted({chunk.file for chunk in near} - named.whole)
    whole = yield lambda context: check_sizes(reading, files, context)
    if not manifest.is_foreign:  # what changes behind this look has not its checksum
        named.whole |= whole
    wanted: list[Wanted] = []
    if part is None:
        want_region(entry, region, 0, wanted)
        stored, extent = torch_dtype(entry.dtype), region.shape
    else:
        Need(entry, 0, span=part.span).expand(wanted)
        stored, extent = torch_dtype(part.node["d"]), (part.num_elements,)
    plan = plan_load(manifest, wanted, core.config)
    result = empty(extent, stored, device_of(device), name)
    streams = caller_streams(devices_of([result]), core, saving=False)
    target = TargetState([Destination(result, stored)], streams)
    reading.target = target
    try:
        yield lambda context: read_plan(plan, reading, context)
    except CheckpointChangedError:  # a file went that was whole before
        named.whole.clear()
        yield lambda context: check_sizes(reading, plan.files, context)
        raise
    target.mark_written()
    if part is not None:
        view = view_of(result, part.node)  # expanded, it is larger than what was read
        result = empty(region.shape, view.dtype, result.device, name)
        as_integers(result).copy_(as_integers(view))
    return result.view(shape)


async def _named(storage: Storage, context: EngineContext) -> Named:
    """Give what is remembered of a checkpoint, as it is now."""
    return context.cache.beside(await context.cache.get(storage), Named)


class _Part(NamedTuple):
    """What has to be read of a stored tensor for a part of a view of it.

    Attributes:
        span: The bytes of it, from the first that is needed to the last.
        node: The part, as a view of those.
        num_elements: How many there are in them, of the view's type.
    """

    span: tuple[int, int]
    node: dict[str, Json]
    num_elements: int


def _part_of(view: dict[str, Json], region: Box, entry: TensorEntry) -> _Part:
    """Say what a part of a view needs. An expanded tensor needs few bytes, however large it is.

    Raises:
        FormatError: The view is not inside of what is stored.
    """
    check_view(view, entry.nbytes)
    itemsize = DTYPES[view["d"]].itemsize
    node = {**view, "s": list(region.shape), "o": 0}
    if not numel(region.shape):
        return _Part((0, 0), node, 0)
    skipped = sum(n * stride for n, stride in zip(region.offset, view["r"], strict=True))
    reach = sum((n - 1) * stride for n, stride in zip(region.shape, view["r"], strict=True)) + 1
    first = view["o"] + skipped * itemsize
    return _Part((first, first + reach * itemsize), node, reach)


def region_of(name: str, whole: tuple[int, ...], index: Index) -> tuple[Box, tuple[int, ...]]:
    """Turn an index into a box of a tensor, and the shape of the result (ints drop theirs).

    Raises:
        TargetError: The index does not fit the tensor.
        ConfigError: It is neither int nor slice, or has a step.
    """
    parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(whole):
        raise TargetError(f"{name!r} of shape {whole} does not take {len(parts)} indices")
    parts += (slice(None),) * (len(whole) - len(parts))
    offset, extent, shape = [], [], []
    for part, size in zip(parts, whole, strict=True):
        if isinstance(part, slice):
            _check_slice(part)
            start, stop, _ = part.indices(size)
            count = max(0, stop - start)
            shape.append(count)
        elif not _is_int(part):
            raise ConfigError(f"load_slice takes ints and slices, not {shown(part)}")
        elif -size <= (number := operator.index(part)) < size:
            start, count = number % size, 1
        else:
            raise TargetError(f"index {shown(part)} is outside of {name!r} of shape {whole}")
        offset.append(start)
        extent.append(count)
    return Box(tuple(offset), tuple(extent)), tuple(shape)


def _check_slice(part: slice) -> None:
    """Refuse steps, and bounds that are no ints."""
    bounds = (part.start, part.stop, part.step)
    if not all(b is None or _is_int(b) for b in bounds) or part.step not in (None, 1):
        raise ConfigError(f"load_slice takes slices of ints with steps of 1, not {shown(part)}")


def _is_int(value: object) -> bool:
    """Whether a value is a whole number, Python's or numpy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
