"""How sessions end, one way after the other."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from ckptio.errors import PeerLostError, RankError
from ckptio.ranks.interface import Same
from ckptio.ranks.solo import SoloRanks
from ckptio.testing import MemoryRanks
from tests.ranks.test_sessions import DEADLINES, NOTICED_S, add, run, turn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ckptio.ranks.interface import Json, Ranks, Session

WORLD = 4


def group(seed: int = 0, world_size: int = WORLD) -> MemoryRanks:
    hosts = [f"h{rank // 2}" for rank in range(world_size)]
    return MemoryRanks(world_size, hosts=hosts, deadlines=DEADLINES, seed=seed)


async def never(messages: Sequence[Json]) -> Same:
    """Decide nothing, for ever."""
    await asyncio.Event().wait()
    return Same(messages)


def errors_of(outcomes: Sequence[object]) -> list[RankError]:
    errors = [outcome for outcome in outcomes if isinstance(outcome, RankError)]
    assert len(errors) == len(outcomes), outcomes
    assert len({str(error) for error in errors}) == 1, outcomes
    return errors


def outcomes_of(
    body: Callable[[Ranks], Awaitable[object]],
    *,
    world_size: int = WORLD,
    within_s: float = math.inf,
) -> list[Any]:
    """Run a body on all ranks, for less than some seconds; gives what each returned or raised."""

    async def scenario() -> list[Any]:
        async with group(world_size=world_size) as world:
            outcomes = await world.run(body)
            assert asyncio.get_running_loop().time() < within_s
            return outcomes

    return run(scenario())


def causes_of(body: Callable[[Ranks], Awaitable[None]]) -> dict[int, str]:
    """Let all ranks fail alike; gives the causes that they tell of."""
    return errors_of(outcomes_of(body))[0].causes


@pytest.mark.parametrize("failing", range(WORLD))
def test_a_failure_stops_all_and_is_the_cause_where_it_was(failing: int) -> None:
    """Bodies elsewhere are cancelled at once; all raise one error, one of them `from` its own."""
    stopped: list[int] = []

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save") as session:
            await session.round("plan", 1, add)
            if ranks.rank == failing:
                raise OSError(28, "no space left")
            try:
                await asyncio.Event().wait()
            finally:
                stopped.append(ranks.rank)

    outcomes = outcomes_of(body, within_s=1)
    for rank, error in enumerate(errors_of(outcomes)):
        assert str(error) == (
            f"session 'save' failed on rank {failing}: OSError: [Errno 28] no space left"
        )
        assert error.causes == {failing: "OSError: [Errno 28] no space left"}
        assert not error.in_doubt
        assert isinstance(error.__cause__, OSError) == (rank == failing)
    assert sorted(stopped) == [r for r in range(WORLD) if r != failing]


def test_a_failed_session_has_the_title_that_each_rank_gave_it() -> None:
    """Its key means nothing to people; ranks that are lost, and sessions of later, included."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save", f"save to 'r{ranks.rank}'") as session:
            if ranks.rank == 2:
                raise ValueError("full")
            await session.round("plan", 1, add)

    async def later(ranks: Ranks) -> None:
        async with ranks.session("load", "load of 'x'") as session:
            await session.round("plan", 1, add)

    async def scenario() -> None:
        async with group() as world:
            for rank, error in enumerate(await world.run(body)):
                assert isinstance(error, RankError)
                assert str(error) == f"save to 'r{rank}' failed on rank 2: ValueError: full"
            await world.ranks[1].close()
            outcomes = await world.run(later)
            for error in errors_of([outcome for r, outcome in enumerate(outcomes) if r != 1]):
                assert str(error).startswith("load of 'x' failed on rank 1: lost, ")

    run(scenario())


