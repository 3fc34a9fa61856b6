from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import SaveEvery, sync
from ckptio.checkpointer.pace import Pace
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks")


def pace(*found: int, steps: int = 10) -> Pace:
    made = Pace(SaveEvery(steps=steps))
    made.found(found)
    return made


def due(made: Pace, *steps: int) -> list[int]:
    return [step for step in steps if made.is_due(step)]


def test_steps_that_were_found_count_as_saved() -> None:
    """Without them, the first step is due, and whatever the run goes on from."""
    assert due(pace(), *range(11, 13)) == [11, 12]
    assert due(pace(7, 10), *range(11, 21)) == [20]
    assert due(pace(7, 10), *range(10, 21)) == [20]
    assert due(pace(7), 8, 9, 10) == [10]  # a last save at a signal was no multiple
    assert due(pace(7), 12) == [12]  # where steps are skipped


def test_a_run_that_goes_back_counts_from_what_is_below_it() -> None:
    """Steps above the first one asked for leave out no save, however they are skipped."""
    assert due(pace(100, 200), 105, 112, 119) == [112, 119]
    assert due(pace(100, 200, steps=100), 101, 199, 200) == [200]  # it is saved over the other
    assert due(pace(200), 105, 106) == [105, 106]  # nobody knows what was saved below


def test_what_is_loaded_counts_before_what_is_found() -> None:
    """Until the run begins; later, steps are found and loaded to be looked at."""
    made = pace(10, 30)
    made.loaded(10)
    made.found([20])
    assert due(made, 31) == [31]
    made = pace(10)
    assert due(made, 11) == []
    made.found([11, 19, 30])
    made.loaded(30)
    assert due(made, 12, 19, 21) == [21]


def test_what_is_discarded_does_not_count() -> None:
    """The run that went on from there has saved nothing since."""
    made = pace(10, 20, 30)
    made.discarded(10)
    assert due(made, 31) == [31]
    made = pace(10, 20, 30)
    made.discarded(30)
    assert due(made, 31, 40) == [40]


def test_a_run_that_goes_back_later_counts_from_what_it_loads() -> None:
    """However steps are skipped: the one saved last is above all that follow."""
    made = pace(steps=100)
    made.saved(903)
    made.loaded(700)
    assert due(made, 707, 798, 805) == [805]
    made = pace(steps=100)
    made.saved(903)
    made.loaded(700)  # only looked at: the run goes on
    assert due(made, 910, 707, 805, 1001) == [1001]
    made = pace(steps=100)
    made.saved(903)
    made.loaded(700)  # and asks about that step first
    assert due(made, 700, 707, 805) == [805]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_goes_back_by_one_save_makes_it_again(steps: int) -> None:
    """It asks where it may save alone, as after each epoch: first of all about the last one."""
    made = pace(steps=steps)
    for step in range(steps, 10, steps):
        assert due(made, step) == [step]
        made.saved(step)
    made.loaded(9 - steps)
    assert due(made, 9) == [9]
    made.saved(9)
    made.loaded(9)  # only looked at
    assert due(made, 9) == []


@pytest.mark.parametrize("others", [[900], [602], [602, 900]])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_that_goes_back_may_look_at_other_steps(others: list[int], *, is_first: bool) -> None:
    """At the best one for one, which may be above or below the one that it goes on from."""
    made = pace(steps=100)
    made.saved(903)
    for step in [700, *others] if is_first else [*others, 700]:
        made.loaded(step)
    assert due(made, 707, 798, 805) == [805]


def test_a_run_that_discards_what_it_saved_counts_from_below() -> None:
    """Whether it loads what it goes on from, and when."""
    made = pace(steps=100)
    made.saved(903)
    made.discarded(700)
    assert due(made, 707, 805) == [805]
    made = pace(steps=100)
    made.saved(903)
    made.discarded(700)
    made.loaded(602)
    assert due(made, 609, 707) == [707]
    made = pace(steps=100)
    made.saved(903)
    made.discarded(1000)  # nothing
    assert due(made, 910, 1001) == [1001]


ASKED: list[Callable[[sync.Checkpointer], Any]] = [
    lambda ckpt: ckpt.latest(),
    lambda ckpt: ckpt.steps(),
    lambda ckpt: ckpt.records(),
]


@pytest.mark.parametrize("ask", ASKED)
def test_a_run_resumed_by_hand_saves_no_step_too_many(
    tmp_path: Path, ask: Callable[[sync.Checkpointer], Any]
) -> None:
    """It asks what there is, loads by other means, and goes on at the next step."""
    saved = []
    for first in (1, 6, 11):
        with sync.Checkpointer(tmp_path, every=SaveEvery(steps=5), config=SMALL) as ckpt:
            ask(ckpt)
            for step in range(first, first + 5):
                if ckpt.should_save(step):
                    ckpt.save({"w": torch.ones(1)}, step)
                    saved.append(step)
    assert saved == [5, 10, 15]


def test_discarded_steps_of_a_run_do_not_count(tmp_path: Path) -> None:
    """Whoever went back so far, by other means than `load`."""
    with sync.Checkpointer(tmp_path, config=SMALL) as ckpt:
        for step in (5, 10):
            ckpt.save({"w": torch.ones(1)}, step)
    with sync.Checkpointer(tmp_path, every=SaveEvery(steps=5), config=SMALL) as ckpt:
        assert ckpt.latest() == 10
        assert ckpt.discard_after(5) == (10,)
        assert ckpt.should_save(11)


def test_a_run_saves_at_the_same_pace_after_it_went_back(tmp_path: Path) -> None:
    """In one block, where no step is a multiple."""
    with sync.Checkpointer(tmp_path, every=SaveEvery(steps=10), config=SMALL) as ckpt:
        saved = []

        def go_on(after: int) -> None:
            for step in range(after + 7, 60, 7):
                if ckpt.should_save(step):
                    ckpt.save({"w": torch.ones(1)}, step)
                    saved.append(step)

        go_on(0)
        assert saved == [14, 21, 35, 42, 56]
        ckpt.load(step=14)
        assert ckpt.discard_after(14) == (21, 35, 42, 56)
        go_on(14)
        assert saved == [14, 21, 35, 42, 56, 21, 35, 42, 56]


def test_a_long_run_remembers_no_steps(tmp_path: Path) -> None:
    """Neither those that it has saved, loaded and listed, nor how often."""
    with sync.Checkpointer(tmp_path, config=SMALL, ranks="solo", every=SaveEvery(steps=1)) as ckpt:
        for step in range(1, 4):
            ckpt.save({"w": torch.ones(2)}, step)
            ckpt.load(step=step)
            ckpt.steps()
        assert not ckpt._core.upkeep.steps.busy
        assert [step for step, _ in ckpt._core.upkeep.steps.saves] == [3]
        assert not ckpt._core._pace._found
