"""The harness itself: what it says of ranks is what happened to them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.groups import end_process_groups
from tests.ranks.jobs.pool import JobError, Jobs, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ranks.jobs.worker import Me

HERE = "tests.ranks.jobs.test_pool"


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Jobs]:
    """Give a pool that may be ruined."""
    pool = Jobs(tmp_path)
    yield pool
    pool.close()


def add_up(me: Me, start: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    try:
        total = torch.tensor(start + me.rank)
        dist.all_reduce(total)
    finally:
        end_process_groups()
    return {"sum": int(total), "pid": os.getpid(), "job": os.environ["TORCHELASTIC_RUN_ID"]}


def wait_for_ever(me: Me) -> int:
    if me.rank == me.world_size - 1:
        threading.Event().wait()
    return me.rank


def stop_alone(me: Me) -> int:
    me.point("here")
    return me.rank


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_are_kept_and_jobs_are_apart(jobs: Jobs) -> None:
    """Each job has a store of its own, so that nothing of one is met in the next."""
    first = jobs.run(2, f"{HERE}:add_up", start=10)
    second = jobs.run(2, f"{HERE}:add_up", start=20)
    assert [answer["sum"] for answer in (*first, *second)] == [21, 21, 41, 41]
    assert [a["pid"] for a in first] == [a["pid"] for a in second]
    assert first[0]["pid"] != first[1]["pid"]
    assert first[0]["job"] != second[0]["job"]


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_rank_is_stopped_where_it_should(jobs: Jobs, how: str) -> None:
    """The others go on; the next job has a new process in its place."""
    before = jobs.run(2, f"{HERE}:add_up", start=0)
    ended = jobs.outcomes(2, f"{HERE}:stop_alone", stop=Stop(1, "here", how))
    assert (ended[0].value, ended[0].stopped) == (0, False)
    assert (ended[1].value, ended[1].stopped) == (None, True)
    assert not is_alive(before[1]["pid"])
    after = jobs.run(2, f"{HERE}:add_up", start=0)
    assert after[0]["pid"] == before[0]["pid"]
    assert after[1]["pid"] != before[1]["pid"]


def test_a_stop_that_never_comes_is_an_error(jobs: Jobs) -> None:
    """A test that stops nothing would show nothing."""
    with pytest.raises(JobError, match="did not come to pass"):
        jobs.outcomes(2, f"{HERE}:stop_alone", stop=Stop(1, "elsewhere", "kill"))


def test_what_a_rank_raises_is_told(jobs: Jobs) -> None:
    """With its kind and text; `run` raises it with the trace."""
    ended = jobs.outcomes(2, f"{HERE}:add_up")
    assert [outcome.error.kind for outcome in ended if outcome.error] == ["TypeError"] * 2
    with pytest.raises(JobError, match="missing 1 required positional argument: 'start'"):
        jobs.run(2, f"{HERE}:add_up")


def test_a_job_that_hangs_is_killed_with_its_stacks(doomed: Jobs) -> None:
    """They name the line at which each rank that is left is waiting; no process stays."""
    pids = [answer["pid"] for answer in doomed.run(1, f"{HERE}:add_up", start=0)]
    with pytest.raises(JobError, match=r"ranks \[0\] did not end(?s:.)*in wait_for_ever"):
        doomed.outcomes(1, f"{HERE}:wait_for_ever", timeout_s=1)
    assert not any(map(is_alive, pids))