def test_causes_of_several_ranks_are_in_one_error() -> None:
    """Ranks that fail while they are stopped are named too; equal causes are named together."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save") as session:
            await session.round("plan", 1, add)
            if ranks.rank == 1:
                raise ValueError("first")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if ranks.rank > 1:
                    raise KeyError("second") from None
                raise

    errors = errors_of(outcomes_of(body))
    assert str(errors[0]) == (
        "session 'save' failed on rank 1: ValueError: first; ranks 2-3: KeyError: 'second'"
    )
    assert [type(e.__cause__) for e in errors] == [
        type(None),
        ValueError,
        KeyError,
        KeyError,
    ]


def test_nobody_raises_before_all_have_stopped() -> None:
    """Who raises may clean up: nobody else still works."""
    stopped_s: list[float] = []

    async def body(ranks: Ranks) -> None:
        try:
            async with ranks.session("save"):
                if ranks.rank == 2:
                    raise ValueError
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(ranks.rank)
                    stopped_s.append(asyncio.get_running_loop().time())
        finally:
            assert len(stopped_s) == WORLD - 1

    errors_of(outcomes_of(body))


def test_a_rank_that_does_not_stop_is_not_waited_for_for_ever() -> None:
    """After the time for meeting, the others raise and name it."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save"):
            if ranks.rank == 2:
                raise ValueError("no")
            if ranks.rank == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(10 * DEADLINES.meet_s)
            await asyncio.Event().wait()

    errors = errors_of(outcomes_of(body))
    assert errors[0].causes == {1: "has not stopped within 60 s", 2: "ValueError: no"}


def test_a_failed_decision_fails_on_all() -> None:
    """An error, a wrong number of answers, an answer that is no JSON: all the same."""

    async def scenario() -> None:
        async with group() as world:
            for number, (answers, cause) in enumerate(
                [
                    (None, "LookupError: nothing"),
                    ([1, 2], "ValueError: 2 answers for 4 ranks"),
                    ([1, 2, 3, object()], "TypeError: Encoding objects of type object is unsup"),
                    (Same(object()), "TypeError: Encoding objects of type object is unsupported"),
                ]
            ):

                async def decide(_: Sequence[Json], answers: Any = answers) -> Any:
                    if answers is None:
                        raise LookupError("nothing")
                    return answers

                async def body(ranks: Ranks, key: str = f"s{number}", decide: Any = decide) -> None:
                    async with ranks.session(key) as session:
                        await session.round("plan", 1, decide)

                errors = errors_of(await world.run(body))
                assert errors[0].causes[0].startswith(cause)

    run(scenario())


def decide_for_good(ranks: Ranks, session: Session) -> None:
    """Say on rank 0 that what is decided cannot be undone."""
    if ranks.rank == 0:
        session.decisive(is_on=True)


def test_a_decision_that_comes_too_late_is_none() -> None:
    """Where nobody hears the answers any more, rank 0 does not go on with its own."""

    async def scenario() -> None:
        async with group() as world:
            leader: Any = world.ranks[0]

            async def decide(_: Sequence[Json]) -> Same:
                leader._hub.failed(2, "save", "ValueError: a moment ago")
                return Same(None)

            async def body(ranks: Ranks) -> None:
                async with ranks.session("save") as session:
                    decide_for_good(ranks, session)
                    await session.round("commit", 1, decide)

            errors = errors_of(await world.run(body))
            assert errors[0].causes == {2: "ValueError: a moment ago"}
            assert errors[0].in_doubt

    run(scenario())


@pytest.mark.parametrize("is_decisive", [True, False])
def test_ranks_are_in_doubt_only_if_rank_0_said_so(*, is_decisive: bool) -> None:
    """A failure while something is decided that changes nothing sends nobody to look."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save") as session:
            if is_decisive:
                decide_for_good(ranks, session)
            if ranks.rank == 3:
                asyncio.get_running_loop().call_later(1, cancel_now, asyncio.current_task())
            await session.round("plan", 1, never)

    errors = errors_of(outcomes_of(body)[:3])
    assert errors[0].causes == {3: "it was cancelled there"}
    assert errors[0].in_doubt == is_decisive


def cancel_now(task: asyncio.Task[object] | None) -> None:
    assert task is not None
    task.cancel()


def test_a_decision_that_is_taken_back_leaves_nobody_in_doubt() -> None:
    """Rank 0 says that it could not do what it began, and raises."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save") as session:

            async def decide(_: Sequence[Json]) -> Same:
                session.decisive(is_on=True)
                await asyncio.sleep(1)
                session.decisive(is_on=False)
                raise OSError(28, "no space left")

            await session.round("commit", 1, decide)

    errors = errors_of(outcomes_of(body))
    assert errors[0].causes == {0: "OSError: [Errno 28] no space left"}
    assert not errors[0].in_doubt


