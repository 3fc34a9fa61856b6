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


async def race(
    server: Server, num_rounds: int, *, is_decided: bool = True, **options: S3Client
) -> None:
    """Have writers race for a path, over and over: what is there is whole, of one who won.

    Args:
        server: Where.
        num_rounds: How often.
        is_decided: Whether the server decides, so that just one wins and the others leave
            nothing; else several may be told that they won.
        **options: Of the engines.
    """
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(config_for(server, max_saves=8, **options)))
            for _ in range(NUM_ENGINES)
        ]
        for _ in range(num_rounds):
            url = new_url()
            winners = await all_save(engines, url)
            (value,) = set((await engines[-1].load(url))["a"].tolist())
            assert value in winners
            prefix = url.partition("://")[2].partition("/")[2]
            assert uploads_in(server, f"{prefix}/") == []
            if is_decided:
                assert len(winners) == 1
                names = {key.rpartition("/")[2] for key in keys_in(server, f"{prefix}/")}
                files = {file.name for file in (await engines[-1].inspect(url)).files}
                assert names == {"manifest.json", *files}


async def all_save(engines: list[Engine], url: str) -> list[int]:
    """Have all save to one path; gives who was told that it won."""

    async def save(number: int) -> bool:
        engine = engines[number % len(engines)]
        try:
            await engine.save({"a": torch.full((1000,), number)}, url)
        except (CommitConflictError, CheckpointExistsError):
            return False
        return True

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(save(number)) for number in range(NUM_WRITERS)]
    return [number for number, task in enumerate(tasks) if task.result()]


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_of_many_writers_one_wins(moto: Server, client: S3Client) -> None:
    """The others are told so, and leave nothing."""
    await race(moto, 2, s3_client=client)


@pytest.mark.real_s3
async def test_of_many_writers_one_wins_on_a_real_server(ceph: Server) -> None:
    """As above, where many threads of a server decide at once."""
    await race(ceph, 3)


@pytest.mark.real_s3
async def test_of_many_writers_one_wins_on_seaweedfs(seaweedfs: Server) -> None:
    """As above, where a gateway decides in front of what keeps the names."""
    await race(seaweedfs, 3)


@pytest.mark.real_s3
async def test_of_many_writers_one_is_there_where_nothing_decides(swift: Server) -> None:
    """Swift has no conditional requests: more than one may win, bytes are never mixed."""
    await race(swift, 2, is_decided=False)


@pytest.mark.real_s3
async def test_of_many_writers_one_is_there_where_conditions_are_ignored(juicefs: Server) -> None:
    """Without a word: more than one may win, bytes are never mixed."""
    await race(juicefs, 2, is_decided=False)


@pytest.mark.stress
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_of_many_writers_one_wins_always_on_moto(moto: Server, client: S3Client) -> None:
    """Over a hundred rounds."""
    await race(moto, 100, s3_client=client)


@pytest.mark.real_s3
@pytest.mark.stress
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_of_many_writers_one_wins_always(ceph: Server, client: S3Client) -> None:
    """Over a hundred rounds."""
    await race(ceph, 100, s3_client=client)


@pytest.mark.real_s3
@pytest.mark.stress
async def test_of_many_writers_one_wins_always_on_seaweedfs(seaweedfs: Server) -> None:
    """Over a hundred rounds."""
    await race(seaweedfs, 100)


@pytest.mark.real_s3
@pytest.mark.stress
async def test_of_many_writers_one_is_there_always(swift: Server) -> None:
    """Over a hundred rounds, where nothing decides."""
    await race(swift, 100, is_decided=False)
