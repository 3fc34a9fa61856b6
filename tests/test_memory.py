"""Memory beside the state: the pool for a save, the pool and 64 MiB for a load."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckptio.config import MiB

if TYPE_CHECKING:
    from pathlib import Path

POOL_NBYTES = 48 * MiB
STATE_NBYTES = 384 * MiB
PROGRAM = """
import os, sys
import torch
from ckptio import sync
from ckptio.config import CheckpointConfig

path, doing = sys.argv[1:]
pool_nbytes, state_nbytes = {pool}, {state}
state = {{f"t{{i}}": torch.full((state_nbytes // 32,), i, dtype=torch.int32) for i in range(8)}}


def peak_nbytes():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) * 1024


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


config = CheckpointConfig(pool_nbytes=pool_nbytes, slab_nbytes=4 << 20, durability="none")
with sync.Engine(config) as engine:
    engine.save({{"x": torch.ones(8)}}, path + "-small", overwrite=True)  # imports, threads
    engine.load(path + "-small")
with sync.Engine(config) as engine:
    if doing == "load":
        engine.save(state, path)
    if doing == "load cached":
        for name in os.listdir(path):
            with open(os.path.join(path, name), "rb", buffering=0) as file:
                room = bytearray(1 << 20)
                while file.readinto(room):
                    pass
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = resident_nbytes()
    if doing == "save":
        engine.save(state, path)
    else:
        engine.load(path, into=state)
    print(peak_nbytes() - before)
"""


def grown_nbytes(path: Path, doing: str) -> int:
    """Give by how much a process grows, at most, while it saves or loads."""
    program = PROGRAM.format(pool=POOL_NBYTES, state=STATE_NBYTES)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path), doing],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return int(done.stdout)


def test_a_save_and_a_load_take_no_more_than_they_may(tmp_path: Path) -> None:
    """Of a state eight times the pool; files that are cached count as far as they are mapped."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pytest.skip("the peak of a process cannot be reset here")
    path = tmp_path / "c"
    grown = {doing: grown_nbytes(path, doing) for doing in ("save", "load cached")}
    assert 0 < grown["save"] <= POOL_NBYTES
    assert 0 < grown["load cached"] <= POOL_NBYTES + 64 * MiB
    assert grown_nbytes(tmp_path / "again", "load") <= 64 * MiB  # beside the pool, which it has
