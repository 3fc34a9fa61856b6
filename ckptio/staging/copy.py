"""Copy a state into slabs, and slabs into tensors.

CPU tensors are copied by address, all pieces of a segment or of a block together. Strided,
conjugate and device tensors go through torch. Copies from and to CUDA run on side streams,
ordered by events behind the caller's stream; nothing here waits for a whole device.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Protocol

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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.plan.load import Piece, Rows
    from ckptio.plan.save import Segment
    from ckptio.staging.cuda import CallerStreams, PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.streams import Memory

#: Offset in the slab, tensor, offset in its row-major bytes, bytes.
FlatPiece = tuple[int, int, int, int]
_SAMPLE_NBYTES = 64


class Known(Protocol):
    """What is known of a tensor of the host that one memmove copies."""

    @property
    def span(self) -> tuple[int, int]:
        """First byte of its memory, and the end of it."""
        ...

    @property
    def version(self) -> int:
        """How often it was written to."""
        ...

    @property
    def storage(self) -> torch.UntypedStorage:
        """Its memory."""
        ...


class SourceState:
    """The tensors of a state that is being saved. Made on the caller's thread.

    The first caller that observes `submitted` or `staged` runs the last check for changes; its
    verdict is shared. States:

        settled    copied
        no         no        tensors are copied, or will be; they must not change
        yes        no        all is submitted, and somebody knows; devices still copy
        no         yes       nobody knows yet: whoever looks next looks at the tensors, too
        yes        yes       over: nothing is referred to any more

    Args:
        tensors: The caller's tensors, in the order of the plan. They, and the storages that they
            have now or had when they were looked at, are referred to until they are copied and
            were looked at a last time (`settled`), so that no memory is reused under a copy. (A
            storage that is resized in place, as FSDP does with gathered parameters, frees its
            memory all the same.)
        streams: What orders copies behind the caller's work on its devices, if any.
        known: What is known of each tensor already; of none if empty.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        streams: CallerStreams | None,
        known: Sequence[Known | None] = (),
    ) -> None:
        self._tensors = tensors
        #: By number: from where one memmove copies, 0 where none can; and where the tensor is.
        self._addresses: list[int] = []
        self._pointers: list[int] = []
        self._storages: list[torch.UntypedStorage] = []
        self._versions: list[int] = []
        #: Shape and strides of each that one memmove cannot copy.
        self._layouts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for tensor, one in zip(tensors, known or itertools.repeat(None), strict=bool(known)):
            address = address_of(tensor) if one is None else one.span[0]
            if not address:
                self._layouts[len(self._addresses)] = tuple(tensor.shape), tensor.stride()
            self._addresses.append(address)
            self._pointers.append(tensor.data_ptr() if one is None else one.span[0])
            self._storages.append(tensor.untyped_storage() if one is None else one.storage)
            self._versions.append(_version_of(tensor) if one is None else one.version)
        self._streams = streams
        self._moved: int | None = None
        #: Tensor, address and bytes of some of what was copied.
        self._samples: list[tuple[int, int, bytes]] = []
        #: What `settled` has found: one entry, as `setdefault` takes the first of several threads.
        self._verdict: dict[str, int | None] = {}
        self._is_copied = False

    @property
    def uses_devices(self) -> bool:
        """Whether devices copy to the slabs."""
        return self._streams is not None

    def changed(self) -> int | None:
        """Say which tensor was written to, or moved, since it was looked at or copied.

        By the counts that autograd keeps, of operations that have ended. Views of one buffer
        have one count. Nobody counts what is written through `.data`, numpy or a kernel of
        one's own, what inference mode makes, the parameters of a fused optimizer, statistics
        of batch norm, collectives, blocks of DTensors, and views that are stored as their common
        memory: so some bytes of each slab that was copied are compared with what is there now,
        on the host, of what one memmove copies. (A step writes to nearly all of them.) A tensor
        is moved by `parameter.data = ...`, of which `module.half()` is made, and by sharing it
        with another process; in place, it may get another shape.
        """
        if self._moved is not None:
            return self._moved
        then = zip(self._pointers, self._versions, strict=True)
        for number, (tensor, (pointer, version)) in enumerate(
            zip(self._tensors, then, strict=True)
        ):
            if tensor.data_ptr() != pointer or _version_of(tensor) != version:
                return number
        return next((sample[0] for sample in self._samples if self._differs(*sample)), None)

    def _differs(self, leaf: int, address: int, copied: bytes) -> bool:
        """Whether memory of a tensor, which is held, is not what was copied any more."""
        storage = self._storages[leaf]
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        is_there = start <= address and address + len(copied) <= stop  # it may be resized
        return not is_there or ctypes.string_at(address, len(copied)) != copied

    def settled(self) -> int | None:
        """Say which tensor was written to before anybody could know that it may be.

        Whoever learns first that all is submitted, or copied, asks this: it looks a last time,
        and so finds operations that were under way when the copies ended. From then on the
        tensors may change. Thread-safe; looks once.
        """
        if not self._verdict:
            self._verdict.setdefault("", self._written())
            if self._is_copied:
                self.drop()
        return self._verdict[""]

    def copied(self, *, is_known: bool) -> None:
        """All is copied; `is_known` if somebody learns of it just now, and so has not before."""
        self._is_copied = True
        if is_known:
            self._verdict.setdefault("", None)
        if self._verdict:
            self.drop()

    def _written(self) -> int | None:
        """Say which tensor was written to since it was looked at, the first of them."""
        versions, tensors = self._versions, self._tensors  # in this order: see `drop`
        for number, (tensor, version) in enumerate(zip(tensors, versions, strict=bool(tensors))):
            if _version_of(tensor) != version:
                return number
        return None

    def drop(self) -> None:
        """Refer to the tensors no more: all of them are copied, or nothing more will be."""
        self._tensors = ()
        for held in (self._storages, self._addresses, self._pointers, self._samples):
            held.clear()
        self._versions = []

    def gather(self, segment: Segment, slab: Slab, pending: list[PendingCopies]) -> None:
        """Copy a segment into a slab. Blocks; thread-safe for different slabs.

        What was moved, or has another shape, is left out. `changed` tells of it.

        Args:
            segment: What to copy.
            slab: Takes it.
            pending: Takes what devices still have to do before the slab is complete.
        """
        base = slab.address
        slab.view[: len(segment.header)] = segment.header
        addresses, pointers, tensors = self._addresses, self._pointers, self._tensors
        moves, slow = [], []
        for piece in segment.pieces:
            position, leaf, offset, nbytes = piece
            address = addresses[leaf]
            if tensors[leaf].data_ptr() != pointers[leaf]:
                self._moved = leaf
            elif address:
                moves.append((base + position, address + offset, nbytes))
            else:
                slow.append(piece)
        move_all(moves)
        self._sample(segment.pieces, base)
        if slow:
            self._gather_slow(slow, slab, pending)

    def _sample(self, pieces: Sequence[FlatPiece], base: int) -> None:
        """Keep some of what was copied to a slab: of its first, its middle and its last piece."""
        for number in {0, len(pieces) // 2, len(pieces) - 1} if pieces else ():
            position, leaf, offset, nbytes = pieces[number]
            address = self._addresses[leaf]
            if address and self._moved is None:
                count = min(nbytes, _SAMPLE_NBYTES)
                middle = (nbytes - count) // 2
                copied = ctypes.string_at(base + position + middle, count)
                self._samples.append((leaf, address + offset + middle, copied))

    def _gather_slow(
        self, pieces: Sequence[FlatPiece], slab: Slab, pending: list[PendingCopies]
    ) -> None:
        """Copy what one memmove cannot: strided, conjugate and device tensors."""
        on_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for position, leaf, offset, nbytes in pieces:
            tensor = bits_of(self._tensors[leaf])
            if (tuple(tensor.shape), tensor.stride()) != self._layouts[leaf]:
                self._moved = leaf
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


def _version_of(tensor: torch.Tensor) -> int:
    """Count how often a tensor was written to, as far as anybody knows."""
    try:
        return tensor._version  # noqa: SLF001  # the one way
    except RuntimeError:  # inference tensors have no count
        return 0


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
