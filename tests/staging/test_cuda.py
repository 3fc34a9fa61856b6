"""What of the way to CUDA needs no device."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ckptio.staging import cuda

GLOBAL, THREAD_LOCAL = 0, 1


@pytest.mark.parametrize(("code", "within"), [(0, THREAD_LOCAL), (100, GLOBAL)])
def test_the_mode_of_captures_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch, code: int, within: int
) -> None:
    """Also where the runtime does not change it: then there is nothing to change back."""
    mode, codes = GLOBAL, [code]

    def exchange(reference: Any) -> int:
        nonlocal mode
        failure = codes.pop() if codes else 0
        if not failure:
            theirs = ctypes.cast(reference, ctypes.POINTER(ctypes.c_int))
            theirs[0], mode = mode, theirs[0]
        return failure

    monkeypatch.setattr(cuda, "_exchange_capture_mode", lambda: exchange)
    with cuda.beside_captures():
        assert mode == within
    assert mode == GLOBAL