def test_members_decide_nothing() -> None:
    """It is a mistake in the program that asks them to."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save") as session:
            if ranks.rank:
                with pytest.raises(AssertionError, match="decides in 'save'"):
                    session.decisive(is_on=True)
            await session.round("plan", 1, add)

    assert outcomes_of(body) == [None] * WORLD


def test_a_decision_that_takes_no_notice_of_the_stop_does_not_hang() -> None:
    """What cannot be cancelled any more goes on to its end; its answer is heard by nobody."""

    async def decide(_: Sequence[Json]) -> Same:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        await asyncio.sleep(1)
        return Same("decided")

    async def body(ranks: Ranks) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with ranks.session("save") as session:
                decide_for_good(ranks, session)
                if ranks.rank == 2:
                    asyncio.get_running_loop().call_later(1, cancel_now, task)
                await session.round("commit", 1, decide)
                went_on.append(ranks.rank)
        finally:
            assert task.cancelling() == (ranks.rank == 2)

    went_on: list[int] = []

    outcomes = outcomes_of(body, within_s=5)
    assert isinstance(outcomes.pop(2), asyncio.CancelledError)
    assert errors_of(outcomes)[0].in_doubt
    assert went_on == []


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_that_comes_with_a_stop_leaves_its_rank_in_doubt(seed: int) -> None:
    """Rank 0 has decided and left; who reads of that and of a failure at once was stopped."""

    async def body(ranks: Ranks) -> Json:
        task = asyncio.current_task()
        async with ranks.session("save") as session:
            decide_for_good(ranks, session)
            if ranks.rank == 1:
                asyncio.get_running_loop().call_later(2, cancel_now, task)
            return await session.round("commit", 1, add)

    async def scenario() -> None:
        async with MemoryRanks(3, deadlines=DEADLINES, seed=seed, joins_pieces=True) as world:
            for rank in (1, 2):
                world.deafen(rank)
                asyncio.get_running_loop().call_later(4, world.thaw, rank)
            outcomes = await world.run(body)
            assert outcomes[0] == 3
            assert isinstance(outcomes[1], asyncio.CancelledError)
            assert isinstance(outcomes[2], RankError)
            assert outcomes[2].in_doubt

    run(scenario(), seed)


def test_a_late_failure_is_of_its_rank_alone() -> None:
    """Ranks that have left do not hear of it, and the failing one does not wait."""

    async def body(ranks: Ranks) -> Json:
        async with ranks.session("save") as session:
            answer = await session.round("commit", 1, add)
            if ranks.rank == 3:
                await asyncio.sleep(5)
                raise ValueError("late")
        return answer

    outcomes = outcomes_of(body, within_s=6)
    assert outcomes[:3] == [WORLD] * 3
    assert str(outcomes[3]) == "session 'save' failed on rank 3: ValueError: late"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_cancelled_rank_stays_cancelled(rank: int) -> None:
    """Others get an error that names it; a count of cancellations is left as it was."""

    async def body(ranks: Ranks) -> None:
        task = asyncio.current_task()
        assert task is not None
        if ranks.rank == rank:
            asyncio.get_running_loop().call_later(1, task.cancel)
        try:
            async with ranks.session("save") as session:
                decide_for_good(ranks, session)
                await session.round("commit", 1, never)
        finally:
            assert task.cancelling() == (ranks.rank == rank)

    outcomes = outcomes_of(body)
    cancelled = outcomes.pop(rank)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(cancelled.__cause__, RankError)
    assert cancelled.__cause__.in_doubt
    errors = errors_of(outcomes)
    assert errors[0].causes == {rank: "it was cancelled there"}
    assert errors[0].in_doubt
    assert "look whether the checkpoint is there" in str(errors[0])


@pytest.mark.parametrize("asks", [False, True])
def test_cancelling_twice_stops_waiting_for_others(*, asks: bool) -> None:
    """A rank that is in a hurry does not wait for one that is slow to stop."""

    async def body(ranks: Ranks) -> float:
        loop = asyncio.get_running_loop()
        task: Any = asyncio.current_task()
        if ranks.rank == 1:
            loop.call_later(1, task.cancel)
            loop.call_later(2, task.cancel)
        try:
            async with ranks.session("save") as session:
                try:
                    if asks:
                        await session.round("commit", 1, never)
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(30 if ranks.rank == 2 else 0)
        except asyncio.CancelledError:
            assert ranks.rank == 1
        except RankError:
            assert ranks.rank != 1
        return loop.time()

    outcomes = outcomes_of(body)
    assert outcomes[1] < 3
    assert min(outcomes[0], outcomes[2]) > 30


def test_a_rank_that_is_cancelled_when_it_was_stopped_waits_for_the_verdict() -> None:
    """Once: another rank had failed before, and who stops for that has to hear of a doubt."""

    async def body(ranks: Ranks) -> float:
        loop = asyncio.get_running_loop()
        task: Any = asyncio.current_task()
        if ranks.rank in (1, 3):
            loop.call_later(2, task.cancel)
        if ranks.rank == 3:
            loop.call_later(3, task.cancel)
        try:
            async with ranks.session("save") as session:
                decide_for_good(ranks, session)
                if ranks.rank == 2:
                    await asyncio.sleep(1)
                    raise OSError(5, "no")
                try:
                    await session.round("commit", 1, never)
                finally:
                    await asyncio.sleep(0 if ranks.rank else 30)
        except asyncio.CancelledError as error:
            verdict = error.__cause__
            assert (verdict is None) == (ranks.rank == 3)
            assert verdict is None or (isinstance(verdict, RankError) and verdict.in_doubt)
        except RankError:
            assert ranks.rank in (0, 2)
        assert task.cancelling() == {1: 1, 3: 2}.get(ranks.rank, 0)
        return loop.time()

    outcomes = outcomes_of(body)
    assert outcomes[3] < 4
    assert min(outcomes[:3]) > 30


def test_a_rank_that_gave_no_message_is_not_held() -> None:
    """Nothing that was decided with it can be in doubt: a timeout around it ends its wait."""

    async def body(ranks: Ranks) -> float:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(RankError, TimeoutError):
            async with asyncio.timeout(1 if ranks.rank == 1 else None), ranks.session("load"):
                if ranks.rank == 1:
                    raise OSError(5, "no")
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(30)
        return loop.time()

    outcomes = outcomes_of(body)
    assert outcomes[1] < 2
    assert outcomes[0] > 30


def test_a_timeout_around_a_session_is_a_timeout() -> None:
    """Scopes of asyncio and anyio around it see their own cancellation."""

    async def body(ranks: Ranks) -> str:
        try:
            if ranks.rank == 1:
                async with asyncio.timeout(1), ranks.session("a") as session:
                    await session.round("commit", 1, never)
            async with ranks.session("a") as session:
                await session.round("commit", 1, never)
        except TimeoutError:
            return "timeout"
        except RankError:
            pass
        with anyio.move_on_after(1 if ranks.rank == 2 else 100) as scope:
            try:
                async with ranks.session("b") as session:
                    await session.round("commit", 1, never)
            except RankError:
                assert ranks.rank != 2
        return "moved on" if scope.cancelled_caught else "error"

    outcomes = outcomes_of(body, world_size=3)
    assert outcomes[1:] == ["timeout", "moved on"]


def test_a_rank_that_does_not_come_is_named() -> None:
    """Alive, but elsewhere: after the time for meeting, the error says who, what and why."""

    async def body(ranks: Ranks) -> None:
        if ranks.rank in {1, 3}:
            await asyncio.sleep(2 * DEADLINES.meet_s)
        async with ranks.session("save") as session:
            await session.round("plan", 1, add)

    errors = errors_of(outcomes_of(body))
    assert str(errors[0]) == (
        "session 'save' failed: ranks 1, 3 did not come to round 'plan' within 60 s;"
        " every rank of the job has to make the same calls, or wait longer with"
        " meet_timeout_s; one that saves or loads alone passes ranks='solo'"
    )
    assert errors[0].causes == {1: "did not come", 3: "did not come"}
    assert {type(error) for error in errors} == {RankError}  # not lost: it lives


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_do_different_things_are_told(seed: int) -> None:
    """Different rounds, or the end instead of a round: an error at once."""

    async def mixed(ranks: Ranks) -> None:
        async with ranks.session("a") as session:
            await session.round("plan" if ranks.rank else "commit", 1, add)

    async def short(ranks: Ranks) -> None:
        async with ranks.session("b") as session:
            await session.round("plan", 1, add)
            if ranks.rank != 2:
                await session.round("commit", 1, add)

    async def scenario() -> None:
        async with group(seed) as world:
            assert "came to round" in str(errors_of(await world.run(mixed))[0])
            outcomes = await world.run(short)
            assert outcomes.pop(2) is None
            assert "left before round 'commit'" in str(errors_of(outcomes)[0])
            assert asyncio.get_running_loop().time() < 2

    run(scenario(), seed)


def test_a_session_that_failed_is_failed_for_who_comes_later() -> None:
    """The others do not wait for it; it raises the same at its first step."""

    async def body(ranks: Ranks) -> None:
        if ranks.rank == 1:
            await asyncio.sleep(5)
        async with ranks.session("save") as session:
            assert ranks.rank != 1
            if ranks.rank == 2:
                raise ValueError("early")
            await session.round("plan", 1, add)

    assert causes_of(body) == {2: "ValueError: early"}


@pytest.mark.parametrize("fate", ["told", "cancelled", "alone"])
def test_who_comes_while_others_still_stop_does_nothing_and_waits_for_the_verdict(
    fate: str,
) -> None:
    """As all do; it may give up, or lose rank 0 meanwhile."""

    async def body(ranks: Ranks) -> None:
        task = asyncio.current_task()
        if ranks.rank == 3:
            await asyncio.sleep(2)
            if fate == "cancelled":
                asyncio.get_running_loop().call_later(1, cancel_now, task)
        try:
            async with ranks.session("save") as session:
                assert ranks.rank != 3
                if ranks.rank == 2:
                    raise ValueError("early")
                try:
                    await session.round("plan", 1, add)
                finally:
                    await asyncio.sleep(5 if ranks.rank == 1 else 0)
        finally:
            ended_s[ranks.rank] = asyncio.get_running_loop().time()

    ended_s: dict[int, float] = {}

    async def scenario() -> None:
        async with group() as world:
            if fate == "alone":
                asyncio.get_running_loop().call_later(3, world.kill, 0)
            outcomes = await world.run(body)
            if fate == "told":
                assert errors_of(outcomes)[3].causes == {2: "ValueError: early"}
                assert ended_s[3] >= 5
            elif fate == "cancelled":
                assert isinstance(outcomes.pop(), asyncio.CancelledError)
                assert errors_of(outcomes)[0].causes == {2: "ValueError: early"}
                assert ended_s[3] < 4
            else:
                assert isinstance(outcomes[3], PeerLostError)
                assert outcomes[3].ranks == (0,)
                assert ended_s[3] < 4

    run(scenario())


def test_who_comes_while_others_still_stop_for_a_lost_rank_waits_for_the_verdict() -> None:
    """It has heard of the loss, but not that nobody is in the session any more."""
    world = group()

    async def body(ranks: Ranks) -> float:
        await asyncio.sleep(2 if ranks.rank == 3 else 0)
        with pytest.raises(PeerLostError, match="rank 2: lost"):
            async with ranks.session("save") as session:
                if ranks.rank == 2:
                    world.kill(2)
                try:
                    await session.round("plan", 1, add)
                finally:
                    await asyncio.sleep(5 if ranks.rank == 1 else 0)
        return asyncio.get_running_loop().time()

    async def scenario() -> None:
        async with world:
            ended_s = await world.run(body)
            assert isinstance(ended_s[3], float)
            assert ended_s[3] >= 5

    run(scenario())


def test_who_comes_to_a_failed_session_when_rank_0_is_lost_waits_for_no_verdict() -> None:
    """Nobody is there to give one."""

    async def body(ranks: Ranks) -> None:
        if ranks.rank == 3:
            await asyncio.sleep(4)
        async with ranks.session("save") as session:
            if ranks.rank == 2:
                raise ValueError("early")
            try:
                await session.round("plan", 1, add)
            finally:
                await asyncio.sleep(5 if ranks.rank == 1 else 0)

    async def scenario() -> None:
        async with group() as world:
            asyncio.get_running_loop().call_later(3, world.kill, 0)
            outcomes = await world.run(body)
            assert isinstance(outcomes[3], PeerLostError)
            assert outcomes[3].ranks == (0,)
            assert asyncio.get_running_loop().time() < 7

    run(scenario())


@pytest.mark.parametrize("then", ["ends", "fails", "asks"])
def test_who_goes_on_when_rank_0_has_closed_is_told_of_that_where_it_asks(then: str) -> None:
    """Rank 0 had left the session: what a rank does there after that concerns it alone."""

    async def body(ranks: Ranks) -> Json:
        async with ranks.session("save", commits=True) as session:
            answer = await session.round("commit", 1, add)
            if ranks.rank:
                await asyncio.sleep(2 * DEADLINES.peer_s)
            if ranks.rank and then == "fails":
                raise ValueError("late")
            if ranks.rank and then == "asks":
                await session.round("more", 1, add)
        if not ranks.rank:
            await ranks.close()
        return answer

    async def scenario() -> None:
        async with group() as world:
            outcomes = await world.run(body)
            assert outcomes.pop(0) == WORLD
            assert asyncio.get_running_loop().time() < 2 * DEADLINES.peer_s + 1
            for rank, outcome in enumerate(outcomes, 1):
                if then == "ends":
                    assert outcome == WORLD
                    continue
                assert isinstance(outcome, RankError)
                assert not outcome.in_doubt
                if then == "fails":
                    assert outcome.causes == {rank: "ValueError: late"}
                else:
                    assert isinstance(outcome, PeerLostError)
                    assert outcome.ranks == (0,)
                    assert "it closed its engine" in str(outcome)

    run(scenario())


def test_who_waits_for_others_when_rank_0_closes_waits_no_longer() -> None:
    """Rank 0 had left the session; who is slow to stop there is waited for by it alone."""

    async def body(ranks: Ranks) -> float:
        loop = asyncio.get_running_loop()
        try:
            async with ranks.session("save") as session:
                await session.round("plan", 1, add)
                if ranks.rank == 2:
                    raise ValueError("late")
                try:
                    await asyncio.sleep(3600 if ranks.rank else 0)
                finally:
                    await asyncio.sleep(3 * DEADLINES.peer_s if ranks.rank == 1 else 0)
            await ranks.close()
        except RankError:
            assert ranks.rank
        return loop.time()

    outcomes = outcomes_of(body)
    assert max(outcomes[0], *outcomes[2:]) < NOTICED_S
    assert outcomes[1] < 3 * DEADLINES.peer_s + 1


def test_a_question_that_rank_0_does_not_hear_any_more_ends() -> None:
    """It closes, and says so, as the question is on its way."""

    async def body(ranks: Ranks) -> float:
        loop = asyncio.get_running_loop()
        try:
            async with ranks.session("save") as session:
                await session.round("plan", 1, add)
                if ranks.rank:
                    await asyncio.sleep(DEADLINES.peer_s + 1)
                    await session.round("more", 1, add)
            await ranks.close()
        except PeerLostError as error:
            assert error.ranks == (0,)
            assert not error.in_doubt
        return loop.time()

    async def scenario() -> None:
        async with group(world_size=2) as world:
            loop = asyncio.get_running_loop()
            loop.call_later(DEADLINES.peer_s - 1, world.deafen, 1)
            loop.call_later(DEADLINES.peer_s + 2, world.thaw, 1)
            outcomes: Any = await world.run(body)
            assert outcomes[1] < DEADLINES.peer_s + 3

    run(scenario())


def test_nobody_is_lost_where_all_stood_still() -> None:
    """A suspended machine, or a step that holds the interpreter: what others said is there."""

    async def body(ranks: Ranks) -> Json:
        loop: Any = asyncio.get_running_loop()
        async with ranks.session("save") as session:
            await session.round("plan", 1, add)
            if ranks.rank == 1:
                await asyncio.sleep(1)
                loop._now_s += 5 * DEADLINES.peer_s
            await asyncio.sleep(DEADLINES.peer_s)
            return await session.round("commit", 1, add)

    assert outcomes_of(body) == [WORLD] * WORLD


class Exit(BaseException):
    """What ends a process: `SystemExit` would end the loop as well."""


def test_what_ends_a_process_waits_for_nobody_and_is_told_to_all() -> None:
    """There is no time for the others to stop."""
    ended_s: dict[int, float] = {}

    async def body(ranks: Ranks) -> None:
        try:
            async with ranks.session("save"):
                if ranks.rank == 2:
                    raise Exit
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(5)
        finally:
            ended_s[ranks.rank] = asyncio.get_running_loop().time()

    outcomes = outcomes_of(body)
    assert isinstance(outcomes.pop(2), Exit)
    assert ended_s[2] < 1
    assert errors_of(outcomes)[0].causes == {2: "Exit"}


def test_a_block_that_takes_the_stop_for_something_else_fails_all_the_same() -> None:
    """Whoever swallows the cancellation meets it again at the next round, or at the end."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save") as session:
            if ranks.rank == 3:
                raise ValueError("no")
            try:
                await session.round("plan", 1, add)
            except asyncio.CancelledError:
                if ranks.rank == 1:
                    await session.round("commit", 1, add)

    assert causes_of(body) == {3: "ValueError: no"}


