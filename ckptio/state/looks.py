"""Look at a plain tensor once, and note all that a save asks of it.

Most of what it costs to ask a tensor for something is that it is far away in memory: of 20,000
tensors, one question takes 0.3 us each, the next ones, asked at once, 0.1.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ckptio.state.leaves import DTYPE_NAMES

#: Exact types of tensors that are their memory and nothing else.
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Look(msgspec.Struct, frozen=True, gc=False):
    """A tensor that one memmove copies, as it was when it was looked at.

    Attributes:
        dtype: Its element type, as manifests name it.
        shape: Its shape.
        span: First byte of its memory, and the end of it.
        version: How often it was written to, as far as autograd knows.
        storage: Keeps the memory, wherever the tensor is moved.
    """

    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int]
    version: int
    storage: torch.UntypedStorage


class Occurrence(msgspec.Struct, eq=False, gc=False):
    """A tensor at a place in the state. A struct, as there are thousands.

    Attributes:
        name: Its name; distinct among occurrences.
        tensor: The tensor.
        dtype: Its element type as the manifest names it, if not torch's own.
        node: Its node in the tree; the index is filled in once ties are known.
        look: What was seen of it, if it is plain.
    """

    name: str
    tensor: torch.Tensor
    dtype: str
    node: dict[str, Any]
    look: Look | None = None

    def look_again(self) -> None:
        """Forget what was seen before, if anything was."""
        if self.look is not None:
            look = look_at(self.tensor)
            self.look = look if look is not None and look.dtype == self.dtype else None


def look_at(tensor: torch.Tensor) -> Look | None:
    """Look at a tensor; `None` for one that is to be looked at closely.

    That is one on a device, with strides, of a class of its own, made in inference mode, or
    whose memory does not hold the values themselves.
    """
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu:
        return None
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        return None
    try:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        start, nbytes, shape = tensor.data_ptr(), tensor.nbytes, tuple(tensor.shape)
        version = tensor._version  # noqa: SLF001  # the one way
    except RuntimeError:
        return None  # nested, made in inference mode, or wrapped by a transform of torch.func
    if nbytes and not start:  # what is to be made functional has no memory
        return None
    return Look(dtype, shape, (start, start + nbytes), version, tensor.untyped_storage())
