"""Agreement between ranks, on schedules drawn from a seed."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio._outcome import Outcome
from ckptio.checkpointer.stops import Stop, Stops
from ckptio.ranks.interface import Deadlines
from ckptio.testing import MemoryRanks, run_virtual
from tests.rig import num_rounds
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptio.ranks.interface import Ranks

DEADLINES = Deadlines(peer_s=5.0, meet_s=60.0)
seeds = st.integers(0, 2**32)


class Trainer:
    """A rank that trains: one step after the other, at a pace of its own."""

    def __init__(self, ranks: Ranks, seed: int, every_s: float | None = None) -> None:
        self.ranks = ranks
        self.rng = random.Random(seed)
        self.asked_s = 0.0
        self.every_s = every_s
        self.agreed: list[Stop] = []
        self.saved: list[int] = []
        self.last: int | None = None
        self.stops = Stops("c", self._due_in_s, self._stopped)
        self.num_steps = 0

    def _due_in_s(self) -> float | None:
        if self.every_s is None:
            return None
        return self.asked_s + self.every_s - asyncio.get_running_loop().time()

    def _stopped(self, stop: Stop) -> None:
        self.asked_s = asyncio.get_running_loop().time()
        self.agreed.append(stop)

    async def should_save(self) -> bool:
        while isinstance(answer := self.stops.ask(), Outcome):
            await asyncio.wait((answer.wrapped(),))
        self.num_steps += 1
        if answer is None:
            return False
        self.asked_s = asyncio.get_running_loop().time()
        self.stops.look_again()
        self.saved.append(self.num_steps)
        if answer.reason:
            self.last = self.num_steps
        return True

    async def train(self, num_steps: int) -> None:
        """Train, in no lockstep at all, until the end or the last save."""
        watching = asyncio.create_task(self.stops.watch(self.ranks), name="watch")
        for _ in range(num_steps):
            await asyncio.sleep(self.rng.expovariate(10))
            await self.should_save()
            if self.last is not None:
                break
        watching.cancel()
        await asyncio.wait((watching,))
        assert watching.cancelled() or watching.exception() is None


async def train(
    world: MemoryRanks, seed: int, calls: dict[int, float], every_s: float | None = None
) -> list[Trainer]:
    """Train on all ranks; some of them get a signal at some time."""
    trainers = [Trainer(ranks, seed + i, every_s) for i, ranks in enumerate(world.ranks)]

    async def call(rank: int, at_s: float) -> None:
        await asyncio.sleep(at_s)
        trainers[rank].stops.call_last(f"signal of {rank}")

    async with asyncio.TaskGroup() as group:
        for rank, at_s in calls.items():
            group.create_task(call(rank, at_s), name=f"signal {rank}")
        for trainer in trainers:
            group.create_task(trainer.train(200), name=f"train {trainer.ranks.rank}")
    return trainers


@given(
    world_size=st.integers(1, 4),
    calls=st.dictionaries(st.integers(0, 3), st.floats(0, 5), min_size=1),
    seed=seeds,
)
@in_virtual_time
async def test_all_ranks_stop_at_one_step(
    world_size: int, calls: dict[int, float], seed: int
) -> None:
    """Whoever is signalled, when and how often, and however far apart the ranks are."""
    async with MemoryRanks(world_size, deadlines=DEADLINES, seed=seed) as world:
        found = {rank % world_size: at_s for rank, at_s in calls.items()}
        trainers = await train(world, seed, found)
        assert len({trainer.last for trainer in trainers}) == 1
        assert trainers[0].last is not None
        assert len({tuple(trainer.agreed) for trainer in trainers}) == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


@given(world_size=st.integers(1, 3), every_s=st.floats(0.5, 5), seed=seeds)
@in_virtual_time
async def test_all_ranks_save_at_the_same_steps_by_time(
    world_size: int, every_s: float, seed: int
) -> None:
    """Rank 0's clock decides; a signal comes on top."""
    async with MemoryRanks(world_size, deadlines=DEADLINES, seed=seed) as world:
        trainers = await train(world, seed, {world_size - 1: 12.0}, every_s)
        assert len({tuple(trainer.saved) for trainer in trainers}) == 1
        assert len(trainers[0].saved) >= 2
        assert trainers[0].last == trainers[0].saved[-1]


@in_virtual_time
async def test_the_clock_of_no_other_rank_decides() -> None:
    """Those that are ahead would have all save more often than was asked for."""
    async with MemoryRanks(2, deadlines=DEADLINES) as world:
        trainers = [
            Trainer(ranks, 0, every_s=rank or None) for rank, ranks in enumerate(world.ranks)
        ]
        async with asyncio.TaskGroup() as group:
            for trainer in trainers:
                group.create_task(trainer.train(200), name=f"train {trainer.ranks.rank}")
        assert [trainer.saved for trainer in trainers] == [[], []]


