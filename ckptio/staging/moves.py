"""Copy memory from address to address: one piece, rows that are alike, or many pieces.

Many short pieces go by `process_vm_readv(2)`, from this process to itself: one system call
takes a thousand of them and lets the GIL go once, where a thousand calls of memmove hold it
or invite a busy trainer to take it a thousand times. 20,000 tensors of 1 to 64 KiB, two
threads: 0.07 s instead of 0.11, in which the threads that write had waited for the GIL; the
whole save took 0.37 s instead of 0.52. `torch._foreach_copy_` came next (0.08), is private,
and wants views that cost the GIL 1 us each.

Where the system call is not there or not allowed (a sandbox), or does not reach some memory
(that of a device), memmove does it all again.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from typing import TYPE_CHECKING

import numpy as np

from ckptio.config import KiB
from ckptio.staging.streaming import LINE_NBYTES, make_streaming_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.plan.load import Rows

#: Address of the target, address of the source, bytes.
Move = tuple[int, int, int]

_memmove_free = ctypes.CDLL(None).memmove
_memmove_held = ctypes.PyDLL(None).memmove
for _function in (_memmove_free, _memmove_held):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None
_process_vm_readv = ctypes.CDLL(None).process_vm_readv
_process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_process_vm_readv.restype = ctypes.c_ssize_t

_stream = make_streaming_copy()

#: Shorter copies keep the GIL, or share a system call. Letting it go invites a busy trainer
#: to take it for its whole switch interval, 5 ms.
SHORT_NBYTES = 128 * KiB
#: Fewer short copies are not worth a table of addresses.
_MIN_SHARED = 8
#: The kernel's limit (UIO_MAXIOV).
_MAX_SHARED = 1024


def can_stream() -> bool:
    """Whether long copies go past the processor's cache on this machine."""
    return _stream is not None


def can_share() -> bool:
    """Whether this process may copy many short pieces in one system call."""
    data, room = ctypes.create_string_buffer(b"ab", 2), ctypes.create_string_buffer(2)
    target, source = ctypes.addressof(room), ctypes.addressof(data)
    pieces = [(target, source, 1), (target + 1, source + 1, 1)]
    return _move_together(pieces) and room.raw == data.raw


def move(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address to address; long copies release the GIL, and pass by the cache."""
    if nbytes < SHORT_NBYTES:
        _memmove_held(target, source, nbytes)
    elif _stream is None:
        _memmove_free(target, source, nbytes)
    else:
        head = -target % LINE_NBYTES
        body = (nbytes - head) // LINE_NBYTES * LINE_NBYTES
        tail = head + body
        _memmove_held(target, source, head)
        _stream(target + head, source + head, body)
        _memmove_held(target + tail, source + tail, nbytes - tail)


def move_all(moves: Sequence[Move]) -> None:
    """Copy from address to address, many times; in any order."""
    rest = list(moves)
    if len(moves) >= _MIN_SHARED:
        rest = [each for each in moves if each[2] >= SHORT_NBYTES]
        short = [each for each in moves if each[2] < SHORT_NBYTES] if rest else moves
        for start in range(0, len(short), _MAX_SHARED):
            batch = short[start : start + _MAX_SHARED]
            if not _move_together(batch):
                rest += batch
    for target, source, nbytes in rest:
        move(target, source, nbytes)


def _move_together(moves: Sequence[Move]) -> bool:
    """Copy in one system call; false if that did not do all of it."""
    into, of, sizes = zip(*moves, strict=True)
    # two arrays of struct iovec: address, bytes
    targets = array("Q", sizes * 2)
    targets[1::2] = array("Q", sizes)
    sources = targets[:]
    targets[::2], sources[::2] = array("Q", into), array("Q", of)
    (target, _), (source, _) = targets.buffer_info(), sources.buffer_info()
    done = _process_vm_readv(os.getpid(), target, len(moves), source, len(moves), 0)
    return bool(done == sum(sizes))


def move_rows(target: int, source: int, nbytes: int, rows: Rows) -> None:
    """Copy rows of `nbytes` each from address to address.

    As numpy copies items of that size: in one call, however short they are.

    Args:
        target: Of the first row.
        source: Of the first row.
        nbytes: Of a row.
        rows: How many, and the bytes from one to the next in the source and in the target.
    """
    count, step, stride = rows
    item = np.dtype((np.void, nbytes))
    into, of = (
        np.ndarray(
            (count,),
            item,
            memoryview((ctypes.c_char * ((count - 1) * distance + nbytes)).from_address(address)),
            strides=(distance,),
        )
        for address, distance in ((target, stride), (source, step))
    )
    np.copyto(into, of)
