"""Copy by torch what is not copied by address: strided, conjugate and converted tensors.

Short pieces are copied in one thread at a time. Torch lets the GIL go for each view and each copy,
and threads that take it from each other all the time took 3.4 s, on 16 cores, to load 20,000
transposed tensors of 8 KiB; one at a time took 1.0 s. To an H200 it was 5 s, and 1.6. Long ones
share the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.staging.moves import SHORT_NBYTES

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from ckptio.staging.cuda import CallerStreams, PendingCopies
    from ckptio.staging.watch import FlatPiece

    #: Gives targets and sources of pieces, one after the other.
    Pairs = Callable[[Sequence[FlatPiece]], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def copy_by_torch(
    pieces: Sequence[FlatPiece],
    tensors: Sequence[torch.Tensor],
    pairs: Pairs,
    lock: threading.Lock,
    streams: CallerStreams | None,
    pending: list[PendingCopies],
) -> None:
    """Copy pieces, those of a device on its side stream. Blocks.

    Args:
        pieces: What to copy.
        tensors: By their numbers in the pieces; where each is now decides who copies it.
        pairs: Makes views of them, and passes over one that is not where it was.
        lock: Held while short ones in the host's memory are copied.
        streams: Those of the devices, if there are any.
        pending: Takes what devices still have to do.
    """
    for is_short in (True, False):
        near: list[FlatPiece] = []
        on_device: dict[torch.device, list[FlatPiece]] = {}
        for piece in pieces:
            if (piece[3] < SHORT_NBYTES) == is_short:
                device = tensors[piece[1]].device
                # one that came to another device just now, `pairs` passes over
                is_far = streams is not None and device in streams.devices
                some = on_device.setdefault(device, []) if is_far else near
                some.append(piece)
        if near and is_short:
            with lock:
                _copy(pairs(near))
        else:
            _copy(pairs(near))
        if on_device and streams is not None:
            views = {device: pairs(some) for device, some in on_device.items()}
            streams.copy_views(views, pending, is_short=is_short)


def _copy(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)
