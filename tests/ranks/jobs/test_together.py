"""Real processes: several things at once, and ranks that die or freeze meanwhile."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import ckptio
from tests.ranks.jobs.pool import Stop
from tests.ranks.jobs.work import LOST_WITHIN_S, check_same, config, plain_state
from tests.rig import assert_tidy, names_in

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.jobs.pool import Jobs

HERE = "tests.ranks.jobs.together"
SAVE_POINTS = ["before save", "planned", "staged", "written", "before commit"]


def lose_one(jobs: Jobs, path: Path, world_size: int, stop: Stop) -> None:
    """Stop a rank in a save, and check that the others say so and the old state is there."""
    ended = jobs.outcomes(world_size, f"{HERE}:overwrite", stop=stop, path=str(path))
    for outcome in ended:
        if outcome.rank == stop.rank:
            continue
        assert outcome.error is not None
        assert outcome.error.kind == "PeerLostError", outcome.error.trace
        assert outcome.error.attributes["ranks"] == [stop.rank]
        assert outcome.seconds < LOST_WITHIN_S
    check_same(ckptio.sync.load(path), plain_state(seed=1))
    assert ckptio.sync.verify(path).is_whole
    assert [name for name in names_in(path) if "manifest" in name] == ["manifest.json"]
    for name in names_in(path):  # what no lock covers is left for an hour
        os.utime(path / name, (0, 0))
    jobs.run(world_size, f"{HERE}:overwrite", path=str(path))
    check_same(ckptio.sync.load(path), plain_state(seed=2))
    assert_tidy(path)


@pytest.mark.parametrize("host", ["", "container"])
def test_ranks_load_what_one_of_them_reads(jobs: Jobs, tmp_path: Path, host: str) -> None:
    """Through memory that they share, and over TCP as ranks in containers of one machine."""
    ckptio.sync.save(plain_state(), tmp_path / "c", config=config())
    path = str(tmp_path / "c")
    assert jobs.run(3, f"{HERE}:load_once", path=path, host=host) == [[True, True], [], []]


@pytest.mark.parametrize(
    ("rank", "point", "how"),
    [
        (1, "planned", "kill"),
        (0, "staged", "kill"),
        (1, "written", "freeze"),
        (0, "before commit", "kill"),
    ],
)
def test_a_rank_that_is_lost_in_a_save_is_named(
    jobs: Jobs, tmp_path: Path, rank: int, point: str, how: str
) -> None:
    """Within the deadline, by every other rank; what was there stays, and the next save works."""
    lose_one(jobs, tmp_path / "c", 2, Stop(rank, point, how))


@pytest.mark.stress
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("point", SAVE_POINTS)
@pytest.mark.parametrize("rank", [0, 2])
def test_any_rank_may_be_lost_anywhere_in_a_save(
    jobs: Jobs, tmp_path: Path, rank: int, point: str, how: str
) -> None:
    """The same for the coordinator and another of four, at every point."""
    if point == "before commit" and rank:
        pytest.skip("the coordinator alone commits")
    lose_one(jobs, tmp_path / "c", 4, Stop(rank, point, how))


@pytest.mark.stress
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("point", ["before load", "load planned", "read"])
@pytest.mark.parametrize("rank", [0, 2])
def test_any_rank_may_be_lost_anywhere_in_a_load(
    jobs: Jobs, tmp_path: Path, rank: int, point: str, how: str
) -> None:
    """The others name it within the deadline; a later load finds everything."""
    path = tmp_path / "c"
    ckptio.sync.save(plain_state(seed=1), path, config=config())
    stop = Stop(rank, point, how)
    for outcome in jobs.outcomes(3, f"{HERE}:load_stopped", stop=stop, path=str(path)):
        if outcome.rank != rank:
            assert outcome.error is not None
            assert outcome.error.kind == "PeerLostError", outcome.error.trace
            assert outcome.error.attributes["ranks"] == [rank]
            assert outcome.seconds < LOST_WITHIN_S
    jobs.run(3, f"{HERE}:load_stopped", path=str(path))


def test_saves_and_the_trainers_collectives_do_not_meet(jobs: Jobs, tmp_path: Path) -> None:
    """Two saves in flight on every rank, and an all-reduce after the other all the while."""
    answers = jobs.run(2, f"{HERE}:save_while_training", path=str(tmp_path))
    assert answers[0] == answers[1] > 3
    for name in "ab":
        check_same(ckptio.sync.load(tmp_path / name), plain_state(seed=4 + "ab".index(name)))
        assert_tidy(tmp_path / name)


def test_groups_of_one_job_do_not_meet(jobs: Jobs, tmp_path: Path) -> None:
    """Each saves its own state to its own place at the same time."""
    assert jobs.run(4, f"{HERE}:save_in_groups", path=str(tmp_path), num_groups=2) == [0, 1, 0, 1]
    assert [ckptio.sync.load(tmp_path / name)["group"] for name in "01"] == [0, 1]
    for name in "01":
        assert_tidy(tmp_path / name)


@pytest.mark.stress
def test_eight_ranks_train_and_save_at_once(jobs: Jobs, tmp_path: Path) -> None:
    """More processes than cores: nobody is taken for dead because it is slow."""
    answers = jobs.run(8, f"{HERE}:save_while_training", timeout_s=240, path=str(tmp_path))
    assert len(set(answers)) == 1
    jobs.run(8, f"{HERE}:save_in_groups", timeout_s=240, path=str(tmp_path / "g"), num_groups=4)
