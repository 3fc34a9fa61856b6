from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

MiB = 1 << 20
#: glibc keeps what large tensors had for the next ones, for each thread by itself: that is no
#: memory of ours, and as much as chance has it.
FREES_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(MiB)}
PROGRAM = """
import sys
from ckptio import sync
from ckptio.config import CheckpointConfig
def peak_kib():  # of this program alone: `ru_maxrss` begins with that of who started it
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1])
source, target, to = sys.argv[1:]
config = CheckpointConfig(pool_nbytes=16 << 20, slab_nbytes=4 << 20, durability="none")
sync.convert(source + "-small", target + "-small", to=to, config=config)  # imports, threads
before = peak_kib()
sync.convert(source, target, to=to, config=config)
print(peak_kib() - before)
"""


def write_sparse(path: Path, num: int, nbytes: int) -> None:
    """Write a file of several tensors of zeros that takes no room."""
    header = {
        f"w{i}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(num)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + num * nbytes)


@pytest.mark.parametrize("to", ["ckptio", "hf", "dcp"])
@pytest.mark.parametrize(("num", "nbytes"), [(4, 96 * MiB), (24, 16 * MiB)])
def test_memory_is_bounded_whatever_is_converted(
    num: int, nbytes: int, to: str, tmp_path: Path
) -> None:
    """Two pools and a few parts on their way; less than half of the state."""
    write_sparse(tmp_path / "source", num, nbytes)
    write_sparse(tmp_path / "source-small", num, 1)
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-c", PROGRAM),
            *(str(tmp_path / "source"), str(tmp_path / "target"), to),
        ],
        env={**os.environ, **FREES_AT_ONCE},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    grown_nbytes = int(done.stdout) * 1024
    assert grown_nbytes < num * nbytes * 0.55, grown_nbytes // MiB