def test_a_block_that_takes_the_stop_for_its_own_end_fails_all_the_same() -> None:
    """Where it waits for something else than the others, too."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save") as session:
            await session.round("plan", 1, add)
            if ranks.rank == 3:
                raise ValueError("no")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    assert causes_of(body) == {3: "ValueError: no"}


def test_a_task_that_was_cancelled_before_hears_of_a_failure_as_such() -> None:
    """It cleans up in a session, say: only what is cancelled there is a cancellation of it."""

    async def body(ranks: Ranks) -> None:
        task: Any = asyncio.current_task()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
        async with ranks.session("save") as session:
            await session.round("plan", 1, add)
            if ranks.rank == 3:
                raise ValueError("no")
            await asyncio.Event().wait()

    assert causes_of(body) == {3: "ValueError: no"}


def test_a_block_that_gives_up_on_a_round_fails() -> None:
    """Whoever goes on without the answer has left the others alone."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save") as session:
            try:
                async with asyncio.timeout(1 if ranks.rank == 3 else None):
                    await session.round("plan", 1, never)
            except TimeoutError:
                pass

    assert causes_of(body) == {3: "it was cancelled there"}


@pytest.mark.parametrize("commits", [False, True])
def test_who_gave_up_on_a_round_is_in_doubt_when_rank_0_has_gone(*, commits: bool) -> None:
    """It gave its message: rank 0 may have decided, and did not wait for it for ever."""

    async def body(ranks: Ranks) -> None:
        async with ranks.session("save", commits=commits) as session:
            try:
                async with asyncio.timeout(0 if ranks.rank == 3 else None):
                    await session.round("commit", 1, add)
            except TimeoutError:
                await asyncio.sleep(2 * DEADLINES.peer_s)  # for longer than rank 0 waits
        if ranks.rank == 0:
            await ranks.close()

    *others, error = outcomes_of(body)
    assert others == [None] * (WORLD - 1)
    assert isinstance(error, RankError)
    assert error.causes == {3: "it was cancelled there"}
    assert error.in_doubt == commits


