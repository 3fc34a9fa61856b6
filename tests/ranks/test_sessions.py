from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import PeerLostError, RankError
from ckptio.ranks.interface import Deadlines, Same
from ckptio.testing import MemoryRanks, run_virtual

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from ckptio.ranks.interface import Json, Ranks, Session

T = TypeVar("T")

seeds = st.integers(0, 2**32)
worlds = st.integers(1, 8)

DEADLINES = Deadlines(peer_s=10.0, meet_s=60.0)
#: When the loss of a peer is noticed at the latest, and everybody has heard of it.
NOTICED_S = 1.25 * DEADLINES.peer_s + 1.0


_HANGS_S = 3600.0


async def add(messages: Sequence[int]) -> Same:
    return Same(sum(messages))


async def turn(messages: Sequence[Json]) -> list[Json]:
    """Give each rank the message of the next one."""
    return [*messages[1:], messages[0]]


def run(scenario: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run on a virtual loop; nothing may be left there."""

    async def checked() -> T:
        loop: Any = asyncio.get_running_loop()
        async with asyncio.timeout(_HANGS_S):  # timers go on when everybody waits for everybody
            result = await scenario
        assert asyncio.all_tasks() == {asyncio.current_task()}
        beating = [timer for timer in loop._scheduled if "Pulse" in repr(timer)]
        assert all(timer.cancelled() for timer in beating)
        return result

    return run_virtual(checked(), seed=seed)


@given(world_size=worlds, seed=seeds)
def test_a_round_gives_each_rank_its_answer(world_size: int, seed: int) -> None:
    """All messages go to one decision, by rank; each rank gets its own answer."""

    async def body(ranks: Ranks) -> tuple[Json, Json]:
        async with ranks.session("s") as session:
            told = await session.round("turn", {"rank": ranks.rank}, turn)
            return told, await session.round("add", 2**ranks.rank, add)

    async def scenario() -> None:
        async with MemoryRanks(world_size, seed=seed) as world:
            outcomes = await world.run(body)
            assert outcomes == [
                ({"rank": (rank + 1) % world_size}, 2**world_size - 1) for rank in range(world_size)
            ]
            assert len({ranks.nonce for ranks in world.ranks}) == 1
            assert len(world.ranks[0].nonce) == 32

    run(scenario(), seed)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_round_is_one_message_up_and_one_down_for_each_other_rank(world_size: int) -> None:
    """Rank 0 talks to itself for nothing."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("s") as session:
            for _ in range(5):
                await session.round("again", None, add_none)

    async def add_none(messages: Sequence[Json]) -> Sequence[Json]:
        return messages

    async def scenario() -> None:
        async with MemoryRanks(world_size) as world:
            await world.run(body)
            leader: Any = world.ranks[0]
            assert leader._hub.num_messages == 5 * 2 * (world_size - 1)

    run(scenario())


@dataclass
class Trouble:
    """Something that befalls one rank."""

    kind: str
    rank: int
    at_s: float


@dataclass
class Job:
    """Several sessions at a time on every rank, and something that goes wrong.

    Attributes:
        decided: Sessions whose last round was decided.
        outcomes: How each session ended, by session and rank.
        ended_s: When each rank's last session ended.
        own: What was raised by the rank that fails.
    """

    world: MemoryRanks
    num_sessions: int
    num_rounds: int
    trouble: Trouble
    rng: random.Random
    decided: set[str] = field(default_factory=set)
    outcomes: dict[str, dict[int, object]] = field(default_factory=dict)
    tasks: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    own: ValueError | None = None

    @property
    def has_lost(self) -> bool:
        """Whether a rank is lost."""
        return self.trouble.kind in {"kill", "freeze"}

    @property
    def alive(self) -> list[int]:
        """The ranks whose ends matter."""
        ranks = range(len(self.world.ranks))
        return [rank for rank in ranks if not (self.has_lost and rank == self.trouble.rank)]

    async def part(self, ranks: Ranks, key: str) -> None:
        """Do one session on one rank, and note how it ended."""
        loop = asyncio.get_running_loop()
        outcome: object = None
        try:
            await asyncio.sleep(self.rng.uniform(0, 2))
            async with ranks.session(key) as session:
                outcome = await self.body(ranks, session, key)
        except (RankError, ValueError, asyncio.CancelledError) as error:
            outcome = error
        self.outcomes.setdefault(key, {})[ranks.rank] = outcome
        self.ended_s[ranks.rank] = loop.time()

    async def body(self, ranks: Ranks, session: Session, key: str) -> Json:
        loop, trouble = asyncio.get_running_loop(), self.trouble
        answer = None

        async def decide(messages: Sequence[int]) -> Same:
            await asyncio.sleep(self.rng.uniform(0, 1))
            if number == self.num_rounds - 1:
                self.decided.add(key)
            return Same(sum(messages))

        for number in range(self.num_rounds):
            try:
                await asyncio.sleep(self.rng.uniform(0, 1))
                answer = await session.round(f"{number}", 1, decide)
            finally:  # cleaning up takes its time, whatever happens
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(self.rng.uniform(0, 0.2))
            mine = trouble.kind == "fail" and trouble.rank == ranks.rank and key == "s0"
            if mine and loop.time() >= trouble.at_s:
                self.own = ValueError(f"of rank {ranks.rank}")
                raise self.own
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        return answer

    async def run(self) -> None:
        """Do all of it."""
        async with asyncio.TaskGroup() as tasks:
            for ranks in self.world.ranks:
                for number in range(self.num_sessions):
                    key = f"s{number}"
                    task = tasks.create_task(self.part(ranks, key), name=f"{ranks.rank} {key}")
                    self.tasks[key, ranks.rank] = task
            trouble = self.trouble
            await asyncio.sleep(trouble.at_s)
            if trouble.kind == "kill":
                self.world.kill(trouble.rank)
            elif trouble.kind == "freeze":
                self.world.freeze(trouble.rank)
            elif trouble.kind == "cancel":
                self.tasks["s0", trouble.rank].cancel()


@given(
    world_size=st.integers(2, 8),
    num_sessions=st.integers(1, 4),
    num_rounds=st.integers(1, 3),
    kind=st.sampled_from(["none", "fail", "cancel", "kill", "freeze"]),
    rank=st.integers(0, 7),
    at_s=st.floats(0, 8),
    seed=seeds,
)
def test_whatever_befalls_a_rank_all_end_alike_and_in_time(
    *,
    world_size: int,
    num_sessions: int,
    num_rounds: int,
    kind: str,
    rank: int,
    at_s: float,
    seed: int,
) -> None:
    """In time, with one verdict for each session, well only if it was decided, and no task left."""
    trouble = Trouble(kind, rank % world_size, at_s)

    async def scenario() -> None:
        async with MemoryRanks(
            world_size, deadlines=DEADLINES, seed=seed, joins_pieces=seed % 2 == 1
        ) as world:
            job = Job(world, num_sessions, num_rounds, trouble, random.Random(seed))
            began_s = asyncio.get_running_loop().time()
            await job.run()
        check_time(job, began_s)
        for key, outcomes in job.outcomes.items():
            check_session(job, key, outcomes)

    run(scenario(), seed)


def check_time(job: Job, began_s: float) -> None:
    """Check when it ended for the ranks that are there."""
    limit_s = began_s + max(job.trouble.at_s, 10.0) + NOTICED_S + 2.0
    if job.trouble.kind == "cancel":  # maybe before it came, and so it did not
        limit_s += 1.25 * DEADLINES.meet_s
    assert max(job.ended_s[rank] for rank in job.alive) <= limit_s


def check_session(job: Job, key: str, outcomes: dict[int, object]) -> None:
    """Check how one session ended for the ranks that are there."""
    trouble, ends = job.trouble, [outcomes[rank] for rank in job.alive]
    errors = [end for end in ends if isinstance(end, RankError)]
    answers = {end for end in ends if not isinstance(end, BaseException)}
    assert answers <= {len(job.world.ranks)}
    assert not answers or key in job.decided
    if trouble.kind == "none" or (not job.has_lost and key != "s0"):
        assert not errors, "one session's failure is no other's"
    if job.has_lost:
        assert all(isinstance(e, PeerLostError) and e.ranks == (trouble.rank,) for e in errors)
    if trouble.rank or not job.has_lost:
        # who did not get into the session is told of the group, not of the session
        inside = [error for error in errors if "session" in str(error)]
        assert len({(str(error), error.in_doubt) for error in inside}) <= 1
        assert not answers or not any(error.in_doubt for error in errors)
    if key == "s0" and job.own is not None:
        ending = outcomes[trouble.rank]
        assert isinstance(ending, RankError)
        assert ending.__cause__ is job.own
        assert ending.causes == {trouble.rank: f"ValueError: of rank {trouble.rank}"}
