"""What the driver is told of copies that are queued together, and what becomes of a refusal."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.staging import batches
from ckptio.staging.batches import copy_together

if TYPE_CHECKING:
    from collections.abc import Iterator

MOVES = [(0x1000, 0x9000_0000_0000, 10), (0x2000, 0x9000_0000_1000, 20), (0x3000, 0x9000, 1)]
STREAM = 0x7F00


class Driver:
    """Has the function of one version or of another, or none."""

    def __init__(self, code: int, *names: str) -> None:
        self.calls: list[tuple[str, list[tuple[int, int, int]], int]] = []
        for name in names:
            setattr(self, name, functools.partial(self._copy, name, code))

    def _copy(self, name: str, code: int, *arguments: Any) -> int:
        """Take what the header of CUDA 13 says, or that of 12.8: one argument more."""
        targets, sources, sizes, count, attributes, firsts, num_attributes, *which = arguments
        stream = which.pop()
        assert len(which) == (0 if name.endswith("_v2") else 1)
        assert (num_attributes.value, firsts._obj.value) == (1, 0)
        # the order of access is the stream's; no hints, no flags
        assert bytes(attributes._obj) == b"\1" + bytes(23)
        columns = [
            (ctypes.c_uint64 * count.value).from_address(column.value)
            for column in (targets, sources, sizes)
        ]
        self.calls.append((name, list(zip(*columns, strict=True)), stream.value))
        return code


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Look for the driver anew, before and after."""
    batches._batch_call.cache_clear()
    yield
    batches._batch_call.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    def load(name: str, mode: int) -> object:
        assert name == "libcuda.so.1"
        assert mode & 4  # RTLD_NOLOAD: no driver is woken
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (["cuMemcpyBatchAsync"], "cuMemcpyBatchAsync"),
        (["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"], "cuMemcpyBatchAsync_v2"),
    ],
    ids=["CUDA 12.8", "CUDA 13"],
)
def test_all_copies_are_told_in_one_call(
    monkeypatch: pytest.MonkeyPatch, names: list[str], used: str
) -> None:
    driver = Driver(0, *names)
    use(monkeypatch, driver)
    assert copy_together(MOVES, STREAM)
    assert driver.calls == [(used, MOVES, STREAM)]


def test_what_the_driver_refuses_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Driver(801, "cuMemcpyBatchAsync_v2"))
    assert not copy_together(MOVES, STREAM)


@pytest.mark.parametrize("driver", [None, Driver(0)], ids=["no driver", "an older one"])
def test_without_such_a_function_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch, driver: object
) -> None:
    use(monkeypatch, driver)
    assert not copy_together(MOVES, STREAM)