def test_a_key_that_is_open_is_not_opened_again() -> None:
    """A mistake of the caller; the session that is open goes on."""

    async def body(ranks: Ranks) -> Json:
        async with ranks.session("save") as session:
            with pytest.raises(RuntimeError, match="a key is used once"):
                async with ranks.session("save"):
                    pass
            return await session.round("plan", 1, add)

    assert outcomes_of(body) == [WORLD] * WORLD


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("where", ["outside", "inside", "question", "round"])
def test_a_lost_rank_is_named_by_all_in_time(how: str, rank: int, where: str) -> None:
    """Wherever the others are: before a session, between rounds, or waiting for an answer.

    Of what only asks, as a load does, nothing can have been decided that lasts.
    """

    async def body(ranks: Ranks) -> None:
        if where == "outside":
            await asyncio.sleep(NOTICED_S + 1)
        async with ranks.session("save", commits=where != "question") as session:
            if where == "round":
                decide_for_good(ranks, session)
            if where in {"round", "question"}:
                await session.round("commit", 1, never)
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with group() as world:
            asyncio.get_running_loop().call_later(0.5, getattr(world, how), rank)
            outcomes = await world.run(body)
            del outcomes[rank]
            errors = errors_of(outcomes)
            assert asyncio.get_running_loop().time() <= NOTICED_S + 2
            for error in errors:
                assert isinstance(error, PeerLostError)
                assert error.ranks == (rank,)
                assert error.in_doubt == (where == "round")
                assert f"(host 'h{rank // 2}')" in str(error)
            errors_of([e for r, e in enumerate(await world.run(body)) if r != rank])

    run(scenario())