@given(world_size=st.integers(1, 3), every_s=st.sampled_from([0.0, 1e-9, 1e-3]), seed=seeds)
def test_a_save_at_each_step_by_time_lets_others_go_on(
    world_size: int, every_s: float, seed: int
) -> None:
    """One that is agreed on is enough until it is asked about: the loop was never given back."""
    num_looks = 0

    def look(self: Trainer) -> float | None:
        nonlocal num_looks
        num_looks += 1
        assert num_looks < 10_000
        return None if self.every_s is None else self.every_s

    async def scenario() -> None:
        async with MemoryRanks(world_size, deadlines=DEADLINES, seed=seed) as world:
            trainers = await train(world, seed, {world_size - 1: 12.0}, every_s)
            assert len({tuple(trainer.saved) for trainer in trainers}) == 1
            first = trainers[0]
            assert len(first.agreed) <= len(first.saved) + 2
            assert len(first.saved) > 5
            assert first.last == first.saved[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_due_in_s", look)
        run_virtual(scenario(), seed=seed)


@given(world_size=st.integers(2, 4), data=st.data(), seed=seeds)
@in_virtual_time
async def test_nobody_waits_for_a_rank_that_leaves_or_dies(
    world_size: int, data: st.DataObject, seed: int
) -> None:
    """A call that meets it is lost; trainers go on, and no task is left."""
    at_s = data.draw(st.floats(0, 3), label="signal")
    leaves_s = data.draw(st.floats(0.001, 3), label="end")  # a task has to begin to say anything
    rank = data.draw(st.integers(0, world_size - 1), label="who")
    dies = data.draw(st.booleans(), label="dies")

    loop = asyncio.get_running_loop()
    async with MemoryRanks(world_size, deadlines=DEADLINES, seed=seed) as world:
        trainers = [Trainer(ranks, seed + i) for i, ranks in enumerate(world.ranks)]
        watching = [asyncio.create_task(t.stops.watch(t.ranks), name="watch") for t in trainers]
        loop.call_later(at_s, trainers[(rank + 1) % world_size].stops.call_last, "signal")
        await asyncio.sleep(leaves_s)
        if dies:
            world.kill(rank)
        else:
            watching[rank].cancel()
        await asyncio.sleep(5)
        async with asyncio.timeout(DEADLINES.peer_s):
            for trainer in trainers:
                await trainer.should_save()
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
        assert all(task.cancelled() or task.exception() is None for task in watching)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("rank", range(3))
def test_nobody_waits_for_a_rank_that_leaves_as_a_call_comes(rank: int) -> None:
    """Also where some have heard the call, and it has not."""

    async def scenario(delay_s: float) -> None:
        async with MemoryRanks(3, deadlines=DEADLINES) as world:
            trainers = [Trainer(ranks, 0) for ranks in world.ranks]
            watching = [asyncio.create_task(t.stops.watch(t.ranks), name="watch") for t in trainers]
            await asyncio.sleep(1)
            trainers[(rank + 1) % 3].stops.call_last("signal")
            await asyncio.sleep(delay_s)
            watching[rank].cancel()
            async with asyncio.timeout(DEADLINES.peer_s):
                await asyncio.wait(watching)
                for trainer in trainers:
                    await trainer.should_save()

    for delay_ms in range(0, 50, 5):
        run_virtual(scenario(delay_ms / 1e3), seed=0)


@pytest.mark.parametrize("world_size", range(1, 4))
@in_virtual_time
async def test_whoever_leaves_is_told_of_nothing_else(world_size: int) -> None:
    """Neither by itself nor beside others that leave at the same time."""
    async with MemoryRanks(world_size, deadlines=DEADLINES) as world:
        trainers = [Trainer(ranks, 0) for ranks in world.ranks]
        watching = [asyncio.create_task(t.stops.watch(t.ranks), name="watch") for t in trainers]
        await asyncio.sleep(1)
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
        assert all(task.cancelled() for task in watching)


async def test_alone_a_call_is_for_the_next_step() -> None:
    """And nothing is said twice; the first reason counts."""
    async with MemoryRanks(1) as world:
        trainer = Trainer(world.ranks[0], 0)
        for reason in ("early", "not so early"):  # before anybody listens
            trainer.stops.call_last(reason)
        await trainer.stops.watch(trainer.ranks)
        trainer.stops.call_last("late")
        assert await trainer.should_save()
        assert trainer.agreed == [Stop(number=1, reason="early")]
        assert not await trainer.should_save()


@pytest.mark.parametrize("num_idle", [0, 1000])
async def test_listening_costs_no_rounds(num_idle: int) -> None:
    """Whatever the number of steps."""
    async with MemoryRanks(2, max_delay_s=0.0) as world:
        trainers = [Trainer(ranks, 0) for ranks in world.ranks]
        watching = [asyncio.create_task(t.stops.watch(t.ranks), name="watch") for t in trainers]
        for _ in range(num_idle):
            for trainer in trainers:
                assert not await trainer.should_save()
        assert num_rounds(world) == 0
        trainers[1].stops.call_last("signal")
        await asyncio.wait(watching)
        assert num_rounds(world) == 1
        assert [stop.number for stop in trainers[0].agreed] == [num_idle + 1]


class _Interrupted(list[Stop]):
    """Stops at which a signal comes when they are looked at, once."""

    def __init__(self, handler: Callable[[], object]) -> None:
        super().__init__()
        self._handlers = [handler]

    def __iter__(self) -> Iterator[Stop]:
        while self._handlers:
            self._handlers.pop()()
        return super().__iter__()


def test_a_handler_may_ask_what_it_interrupts() -> None:
    """A loop that is asking, and a handler of signals that does so, too: nobody waits for ever.

    The loop is told what is due, and once; what the handler asks is no step.
    """
    stops = Stops("c", lambda: None, lambda _: None)
    answers: list[object] = []
    stops._pending = _Interrupted(lambda: answers.append(stops.ask()))
    stop = Stop(number=1, reason="a test")
    stops._pending.append(stop)
    asking = threading.Thread(target=lambda: answers.append(stops.ask()), daemon=True)
    asking.start()
    asking.join(30)
    assert answers == [None, stop]
    assert stops._num_asked == 1
    assert stops.ask() is None
