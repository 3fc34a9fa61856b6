"""Ranks on CUDA devices that train under NCCL: nothing of ours is a collective, or waits for one.

With a single device, ranks share it; see `tests.gpu.nccl`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import ckptio.sync
from tests.gpu.nccl import NUM_STEPS
from tests.ranks.jobs.pool import Jobs, Stop
from tests.ranks.jobs.work import LOST_WITHIN_S, sums

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE = "tests.gpu.nccl"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL"),
    pytest.mark.skipif(
        hasattr(ctypes.CDLL(None), "standin_fail_after"),
        reason="needs a real CUDA device: the stand-in has no kernels for NCCL",
    ),
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Give processes whose devices are theirs."""
    pool = Jobs(tmp_path_factory.mktemp("jobs"))
    yield pool
    pool.close()


def test_fsdp_is_saved_while_it_trains_and_loads_on_other_ranks(jobs: Jobs, tmp_path: Path) -> None:
    """Each step as it was, though the next has begun; on 1 and 3 ranks, and without a device."""
    path = tmp_path / "run"
    first, other = jobs.run(2, f"{HERE}:save_while_training", timeout_s=180, path=str(path))
    assert first == other
    last = path / str(NUM_STEPS - 1)
    for world_size in (1, 3):
        for found in jobs.run(world_size, f"{HERE}:load_elsewhere", timeout_s=180, path=str(last)):
            assert found == first
    assert sums(ckptio.sync.load(last, device="cpu")["model"]) == first
    assert ckptio.sync.verify(last).is_whole


def test_ddp_is_saved_while_it_trains(jobs: Jobs, tmp_path: Path) -> None:
    """All-reduces of the next step are under way on the device then."""
    jobs.run(2, f"{HERE}:save_under_ddp", timeout_s=180, path=str(tmp_path / "run"))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_plug_ins_for_dcp_work_under_nccl(jobs: Jobs, tmp_path: Path, backend: str) -> None:
    """In the background, too, where there is a group for it."""
    path = str(tmp_path / "c")
    jobs.run(2, f"{HERE}:plug_into_dcp", timeout_s=180, path=path, backend=backend)


def test_a_rank_that_dies_is_named_and_not_waited_for(jobs: Jobs, tmp_path: Path) -> None:
    """What was there stays; NCCL would find out after minutes."""
    path = tmp_path / "c"
    stop = Stop(1, "staged", "kill")
    ended = jobs.outcomes(2, f"{HERE}:lose_a_rank", timeout_s=120, stop=stop, path=str(path))
    assert ended[0].error is not None
    assert ended[0].error.kind == "PeerLostError", ended[0].error.trace
    assert ended[0].seconds < LOST_WITHIN_S
    assert ckptio.sync.verify(path).is_whole
