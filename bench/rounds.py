"""What a round costs rank 0, by the number of ranks: real connections, one machine.

Rank 0 has this process; all other ranks are in another one, on one loop, and are told
apart by their connections over loopback, so what this process burns is what rank 0 of a
job would.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from typing import TYPE_CHECKING, Any

import msgspec

from bench.harness import Clock
from bench.planners import Size
from ckptio.engine.decide import _leaves
from ckptio.plan.job import plan_job
from ckptio.ranks.coordinator import Coordinator
from ckptio.ranks.interface import Deadlines, Same
from ckptio.ranks.member import Member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.ranks.interface import Decide, Ranks

    Json = Any

_HOST = "127.0.0.1"
_TOKEN = "token"  # noqa: S105  # of a group that lives for a second
_DEADLINES = Deadlines(peer_s=120.0, meet_s=300.0)
_NUM_EMPTY = 5
_AT_A_TIME = 64
#: Bytes of an answer that all ranks are given: a manifest, say.
ANSWER_NBYTES = 1 << 20


async def measure_rounds(size: Size) -> dict[str, float]:
    """Open a group of many ranks, go through a few rounds, and close it.

    Returns:
        Seconds until all ranks have met; seconds that a round takes, and seconds of CPU
        that it takes rank 0: one without content, one in which ranks say what they hold
        and are told what they write, and one in which all are given `ANSWER_NBYTES`.
    """
    _allow_files(size.num_ranks + 100)
    loop = asyncio.get_running_loop()
    group = Coordinator(size.num_ranks, _TOKEN, _DEADLINES, "node0")
    server = await loop.create_server(group.guest, _HOST, 0, backlog=size.num_ranks)
    port = server.sockets[0].getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    others = context.Process(target=follow, args=(port, size.num_ranks, size.per_rank), daemon=True)
    others.start()
    figures = {}
    try:
        clock = Clock()
        await group.gather(_DEADLINES.meet_s)
        figures["join_s"] = clock.elapsed_s()
        await _walk(group, size, figures)
    finally:
        server.close()
        await group.close()
        await asyncio.to_thread(others.join)
    assert others.exitcode == 0
    return figures


def follow(port: int, num_ranks: int, per_rank: int) -> None:
    """Be all ranks but rank 0: what the other process does."""
    _allow_files(num_ranks + 100)
    asyncio.run(_follow(port, Size(num_ranks, per_rank)))


async def _follow(port: int, size: Size) -> None:
    doors = asyncio.Semaphore(_AT_A_TIME)
    loop = asyncio.get_running_loop()

    async def one(rank: int) -> None:
        member = Member(rank, size.num_ranks, _TOKEN, _DEADLINES, f"node{rank // 8}")
        async with doors:
            reason = await member.knock(
                lambda make: loop.create_connection(make, _HOST, port), _DEADLINES.peer_s
            )
        assert not reason, reason
        await member.gather(_DEADLINES.meet_s)
        try:
            await _walk(member, size, {})
        finally:
            await member.close()

    async with asyncio.TaskGroup() as tasks:
        for rank in range(1, size.num_ranks):
            tasks.create_task(one(rank), name=f"rank {rank}")


async def _walk(ranks: Ranks, size: Size, figures: dict[str, float]) -> None:
    """Go through the same rounds on every rank."""
    async with ranks.session("empty") as session:
        await session.round("meet", None, _nothing)
        clock, cpu_s = Clock(), time.process_time()
        for number in range(_NUM_EMPTY):
            await session.round(f"empty {number}", None, _nothing)
        figures["empty_s"] = clock.elapsed_s() / _NUM_EMPTY
        figures["empty_cpu_s"] = (time.process_time() - cpu_s) / _NUM_EMPTY

    async def plan(messages: Sequence[Json]) -> Sequence[Json]:
        job = plan_job([_leaves(message) for message in messages], hosts=size.hosts())
        return [msgspec.to_builtins(assigned) for assigned in job.assignments]

    listed = size.holds(ranks.rank)
    figures["plan_s"], figures["plan_cpu_s"] = await _round(ranks, "plan", listed, plan)
    text = "x" * ANSWER_NBYTES

    async def give(messages: Sequence[Json]) -> Same:
        del messages
        return Same(text)

    figures["give_s"], figures["give_cpu_s"] = await _round(ranks, "give", None, give)


async def _round(ranks: Ranks, key: str, message: Json, decide: Decide) -> tuple[float, float]:
    """Do a round, from when all ranks are there until all have the answer.

    Returns:
        Its seconds, and seconds of CPU of this process.
    """
    async with ranks.session(key) as session:
        await session.round("meet", None, _nothing)
        clock, cpu_s = Clock(), time.process_time()
        await session.round("work", message, decide)
        await session.round("done", None, _nothing)
        return clock.elapsed_s(), time.process_time() - cpu_s


async def _nothing(messages: Sequence[Json]) -> Same:
    del messages
    return Same(None)


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
