"""What of the way to CUDA needs no device."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ckptio.staging import cuda

GLOBAL, THREAD_LOCAL = 0, 1


@pytest.mark.parametrize("before", [GLOBAL, THREAD_LOCAL])
@pytest.mark.parametrize("code", [0, 700])
@pytest.mark.parametrize("changes", [True, False])
def test_the_mode_of_captures_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch, before: int, code: int, *, changes: bool
) -> None:
    """Also where the runtime does not change it; its code may be of what failed before."""
    mode = before

    def exchange(reference: Any) -> int:
        nonlocal mode
        if changes:
            theirs = ctypes.cast(reference, ctypes.POINTER(ctypes.c_int))
            theirs[0], mode = mode, theirs[0]
        return code

    monkeypatch.setattr(cuda, "_exchange_capture_mode", lambda: exchange)
    with cuda.beside_captures():
        assert mode == (THREAD_LOCAL if changes else before)
    assert mode == before
