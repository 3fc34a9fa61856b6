"""A file system that is really full, in a namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptio

#: What mounts a small file system for one command, which need not be root's.
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
_MOUNT = 'mount -t tmpfs -o size=24m none "$0" && exec "$@"'

JOB = """
import errno
import os
import sys

import torch

import ckptio
import ckptio.sync

full, other, is_second = sys.argv[1], sys.argv[2], sys.argv[3] == "second"
tiers = {"root": other, "then": full} if is_second else {"root": full}


def state_of(step):
    return {"w": torch.full((1 << 20,), float(step))}


def committed():
    return [int(name[5:]) for name in sorted(os.listdir(full))
            if os.path.exists(f"{full}/{name}/manifest.json")]


def save(checkpointer, step):
    checkpointer.start_save(state_of(step), step).durable.wait()


def save_until_full(checkpointer, step):
    try:
        for step in range(step, step + 20):
            save(checkpointer, step)
    except ckptio.StorageError as error:
        assert error.errno == errno.ENOSPC, error
    return step


with ckptio.sync.Checkpointer(**tiers) as checkpointer:
    failed = save_until_full(checkpointer, 1)
    last = failed - 1
    checkpointer.discard_after(last)  # where the copy failed alone: nothing is owed
assert committed() == [*range(1, failed)]
with ckptio.sync.Checkpointer(**tiers, keep=ckptio.KeepLast(2)) as checkpointer:
    assert checkpointer.load(step=last)["w"][0] == last
    assert save_until_full(checkpointer, failed) == failed
assert committed() == [last - 1, last]
with ckptio.sync.Checkpointer(**tiers, keep=ckptio.KeepLast(2)) as checkpointer:
    for step in range(failed + 1, failed + 11):
        save(checkpointer, step)
assert committed() == [failed + 9, failed + 10]
for step in committed():
    found = ckptio.sync.load(f"{full}/step-{step:08d}")["w"]
    assert torch.equal(found, state_of(step)["w"])
"""


@pytest.fixture
def namespace(tmp_path: Path) -> list[str]:
    """What a command begins with to have a file system of 24 MiB, and nobody else."""
    (tmp_path / "full").mkdir()
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("there is no unshare or no mount here")
    command = [*_UNSHARE, "sh", "-c", _MOUNT, str(tmp_path / "full")]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing may be mounted here: {tried.stderr.strip()}")
    return command


@pytest.mark.parametrize("tier", ["first", "second"])
def test_a_run_goes_on_where_the_run_before_filled_the_disk(
    tier: str, namespace: list[str], tmp_path: Path
) -> None:
    """It keeps fewer steps; what was committed loads at any time."""
    (tmp_path / "job.py").write_text(JOB)
    arguments = [str(tmp_path / "job.py"), str(tmp_path / "full"), str(tmp_path / "other"), tier]
    ended = subprocess.run(
        [*namespace, sys.executable, *arguments],
        cwd=Path(ckptio.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