async def stay(ranks: Ranks) -> None:
    """Be in a session until something ends it."""
    async with ranks.session("save"):
        await asyncio.Event().wait()


def test_a_rank_that_wakes_up_knows_that_it_was_given_up() -> None:
    """It hears why from the others, although it heard nothing while it slept."""

    async def scenario() -> None:
        async with group() as world:
            loop = asyncio.get_running_loop()
            world.freeze(3)
            running = asyncio.ensure_future(world.run(stay))
            await asyncio.sleep(1.3 * DEADLINES.peer_s)
            world.thaw(3)
            errors = errors_of((await running)[:3])
            assert "nothing was heard of it for 10 s" in str(errors[0])
            with pytest.raises(PeerLostError):
                await stay(world.ranks[3])
            assert loop.time() < 2 * DEADLINES.peer_s

    run(scenario())


def test_a_rank_that_is_not_heard_is_told_and_stops() -> None:
    """It hears the others: a way may be lost in one direction. Nobody counts on it any more."""

    async def scenario() -> None:
        async with group() as world:
            end, _ = world._ends[3]
            end.hold(held=True)
            errors = errors_of(await world.run(stay))
            assert "nothing was heard of it for 10 s" in str(errors[3])
            assert isinstance(errors[3], PeerLostError)
            assert errors[3].ranks == (3,)
            assert asyncio.get_running_loop().time() <= NOTICED_S + 2

    run(scenario())


