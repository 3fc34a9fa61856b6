from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from ckptio.config import MiB
from ckptio.staging import teams
from ckptio.staging.copy import Destination, TargetState
from ckptio.staging.pool import Slab
from ckptio.staging.teams import alone

if TYPE_CHECKING:
    from collections.abc import Iterator

TEAM = 6
SLAB = MiB


@pytest.fixture(autouse=True)
def team() -> Iterator[None]:
    """Let torch use more threads than this machine may have cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(TEAM)
    yield
    torch.set_num_threads(before)


def num_threads() -> int:
    """Count the threads that the system knows of, OpenMP's among them."""
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("stride", [1, 3])
def test_a_thread_that_converts_begins_no_others(stride: int) -> None:
    """A dozen readers would begin a dozen teams, each of as many threads as there are cores."""
    slab = Slab(SLAB)
    target = torch.zeros(SLAB // torch.bfloat16.itemsize * stride)[::stride]
    state = TargetState([Destination(target, torch.bfloat16)], None)

    def scatter() -> int:
        before = num_threads()
        state.scatter([(0, ((0, 0, 0, SLAB, None),))], slab, [])
        return num_threads() - before

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(scatter).result() == 0
        # on that thread torch has its team as before
        assert executor.submit(torch.get_num_threads).result() == TEAM


def test_others_keep_their_teams() -> None:
    """What is set holds for the thread that sets it, while it copies."""
    inside, go = threading.Event(), threading.Event()
    limits: list[int] = []

    def copy() -> None:
        with alone():
            inside.set()
            assert go.wait(60)
            limits.append(torch.get_num_threads())
        limits.append(torch.get_num_threads())

    with ThreadPoolExecutor(1) as executor:
        copying = executor.submit(copy)
        assert inside.wait(60)
        assert torch.get_num_threads() == TEAM
        go.set()
        copying.result()
    assert limits == [1, TEAM]


def test_the_limit_goes_with_an_error_too() -> None:
    """The caller's own thread has its team back, whatever happened."""
    with pytest.raises(ZeroDivisionError), alone():
        raise ZeroDivisionError
    assert torch.get_num_threads() == TEAM


def test_without_openmp_nothing_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch was built with threads of its own, which all share."""
    monkeypatch.setattr(teams, "_setter", lambda: None)
    with alone():
        assert torch.get_num_threads() == TEAM
