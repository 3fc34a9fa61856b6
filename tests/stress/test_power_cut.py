from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from tests.stress.lab import BTRFS, EXT4, ROOT, XFS, FileSystem, recording, why_not
from tests.stress.recorder import Kind
from tests.stress.replay import Tally, check_cut, choose_cuts, cut_power, read_log
from tests.stress.workload import RUN, all_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.stress

_NUM_CUTS = 150
_SEED = 1
_WORKLOAD_TIMEOUT_S = 120.0


@pytest.fixture(params=[EXT4, XFS, BTRFS], ids=lambda fs: fs.name)
def fs(request: pytest.FixtureRequest) -> FileSystem:
    """Give a file system; skip where no power can be cut."""
    found: FileSystem = request.param
    if (reason := why_not(found)) is not None:
        pytest.skip(reason)
    return found


@pytest.fixture
def directory() -> Iterator[str]:
    """Give a directory in memory if there is one."""
    memory = "/dev/shm"  # noqa: S108  # a directory of our own is made in it
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckptio-power-", dir=parent) as path:
        yield path


def run_and_cut(
    fs: FileSystem, directory: str, durability: str, direct_io: str, kind: str = "paths"
) -> Tally:
    """Record a run of saves, cut the power at many points of it, and count what is left."""
    log_path = f"{directory}/log"
    with recording(directory, fs, log_path) as (root, control_path):
        arguments = [root, control_path, kind, durability, direct_io]
        subprocess.run(
            [sys.executable, "-m", "tests.stress.workload", *arguments],
            cwd=ROOT,
            check=True,
            timeout=_WORKLOAD_TIMEOUT_S,
        )
    records = read_log(log_path)
    os.unlink(log_path)
    kinds = [record.kind for record in records]
    assert kinds.count(Kind.MARK) == len(all_steps(kind)) + 1
    indices = choose_cuts(records, _NUM_CUTS, _SEED)
    tally = Tally()
    for cut in cut_power(kind, records, indices, fs, _SEED):
        check_cut(cut, fs, directory, tally, goes_on=durability == "full")
    print(  # noqa: T201  # figures for whoever runs with -s, or sees it fail
        f"\n{kind} on {fs.name}, durability={durability!r}, direct_io={direct_io!r}:"
        f" {kinds.count(Kind.WRITE)} writes, {kinds.count(Kind.FLUSH)} flushes; {tally}"
    )
    return tally


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_no_acknowledged_checkpoint_is_lost_to_a_power_cut(
    fs: FileSystem, directory: str, direct_io: str
) -> None:
    """Whenever the power goes, what was acknowledged loads, and what is listed is whole."""
    tally = run_and_cut(fs, directory, "full", direct_io)
    assert tally.findings == []
    assert tally["acknowledged"] > tally["cuts"]


def test_no_run_loses_its_newest_step_to_a_power_cut(fs: FileSystem, directory: str) -> None:
    """Steps go meanwhile; none that goes is ever found in part, and the next save tidies up."""
    tally = run_and_cut(fs, directory, "full", "auto", RUN)
    assert tally.findings == []
    assert tally["acknowledged"] > tally["cuts"] // 2


@pytest.mark.parametrize("durability", ["none", "file"])
def test_without_every_sync_a_power_cut_takes_what_was_acknowledged(
    fs: FileSystem, directory: str, durability: str
) -> None:
    """The same cuts do find lost checkpoints, even where only directories are not synced.

    And even then nothing loads that is not what was saved.
    """
    tally = run_and_cut(fs, directory, durability, "auto")
    assert tally["lost"] > 0
    assert tally["wrong"] == 0
