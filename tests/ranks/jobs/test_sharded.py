"""Real processes: whatever ranks saved comes back bit for bit, on however many."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import pytest
import torch

import ckptio
from ckptio.config import PAGE_NBYTES
from ckptio.format.manifest import decode_manifest
from tests.ranks.jobs.work import (
    check_same,
    config,
    large_state,
    plain_state,
    sums,
    zeros_like,
)
from tests.rig import assert_tidy

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.jobs.pool import Jobs

HERE = "tests.ranks.jobs.sharded"
ROWS, COLUMNS, WHOLE = 0, 1, -1


def nbytes_by_rank(path: Path) -> dict[int, int]:
    """Add up the data in the files of each rank, by their names; headers have a page."""
    found: dict[int, int] = collections.Counter()
    for entry in decode_manifest((path / "manifest.json").read_bytes()).files:
        found[int(entry.name.split("-")[2])] += entry.nbytes - PAGE_NBYTES
    return dict(found)


def nbytes_of(state: dict[str, torch.Tensor]) -> int:
    """Add up the tensors of a state."""
    return sum(tensor.nbytes for tensor in state.values())


def save_layout(jobs: Jobs, path: Path, mesh: list[int], placements: list[int]) -> None:
    jobs.run(
        torch.Size(mesh).numel(),
        f"{HERE}:save_layout",
        path=str(path),
        mesh=mesh,
        placements=placements,
    )


def load_layout(
    jobs: Jobs, path: Path, mesh: list[int], placements: list[int], save_to: Path | None = None
) -> None:
    jobs.run(
        torch.Size(mesh).numel(),
        f"{HERE}:load_layout",
        path=str(path),
        mesh=mesh,
        placements=placements,
        save_to=str(save_to) if save_to else None,
    )


def load_alone(path: Path) -> None:
    """Load in this process, with and without a target, and compare."""
    expected = plain_state()
    check_same(ckptio.sync.load(path), expected)
    target = zeros_like(expected)
    ckptio.sync.load(path, target)
    check_same(target, expected)


def test_replicas_are_written_once_by_all_ranks(jobs: Jobs, tmp_path: Path) -> None:
    """Ranks started as torchrun does, without a process group, share a state out by bytes."""
    path = tmp_path / "c"
    answers = jobs.run(2, f"{HERE}:save_and_load_replicas", path=str(path))
    assert answers[0] == answers[1]
    found = ckptio.sync.load(path)
    check_same(found["model"], large_state(seed=1))
    assert found["step"] == 4
    assert_tidy(path)
    written = nbytes_by_rank(path)
    assert sum(written.values()) == nbytes_of(large_state())  # no replica twice
    assert max(written.values()) < 1.10 * nbytes_of(large_state()) / 2


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="FSDP2 of this version of torch trains on GPUs alone",
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp_model_and_optimizer_come_back(jobs: Jobs, tmp_path: Path, world_size: int) -> None:
    """Training goes on as if nothing had happened; a single process loads the whole of it."""
    path = tmp_path / "c"
    answers = jobs.run(world_size, f"{HERE}:save_and_load_fsdp", path=str(path))
    assert all(answer == answers[0] for answer in answers)
    found = ckptio.sync.load(path)
    assert sums(found["model"]) == answers[0]
    assert found["optimizer"]["state"]["0.weight"]["exp_avg"].shape == (13, 7)
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert_tidy(path)


def test_rows_become_columns_on_other_worlds(jobs: Jobs, tmp_path: Path) -> None:
    """2 ranks by rows, 4 by columns, 3 by rows, 1 whole: each loads what the last one saved."""
    paths = [tmp_path / str(i) for i in range(3)]
    save_layout(jobs, paths[0], [2], [ROWS])
    load_layout(jobs, paths[0], [4], [COLUMNS], save_to=paths[1])
    load_layout(jobs, paths[1], [3], [ROWS], save_to=paths[2])
    for path in paths:
        load_alone(path)
        assert_tidy(path)
    assert set(nbytes_by_rank(paths[1])) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [([2, 2], [ROWS, COLUMNS]), ([2, 2], [WHOLE, ROWS]), ([2, 2], [ROWS, ROWS])],
    ids=["blocks", "hybrid", "rows of rows"],
)
def test_plain_tensors_become_dtensors_and_back(
    jobs: Jobs, tmp_path: Path, mesh: list[int], placements: list[int]
) -> None:
    """On meshes of two dimensions, replicated ones among them."""
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    ckptio.sync.save(plain_state(), plain, config=config())
    load_layout(jobs, plain, mesh, placements, save_to=sharded)
    load_alone(sharded)
    assert_tidy(sharded)
    assert sum(nbytes_by_rank(sharded).values()) == nbytes_of(plain_state())


@pytest.mark.stress
@pytest.mark.parametrize("saved", [1, 2, 3, 4, 8])
def test_any_world_loads_what_any_other_saved(jobs: Jobs, tmp_path: Path, saved: int) -> None:
    """By rows, by columns and whole; up to 8 ranks, which some tensors have no rows for."""
    path = tmp_path / "c"
    save_layout(jobs, path, [saved], [ROWS if saved % 2 else COLUMNS])
    for loaded in (1, 2, 3, 4, 8):
        for placement in (ROWS, COLUMNS, WHOLE):
            load_layout(jobs, path, [loaded], [placement])


@pytest.mark.stress
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ([2, 2, 2], [ROWS, COLUMNS, ROWS]),
        ([2, 4], [WHOLE, COLUMNS]),
        ([2, 2, 2], [WHOLE, ROWS, COLUMNS]),
    ],
    ids=["three dimensions", "wide", "hybrid"],
)
def test_eight_ranks_in_meshes(
    jobs: Jobs, tmp_path: Path, mesh: list[int], placements: list[int]
) -> None:
    """Saved on three dimensions, loaded on one, and the other way round."""
    paths = [tmp_path / "a", tmp_path / "b"]
    save_layout(jobs, paths[0], mesh, placements)
    load_layout(jobs, paths[0], [3], [ROWS], save_to=paths[1])
    load_layout(jobs, paths[1], mesh, placements)
    load_alone(paths[0])
