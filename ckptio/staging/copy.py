"""Copy a state into slabs, and slabs into tensors.

Tensors that lie in one piece are copied by address, all pieces of a segment or of a block
together. Strided, conjugate and converted ones go through torch, as do those on a device where
slabs are not pinned, or the driver copies no addresses. Copies from and to CUDA run on side
streams, ordered by events behind the caller's stream; nothing here waits for a whole device.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import msgspec
import torch

from ckptio._gc import without_collection
from ckptio.errors import TargetError
from ckptio.staging.by_torch import copy_by_torch
from ckptio.staging.memory import (
    address_of,
    bits_of,
    boxes,
    far_address_of,
    is_physical,
    layout_of,
    window,
)
from ckptio.staging.moves import move_all, move_rows
from ckptio.staging.teams import alone
from ckptio.staging.watch import SourceWatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.plan.load import BlockPieces, Rows
    from ckptio.plan.save import Segment
    from ckptio.staging.cuda import CallerStreams, PendingCopies
    from ckptio.staging.far_moves import FarMove
    from ckptio.staging.memory import Layout
    from ckptio.staging.pool import Slab
    from ckptio.staging.watch import FlatPiece, Known
    from ckptio.storage.streams import Memory


class SourceState:
    """The tensors of a state that is being saved. Made on the caller's thread.

    Args:
        tensors: The caller's tensors, in the order of the plan; see `SourceWatch`.
        streams: What orders copies behind the caller's work on its devices, if any.
        known: What is known of each tensor already; of none if empty.

    Attributes:
        watch: Has the tensors until they are copied, and says whether they were changed before.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        streams: CallerStreams | None,
        known: Sequence[Known | None] = (),
    ) -> None:
        self.watch = SourceWatch(tensors, known)
        self._streams = streams
        self._lock = threading.Lock()

    @property
    def uses_devices(self) -> bool:
        """Whether devices copy to the slabs."""
        return self._streams is not None

    def gather(self, segment: Segment, slab: Slab, pending: list[PendingCopies]) -> None:
        """Copy a segment into a slab. Blocks; thread-safe for different slabs.

        A tensor that was moved is left out, and so is one with another shape, unless it is copied
        from its address: the bytes are the same then. `SourceWatch.changed` tells what is left out.

        Args:
            segment: What to copy.
            slab: Takes it.
            pending: Takes what devices still have to do before the slab is complete.
        """
        base = slab.address
        slab.view[: len(segment.header)] = segment.header
        watch = self.watch
        addresses, pointers, tensors = watch.addresses, watch.pointers, watch.tensors
        devices = watch.devices if slab.pinned else {}
        moves, slow = [], []
        far: dict[torch.device, list[FarMove]] = {}
        in_far: list[FlatPiece] = []
        for piece in segment.pieces:
            position, leaf, offset, nbytes = piece
            address = addresses[leaf]
            if tensors[leaf].data_ptr() != pointers[leaf]:
                watch.moved = leaf
            elif address:
                moves.append((base + position, address + offset, nbytes))
            elif leaf in devices and not watch.is_there(leaf):
                watch.moved = leaf
            elif leaf in devices:
                in_far.append(piece)
                way = base + position, pointers[leaf] + offset, nbytes, leaf
                far.setdefault(devices[leaf][0], []).append(way)
            else:
                slow.append(piece)
        move_all(moves)
        watch.sample(segment.pieces, base)
        if far and not _far(self._streams).copy_memory(far, pending, saving=True):
            slow += in_far
        if slow:
            self._gather_slow(slow, slab, pending)

    def _gather_slow(
        self, pieces: Sequence[FlatPiece], slab: Slab, pending: list[PendingCopies]
    ) -> None:
        """Copy by torch what is not copied by address."""
        tensors, streams = self.watch.tensors, self._streams
        ways = functools.partial(self._pairs, slab=slab)
        copy_by_torch(pieces, tensors, ways, self._lock, streams, pending)

    def _pairs(
        self, pieces: Sequence[FlatPiece], slab: Slab
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Give views of the slab and of the tensors, one after the other.

        Views of thousands at once would set off a collection of all garbage.
        """
        for position, leaf, offset, nbytes in pieces:
            tensor = self.watch.tensors[leaf]
            if not self._is_as_it_was(leaf, tensor):
                self.watch.moved = leaf
                continue
            tensor = bits_of(tensor)
            flat = window(slab, position, nbytes, tensor.dtype)
            for source, target in boxes(tensor, flat, offset // tensor.itemsize):
                yield target, source

    def _is_as_it_was(self, leaf: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory as it did; one in one piece may have another shape."""
        watch = self.watch
        if tensor.data_ptr() != watch.pointers[leaf]:  # while others were copied
            return False
        if leaf in watch.devices:
            is_whole = tensor.is_contiguous() and tensor.nbytes == watch.devices[leaf][1]
            return is_whole and watch.is_there(leaf)
        return layout_of(tensor) == watch.layouts[leaf]


def _far(streams: CallerStreams | None) -> CallerStreams:
    assert streams is not None  # noqa: S101  # made for just the devices of the tensors
    return streams


class Destination(msgspec.Struct, frozen=True, gc=False):
    """A tensor that takes bytes of a checkpoint. A struct, as there are thousands.

    Attributes:
        tensor: Where they go; of the shape of what is stored.
        dtype: The element type they are stored in; the copy converts if it differs.
        span: First byte and end of its memory a moment ago, if one memmove can fill it, or one
            copy of `device`.
        device: The CUDA device that has the span; `None` if the host does.
        storage: Keeps the memory of the span since somebody looked.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    span: tuple[int, int] | None = None
    device: torch.device | None = None
    storage: torch.UntypedStorage | None = None

    def __repr__(self) -> str:
        """Say what it is; the storage's own has every byte of it."""
        return f"<Destination {self.dtype} {tuple(self.tensor.shape)}>"


def _span_of(destination: Destination) -> tuple[tuple[int, int] | None, torch.device | None]:
    """Find what one memmove, or one copy by a device, fills; and that device."""
    tensor = destination.tensor
    if tensor.dtype != destination.dtype:
        return None, None
    start = address_of(tensor) or far_address_of(tensor)
    device = tensor.device if start and tensor.is_cuda else None
    return (start, start + tensor.nbytes) if start else None, device


class TargetState:
    """The tensors that are being filled.

    Args:
        destinations: In the order in which the plan numbers them. They, and the storages that
            they have now, or had when somebody looked, are referred to, so that no memory that is
            filled is another's.
        streams: What orders copies behind the caller's work on its devices, if any.
    """

    def __init__(self, destinations: Sequence[Destination], streams: CallerStreams | None) -> None:
        self._destinations = destinations
        self._tensors = [each.tensor for each in destinations]
        #: By number: where one memmove goes, 0 where none can; and where the tensor is.
        self._addresses: list[int] = []
        self._pointers: list[int] = []
        #: By number: the device that fills a tensor by one copy, and the end of that; and how one
        #: lies that torch fills.
        self._devices: dict[int, torch.device] = {}
        self._stops: dict[int, int] = {}
        self._layouts: dict[int, Layout] = {}
        self._storages = self._look()
        self._streams = streams
        self._lock = threading.Lock()
        self._moved: int | None = None
        self.count_write()

    @without_collection
    def _look(self) -> list[torch.UntypedStorage]:
        """Note how each is filled, and give what it lies in."""
        storages = [
            each.tensor.untyped_storage() if each.storage is None else each.storage
            for each in self._destinations
        ]
        for number, each in enumerate(self._destinations):
            if each.span is not None and each.device is None:
                self._pointers.append(each.span[0])  # nearly all
                self._addresses.append(each.span[0])
            else:
                self._look_at(number, each)
        return storages

    def _look_at(self, number: int, destination: Destination) -> None:
        """Note how one is filled that was not looked at, or is on a device."""
        span, device = destination.span, destination.device
        if span is None:
            span, device = _span_of(destination)
        self._pointers.append(destination.tensor.data_ptr() if span is None else span[0])
        self._addresses.append(0 if span is None or device is not None else span[0])
        if span is None:
            self._layouts[number] = layout_of(destination.tensor)
        elif device is not None:
            self._devices[number], self._stops[number] = device, span[1]

    @property
    def is_async(self) -> bool:
        """Whether `scatter` may leave copies pending, so that the slab must stay as it is."""
        return self._streams is not None

    def scatter(
        self, blocks: Sequence[BlockPieces], memory: Memory, pending: list[PendingCopies]
    ) -> None:
        """Copy the pieces of verified blocks where they belong. Blocks; thread-safe.

        Nothing is written to a target that was moved: its old memory may be another's by now.
        `mark_written` tells of it.

        Args:
            blocks: Where each starts in the memory, and its pieces as `plan.load.ReadSegment`
                has them.
            memory: Holds the blocks.
            pending: Takes what devices still have to read from it.
        """
        addresses, pointers, tensors = self._addresses, self._pointers, self._tensors
        devices = self._devices if memory.pinned else {}
        moves, slow = [], []
        far: dict[torch.device, list[FarMove]] = {}
        in_far: list[FlatPiece] = []
        for start, pieces in blocks:
            base = memory.address + start
            for position, index, offset, nbytes, rows in pieces:
                address = addresses[index]
                if tensors[index].data_ptr() != pointers[index] or (
                    index in devices and not self._is_there(index)
                ):
                    self._moved = index
                elif index in devices:
                    ways = far.setdefault(devices[index], [])
                    for piece in _rows(start + position, index, offset, nbytes, rows):
                        in_far.append(piece)
                        to = pointers[index] + piece[2]
                        ways.append((to, memory.address + piece[0], nbytes, index))
                elif not address:
                    slow += _rows(start + position, index, offset, nbytes, rows)
                elif rows is None:
                    moves.append((address + offset, base + position, nbytes))
                else:
                    move_rows(address + offset, base + position, nbytes, rows)
        move_all(moves)
        if far and not _far(self._streams).copy_memory(far, pending, saving=False):
            slow += in_far
        if slow:
            # tensors made in inference mode can be written to in no other; the rest can, too
            with torch.inference_mode(), alone():
                self._scatter_slow(slow, memory, pending)

    def _scatter_slow(
        self, pieces: Sequence[FlatPiece], memory: Memory, pending: list[PendingCopies]
    ) -> None:
        """Copy by torch what is not copied by address."""
        ways = functools.partial(self._pairs, memory=memory)
        copy_by_torch(pieces, self._tensors, ways, self._lock, self._streams, pending)

    def _pairs(
        self, pieces: Sequence[FlatPiece], memory: Memory
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Give views of the tensors and of the memory; see `SourceState`."""
        for position, index, offset, nbytes in pieces:
            destination = self._destinations[index]
            if not self._is_as_it_was(index, destination.tensor):
                self._moved = index
                continue
            tensor = destination.tensor.detach()
            flat = window(memory, position, nbytes, destination.dtype)
            start = offset // destination.dtype.itemsize
            if tensor.dtype == destination.dtype and is_physical(tensor):
                tensor, flat = bits_of(tensor), bits_of(flat)
            yield from boxes(tensor, flat, start)

    def _is_as_it_was(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory as it did; one in one piece may have another shape."""
        if tensor.data_ptr() != self._pointers[index]:  # while others were copied
            return False
        if index in self._devices:
            is_same = tensor.dtype == self._destinations[index].dtype and is_physical(tensor)
            is_whole = (
                tensor.is_contiguous()
                and self._pointers[index] + tensor.nbytes == self._stops[index]
            )
            return is_same and is_whole and self._is_there(index)
        return layout_of(tensor) == self._layouts[index]

    def _is_there(self, index: int) -> bool:
        """Whether a device's memory still has all of a tensor; its storage may be resized."""
        storage = self._storages[index]
        return self._stops[index] <= storage.data_ptr() + storage.nbytes()

    def count_write(self) -> None:
        """Count a write to each tensor, as autograd does; before the first byte and after the last.

        A backward pass that needs the old values is refused then, and a save under way fails, also
        if the load itself fails. (Torch counts its own operations when they have ended.)
        """
        torch.autograd.graph.increment_version(self._tensors)

    def mark_written(self) -> None:
        """Count the writes that are done, if all targets are where they were.

        Raises:
            TargetError: One was moved in memory meanwhile, and not filled.
        """
        if self._moved is not None:
            shape = tuple(self._tensors[self._moved].shape)
            raise TargetError(
                f"a target of shape {shape} was moved in memory, or changed its shape or storage,"
                " while targets were filled, and so some are and some are not: load again, and"
                " share or convert tensors afterwards"
            )
        self.count_write()


def _rows(
    position: int, index: int, offset: int, nbytes: int, rows: Rows | None
) -> list[FlatPiece]:
    """Take rows apart that are copied one by one."""
    count, step, stride = rows or (1, 0, 0)
    return [(position + i * step, index, offset + i * stride, nbytes) for i in range(count)]
