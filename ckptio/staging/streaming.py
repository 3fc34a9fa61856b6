"""Copies that write past the processor's cache.

A store into memory that is not in the cache fetches the line first, only to write over it,
and drives something else out: staging a state costs three passes over memory instead of two,
and the training step its cache. Stores with a non-temporal hint do neither (Intel's
optimization manual, "Non-temporal stores"; glibc's memmove uses them as well, but only for
single copies above three quarters of the shared cache, hundreds of MiB on a server). Two
cores, two threads, copies of 1 MiB: 19 GB/s, memmove 13.

No function of a library that is always there does it for a size of the caller's choice, so
the loop is here, in 15 instructions (see `machine_code`). Where there can be none, or it does not
copy a page as it should, memmove serves; on arm64, too, where nobody has measured it.

Rejected: `GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold`, which does the same for the whole
process, and has to be set before it starts.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

from ckptio.staging.machine_code import make_function

if TYPE_CHECKING:
    from collections.abc import Callable

    #: Address of the target, address of the source, bytes.
    Copy = Callable[[int, int, int], None]

#: Targets are aligned to this and sizes are multiples of it: a line of the cache.
LINE_NBYTES = 64

# System V calling convention: rdi is the target, rsi the source, rdx the bytes; xmm0 to xmm3
# are the callee's to use
_X86_64 = bytes.fromhex(
    "f30f1efa"  # endbr64
    "f30f6f06"  # loop: movdqu xmm0, [rsi]
    "f30f6f4e10"  # movdqu xmm1, [rsi + 16]
    "f30f6f5620"  # movdqu xmm2, [rsi + 32]
    "f30f6f5e30"  # movdqu xmm3, [rsi + 48]
    "660fe707"  # movntdq [rdi], xmm0
    "660fe74f10"  # movntdq [rdi + 16], xmm1
    "660fe75720"  # movntdq [rdi + 32], xmm2
    "660fe75f30"  # movntdq [rdi + 48], xmm3
    "4883c640"  # add rsi, 64
    "4883c740"  # add rdi, 64
    "4883ea40"  # sub rdx, 64
    "75cc"  # jne loop
    "0faef8"  # sfence: others see the bytes before they see that the copy has ended
    "c3"  # ret
)
_CODES = {"x86_64": _X86_64}


def make_streaming_copy() -> Copy | None:
    """Make a function that copies past the cache, or `None` where there can be none.

    It copies whole lines (`LINE_NBYTES`), at least one, to an aligned target from any source, and
    releases the GIL. As with memmove, the caller answers for both addresses.
    """
    copy = make_function(_CODES, None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return copy if copy is not None and _copies(copy) else None


def _copies(copy: Copy) -> bool:
    """Try it on a page, between two that must stay as they are."""
    data = bytes(range(256)) * (mmap.PAGESIZE // 256)
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as room:
        anchor = ctypes.c_char.from_buffer(room)
        source = ctypes.create_string_buffer(data, len(data))
        copy(ctypes.addressof(anchor) + mmap.PAGESIZE, ctypes.addressof(source), len(data))
        del anchor
        empty = bytes(mmap.PAGESIZE)
        return room[:] == empty + data + empty
