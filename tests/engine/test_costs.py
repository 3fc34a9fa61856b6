"""Tests for what one more tensor costs: some states have 20,000, most of them small.

Counted in calls, of Python's functions and of C's: nearly the same in every run; beside others,
who waits looks more often, so the least of three runs counts. Seconds are
for the benches, and nobody runs those with every change: a load had come from 56 calls for each
tensor to 87 over some hundred changes, one question to each tensor after another.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Work = Callable[[sync.Engine, dict[str, torch.Tensor], Path], object]


def _state(number: int, device: str) -> dict[str, torch.Tensor]:
    return {f"t{index:05}": torch.ones(4, device=device) for index in range(number)}


def _count(work: Work, number: int, path: Path, device: str = "cpu") -> int:
    """Count the calls of all threads that do something with a state of so many tensors."""
    seen: list[str] = []

    def see(_: object, event: str, __: object) -> None:
        if event in ("call", "c_call"):
            seen.append(event)

    state, path = _state(number, device), path / str(number)
    sync.save(state, path)
    threading.setprofile(see)
    try:
        with sync.Engine() as engine:
            sys.setprofile(see)
            try:
                work(engine, state, path)
            finally:
                sys.setprofile(None)
    finally:
        threading.setprofile(None)
    return len(seen)


def _save(engine: sync.Engine, state: dict[str, torch.Tensor], path: Path) -> None:
    engine.save(state, path, overwrite=True)


def _fill(engine: sync.Engine, state: dict[str, torch.Tensor], path: Path) -> None:
    engine.load(path, into=state)


def _make(engine: sync.Engine, _: Any, path: Path) -> None:
    engine.load(path)


@pytest.mark.parametrize(
    ("work", "budget"), [(_save, 53), (_fill, 62), (_make, 59)], ids=["save", "fill", "make"]
)
def test_one_more_tensor_costs_a_few_calls(work: Work, budget: int, tmp_path: Path) -> None:
    """What is spent above that is to be known: a call is 0.05 to 0.3 us, of each tensor."""
    few, many = (
        min(_count(work, number, tmp_path / f"{attempt}") for attempt in range(3))
        for number in (500, 1500)
    )
    assert round((many - few) / 1000) <= budget  # a few calls come and go with waits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("work", "budget"), [(_save, 62), (_fill, 71)], ids=["save", "fill"])
def test_one_more_tensor_of_a_device_costs_hardly_more(
    work: Work, budget: int, tmp_path: Path
) -> None:
    """A device's target was looked at three times."""
    few, many = (
        min(_count(work, number, tmp_path / f"{attempt}", "cuda") for attempt in range(3))
        for number in (500, 1500)
    )
    assert round((many - few) / 1000) <= budget  # a few calls come and go with waits


@pytest.mark.parametrize(
    ("make", "is_filled", "budget"),
    [
        (lambda n: {f"k{i}": i / 2 for i in range(n)}, True, 14),
        (lambda n: list(range(n)), True, 3),
        (lambda n: {f"k{i}": i / 2 for i in range(n)}, False, 3),
        (lambda n: list(range(n)), False, 2),
    ],
    ids=["dict", "list", "new dict", "new list"],
)
def test_one_more_number_costs_a_few_calls(
    make: Callable[[int], Any], budget: int, tmp_path: Path, *, is_filled: bool
) -> None:
    """In a target it was looked at for methods, and rebuilt by a decoder of its own: 100 calls.

    A list that a loader of data has shuffled has a million; a name was made for each.
    """

    def count(number: int) -> int:
        state, path = make(number), tmp_path / str(number)
        seen: list[str] = []
        sync.save(state, path, overwrite=True)
        with sync.Engine() as engine:
            sys.setprofile(lambda _, event, __: seen.append(event) if "call" in event else None)
            try:
                engine.load(path, into=state if is_filled else None)
            finally:
                sys.setprofile(None)
        return len(seen)

    few, many = (min(count(number) for _ in range(2)) for number in (500, 1500))
    assert round((many - few) / 1000) <= budget  # a few calls come and go with waits
