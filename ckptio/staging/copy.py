"""Copy a state into slabs, and slabs into tensors.

CPU tensors are copied by address, all pieces of a segment or of a block together. Strided,
conjugate and device tensors go through torch. Copies from and to CUDA run on side streams,
ordered by events behind the caller's stream; nothing here waits for a whole device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from ckptio.errors import TargetError
from ckptio.staging.memory import (
    address_of,
    bits_of,
    boxes,
    is_physical,
    window,
)
from ckptio.staging.moves import move_all, move_rows
from ckptio.staging.teams import alone
from ckptio.staging.watch import SourceWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.plan.load import Piece, Rows
    from ckptio.plan.save import Segment
    from ckptio.staging.cuda import CallerStreams, PendingCopies
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

    @property
    def uses_devices(self) -> bool:
        """Whether devices copy to the slabs."""
        return self._streams is not None

    def gather(self, segment: Segment, slab: Slab, pending: list[PendingCopies]) -> None:
        """Copy a segment into a slab. Blocks; thread-safe for different slabs.

        What was moved, or has another shape, is left out. `SourceWatch.changed` tells of it.

        Args:
            segment: What to copy.
            slab: Takes it.
            pending: Takes what devices still have to do before the slab is complete.
        """
        base = slab.address
        slab.view[: len(segment.header)] = segment.header
        watch = self.watch
        addresses, pointers, tensors = watch.addresses, watch.pointers, watch.tensors
        moves, slow = [], []
        for piece in segment.pieces:
            position, leaf, offset, nbytes = piece
            address = addresses[leaf]
            if tensors[leaf].data_ptr() != pointers[leaf]:
                watch.moved = leaf
            elif address:
                moves.append((base + position, address + offset, nbytes))
            else:
                slow.append(piece)
        move_all(moves)
        watch.sample(segment.pieces, base)
        if slow:
            self._gather_slow(slow, slab, pending)

    def _gather_slow(
        self, pieces: Sequence[FlatPiece], slab: Slab, pending: list[PendingCopies]
    ) -> None:
        """Copy what one memmove cannot: strided, conjugate and device tensors."""
        on_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for position, leaf, offset, nbytes in pieces:
            tensor = bits_of(self.watch.tensors[leaf])
            if (tuple(tensor.shape), tensor.stride()) != self.watch.layouts[leaf]:
                self.watch.moved = leaf
                continue
            flat = window(slab, position, nbytes, tensor.dtype)
            for source, target in boxes(tensor, flat, offset // tensor.itemsize):
                if tensor.is_cuda:
                    on_device.setdefault(tensor.device, []).append((target, source))
                else:
                    target.copy_(source)
        if on_device:
            assert self._streams is not None  # noqa: S101  # made for just these devices
            pending.append(self._streams.copy(on_device))


class Destination(msgspec.Struct, frozen=True, gc=False):
    """A tensor that takes bytes of a checkpoint. A struct, as there are thousands.

    Attributes:
        tensor: Where they go; of the shape of what is stored.
        dtype: The element type they are stored in; the copy converts if it differs.
        address: Where its memory was a moment ago, if one memmove can fill it.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    address: int | None = None


class TargetState:
    """The tensors that are being filled.

    Args:
        destinations: In the order in which the plan numbers them. They, and the storages that
            they have now, are referred to, so that no memory that is filled is another's.
        streams: What orders copies behind the caller's work on its devices, if any.
    """

    def __init__(self, destinations: Sequence[Destination], streams: CallerStreams | None) -> None:
        self._destinations = destinations
        self._tensors = [each.tensor for each in destinations]
        #: By number: where one memmove goes, 0 where none can; and where the tensor is.
        self._addresses: list[int] = []
        self._pointers: list[int] = []
        self._storages = [each.tensor.untyped_storage() for each in destinations]
        for each in destinations:
            address = pointer = each.address
            if address is None or pointer is None:
                address = address_of(each.tensor) if each.tensor.dtype == each.dtype else 0
                pointer = each.tensor.data_ptr()
            self._addresses.append(address)
            self._pointers.append(pointer)
        self._streams = streams
        self._moved: int | None = None
        self.count_write()

    @property
    def is_async(self) -> bool:
        """Whether `scatter` may leave copies pending, so that the slab must stay as it is."""
        return self._streams is not None

    def scatter(
        self, pieces: Sequence[Piece], memory: Memory, start: int, pending: list[PendingCopies]
    ) -> None:
        """Copy the pieces of a verified block where they belong. Blocks; thread-safe.

        Nothing is written to a target that was moved: its old memory may be another's by now.
        `mark_written` tells of it.

        Args:
            pieces: As `plan.load.ReadSegment` has them.
            memory: Holds the block.
            start: Where the block starts in it.
            pending: Takes what devices still have to read from it.
        """
        base = memory.address + start
        addresses, pointers, tensors = self._addresses, self._pointers, self._tensors
        moves, slow = [], []
        for position, index, offset, nbytes, rows in pieces:
            address = addresses[index]
            if tensors[index].data_ptr() != pointers[index]:
                self._moved = index
            elif not address:
                slow += _rows(start + position, index, offset, nbytes, rows)
            elif rows is None:
                moves.append((address + offset, base + position, nbytes))
            else:
                move_rows(address + offset, base + position, nbytes, rows)
        move_all(moves)
        if slow:
            # tensors made in inference mode can be written to in no other; the rest can, too
            with torch.inference_mode(), alone():
                self._scatter_slow(slow, memory, pending)

    def _scatter_slow(
        self, pieces: Sequence[FlatPiece], memory: Memory, pending: list[PendingCopies]
    ) -> None:
        """Copy what one memmove cannot: strided, converted and device tensors."""
        on_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for position, index, offset, nbytes in pieces:
            destination = self._destinations[index]
            tensor = destination.tensor.detach()
            flat = window(memory, position, nbytes, destination.dtype)
            start = offset // destination.dtype.itemsize
            if tensor.dtype == destination.dtype and is_physical(tensor):
                tensor, flat = bits_of(tensor), bits_of(flat)
            for target, source in boxes(tensor, flat, start):
                if tensor.is_cuda:
                    on_device.setdefault(tensor.device, []).append((target, source))
                else:
                    target.copy_(source)
        if on_device:
            assert self._streams is not None  # noqa: S101  # made for just these devices
            pending.append(self._streams.copy(on_device))

    def count_write(self) -> None:
        """Tell autograd that the tensors change, before the first byte, and after the last.

        What autograd has kept of them is refused then, and a save under way is, also where the
        load that fills them fails. (An operation of torch is counted when it has ended.)
        """
        torch.autograd.graph.increment_version(self._tensors)

    def mark_written(self) -> None:
        """All is written.

        Raises:
            TargetError: One was moved in memory meanwhile, and not filled.
        """
        if self._moved is not None:
            shape = tuple(self._tensors[self._moved].shape)
            raise TargetError(
                f"a target of shape {shape} was moved in memory while targets were filled, and so"
                " some are and some are not: load again, and share or convert tensors afterwards"
            )
        self.count_write()


def _rows(
    position: int, index: int, offset: int, nbytes: int, rows: Rows | None
) -> list[FlatPiece]:
    """Take rows apart that are copied one by one."""
    count, step, stride = rows or (1, 0, 0)
    return [(position + i * step, index, offset + i * stride, nbytes) for i in range(count)]
