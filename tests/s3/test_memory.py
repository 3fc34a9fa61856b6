from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from ckptio.config import MiB
from tests.s3.rig import PART_NBYTES, new_url

if TYPE_CHECKING:
    from tests.s3.servers import Server

NUM_PARTS = 4
NBYTES = 320 * MiB

SAVER = """
import asyncio, json, sys
import torch
from ckptio import CheckpointConfig, Engine


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


async def main():
    options, url, part_nbytes, num_parts, nbytes = json.loads(sys.stdin.read())
    config = CheckpointConfig(
        storage_options=options,
        slab_nbytes=part_nbytes,
        pool_nbytes=num_parts * part_nbytes,
        max_requests=num_parts,
        max_writes=num_parts,
    )
    state = {"large": torch.full((nbytes,), 7, dtype=torch.uint8)}
    async with Engine(config) as engine:
        await engine.save({"first": state["large"][: 2 * num_parts * part_nbytes]}, f"{url}/warm")
        before = status("VmRSS")
        await engine.save(state, f"{url}/large")
        print(status("VmHWM") - before)
        found = await engine.load_slice(f"{url}/large", "large", slice(nbytes - 10, nbytes))
        assert found.tolist() == [7] * 10


asyncio.run(main())
"""


def test_a_large_save_takes_no_more_memory_than_its_parts(moto: Server) -> None:
    """Beside the pool: at most as much as the parts in flight, and 32 MiB."""
    given = [moto.options, new_url(), PART_NBYTES, NUM_PARTS, NBYTES]
    done = subprocess.run(
        [sys.executable, "-c", SAVER],
        input=json.dumps(given),
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    most = NUM_PARTS * PART_NBYTES + 32 * MiB
    assert 4 * most < NBYTES
    assert int(done.stdout) <= most