def test_who_leaves_does_not_wait_again_for_a_rank_that_was_given_up() -> None:
    """It was silent for as long as anybody waits; it knows why when it wakes up."""

    async def scenario() -> None:
        async with group() as world:
            loop = asyncio.get_running_loop()
            world.freeze(3)
            running = asyncio.ensure_future(world.run(stay))
            await asyncio.wait((running,), timeout=NOTICED_S + 2)
            begun_s = loop.time()
            for rank in (1, 2, 0):
                await world.ranks[rank].close()
            assert loop.time() - begun_s < 1
            world.thaw(3)
            error = (await running)[3]
            assert isinstance(error, PeerLostError)
            assert "nothing was heard of it for 10 s" in str(error)

    run(scenario())


def test_ranks_close_in_any_order() -> None:
    """Who closes is missed by name, by those who need it; the others go on to their ends."""

    async def body(ranks: Ranks) -> Json:
        async with ranks.session("save") as session:
            answer = await session.round("commit", 1, add)
            await asyncio.sleep(0.1 * ranks.rank)
        await ranks.close()
        return answer

    async def more(ranks: Ranks) -> None:
        async with ranks.session("more") as session:
            await session.round("plan", 1, add)

    async def scenario() -> None:
        for last in (1, WORLD - 1):
            async with group() as world:
                if last == 1:
                    assert await world.run(body) == [WORLD] * WORLD
                else:
                    await world.ranks[1].close()
                    outcomes = await world.run(more)
                    errors = errors_of([outcomes[0], *outcomes[2:]])
                    assert "rank 1: lost, it closed its engine, and every rank has to make" in str(
                        errors[0]
                    )
        assert asyncio.get_running_loop().time() < 5

    run(scenario())


