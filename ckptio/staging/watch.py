"""Whether a state that is being saved was changed, or moved, before it was copied.

A trainer that goes on too early would save a state that never was, half of one step and half of
the next. That is found, not prevented: by autograd's counts of writes, by addresses, and by a few
bytes of what nobody counts, looked at before and after. To copy under a lock, or to hash all of
it twice, would cost more than the save. A change that is found fails the save; bytes that nobody
counts and that are not among those looked at may be missed.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Protocol

from ckptio.staging.memory import address_of, far_address_of, layout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ckptio.staging.memory import Layout

#: Offset in the slab, tensor, offset in its row-major bytes, bytes.
FlatPiece = tuple[int, int, int, int]
_SAMPLE_NBYTES = 64
#: Tensors of which some bytes are kept when a save is asked for, twice as many at the most.
_NUM_AT_CALL = 64


class Known(Protocol):
    """What is known of a tensor that one memmove copies, or a device's copy."""

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

    @property
    def device(self) -> torch.device | None:
        """The CUDA device that has it; `None` for memory of the host."""
        ...


class SourceWatch:
    """The tensors of a state that is being saved, and what was known of them before.

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
        known: What is known of each tensor already; of none if empty.

    Attributes:
        tensors: Those; none once they are referred to no more.
        addresses: By number: from where one memmove copies, 0 where none can.
        pointers: By number: where the tensor is.
        devices: The CUDA device of each from whose `pointers` that copies, and its bytes.
        layouts: How each other lies in memory.
        moved: One that was found elsewhere, or in another shape, and so was not copied.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], known: Sequence[Known | None] = ()) -> None:
        self.tensors = tensors
        self.addresses: list[int] = []
        self.pointers: list[int] = []
        self.layouts: dict[int, Layout] = {}
        self.devices: dict[int, tuple[torch.device, int]] = {}
        self.moved: int | None = None
        self._storages: list[torch.UntypedStorage] = []
        self._versions: list[int] = []
        pairs = zip(tensors, known or itertools.repeat(None), strict=bool(known))
        for number, (tensor, one) in enumerate(pairs):
            if one is None:
                pointer = tensor.data_ptr()
                address = address_of(tensor)
                if far_address_of(tensor):
                    self.devices[number] = tensor.device, tensor.nbytes
                elif not address:
                    self.layouts[number] = layout_of(tensor)
            else:
                pointer, stop = one.span
                address = pointer if one.device is None else 0
                if one.device is not None:
                    self.devices[number] = one.device, stop - pointer
            self.addresses.append(address)
            self.pointers.append(pointer)
            self._storages.append(tensor.untyped_storage() if one is None else one.storage)
            self._versions.append(_version_of(tensor) if one is None else one.version)
        #: Tensor, address and bytes of some of what is there now, and of what was copied.
        self._samples = [self._look_at(leaf) for leaf in self._spread()]
        #: What `settled` has found: one entry, as `setdefault` takes the first of several threads.
        self._verdict: dict[str, int | None] = {}
        self._is_copied = False

    def is_there(self, leaf: int) -> bool:
        """Whether a device's memory still has all of a tensor; its storage may be resized."""
        storage = self._storages[leaf]
        stop = self.pointers[leaf] + self.devices[leaf][1]
        return stop <= storage.data_ptr() + storage.nbytes()

    def _spread(self) -> list[int]:
        """Choose some tensors that one memmove copies, from all of the state."""
        plain = [number for number, address in enumerate(self.addresses) if address]
        step = max(1, len(plain) // _NUM_AT_CALL)
        return [number for number in plain[::step] if self.tensors[number].nbytes]

    def _look_at(self, leaf: int) -> tuple[int, int, bytes]:
        """Take bytes from the middle of a tensor."""
        nbytes = self.tensors[leaf].nbytes
        count = min(nbytes, _SAMPLE_NBYTES)
        address = self.addresses[leaf] + (nbytes - count) // 2
        return leaf, address, ctypes.string_at(address, count)

    def sample(self, pieces: Sequence[FlatPiece], base: int) -> None:
        """Keep some of what was copied to a slab: of its first, its middle and its last piece."""
        for number in {0, len(pieces) // 2, len(pieces) - 1} if pieces else ():
            position, leaf, offset, nbytes = pieces[number]
            address = self.addresses[leaf]
            if address and self.moved is None:
                count = min(nbytes, _SAMPLE_NBYTES)
                middle = (nbytes - count) // 2
                copied = ctypes.string_at(base + position + middle, count)
                self._samples.append((leaf, address + offset + middle, copied))

    def changed(self) -> int | None:
        """Say which tensor was written to, or moved, since it was looked at or copied.

        By the counts that autograd keeps, of operations that have ended. Views of one buffer
        have one count. Nobody counts what is written through `.data`, numpy or a kernel of
        one's own, what inference mode makes, the parameters of a fused optimizer, statistics
        of batch norm, collectives, blocks of DTensors, and views that are stored as their common
        memory: so some bytes of some tensors, as they were when they were looked at, and of each
        slab that was copied are compared with what is there now, on the host, of what one memmove
        copies. (A step writes to nearly all of them.) A tensor
        is moved by `parameter.data = ...`, of which `module.half()` is made, and by sharing it
        with another process; in place, it may get another shape, which matters only to what is not
        copied from its address.
        """
        if self.moved is not None:
            return self.moved
        then = zip(self.pointers, self._versions, strict=True)
        for number, (tensor, (pointer, version)) in enumerate(zip(self.tensors, then, strict=True)):
            if tensor.data_ptr() != pointer or _version_of(tensor) != version:
                return number
        for leaf in self.devices:
            if not self.is_there(leaf):
                return leaf
        return next((sample[0] for sample in self._samples if self._differs(*sample)), None)

    def _differs(self, leaf: int, address: int, copied: bytes) -> bool:
        """Whether memory of a tensor, which is held, is not what was copied any more."""
        storage = self._storages[leaf]
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        is_there = start <= address and address + len(copied) <= stop  # it may be resized
        return not is_there or ctypes.string_at(address, len(copied)) != copied

    def settled(self) -> int | None:
        """Say which tensor was written to before the caller was told that it may be.

        Called by whoever learns first that all is submitted, or copied: this looks a last time, and
        so finds operations that were under way when the copies ended. From then on the tensors may
        change. Thread-safe; later calls give the same answer without looking.
        """
        if not self._verdict:
            self._verdict.setdefault("", self._written())
            if self._is_copied:
                self.drop()
        return self._verdict[""]

    def copied(self, *, is_known: bool) -> None:
        """Note that all is copied; `is_known` if somebody learns of it only now."""
        self._is_copied = True
        if is_known:
            self._verdict.setdefault("", None)
        if self._verdict:
            self.drop()

    def _written(self) -> int | None:
        """Say which tensor was written to since it was looked at, the first of them."""
        versions, tensors = self._versions, self.tensors  # in this order: see `drop`
        for number, (tensor, version) in enumerate(zip(tensors, versions, strict=bool(tensors))):
            if _version_of(tensor) != version:
                return number
        return None

    def drop(self) -> None:
        """Let go of the tensors: all of them are copied, or nothing more will be."""
        self.tensors = ()
        for held in (self._storages, self.addresses, self.pointers, self.devices, self._samples):
            held.clear()
        self._versions = []


def _version_of(tensor: torch.Tensor) -> int:
    """Count how often a tensor was written to, as far as anybody knows."""
    try:
        return tensor._version  # noqa: SLF001  # the one way
    except RuntimeError:  # inference tensors have no count
        return 0
