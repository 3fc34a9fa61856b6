"""Real processes: values of ranks are kept apart, equal, or refused by all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ckptio
from tests.rig import names_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.ranks.jobs.pool import Failure, Jobs, Outcome

HERE = "tests.ranks.jobs.values"


def same_failure(outcomes: Sequence[Outcome], kind: str) -> Failure:
    """Check that every rank failed alike, and give how."""
    errors = [outcome.error for outcome in outcomes]
    assert all(error is not None for error in errors), errors
    failures = [error for error in errors if error is not None]
    assert {failure.kind for failure in failures} == {kind}, failures[0].trace
    assert len({failure.message for failure in failures}) == 1
    return failures[0]


def assert_nothing_at(path: Path) -> None:
    """Check that a save left nothing behind."""
    assert not path.exists() or names_in(path) == []


def test_each_rank_has_its_random_state_back(jobs: Jobs, tmp_path: Path) -> None:
    """A rank that was not there keeps its own; one that is gone is not missed."""
    path = str(tmp_path / "c")
    drawn = jobs.run(2, f"{HERE}:save_random_states", path=path)
    assert drawn[0] != drawn[1]
    assert jobs.run(2, f"{HERE}:load_random_states", path=path) == drawn
    assert jobs.run(1, f"{HERE}:load_random_states", path=path) == drawn[:1]
    wider = jobs.run(3, f"{HERE}:load_random_states", path=path)
    assert wider[:2] == drawn
    assert wider[2] not in drawn


def test_an_optimizer_whose_state_is_on_all_ranks_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    """What rank 0 has of it is saved; and on other numbers of ranks it goes on from there."""
    path = str(tmp_path / "c")
    job = f"{HERE}:train_with_zero"
    (wanted, _) = jobs.run(2, job, path=str(tmp_path / "whole"), steps=[0, 4])
    jobs.run(2, job, path=path, steps=[0, 2])
    for num_ranks in (2, 1):
        for found in jobs.run(num_ranks, job, path=path, steps=[2, 4]):
            assert found == pytest.approx(wanted)


def test_values_that_differ_are_refused_by_every_rank(jobs: Jobs, tmp_path: Path) -> None:
    """All name the value, the ranks and the way out; nothing is left."""
    path = tmp_path / "c"
    failure = same_failure(jobs.outcomes(2, f"{HERE}:save_different", path=str(path)), "RankError")
    assert "'data.position' is 0 on rank 0 and 1 on rank 1" in failure.message
    assert "ckptio.PerRank" in failure.message
    assert_nothing_at(path)


@pytest.mark.parametrize(
    "rows",
    [[[0, 4], [5, 10]], [[0, 5], [5, 9]], [[0, 6], [5, 10]]],
    ids=["gap", "end missing", "overlap"],
)
def test_rows_that_do_not_fit_are_refused_by_every_rank(
    jobs: Jobs, tmp_path: Path, rows: list[list[int]]
) -> None:
    """Before a byte is written."""
    path = tmp_path / "c"
    ended = jobs.outcomes(2, f"{HERE}:save_with_gap", path=str(path), rows=rows)
    assert "'w'" in same_failure(ended, "RankError").message
    assert_nothing_at(path)


def test_rows_that_fit_are_one_tensor(jobs: Jobs, tmp_path: Path) -> None:
    """Described by hand, uneven, one rank without any."""
    path = tmp_path / "c"
    jobs.run(3, f"{HERE}:save_with_gap", path=str(path), rows=[[0, 4], [4, 4], [4, 10]])
    found: Any = ckptio.sync.load(path)
    assert found["w"].shape == (10, 3)


def test_a_state_that_one_rank_cannot_save_is_refused_by_all(jobs: Jobs, tmp_path: Path) -> None:
    """The others say which rank it was, and what it said, without waiting for a deadline."""
    path = tmp_path / "c"
    ended = jobs.outcomes(2, f"{HERE}:save_what_one_cannot", path=str(path), timeout_s=20)
    own, other = ended[1].error, ended[0].error
    assert own is not None
    assert other is not None
    assert "no portable form" in own.message
    assert "RankError" in other.kinds
    assert_nothing_at(path)
