"""Copy from address to address between the host and a device: `staging.moves` for devices.

Told by torch's `copy_`, each copy costs views of both ends and a round through torch. On an H200,
copies of 16 KiB: 10 us each to the host and 12 to the device, and the views 20 and more; by the
driver's own function, called with addresses, 4 and 2.5 us. `torch._foreach_copy_` takes 5.5 and
8.7 us, and the views.

Rejected: `cuMemcpyBatchAsync` (CUDA 12.8), which takes thousands of copies in one call: 1 us each
to the host, 4 to the device. With driver 580.159.04 a call with 500 copies of 1 to 64 KiB to the
device ended the process with a segmentation fault, and others have seen that, and hangs, with
the same driver (vllm #49276).
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptio.staging.moves import Move


def copy_far(moves: Iterable[Move], stream: int) -> bool:
    """Queue copies on a stream; the device of the stream is the thread's current one.

    Args:
        moves: Addresses of targets and sources, and bytes. Memory of the host is pinned.
        stream: A stream's handle.

    Returns:
        Whether all are queued. If not, some may be: whoever copies them once more, behind these
        on the same stream, copies the same bytes.
    """
    copy = _driver_copy()
    if copy is None:
        return False
    return all(copy(*move, stream) == 0 for move in joined(moves))


def joined(moves: Iterable[Move]) -> Iterator[Move]:
    """Join copies that go on where the one before them ends, on both sides."""
    target = source = nbytes = 0
    for into, of, count in moves:
        if nbytes and (into, of) == (target + nbytes, source + nbytes):
            nbytes += count
            continue
        if nbytes:
            yield target, source, nbytes
        target, source, nbytes = into, of, count
    if nbytes:
        yield target, source, nbytes


@functools.cache
def _driver_copy() -> Callable[[int, int, int, int], int] | None:
    """Find `cuMemcpyAsync`; `None` where there is no such driver. It is loaded once CUDA is used.

    The driver's, and not the runtime's: torch may have the runtime within itself.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        copy = driver.cuMemcpyAsync
    except (OSError, AttributeError):
        return None
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int
    return copy
