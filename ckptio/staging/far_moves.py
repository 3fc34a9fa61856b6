"""Copy from address to address between the host and a device: `staging.moves` for devices.

Told by torch's `copy_`, each copy costs views of both ends and a round through torch. On an H200,
copies of 16 KiB: 10 us each to the host and 12 to the device, and the views 20 and more; by the
driver's `cuMemcpyAsync`, called with addresses, 4 and 2.5 us. `torch._foreach_copy_` takes 5.5
and 8.7 us, and the views.

All copies of a slab are one call: a loop in machine code calls the driver for each. Else each
copy lets the GIL go, which invites a busy trainer to take it for its whole switch interval, 5 ms.
5,000 tensors beside a thread that is busy in Python, on two cores and the stand-in for CUDA, until
all copies were queued: 27 and 32 s by `copy_`, 1.2 and 2 s by addresses one by one, 0.2 s at once.

Rejected: `cuMemcpyBatchAsync` (CUDA 12.8), which takes thousands of copies in one call: 1 us each
to the host, 4 to the device. With driver 580.159.04 a call with 500 copies of 1 to 64 KiB to the
device ended the process with a segmentation fault, and others have seen that, and hangs, with
the same driver (vllm #49276). Holding the GIL over each call: one that finds the stream's queue
full blocks until the device gets there, and so would the trainer.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from array import array
from typing import TYPE_CHECKING

from ckptio.staging.machine_code import make_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptio.staging.moves import Move


#: Address of the target, address of the source, bytes, and the number of the tensor.
FarMove = tuple[int, int, int, int]

_TO_HOST, _TO_DEVICE = "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"

# System V calling convention: rdi is the function, rsi the rows (target, source, bytes), rdx
# their number, rcx the stream; eax is what the function says, 0 for well
_X86_64 = bytes.fromhex(
    "f30f1efa"  # endbr64
    "5355"  # push rbx; push rbp
    "41544155"  # push r12; push r13
    "4883ec08"  # sub rsp, 8: aligned as calls want it
    "4889fb"  # mov rbx, rdi
    "4889f5"  # mov rbp, rsi
    "4989d4"  # mov r12, rdx
    "4989cd"  # mov r13, rcx
    "31c0"  # xor eax, eax
    "4d85e4"  # test r12, r12
    "741f"  # je end
    "488b7d00"  # loop: mov rdi, [rbp]
    "488b7508"  # mov rsi, [rbp + 8]
    "488b5510"  # mov rdx, [rbp + 16]
    "4c89e9"  # mov rcx, r13
    "ffd3"  # call rbx
    "85c0"  # test eax, eax
    "750a"  # jne end
    "4883c518"  # add rbp, 24
    "4983ec01"  # sub r12, 1
    "75e1"  # jne loop
    "4883c408"  # end: add rsp, 8
    "415d415c"  # pop r13; pop r12
    "5d5b"  # pop rbp; pop rbx
    "c3"  # ret
)

# Arm's calling convention: x0 is the function, x1 the rows, x2 their number, x3 the stream; w0 is
# what the function says. Instructions as they lie in memory, little end first
_AARCH64 = bytes.fromhex(
    "5f2403d5"  # bti c
    "fd7bbda9"  # stp x29, x30, [sp, #-48]!
    "fd030091"  # mov x29, sp
    "f35301a9"  # stp x19, x20, [sp, #16]
    "f55b02a9"  # stp x21, x22, [sp, #32]
    "f30300aa"  # mov x19, x0
    "f40301aa"  # mov x20, x1
    "f50302aa"  # mov x21, x2
    "f60303aa"  # mov x22, x3
    "00008052"  # mov w0, #0
    "350100b4"  # cbz x21, end
    "800640a9"  # loop: ldp x0, x1, [x20]
    "820a40f9"  # ldr x2, [x20, #16]
    "e30316aa"  # mov x3, x22
    "60023fd6"  # blr x19
    "80000035"  # cbnz w0, end
    "94620091"  # add x20, x20, #24
    "b50600f1"  # subs x21, x21, #1
    "21ffff54"  # b.ne loop
    "f55b42a9"  # end: ldp x21, x22, [sp, #32]
    "f35341a9"  # ldp x19, x20, [sp, #16]
    "fd7bc3a8"  # ldp x29, x30, [sp], #48
    "c0035fd6"  # ret
)
_CODES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def copy_far(moves: Iterable[FarMove], stream: int, *, saving: bool) -> bool:
    """Queue copies on a stream; the device of the stream is the thread's current one.

    Blocks while the stream's queue is full, and lets the GIL go.

    Args:
        moves: The copies. Memory of the host is pinned.
        stream: A stream's handle.
        saving: Whether they are from the device, or else to it. The driver refuses an address on
            the device that is none; told to find out by itself, it took it for the host's.

    Returns:
        Whether all are queued. If not, some may be: whoever copies them once more, behind these
        on the same stream, copies the same bytes.
    """
    copy_rows = _driver_copy(_TO_HOST if saving else _TO_DEVICE)
    if copy_rows is None:
        return False
    rows = array("Q", itertools.chain.from_iterable(joined(moves)))
    return copy_rows(rows, stream) == 0


def joined(moves: Iterable[FarMove]) -> Iterator[Move]:
    """Join copies of one tensor that go on where the one before them ends, on both sides.

    What is another's may lie next to it in another allocation, and no copy crosses these.
    """
    target = source = nbytes = whose = 0
    for into, of, count, number in moves:
        goes_on = number == whose and (into, of) == (target + nbytes, source + nbytes)
        if nbytes and goes_on:
            nbytes += count
            continue
        if nbytes:
            yield target, source, nbytes
        target, source, nbytes, whose = into, of, count, number
    if nbytes:
        yield target, source, nbytes


@functools.cache
def _driver_copy(name: str) -> Callable[[array[int], int], int] | None:
    """Find a function; `None` where there is no such driver. It is loaded once CUDA is used.

    The driver's, and not the runtime's: torch may have the runtime within itself.

    Returns:
        What calls it with each row, and a stream; gives the first code that is not 0.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        copy = getattr(driver, name)
    except (OSError, AttributeError):
        return None
    word = ctypes.c_size_t
    loop = make_function(_CODES, ctypes.c_int, *[word] * 4)
    if loop is not None:
        address = ctypes.cast(copy, ctypes.c_void_p).value or 0
        return functools.partial(_copy_at_once, loop, address)
    copy.argtypes, copy.restype = (word,) * 4, ctypes.c_int
    return functools.partial(_copy_one_by_one, copy)


def _copy_at_once(
    loop: Callable[[int, int, int, int], int], copy: int, rows: array[int], stream: int
) -> int:
    address, num_words = rows.buffer_info()
    return loop(copy, address, num_words // 3, stream)


def _copy_one_by_one(copy: Callable[..., int], rows: array[int], stream: int) -> int:
    codes = (copy(*rows[at : at + 3], stream) for at in range(0, len(rows), 3))
    return next((code for code in codes if code), 0)
