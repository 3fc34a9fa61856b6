"""Copies between the host and a device that are told to the driver all at once.

`cuMemcpyBatchAsync` (CUDA 12.8) takes the addresses of thousands of copies in one call, and lets
the GIL go once. Told one by one by torch's `copy_`, each costs views of both ends and its own
round through torch and the driver, and invites whoever waits for the GIL to take it. On an H200,
copies of 16 KiB to the host: 1 us each, and 10 us by `copy_` (`torch._foreach_copy_` 5.5 and the
views, `cuMemcpyAsync` by ctypes 3.8); to the device 4 and 12 us; of 1 MiB 1 and 10 us.

The driver's function, not the runtime's: that of one name takes one list of arguments for ever,
while the runtime's lost one in CUDA 13, and torch may be linked with any. Where there is none,
where memory is not pinned, and where the driver refuses, torch copies, and says what is wrong.
"""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.staging.moves import Move

#: Names of the function, and whether it says which copy is at fault, an argument that we drop.
_NAMES = (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True))


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`, of all copies. Hints of where memory is are for managed memory."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_ORDER_OF_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


def copy_together(moves: Sequence[Move], stream: int) -> bool:
    """Queue copies on a stream; the device of the stream is the thread's current one.

    Args:
        moves: Addresses of targets and sources, and bytes, none of them 0. Memory of the host is
            pinned; no two write to the same place.
        stream: A stream's handle, and not 0, the default stream's.

    Returns:
        Whether all are queued. If not, some may be: whoever copies them once more, behind these
        on the same stream, copies the same bytes.
    """
    call = _batch_call()
    if call is None:
        return False
    # of the C library's: arrays of pointers, and of sizes
    columns = [array("Q", column) for column in zip(*moves, strict=True)]
    addresses = [column.buffer_info()[0] for column in columns]
    return call(*addresses, len(moves), stream) == 0


@functools.cache
def _batch_call() -> Callable[..., int] | None:
    """Find the function; `None` where the driver has none. It is loaded once CUDA is in use.

    Returns:
        It, with targets, sources, sizes, number of copies and stream.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    for name, tells_which in _NAMES:
        if (function := getattr(driver, name, None)) is not None:
            return functools.partial(_call, function, tells_which=tells_which)
    return None


def _call(
    function: Callable[..., int],
    targets: int,
    sources: int,
    sizes: int,
    count: int,
    stream: int,
    *,
    tells_which: bool,
) -> int:
    """Call the driver, which has read all that it is given when it returns."""
    attributes, first = _Attributes(source_access_order=_IN_ORDER_OF_STREAM), ctypes.c_size_t(0)
    which = (ctypes.byref(ctypes.c_size_t()),) if tells_which else ()
    return function(
        ctypes.c_void_p(targets),
        ctypes.c_void_p(sources),
        ctypes.c_void_p(sizes),
        ctypes.c_size_t(count),
        ctypes.byref(attributes),
        ctypes.byref(first),  # the first copy that these attributes are of: each of the others too
        ctypes.c_size_t(1),
        *which,
        ctypes.c_void_p(stream),
    )
