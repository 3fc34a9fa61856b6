"""What the driver is told of copies, and what becomes of a refusal."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from ckptio.staging import far_moves
from ckptio.staging.far_moves import copy_far, joined
from ckptio.staging.machine_code import make_function

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE, STREAM = 0x9000_0000_0000, 2**64 - 1
MOVES = [(0x1000, DEVICE, 10, 0), (0x2000, DEVICE + 0x1000, 20, 1), (0x3000, 0x9000, 1, 2)]


class Driver:
    """Copies so much, and then refuses."""

    def __init__(self, num_copies: int) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.num_to_device = 0
        self._num_left = num_copies
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t
        )
        self.cuMemcpyDtoHAsync_v2 = prototype(self._copy)
        self.cuMemcpyHtoDAsync_v2 = prototype(self._copy_back)

    def _copy_back(self, *arguments: int) -> int:
        self.num_to_device += 1
        return self._copy(*arguments)

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


@pytest.fixture(params=["at once", "one by one"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there can be a loop in machine code."""
    if request.param == "one by one":
        monkeypatch.setattr(far_moves, "make_function", lambda *_: None)
    elif make_function(far_moves._CODES, None) is None:
        pytest.skip("not on this processor, or a policy forbids it")


def use(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    def load(name: str, mode: int) -> object:
        assert name == "libcuda.so.1"
        assert mode & 4  # RTLD_NOLOAD: no driver is woken
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("saving", [True, False], ids=["to the host", "to the device"])
@pytest.mark.parametrize("count", [0, 1, 3, 700])
def test_each_copy_is_told_with_its_addresses_and_the_stream(
    monkeypatch: pytest.MonkeyPatch, count: int, *, saving: bool
) -> None:
    driver = Driver(count)
    use(monkeypatch, driver)
    moves = [(4096 * i + i, DEVICE + 8192 * i, 1 + i, i) for i in range(count)]
    assert copy_far(moves, STREAM, saving=saving)
    assert driver.calls == [(*move[:3], STREAM) for move in moves]
    assert driver.num_to_device == (0 if saving else count)


@pytest.mark.usefixtures("how")
def test_what_the_driver_refuses_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(1)
    use(monkeypatch, driver)
    assert not copy_far(MOVES, STREAM, saving=True)
    assert len(driver.calls) == 2


@pytest.mark.parametrize("driver", [None, object()], ids=["no driver", "of another maker"])
def test_without_such_a_function_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch, driver: object
) -> None:
    use(monkeypatch, driver)
    assert not copy_far(MOVES, STREAM, saving=True)


def test_copies_of_a_tensor_that_go_on_are_one() -> None:
    """Its blocks; not what goes on on one side alone, nor what another begins with."""
    parts = [(0, 100, 5), (5, 105, 5), (10, 110, 1), (11, 200, 2), (20, 202, 2), (22, 204, 3)]
    assert list(joined([(*part, 7) for part in parts])) == [
        (0, 100, 11),
        (11, 200, 2),
        (20, 202, 5),
    ]
    assert list(joined([(*part, number) for number, part in enumerate(parts)])) == parts
    assert list(joined([])) == []
