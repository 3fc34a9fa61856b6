"""Real processes with gloo: what DCP spreads over ranks comes back on however many."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

import ckptio
from ckptio.adapters.dcp import StorageWriter
from tests.adapters.rig import large_blocks, save
from tests.adapters.test_dcp import has_option
from tests.ranks.jobs.work import check_same, plain_state
from tests.rig import assert_tidy, names_in

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.jobs.pool import Jobs

HERE = "tests.adapters.jobs"


def has(name: str) -> bool:
    """Whether DCP's `save` has an option."""
    return name in inspect.signature(state_dict_saver.save).parameters


ROWS, COLUMNS, WHOLE = 0, 1, -1


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(ROWS, ROWS), (ROWS, COLUMNS), (COLUMNS, ROWS), (WHOLE, ROWS)],
    ids=["rows to rows", "rows to columns", "columns to rows", "whole to rows"],
)
def test_two_ranks_become_three(jobs: Jobs, tmp_path: Path, saved: int, loaded: int) -> None:
    """In four placements; `ckptio.load` reads the whole of it, and each rank wrote a file."""
    path = tmp_path / "c"
    jobs.run(2, f"{HERE}:save_layout", path=str(path), mesh=[2], placements=[saved])
    jobs.run(3, f"{HERE}:load_layout", path=str(path), mesh=[3], placements=[loaded])
    found = ckptio.sync.load(path)
    check_same(found["model"], plain_state())
    assert found["step"] == 3
    assert_tidy(path)
    assert not ckptio.sync.verify(path).damage
    ranks = {file.rank for file in ckptio.sync.inspect(path).files}
    assert ranks == {0, 1}


def test_one_rank_becomes_four_and_each_byte_is_read_about_once(jobs: Jobs, tmp_path: Path) -> None:
    """Blocks at the borders of shards twice, and what DCP has to know once on each rank."""
    path, rows = tmp_path / "c", 4096
    state = {"w": torch.arange(rows).float()[:, None].expand(rows, 256)}
    save(state, storage_writer=StorageWriter(path, config=large_blocks()))
    read = jobs.run(4, f"{HERE}:load_shares", path=str(path), rows=rows)
    assert sum(read) <= rows * 256 * 4 * 1.10
    assert max(read) <= rows * 256 + 3 * 64 * 1024


@pytest.mark.skipif(not has("no_dist"), reason="FSDP2 of a later version of torch, on the CPU")
def test_fsdp_model_and_optimizer_come_back(jobs: Jobs, tmp_path: Path) -> None:
    """Training goes on as if nothing had happened."""
    answers = jobs.run(2, f"{HERE}:save_and_load_fsdp", path=str(tmp_path / "c"))
    assert answers[0] == answers[1]
    found = ckptio.sync.load(tmp_path / "c")
    assert found["optimizer"]["state"]["0.weight"]["exp_avg"].shape == (13, 7)
    assert_tidy(tmp_path / "c")


@pytest.mark.parametrize("phase", ["plan", "data"])
def test_one_rank_that_fails_fails_all_and_leaves_the_old_checkpoint(
    jobs: Jobs, tmp_path: Path, phase: str
) -> None:
    """Every rank hears of the rank and of its error; nothing new is left."""
    answers = jobs.run(2, f"{HERE}:fail_on_one_rank", path=str(tmp_path / "c"), phase=phase)
    expected = f"[(1, \"ZeroDivisionError('in the {phase} of rank 1')\")]"
    assert answers == [[expected], [expected]]


def test_an_error_of_ours_comes_whole_to_all_ranks(jobs: Jobs, tmp_path: Path) -> None:
    """As itself, with what it carries."""
    answers = jobs.run(2, f"{HERE}:refuse_on_one_rank", path=str(tmp_path / "c"))
    assert answers == [["UnsupportedLeafError odd1"]] * 2
    assert not (tmp_path / "c").exists()


def test_ranks_that_do_not_share_a_place_are_told(jobs: Jobs, tmp_path: Path) -> None:
    """What looks whole on one host alone is no checkpoint."""
    answers = jobs.run(2, f"{HERE}:save_apart", path=str(tmp_path / "c"))
    assert all("of rank 1 is not there" in answer for answer in answers)
    assert not (tmp_path / "c-0").exists()


@pytest.mark.skipif(not has("no_dist"), reason="DCP of a later version of torch")
def test_a_subgroup_saves_and_loads(jobs: Jobs, tmp_path: Path) -> None:
    """Ranks outside of it take no part."""
    jobs.run(3, f"{HERE}:save_in_a_subgroup", path=str(tmp_path / "c"))
    assert ckptio.sync.load(tmp_path / "c")["step"] == 4


@pytest.mark.skipif(not has("use_collectives"), reason="a later version of torch")
def test_ranks_save_each_for_itself(jobs: Jobs, tmp_path: Path) -> None:
    """With use_collectives=False; each has a checkpoint of its own, with its shards."""
    jobs.run(2, f"{HERE}:save_for_itself", path=str(tmp_path / "c"))
    assert names_in(tmp_path / "c") == ["rank-00000", "rank-00001"]
    for rank in range(2):
        assert_tidy(tmp_path / "c" / f"rank-0000{rank}")
        found: Any = ckptio.sync.load(tmp_path / "c" / f"rank-0000{rank}")
        assert found["mine"] == rank


@pytest.mark.skipif(not has_option("enable_plan_caching"), reason="a later version of torch")
def test_cached_plans_on_two_ranks_do_not_mix_saves(jobs: Jobs, tmp_path: Path) -> None:
    """Names of the first save come again with its plan; no file meets another."""
    jobs.run(2, f"{HERE}:save_cached", path=str(tmp_path / "c"))
    assert_tidy(tmp_path / "c")


@pytest.mark.parametrize("how", ["thread", "process"])
def test_what_changes_after_staging_is_not_saved(jobs: Jobs, tmp_path: Path, how: str) -> None:
    """async_save on two ranks, in a thread and in a process of its own."""
    if how == "process" and not hasattr(state_dict_saver, "AsyncCheckpointerType"):
        pytest.skip("a later version of torch")
    jobs.run(2, f"{HERE}:save_async", path=str(tmp_path / "c"), how=how, timeout_s=120)
    assert_tidy(tmp_path / "c")
