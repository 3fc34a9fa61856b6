"""Some bytes of a tensor, from all over it: they change with nearly all that is done to it."""

from __future__ import annotations

import torch

from ckptio.state.looks import PLAIN_TENSORS, order_of

#: Of a longer tensor, as many words of eight bytes are taken, and the last one.
_NUM_WORDS, _WORD_NBYTES = 64, 8
#: Of one with gaps about as many elements.
_NUM_ELEMENTS = 512


def some_of(tensor: torch.Tensor) -> bytes | None:
    """Give some bytes of a tensor in the host's memory, from all over it; `None` of others."""
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu:
        return None
    try:
        found = tensor.detach()
        if order := order_of(found):
            found = found.permute(order)
        if not found.is_contiguous():
            count = max(2, int(_NUM_ELEMENTS ** (1 / found.dim())))
            found = found[tuple(slice(None, None, -(-n // count) or 1) for n in found.shape)]
            found = found.resolve_conj().resolve_neg().contiguous()
        place = found.storage_offset() * found.itemsize, (found.nbytes,), (1,)
        memory = torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage(), *place).numpy()
        if found.nbytes <= _NUM_WORDS * _WORD_NBYTES:
            return memory.tobytes()
        num_words = found.nbytes // _WORD_NBYTES
        words = memory[: num_words * _WORD_NBYTES].reshape(num_words, _WORD_NBYTES)
        return words[:: num_words // _NUM_WORDS].tobytes() + memory[-_WORD_NBYTES:].tobytes()
    except RuntimeError:  # its memory is not there any more, or is none
        return None
