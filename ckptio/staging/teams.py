"""Copies by torch on the thread that asks for them.

torch hands an operation on more than 32,768 elements (`at::internal::GRAIN_SIZE`) to a team of
OpenMP threads, and each thread that asks has a team of its own: with 12 that read and 16
intra-op threads a process had 229 threads, 49 without their teams, and was no faster for it. So
a reader copies alone; there are enough of them. torch's own limit (`torch.set_num_threads`)
is for all threads of the process, which are not ours; OpenMP's is for the thread that sets it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let torch's operations on this thread, and no other, do without a team."""
    limit = _setter()
    if limit is None:
        yield
        return
    before = torch.get_num_threads()  # it sets the limit, the first time on a thread
    limit(1)
    try:
        yield
    finally:
        limit(before)


@functools.cache
def _setter() -> Callable[[int], None] | None:
    """Find what limits OpenMP's teams on a thread; `None` where torch was built without.

    In the library that torch's operations are in, and those that it needs: there may be others of
    OpenMP in the process, and torch's own may be loaded for nobody else, as that of its wheels for
    arm64 is.
    """
    operations = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        setter = ctypes.PyDLL(operations, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_set_num_threads
    except (OSError, AttributeError):
        return None
    setter.argtypes, setter.restype = (ctypes.c_int,), None
    return setter
