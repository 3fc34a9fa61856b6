"""What the driver is told of copies, and what becomes of a refusal."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from ckptio.staging import far_moves
from ckptio.staging.far_moves import copy_far, joined

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE, STREAM = 0x9000_0000_0000, 0x7F00
MOVES = [(0x1000, DEVICE, 10), (0x2000, DEVICE + 0x1000, 20), (0x3000, 0x9000, 1)]


class Driver:
    """Copies so much, and then refuses."""

    def __init__(self, num_copies: int) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._num_left = num_copies
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        )
        self.cuMemcpyAsync = prototype(self._copy)

    def _copy(self, *arguments: int) -> int:
        self.calls.append(arguments)
        self._num_left -= 1
        return 0 if self._num_left >= 0 else 719


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Look for the driver anew, before and after."""
    far_moves._driver_copy.cache_clear()
    yield
    far_moves._driver_copy.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    def load(name: str, mode: int) -> object:
        assert name == "libcuda.so.1"
        assert mode & 4  # RTLD_NOLOAD: no driver is woken
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_each_copy_is_told_with_its_addresses_and_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(9)
    use(monkeypatch, driver)
    assert copy_far(MOVES, STREAM)
    assert driver.calls == [(*move, STREAM) for move in MOVES]


def test_what_the_driver_refuses_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(1)
    use(monkeypatch, driver)
    assert not copy_far(MOVES, STREAM)
    assert len(driver.calls) == 2


@pytest.mark.parametrize("driver", [None, object()], ids=["no driver", "of another maker"])
def test_without_such_a_function_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch, driver: object
) -> None:
    use(monkeypatch, driver)
    assert not copy_far(MOVES, STREAM)


def test_copies_that_go_on_are_one() -> None:
    """Blocks of one tensor, for one; not what goes on on one side alone."""
    parts = [(0, 100, 5), (5, 105, 5), (10, 110, 1), (11, 200, 2), (20, 202, 2), (22, 204, 3)]
    assert list(joined(parts)) == [(0, 100, 11), (11, 200, 2), (20, 202, 5)]
    assert list(joined([])) == []
