"""Views of tensors and of memory, by which copies keep every bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ckptio.layout import Box, boxes_of_range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.storage.streams import Memory

#: Shape, strides, element type, and bytes of the storage.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]

_INT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_physical(tensor: torch.Tensor) -> bool:
    """Whether memory holds the values themselves, not their conjugates or negatives."""
    return not (tensor.is_conj() or tensor.is_neg())


def address_of(tensor: torch.Tensor) -> int:
    """Give the address of a tensor that one memmove can copy, 0 for any other."""
    if tensor.is_cpu and tensor.is_contiguous() and is_physical(tensor) and _is_there(tensor):
        return tensor.data_ptr()
    return 0


def far_address_of(tensor: torch.Tensor) -> int:
    """Give the address of a tensor that one copy by a device moves, 0 for any other."""
    if tensor.is_cuda and tensor.is_contiguous() and is_physical(tensor) and _is_there(tensor):
        return tensor.data_ptr()
    return 0


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor's memory has all of it: it may have been resized.

    torch looks at every view that it makes of one that is not, and raises.
    """
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return bool(start) and tensor.data_ptr() + tensor.nbytes <= start + storage.nbytes()


def layout_of(tensor: torch.Tensor) -> Layout:
    """Say how a tensor lies in its storage, and how large that is."""
    nbytes = tensor.untyped_storage().nbytes()
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, nbytes


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers, so that copies keep every bit.

    Elements whose memory does not hold the value itself, or that have no integer of
    their size (16 bytes), stay what they are.
    """
    tensor = tensor.detach()
    integer = _INT_VIEWS.get(tensor.itemsize)
    return tensor.view(integer) if integer is not None and is_physical(tensor) else tensor


def window(memory: Memory, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """View some memory as a flat tensor. Use it only while that memory is leased, or lent."""
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
