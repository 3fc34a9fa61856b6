"""Three processes, a real store, real sockets: one is killed, one is stopped."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.ranks.discover import ranks_of
from ckptio.ranks.interface import Deadlines
from tests.ranks.jobs.pool import Stop
from tests.ranks.jobs.work import LOST_WITHIN_S, PEER_TIMEOUT_S, process_group

if TYPE_CHECKING:
    from tests.ranks.jobs.pool import Jobs
    from tests.ranks.jobs.worker import Me

DEADLINES = Deadlines(peer_s=PEER_TIMEOUT_S, meet_s=30.0)


async def wait_for_ever(_: object) -> list[object]:
    await asyncio.Event().wait()
    return []


async def give_back(messages: Any) -> Any:
    return messages


async def live(me: Me) -> None:
    """Be one rank: meet, work, end the process group, wait for an answer that never comes."""
    with ThreadPoolExecutor(2) as threads:
        with process_group():
            ranks = await ranks_of(environ={}, deadlines=DEADLINES, executor=threads)
        try:
            async with ranks.session("first") as session:
                assert await session.round("plan", me.rank, give_back) == me.rank
            async with ranks.session("second") as session:
                await session.round("plan", me.rank, give_back)
                me.point("met")
                await session.round("commit", me.rank, wait_for_ever)
        finally:
            await ranks.close()


def meet(me: Me) -> None:
    asyncio.run(live(me))


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_dead_or_frozen_process_is_named_by_the_others(jobs: Jobs, how: str, lost: int) -> None:
    """Within the deadline, whichever it is; without the store and the process group."""
    for outcome in jobs.outcomes(3, f"{__name__}:meet", stop=Stop(lost, "met", how)):
        if outcome.rank == lost:
            continue
        assert outcome.error is not None
        assert outcome.error.kind == "PeerLostError", outcome.error.trace
        assert outcome.error.attributes["ranks"] == [lost]
        assert outcome.error.message.startswith("session 'second' failed on rank")
        assert outcome.seconds < LOST_WITHIN_S
