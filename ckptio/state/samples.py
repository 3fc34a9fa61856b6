"""Some bytes of a tensor, from all over it: what rewrites the tensor changes them, as a rule."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from ckptio.state.looks import PLAIN_TENSORS, order_of, plain_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

#: Of a longer tensor, at least as many words of eight bytes are taken, less than twice as many, and
#: the last one.
_NUM_WORDS, _WORD_NBYTES = 64, 8
#: Of one with gaps about as many elements.
_NUM_ELEMENTS = 512

_TO_READ = 0x100  # PyBUF_READ
_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def some_of(tensor: torch.Tensor) -> bytes | None:
    """Give some bytes of a tensor in the host's memory, from all over it; `None` of others."""
    found = plain_memory(tensor)
    if found is not None:  # by far the most
        start, stop = found[2]
        return _some_of_memory(start, stop - start)
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu:
        return None
    try:
        return _some_elements(tensor.detach())
    except RuntimeError:  # sparse, wrapped by a transform of torch.func, or the like
        return None


def _some_of_memory(start: int, nbytes: int) -> bytes:
    """Give some of the bytes at an address. They are read at once: nobody has to keep them."""
    if nbytes <= _NUM_WORDS * _WORD_NBYTES:
        return ctypes.string_at(start, nbytes)
    num_words = nbytes // _WORD_NBYTES
    step = num_words // _NUM_WORDS
    shape, strides = (-(-num_words // step),), (step * _WORD_NBYTES,)
    memory = _view(start, nbytes, _TO_READ)
    words = np.ndarray(shape, f"V{_WORD_NBYTES}", memory, 0, strides).tobytes()
    return words + ctypes.string_at(start + nbytes - _WORD_NBYTES, _WORD_NBYTES)


def _some_elements(tensor: torch.Tensor) -> bytes | None:
    """Give some of a tensor that lies in memory in another way; `None` if it is not all there."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.untyped_storage()
    nbytes = (tensor.storage_offset() + last + 1) * tensor.itemsize
    if nbytes > storage.nbytes() or not storage.data_ptr():
        return None
    if order := order_of(tensor):
        tensor = tensor.permute(order)
    if not tensor.is_contiguous():
        tensor = tensor[_steps_of(tensor.shape)]
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return _some_of_memory(tensor.data_ptr(), tensor.nbytes)


def _steps_of(shape: Sequence[int]) -> tuple[slice, ...]:
    """Give steps that meet about as many elements, whatever the shape; short dimensions first."""
    steps, left = [1] * len(shape), _NUM_ELEMENTS
    for num_before, dim in enumerate(sorted(range(len(shape)), key=shape.__getitem__)):
        count = int(left ** (1 / (len(shape) - num_before)))
        steps[dim] = -(-shape[dim] // count)
        left //= -(-shape[dim] // steps[dim])
    return tuple(slice(None, None, step) for step in steps)
