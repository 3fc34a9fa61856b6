"""Three processes, a real store, real sockets: one is killed, one is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckptio.errors import PeerLostError
from ckptio.ranks.discover import ranks_of
from ckptio.ranks.interface import Deadlines
from tests.groups import end_process_groups

WORLD = 3
DEADLINES = Deadlines(peer_s=2.0, meet_s=30.0)
_END_S = 60.0

torch_store: Any = dist  # whose stubs leave the stores out


async def wait_for_ever(_: object) -> list[object]:
    await asyncio.Event().wait()
    return []


async def give_back(messages: Any) -> Any:
    return messages


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def live(rank: int, port: int) -> None:
    """Be one rank: meet, work, close the store, wait for an answer that never comes."""
    with ThreadPoolExecutor(2) as threads:
        store = torch_store.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        ranks = await ranks_of(environ={}, deadlines=DEADLINES, executor=threads)
        end_process_groups()  # nobody needs it any more
        del store
        try:
            async with ranks.session("first") as session:
                assert await session.round("plan", rank, give_back) == rank
            tell("ready")
            try:
                async with ranks.session("second") as session:
                    await session.round("plan", rank, give_back)
                    await session.round("commit", rank, wait_for_ever)
            except PeerLostError as error:
                tell(f"lost {error.ranks[0]} {error}")
        finally:
            await ranks.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_dead_or_frozen_process_is_named_by_the_others(how: signal.Signals, lost: int) -> None:
    """Within the deadline, whichever it is; without the store and the process group."""
    store = torch_store.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-W", "error", "-m", __name__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store.port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        began_s = time.monotonic()
        processes[lost].send_signal(how)
        others = [process for rank, process in enumerate(processes) if rank != lost]
        ends = [process.communicate(timeout=_END_S)[0] for process in others]
        assert all(end.startswith(f"lost {lost} session 'second' failed on rank") for end in ends)
        assert [process.returncode for process in others] == [0, 0]
        assert time.monotonic() - began_s < _END_S / 2
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    asyncio.run(live(int(sys.argv[1]), int(sys.argv[2])))
