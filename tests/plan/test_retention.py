from __future__ import annotations

import dataclasses
import datetime as dt
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio import ConfigError
from ckptio.plan.retention import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepIf,
    KeepLast,
    KeepSteps,
    Retention,
    StepRecord,
    plan_removals,
)
from ckptio.plan.schedule import SaveEvery

if TYPE_CHECKING:
    from collections.abc import Callable

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def record(step: int, at_s: float | None = None, **metrics: float) -> StepRecord:
    created = START + dt.timedelta(seconds=step if at_s is None else at_s)
    return StepRecord(step=step, created=created, metrics=metrics)


def kept(policy: Retention, *records: StepRecord, exempt: tuple[int, ...] = ()) -> set[int]:
    return {r.step for r in records} - set(plan_removals(records, policy, exempt=exempt))


RUN = [record(step) for step in range(10, 101, 10)]

policies = st.recursive(
    st.one_of(
        st.just(KeepAll()),
        st.integers(1, 5).map(KeepLast),
        st.integers(1, 7).map(lambda steps: KeepEvery(steps=steps)),
        st.floats(0.1, 50).map(lambda seconds: KeepEvery(seconds=seconds)),
        st.builds(KeepBest, st.integers(1, 4), st.just("loss"), st.sampled_from(("min", "max"))),
        st.lists(st.integers(0, 30)).map(lambda steps: KeepSteps(*steps)),
        st.integers(1, 5).map(lambda n: KeepIf(lambda record: record.step % n == 0)),
    ),
    lambda children: st.tuples(children, children).map(lambda pair: pair[0] | pair[1]),
    max_leaves=4,
)
records = st.lists(
    st.builds(
        lambda step, at_s, loss: record(step, at_s, **({} if loss is None else {"loss": loss})),
        st.integers(0, 30),
        st.floats(0, 100),
        st.none() | st.floats(),
    ),
    unique_by=lambda record: record.step,
)


def test_the_last_ones_stay() -> None:
    """By number, not by age."""
    assert kept(KeepLast(3), *RUN) == {80, 90, 100}
    assert kept(KeepLast(30), *RUN) == {record.step for record in RUN}


def test_one_in_a_while_stays_for_good() -> None:
    """By number or by time; the newest is there until there is a newer one."""
    assert kept(KeepEvery(steps=40), *RUN) == {40, 80, 100}
    assert kept(KeepEvery(seconds=25), *RUN) == {10, 40, 70, 100}
    assert kept(KeepEvery(seconds=30), *RUN) == {10, 40, 70, 100}
    assert kept(KeepEvery(seconds=30), record(1, 0), record(2, 0), record(3, 0.5), *RUN) == {
        1, 30, 60, 90, 100,
    }  # fmt: skip


def test_a_clock_that_goes_back_begins_anew() -> None:
    """One step that was dated ahead would else be the last one to stay for good."""
    run = [record(1, 0), record(2, 10), record(3, 1e9), record(4, 20), record(5, 30), record(6, 90)]
    assert kept(KeepEvery(seconds=25), *run) == {1, 3, 4, 6}


def test_the_best_stay() -> None:
    """Of equal ones the higher step; without the metric, or with NaN, nothing is best."""
    run = [
        record(1, loss=3.0),
        record(2, loss=1.0),
        record(3, loss=1.0),
        record(4, loss=math.nan),
        record(5),
        record(6, loss=math.inf),
        record(7, accuracy=1.0),
    ]
    assert kept(KeepBest(1, "loss", "min"), *run) == {3, 7}
    assert kept(KeepBest(2, "loss", "min"), *run) == {2, 3, 7}
    assert kept(KeepBest(2, "loss", "max"), *run) == {1, 6, 7}
    assert kept(KeepBest(1, "nothing", "min"), *run) == set(range(1, 8))  # a typo, perhaps
    assert kept(KeepBest(1, "loss", "min"), *run[3:5]) == {4, 5}  # diverged at once


def test_pins_and_predicates_keep_what_others_let_go() -> None:
    """Joined by a bar."""
    policy = KeepLast(1) | KeepSteps(20, 999) | KeepIf(lambda record: record.step == 50)
    assert kept(policy, *RUN) == {20, 50, 100}
    assert policy == KeepLast(1) | (KeepSteps(999, 20) | policy.policies[2])


def test_pins_are_shown_as_they_are_written() -> None:
    """For a log that says what a run keeps."""
    assert repr(KeepSteps(16, 3)) == "KeepSteps(3, 16)"
    assert eval(repr(KeepSteps(20, 3))) == KeepSteps(3, 20)  # noqa: S307  # ours


def test_records_can_be_in_a_set() -> None:
    """Whatever was measured then."""
    assert len({*RUN, *RUN, dataclasses.replace(RUN[0], metrics={"loss": 1.0})}) == len(RUN) + 1


def test_what_is_in_use_stays() -> None:
    """Being written or read."""
    assert kept(KeepLast(1), *RUN, exempt=(30,)) == {30, 100}


def test_after_going_back_the_new_work_stays() -> None:
    """Steps of an abandoned future are higher than what was saved last."""
    future = [record(step, step) for step in (70, 80, 90, 100)]
    assert kept(KeepLast(2), *future, record(60, 500)) == {60, 90, 100}
    at_once = record(50, 500), record(60, 500)
    assert kept(KeepLast(2), *future, *at_once) == {60, 90, 100}


