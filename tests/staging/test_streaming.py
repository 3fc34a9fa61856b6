from __future__ import annotations

import ctypes
import mmap
import platform
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.staging import machine_code, streaming
from ckptio.staging.streaming import LINE_NBYTES, make_streaming_copy

stream = make_streaming_copy()
_GUARD_NBYTES = 2 * LINE_NBYTES


def require() -> streaming.Copy:
    if stream is None:
        pytest.skip(f"no streaming copy on {platform.machine()}, or a policy forbids it")
    return stream


@given(lines=st.integers(1, 100), shift=st.integers(0, LINE_NBYTES))
def test_whole_lines_arrive_from_any_source(lines: int, shift: int) -> None:
    """And nothing before or behind them changes."""
    copy = require()
    nbytes = lines * LINE_NBYTES
    source = np.random.default_rng(lines).integers(0, 256, nbytes + shift, dtype=np.uint8)
    room = np.full(nbytes + 3 * _GUARD_NBYTES, 7, dtype=np.uint8)
    start = _GUARD_NBYTES + -room.ctypes.data % LINE_NBYTES
    copy(room.ctypes.data + start, source.ctypes.data + shift, nbytes)
    assert (room[start : start + nbytes] == source[shift:]).all()
    assert (room[:start] == 7).all()
    assert (room[start + nbytes :] == 7).all()


def test_it_is_there_on_the_machines_it_is_for() -> None:
    """Where JIT compilers run, which need the same of the system, and the processor fits."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("for Linux on x86-64")
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if machine_code._LIBC.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        pytest.skip("a policy forbids executable memory")
    assert stream is not None


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le"])
def test_other_processors_have_none(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """The code is for x86-64."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert make_streaming_copy() is None


def test_a_policy_that_forbids_it_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses to make a page executable: nothing is run, nothing raises."""

    class Refusing:
        @staticmethod
        def mprotect(*_: int) -> int:
            return -1

    monkeypatch.setattr(machine_code, "_LIBC", Refusing)
    assert make_streaming_copy() is None


@pytest.mark.parametrize("code", ["c3", "c60700c3"], ids=["does nothing", "writes a byte"])
def test_a_loop_that_does_not_copy_is_not_used(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """It is tried before anybody relies on it."""
    require()
    monkeypatch.setattr(streaming, "_CODES", {"x86_64": bytes.fromhex(code)})
    assert make_streaming_copy() is None


def test_the_page_is_not_writable() -> None:
    """Executable memory that could be written to would be a gift to whoever breaks in."""
    require()
    address = ctypes.cast(stream, ctypes.c_void_p).value  # type: ignore[arg-type]
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= (address or 0) < last:
                assert line.split()[1] == "r-xp"
                return
    pytest.fail("its page is not mapped")
