"""Loops in machine code, where Python's own would take the GIL and let it go at each turn.

A few instructions, written down as bytes, in a page that is made executable once it is written
and is never writable again, as the JIT compilers inside torch do. (Linux sees to it on arm64 that
instructions are read as they were written, where a page becomes executable: `__sync_icache_dcache`
in arch/arm64/mm/flush.c.) Where the processor
is another, or a policy forbids such pages, there are none, and the callers have another way.

Rejected: a compiled extension, which turns one wheel into dozens for these bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_function(
    codes: Mapping[str, bytes], result: type[Any] | None, *arguments: type[Any]
) -> Callable[..., Any] | None:
    """Make a function of code for this processor, less than a page, as C functions are called.

    A call lets the GIL go, once.

    Args:
        codes: The instructions, by what `platform.machine` calls the processor.
        result: The type of what it returns, of ctypes.
        arguments: The types of what it takes.

    Returns:
        It; `None` where there can be none.
    """
    code = codes.get(platform.machine())
    if code is None or sys.maxsize < 2**32 or sys.platform != "linux":
        return None
    try:
        page = mmap.mmap(
            -1,
            mmap.PAGESIZE,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    except OSError:
        return None
    page[: len(code)] = code
    anchor = ctypes.c_char.from_buffer(page)  # keeps the page where it is
    address = ctypes.addressof(anchor)
    if _LIBC.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        return None
    function = ctypes.CFUNCTYPE(result, *arguments)(address)
    function.page = anchor  # type: ignore[attr-defined]  # kept for as long as it can be called
    return function
