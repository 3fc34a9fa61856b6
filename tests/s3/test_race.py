from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

from ckptio import Engine
from ckptio.errors import CheckpointExistsError, CommitConflictError
from tests.s3.rig import config_for, keys_in, new_url, uploads_in

if TYPE_CHECKING:
    from ckptio.config import S3Client
    from tests.s3.servers import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")

NUM_WRITERS = 32
#: Each an engine of its own, with its own connections.
NUM_ENGINES = 4


async def race(server: Server, num_rounds: int, **options: S3Client) -> None:
    """Have writers race for a path, over and over: one wins, and what is there is its own."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(config_for(server, max_saves=8, **options)))
            for _ in range(NUM_ENGINES)
        ]
        for _ in range(num_rounds):
            url = new_url()
            winner = await one_round(engines, url)
            loaded = await engines[-1].load(url)
            assert loaded["a"].tolist() == [winner] * 1000
            prefix = url.partition("://")[2].partition("/")[2]
            names = {key.rpartition("/")[2] for key in keys_in(server, f"{prefix}/")}
            files = {file.name for file in (await engines[-1].inspect(url)).files}
            assert names == {"manifest.json", *files}
            assert uploads_in(server, f"{prefix}/") == []


async def one_round(engines: list[Engine], url: str) -> int:
    """Have all save to one path; gives who won."""

    async def save(number: int) -> bool:
        engine = engines[number % len(engines)]
        try:
            await engine.save({"a": torch.full((1000,), number)}, url)
        except (CommitConflictError, CheckpointExistsError):
            return False
        return True

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(save(number)) for number in range(NUM_WRITERS)]
    winners = [number for number, task in enumerate(tasks) if task.result()]
    assert len(winners) == 1
    return winners[0]


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_of_many_writers_one_wins(moto: Server, client: S3Client) -> None:
    """The others are told so, and leave nothing."""
    await race(moto, 2, s3_client=client)


@pytest.mark.real_s3
async def test_of_many_writers_one_wins_on_a_real_server(ceph: Server) -> None:
    """As above, where many threads of a server decide at once."""
    await race(ceph, 3)


@pytest.mark.real_s3
@pytest.mark.stress
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_of_many_writers_one_wins_always(ceph: Server, client: S3Client) -> None:
    """Over a hundred rounds."""
    await race(ceph, 100, s3_client=client)