@given(records=records, policy=policies)
def test_the_last_good_ones_always_stay(records: list[StepRecord], policy: Retention) -> None:
    """The highest step and the one committed last, whatever the policy; nothing unknown goes."""
    removed = plan_removals(records, policy)
    assert list(removed) == sorted(removed)
    assert set(removed) <= {record.step for record in records}
    if records:
        stays = {record.step for record in records} - set(removed)
        assert max(record.step for record in records) in stays
        assert max(records, key=lambda r: (r.created, r.step)).step in stays


def test_a_save_that_another_one_followed_is_not_the_last() -> None:
    """Both were under way, and the older one was committed after the newer one."""
    older = dataclasses.replace(record(2, 5.0), save_id="older")
    newer = dataclasses.replace(record(3, 4.0), save_id="newer")
    assert plan_removals([older, newer], KeepLast(1)) == ()
    called = ["older", "newer", "not committed"]
    assert plan_removals([older, newer], KeepLast(1), called=called) == (2,)
    others = record(1, 4.5)  # somebody else went back, and has saved that last
    assert plan_removals([others, older, newer], KeepLast(1), called=called) == (2,)
    higher = record(9, 0.0)
    assert plan_removals([older, higher], KeepLast(1), called=called) == ()  # no copy of it yet
    assert plan_removals([older, newer, higher], KeepLast(1), called=called) == (2,)


@given(records=records, policy=policies, exempt=st.sets(st.integers(0, 30)))
def test_deciding_again_removes_nothing_more(
    records: list[StepRecord], policy: Retention, exempt: set[int]
) -> None:
    """A removal does not make others superfluous: a crash between two of them changes nothing."""
    removed = set(plan_removals(records, policy, exempt=exempt))
    assert not removed & exempt
    for gone in (set[int](), removed, set(sorted(removed)[::2])):
        left = [record for record in records if record.step not in gone]
        assert set(plan_removals(left, policy, exempt=exempt)) == removed - gone


@given(records=records, one=policies, other=policies)
def test_a_union_keeps_what_either_keeps(
    records: list[StepRecord], one: Retention, other: Retention
) -> None:
    """And no more."""
    both = set(plan_removals(records, one | other))
    assert both == set(plan_removals(records, one)) & set(plan_removals(records, other))


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast(num_steps=True),
        lambda: KeepLast(1.0),  # type: ignore[arg-type]  # refused
        KeepEvery,
        lambda: KeepEvery(steps=3, seconds=3),
        lambda: KeepEvery(steps=0),
        lambda: KeepEvery(seconds=math.inf),
        lambda: KeepEvery(seconds=0),
        lambda: KeepEvery(seconds=True),
        lambda: KeepEvery(seconds="3"),  # type: ignore[arg-type]  # refused
        lambda: KeepBest(0, "loss", "min"),
        lambda: KeepBest(1, "", "min"),
        lambda: KeepBest(1, 3, "min"),  # type: ignore[arg-type]  # refused
        lambda: KeepBest(1, "loss", "best"),  # type: ignore[arg-type]  # refused
        lambda: KeepSteps(-1),
        lambda: KeepSteps(1.5),  # type: ignore[arg-type]  # refused
        lambda: KeepIf(3),  # type: ignore[arg-type]  # refused
        SaveEvery,
        lambda: KeepBest(1, "loss", np.array(["min", "max"])),  # type: ignore[arg-type]  # refused
        lambda: SaveEvery(steps=0),
        lambda: SaveEvery(seconds=math.nan),
        lambda: SaveEvery(seconds=10**400),
        lambda: SaveEvery(steps=1.5),  # type: ignore[arg-type]  # refused
        # Python writes no int of so many digits
        lambda: SaveEvery(steps=-(10**5000)),
        lambda: SaveEvery(steps=10**5000),
        lambda: KeepLast(10**5000),
        lambda: KeepBest(1, 10**5000, "min"),  # type: ignore[arg-type]  # refused
        lambda: KeepIf(10**5000),  # type: ignore[arg-type]  # refused
    ],
)
def test_a_policy_that_means_nothing_is_refused(make: Callable[[], Any]) -> None:
    """When it is made, not after the first commit."""
    with pytest.raises(ConfigError):
        make()
    with pytest.raises(TypeError):
        KeepLast(1) | 3  # type: ignore[operator]  # refused
    with pytest.raises(TypeError, match="mode"):  # of an accuracy, the lowest were kept
        KeepBest(1, "accuracy")  # type: ignore[call-arg]  # refused


@given(every=st.integers(1, 20), steps=st.lists(st.integers(1, 5), max_size=60))
def test_every_multiple_is_due_once(every: int, steps: list[int]) -> None:
    """Also where steps are skipped: at the next one asked for."""
    decision, last, now, num_saves = SaveEvery(steps=every), 0, 0, 0
    for stride in steps:
        before, now = now, now + stride
        due = decision.is_due(now, last)
        assert due == any(step % every == 0 for step in range(before + 1, now + 1))
        if due:
            last, num_saves = now, num_saves + 1
    assert num_saves <= now // every


def test_a_run_that_went_back_saves_at_multiples() -> None:
    """Those that it comes by again, and not each step until it is where it was."""
    every = SaveEvery(steps=4)
    assert [step for step in range(1, 11) if every.is_due(step, 11)] == [4, 8]
    assert not every.is_due(8, 8)


def test_time_is_a_number_of_seconds_to_wait() -> None:
    """Never less than none."""
    assert SaveEvery(seconds=10).wait_s(3) == 7
    assert SaveEvery(seconds=10).wait_s(30) == 0
    assert SaveEvery(steps=1).wait_s(30) is None
    assert not SaveEvery(seconds=10).is_due(100, 0)