def test_who_needs_rank_0_hears_at_once_that_it_has_closed() -> None:
    """Those that wait for it in a session, and it does not wait for them."""

    async def body(ranks: Ranks) -> None:
        if ranks.rank == 0:
            await asyncio.sleep(1)
            await ranks.close()
            return
        async with ranks.session("save") as session:
            await session.round("plan", 1, add)

    outcomes = outcomes_of(body, within_s=2)
    assert outcomes.pop(0) is None
    for error in errors_of(outcomes):
        assert isinstance(error, PeerLostError)
        assert error.ranks == (0,)
        assert "it closed its engine" in str(error)


def test_large_messages_pass() -> None:
    """Larger than a slice and than what a connection takes at a time; while others talk."""
    text = "x" * (1 << 20)

    async def body(ranks: Ranks) -> list[int]:
        async with ranks.session("save") as session:
            told = await session.round("plan", text + str(ranks.rank), turn)
            same = await session.round("same", 0, answer)
        return [int(told[len(text) :]), len(same)]

    async def answer(_: Sequence[Json]) -> Same:
        return Same(text)

    assert outcomes_of(body, within_s=DEADLINES.beat_s / 2) == [
        [(r + 1) % WORLD, len(text)] for r in range(WORLD)
    ]


async def test_a_world_of_one_decides_alone() -> None:
    """No copies, and errors as they are."""
    ranks = SoloRanks("here")
    async with ranks.session("save") as session:
        message: dict[str, object] = {"any": object()}
        assert await session.round("plan", message, turn) is message
        assert await session.round("add", 3, add) == 3
    assert (ranks.rank, ranks.world_size, ranks.hosts) == (0, 1, ("here",))
    with pytest.raises(ZeroDivisionError):
        async with ranks.session("fail"):
            raise ZeroDivisionError
    assert ranks.nonce != SoloRanks().nonce
