from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import KiB
from ckptio.staging import moves

if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP_NBYTES = 3
SIZES = [0, 1, 5, 4096, 5000, 128 * KiB - 1, 128 * KiB, 128 * KiB + 77, 300_001]


def copied(sizes: Sequence[int]) -> bool:
    """Copy pieces of `sizes` bytes; whether they arrived, and nothing between them changed."""
    rng = np.random.default_rng(len(sizes))
    pieces = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    room = np.full(sum(sizes) + _GAP_NBYTES * (len(sizes) + 1), 7, dtype=np.uint8)
    expected = room.copy()
    asked, start = [], _GAP_NBYTES
    for piece in pieces:
        asked.append((room.ctypes.data + start, piece.ctypes.data, len(piece)))
        expected[start : start + len(piece)] = piece
        start += len(piece) + _GAP_NBYTES
    moves.move_all(asked)
    return bool((room == expected).all())


@pytest.mark.parametrize("has_stream", [True, False])
@given(sizes=st.lists(st.sampled_from(SIZES), max_size=40))
def test_pieces_of_any_size_arrive(*, has_stream: bool, sizes: list[int]) -> None:
    """Short and long ones, none and many, at any address, past the cache or not."""
    with pytest.MonkeyPatch.context() as patch:
        if not has_stream:
            patch.setattr(moves, "_stream", None)
        assert copied(sizes)


def test_thousands_of_pieces_take_few_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them each; the few long ones are copied on their own."""
    calls = []
    together = moves._process_vm_readv

    def counted(*args: int) -> int:
        done = int(together(*args))
        calls.append(done)
        return done

    monkeypatch.setattr(moves, "_process_vm_readv", counted)
    assert copied([100] * 2500 + [200 * KiB])
    if calls[0] < 0:
        pytest.skip("process_vm_readv is not allowed")
    assert calls == [102_400, 102_400, 45_200]


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["forbidden", "half"])
def test_what_the_system_call_leaves_is_copied_all_the_same(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """A kernel without it, a sandbox that forbids it, memory it does not reach."""
    real = moves._process_vm_readv

    def partial(pid: int, targets: int, count: int, sources: int, _: int, flags: int) -> int:
        count = int(count * share)
        return -1 if not count else int(real(pid, targets, count, sources, count, flags))

    monkeypatch.setattr(moves, "_process_vm_readv", partial)
    assert copied([10, 4096] * 700)
