"""memmove, with and without the GIL, and integer views of tensors."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckptio.config import KiB
from ckptio.layout import Box, boxes_of_range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.plan.load import Rows
    from ckptio.storage.streams import Memory

_memmove_free = ctypes.CDLL(None).memmove
_memmove_held = ctypes.PyDLL(None).memmove
for _function in (_memmove_free, _memmove_held):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None

#: Shorter copies keep the GIL. Letting it go invites a busy trainer to take it for its
#: whole switch interval, 5 ms; 20,000 small tensors would wait 20,000 times.
_HELD_NBYTES = 128 * KiB
_INT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def move(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address to address; long copies let the GIL go."""
    if nbytes < _HELD_NBYTES:
        _memmove_held(target, source, nbytes)
    else:
        _memmove_free(target, source, nbytes)


def move_rows(target: int, source: int, nbytes: int, rows: Rows) -> None:
    """Copy rows of `nbytes` each from address to address.

    As numpy copies items of that size: in one call, however short they are.

    Args:
        target: Of the first row.
        source: Of the first row.
        nbytes: Of a row.
        rows: How many, and the bytes from one to the next in the source and in the target.
    """
    count, step, stride = rows
    item = np.dtype((np.void, nbytes))
    into, of = (
        np.ndarray(
            (count,),
            item,
            memoryview((ctypes.c_char * ((count - 1) * distance + nbytes)).from_address(address)),
            strides=(distance,),
        )
        for address, distance in ((target, stride), (source, step))
    )
    np.copyto(into, of)


def is_physical(tensor: torch.Tensor) -> bool:
    """Whether memory holds the values themselves, not their conjugates or negatives."""
    return not (tensor.is_conj() or tensor.is_neg())


def address_of(tensor: torch.Tensor) -> int:
    """Give the address of a tensor that one memmove can copy, 0 for any other."""
    if tensor.is_cpu and tensor.is_contiguous() and is_physical(tensor):
        return tensor.data_ptr()
    return 0


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers, so that copies keep every bit.

    Elements whose memory does not hold the value itself, or that have no integer of
    their size (16 bytes), stay what they are.
    """
    tensor = tensor.detach()
    integer = _INT_VIEWS.get(tensor.itemsize)
    return tensor.view(integer) if integer is not None and is_physical(tensor) else tensor


def window(memory: Memory, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """View some memory as a flat tensor. Holds no lease: use it inside the memory's own."""
    raw = torch.frombuffer(memory.view, dtype=torch.uint8, count=nbytes, offset=start)
    return raw.view(dtype)


def boxes(
    tensor: torch.Tensor, flat: torch.Tensor, start: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the parts of a strided tensor with those of a flat one that holds a range of it.

    Args:
        tensor: The strided tensor.
        flat: Elements `[start, start + flat.numel())` of it, in row-major order.
        start: The first of them.

    Yields:
        A view of `tensor`, and the view of `flat` with the same shape.
    """
    if tensor.is_contiguous():
        yield tensor.view(-1)[start : start + flat.numel()], flat
        return
    done = 0
    for box in boxes_of_range(tuple(tensor.shape), start, start + flat.numel()):
        part = _part(tensor, box)
        yield part, flat[done : done + part.numel()].view(part.shape)
        done += part.numel()


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (first, count) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, first, count)
    return tensor
