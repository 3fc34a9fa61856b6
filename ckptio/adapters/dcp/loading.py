"""One load, as one rank of it sees it: from read items to filled tensors.

    files      sizes of all that are needed, before any target is asked for
    values     what is no tensor: read and decoded, and pickled anew as planners expect it
    tensors    in waves: the planner gives targets, ranges land in them, they are committed
    values     handed over, last of all: a tensor that cannot be read leaves them as they were

A planner that gives its targets as they are in the state gets one wave. One that makes
them for each item (to cast, to gather) gets waves of about the size of the pool, so that
no more of them are in memory.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from ckptio.adapters.dcp.document import MAX_DOCUMENT_NBYTES, decode_document
from ckptio.adapters.dcp.regions import (
    Opened,
    Region,
    files_of,
    is_tensor,
    node_of,
    region_of,
    tree_of,
)
from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes, plan_and_read, read_plan
from ckptio.engine.regions import want_region
from ckptio.errors import FormatError, TargetError
from ckptio.layout import Box, batches
from ckptio.plan.load import plan_load
from ckptio.runtime.streams import caller_streams, devices_of
from ckptio.staging.copy import Destination, TargetState
from ckptio.state.rebuild import Rebuilder, allocate, torch_dtype
from ckptio.state.tree import indices_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from ckptio.engine.context import EngineContext
    from ckptio.plan.load import Wanted
    from ckptio.runtime.core import EngineCore
    from ckptio.storage.interface import Storage

_HOOKS = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")


async def open_checkpoint(storage: Storage, context: EngineContext) -> Opened:
    """Read what a checkpoint is made of.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It was not saved through DCP, or is damaged.
    """
    manifest = await context.cache.get(storage)
    entry = manifest.document
    if entry is None or entry.dtype != "uint8" or entry.nbytes > MAX_DOCUMENT_NBYTES:
        raise FormatError(
            f"{storage.path!r} was not saved by a StorageWriter; load it with ckptio.load"
        )
    reading = Reading(storage, manifest)
    await check_sizes(reading, [chunk.file for chunk in entry.chunks], context)
    data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    reading.target = TargetState([Destination(data, torch.uint8)], None)
    wanted: list[Wanted] = []
    want_region(entry, Box((0,), (entry.nbytes,)), 0, wanted)
    await read_plan(plan_load(manifest, wanted, context.config), reading, context)
    document = decode_document(data.numpy().tobytes(), manifest)
    return Opened(manifest, document, {item.fqn: item for item in document.items}, {})


class RankLoad:
    """One rank's part of a load.

    Args:
        opened: The checkpoint.
        storage: Where it is.
        core: An engine.
        types: Classes that may be built.
        allows_opaque: Whether the planner may have bytes that a planner made.
    """

    def __init__(
        self,
        opened: Opened,
        storage: Storage,
        core: EngineCore,
        *,
        types: Collection[type],
        allows_opaque: bool,
    ) -> None:
        self._opened = opened
        self._storage = storage
        self._core = core
        self._types = types
        self._allows_opaque = allows_opaque

    def run(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Give a planner everything it asks for. Blocks; the planner is called on this thread.

        Raises:
            TargetError: A target does not have the shape that was asked for.
            CorruptionError: A size or a checksum is wrong.
            CheckpointChangedError: The checkpoint was overwritten meanwhile.
            StorageError: It cannot be read.
        """
        regions = [region_of(self._opened, item) for item in items if is_tensor(item)]
        others = [item for item in items if not is_tensor(item)]
        files = files_of(self._opened, items)
        reading = Reading(self._storage, self._opened.manifest)
        self._core.call_blocking(lambda context: check_sizes(reading, files, context), "sizes")
        values = self._read_values(others)
        for wave in self._waves(regions, planner):
            self._fill(wave, planner)
        for item, value in zip(others, values, strict=True):
            planner.load_bytes(item, value)

    def _waves(self, regions: Sequence[Region], planner: LoadPlanner) -> Iterator[Sequence[Region]]:
        """Cut what is asked for into waves, in the order in which it lies in files."""
        if _is_stock(planner):
            if regions:
                yield regions
            return
        yield from batches(sorted(regions, key=_place), self._core.config.pool_nbytes)

    def _fill(self, wave: Sequence[Region], planner: LoadPlanner) -> None:
        """Fill the targets of a wave, and hand them back."""
        targets = [_checked(planner.resolve_tensor(region.item), region) for region in wave]
        rooms = [
            target
            if _takes_bytes(target)
            else torch.empty(region.box.shape, dtype=target.dtype, device="cpu")
            for target, region in zip(targets, wave, strict=True)
        ]
        wanted: list[Wanted] = []
        destinations = []
        for i, (region, room) in enumerate(zip(wave, rooms, strict=True)):
            want_region(region.entry, region.box, i, wanted)
            destinations.append(Destination(room, torch_dtype(region.entry.dtype)))
        self._read(wanted, destinations)
        for region, target, room in zip(wave, targets, rooms, strict=True):
            if room is not target:
                target.copy_(room)
            planner.commit_tensor(region.item, target)

    def _read(self, wanted: Sequence[Wanted], destinations: Sequence[Destination]) -> None:
        tensors = [destination.tensor for destination in destinations]
        streams = caller_streams(devices_of(tensors), self._core, saving=False)
        target = TargetState(destinations, streams)
        reading = Reading(
            self._storage, self._opened.manifest, target=target, num_tensors=len(destinations)
        )
        try:
            self._core.call_blocking(
                lambda context: plan_and_read(reading, wanted, context, whole_files=False),
                f"read {self._storage.path}",
            )
        except BaseException:
            target.count_write()  # some of it is
            raise
        target.mark_written()

    def _read_values(self, items: Sequence[ReadItem]) -> list[io.BytesIO]:
        """Read what is no tensor, and put it as planners expect it."""
        if not items:
            return []
        manifest = self._opened.manifest
        tree = tree_of(self._opened, items)
        nodes = [node_of(self._opened, tree, item) for item in items]
        indices = sorted({index for node in nodes for index in indices_in(node)})
        tensors = {index: allocate(manifest.tensors[index]) for index in indices}
        wanted: list[Wanted] = []
        destinations = []
        for i, index in enumerate(indices):
            entry = manifest.tensors[index]
            want_region(entry, entry.box, i, wanted)
            destinations.append(Destination(tensors[index], torch_dtype(entry.dtype)))
        if destinations:
            self._read(wanted, destinations)
        rebuilder = Rebuilder(tensors, self._types)
        values = [
            self._as_bytes(item, rebuilder.rebuild(item.storage_index.fqn, node))
            for item, node in zip(items, nodes, strict=True)
        ]
        for note in rebuilder.notes:
            warnings.warn(note, stacklevel=2)
        return values

    def _as_bytes(self, item: ReadItem, value: Any) -> io.BytesIO:
        """Put a value as planners expect it: what they unpickle was pickled here, just now.

        Raises:
            FormatError: A planner made these bytes, and nobody said that a planner may have
                them: DCP's own unpickles whatever it is given.
        """
        fqn = item.storage_index.fqn
        word = self._opened.items[fqn].what
        if word in {"opaque", "bytesio"}:
            if type(value) is not bytes:
                raise FormatError(f"{fqn!r} is a {type(value).__name__} and is noted as bytes")
            if word == "opaque" and not self._allows_opaque:
                raise FormatError(
                    f"{fqn!r} is bytes that a planner made; if your planner reads them without"
                    " pickle, or you trust the checkpoint, pass allow_opaque=True to StorageReader"
                )
            if word == "opaque":
                return io.BytesIO(value)
            value = io.BytesIO(value)
        made = io.BytesIO()
        torch.save(value, made)
        made.seek(0)
        return made


def _is_stock(planner: LoadPlanner) -> bool:
    """Whether a planner gives the state's own tensors as targets."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name)
        and name not in vars(planner)
        for name in _HOOKS
    )


def _place(region: Region) -> tuple[int, int]:
    """Say where a part begins, to read files from front to back."""
    chunks = region.entry.chunks
    return (chunks[0].file, chunks[0].start) if chunks else (-1, 0)


def _checked(target: torch.Tensor, region: Region) -> torch.Tensor:
    """Check that a target has the shape that was asked for.

    Raises:
        TargetError: It has not.
    """
    if tuple(target.shape) != region.box.shape:
        raise TargetError(
            f"the planner gave a target of shape {tuple(target.shape)} for"
            f" {region.item.dest_index.fqn!r}, and asked for {region.box.shape}"
        )
    return target.detach()


def _takes_bytes(target: torch.Tensor) -> bool:
    """Whether a target has memory that bytes can be copied to."""
    return (
        type(target) is torch.Tensor
        and target.layout is torch.strided
        and (target.is_cpu or target.is_cuda)
    )
