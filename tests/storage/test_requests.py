from __future__ import annotations

import asyncio
import errno
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import StorageError
from ckptio.events import RequestRetried
from ckptio.storage.requests import RequestLimit, Requests, settling_wait_s
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectMissingError,
    RefusedError,
    StoreError,
    TransientError,
)
from ckptio.testing import EventLog, run_virtual
from tests.rig import config_with
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

seeds = st.integers(0, 2**32)


def requests(
    log: EventLog | None = None, limit: RequestLimit | None = None, seed: int = 0, **options: object
) -> Requests:
    return Requests(
        "memory://run",
        config_with(**options),
        limit or RequestLimit(16),
        log or EventLog(),
        random.Random(seed),
    )


def failing(*errors: StoreError | None) -> Callable[[], Awaitable[str]]:
    """Give a request that ends as said, try by try, and well after that."""
    left = list(errors)

    async def request() -> str:
        await asyncio.sleep(0.01)
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return "done"

    return request


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_log_says_once_that_nothing_is_answered(
    caplog: pytest.LogCaptureFixture, *, is_silent: bool
) -> None:
    """Long before it is an error, for all requests together; and nothing that is secret."""

    async def dead() -> str:
        await asyncio.sleep(1000 if is_silent else 0.01)
        raise TransientError("connection refused")

    async def scenario() -> None:
        run = requests()
        for _ in range(2):
            with pytest.raises(StorageError):
                await asyncio.gather(
                    *(run.run("write", "http://s/a?key=x", dead) for _ in range(3))
                )
        with pytest.raises(StorageError):
            await run.brief().run("drop", "b", dead)

    run_virtual(scenario(), seed=1)
    (record,) = caplog.records
    problem = "no answer within 10 s" if is_silent else "connection refused"
    assert record.levelname == "WARNING"
    assert f"cannot write 'http://s/a?...' of 'memory://run' yet: {problem}; " in record.message
    assert "is tried again for up to 600 s (retry_timeout_s)" in record.message


def test_the_log_says_nothing_of_what_is_soon_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Nor of what takes long after an answer: it may be much."""

    async def slow() -> str:
        await asyncio.sleep(20)
        return "done"

    async def scenario() -> None:
        run = requests()
        await run.run("write", "a", failing(*[TransientError("no luck")] * 3))
        with pytest.raises(StorageError):
            await run.run("write", "a", failing(RefusedError("no")))
        await run.run("write", "a", slow)
        run = requests()
        with pytest.raises(ObjectMissingError):
            await run.run("read", "a", failing(ObjectMissingError("none")))
        await run.run("read", "a", slow)
        await requests().run("write", "a", slow, has_body=True)

    run_virtual(scenario(), seed=1)
    assert not caplog.records


def test_the_log_says_nothing_of_what_waits_for_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    """Behind what another save sends: the store is not asked before."""

    async def slow() -> str:
        await asyncio.sleep(20)
        return "done"

    async def scenario() -> None:
        limit = RequestLimit(1)
        one, other = (requests(limit=limit) for _ in range(2))
        async with asyncio.TaskGroup() as group:
            group.create_task(one.run("write", "a", slow, has_body=True))
            await asyncio.sleep(0)
            group.create_task(other.run("read", "b", failing()))

    run_virtual(scenario(), seed=1)
    assert not caplog.records


@given(num_failures=st.integers(0, 12), max_retries=st.integers(1, 8), seed=seeds)
@in_virtual_time
async def test_what_may_get_better_is_tried_again_as_often_as_allowed(
    num_failures: int, max_retries: int, seed: int
) -> None:
    """Each further try is an event; when the budget is spent the error names the object."""
    log = EventLog()
    run = requests(log, seed=seed, max_retries=max_retries)
    request = failing(*[TransientError("no luck")] * num_failures)
    if num_failures <= max_retries:
        assert await run.run("write", "run/a", request) == "done"
    else:
        with pytest.raises(StorageError, match="cannot write 'run/a': no luck") as caught:
            await run.run("write", "run/a", request)
        assert isinstance(caught.value.__cause__, TransientError)
    events = log.of(RequestRetried)
    assert [event.num_tries for event in events] == [
        number + 1 for number in range(min(num_failures, max_retries))
    ]
    for event in events:
        assert (event.operation, event.object) == ("write", "run/a")
        assert 0 <= event.wait_s <= min(20.0, 0.1 * 2**event.num_tries)


def test_waits_are_drawn() -> None:
    """Writers that were refused together do not come back together, and a seed repeats a run."""

    async def waits(seed: int) -> list[float]:
        log = EventLog()
        await requests(log, seed=seed).run("write", "a", failing(*[TransientError("x")] * 5))
        return [event.wait_s for event in log.of(RequestRetried)]

    found = [run_virtual(waits(seed), seed=0) for seed in (1, 2, 3, 1)]
    assert found[0] == found[3]
    assert len({tuple(drawn) for drawn in found}) == 3


@pytest.mark.parametrize("error", [ObjectMissingError("x"), ConditionFailedError("x")])
@in_virtual_time
async def test_an_answer_is_no_failure(error: StoreError) -> None:
    """What is missing, or a condition that does not hold, is for the caller, at once."""
    log = EventLog()
    with pytest.raises(type(error)):
        await requests(log).run("read", "a", failing(error), has_condition=True)
    with pytest.raises(StorageError, match="cannot read 'a'"):
        await requests(log).must("read", "a", failing(error))
    assert log.events == []


@in_virtual_time
async def test_a_condition_that_nobody_set_is_a_failure() -> None:
    """A gateway may answer whatever it likes; it is told in an error that callers expect."""
    log = EventLog()
    with pytest.raises(StorageError, match=r"cannot read 'a': PreconditionFailed \(412\)"):
        error = ConditionFailedError("PreconditionFailed (412)")
        await requests(log).run("read", "a", failing(error))
    assert log.events == []


@in_virtual_time
async def test_what_is_refused_is_not_tried_again() -> None:
    """No permission now is no permission later."""
    log = EventLog()
    with pytest.raises(StorageError, match="cannot read 'a': access denied"):
        await requests(log).run("read", "a", failing(RefusedError("access denied")))
    assert log.events == []


@in_virtual_time
async def test_nothing_is_tried_again_after_the_deadline() -> None:
    """A store that is away for long ends a save, however many tries are left."""
    run = requests(max_retries=1000, retry_timeout_s=100.0)
    with pytest.raises(StorageError, match="tries"):
        await run.run("write", "a", failing(*[TransientError("away")] * 1000))
    assert 50 < asyncio.get_running_loop().time() <= 101
    await asyncio.sleep(60)
    with pytest.raises(StorageError, match="cannot write 'b': away"):
        await run.run("write", "b", failing(TransientError("away")))


@in_virtual_time
async def test_the_deadline_is_that_of_an_outage() -> None:
    """A failure long ago, and much that worked since, does not end a save that lasts."""
    run = requests(retry_timeout_s=100.0)
    for _ in range(10):
        await run.run("write", "a", failing(TransientError("a hiccup")))
        await asyncio.sleep(90)


@in_virtual_time
async def test_an_answer_ends_an_outage() -> None:
    """That there is no object, too: the store has said so."""
    run = requests(retry_timeout_s=100.0)
    for _ in range(10):
        with pytest.raises(ObjectMissingError):
            await run.run(
                "look at", "a", failing(TransientError("a hiccup"), ObjectMissingError("x"))
            )
        await asyncio.sleep(90)


@in_virtual_time
async def test_a_request_that_is_never_answered_ends_and_says_which() -> None:
    """A stalled connection is an error that names the object, not a hang."""

    async def stalled() -> None:
        await asyncio.get_running_loop().create_future()

    log = EventLog()
    run = requests(log, request_timeout_s=60.0, max_retries=2)
    with pytest.raises(StorageError, match=r"cannot read 'run/a': no answer within 60 s \(3"):
        await run.run("read", "run/a", stalled)
    assert len(log.of(RequestRetried)) == 2
    assert 180 <= asyncio.get_running_loop().time() < 190


@given(
    num=st.integers(1, 40),
    places=st.integers(1, 8),
    cancelled=st.lists(st.tuples(st.integers(0, 39), st.floats(0, 3))),
    seed=seeds,
)
def test_the_limit_holds_whoever_is_cancelled(
    num: int, places: int, cancelled: Sequence[tuple[int, float]], seed: int
) -> None:
    """Never more at a time than allowed, every place comes back, and each error is its own."""

    async def scenario() -> None:
        limit = RequestLimit(places)
        running = peak = 0

        async def one(number: int) -> None:
            nonlocal running, peak
            async with limit.slot():
                running += 1
                peak = max(peak, running)
                try:
                    await asyncio.sleep((number * 7 % 5) / 10)
                finally:
                    running -= 1

        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(num)]
            for number, when in cancelled:
                loop.call_later(when, tasks[number % num].cancel)
        assert peak <= places
        assert running == limit._running == 0
        assert not limit._waiters

    run_virtual(scenario(), seed=seed)


@pytest.mark.parametrize("has_place", [False, True])
@in_virtual_time
async def test_a_waiter_that_leaves_as_a_place_comes_free_leaves_quietly(
    *, has_place: bool
) -> None:
    """Who is cancelled in the very turn in which a request ends is cancelled, nothing else.

    And gives the place back, if it was given it before.
    """
    limit = RequestLimit(1)

    async def wait() -> None:
        async with limit.slot():
            raise AssertionError("it was cancelled before")

    async with limit.slot():
        waiter = asyncio.get_running_loop().create_task(wait())
        await asyncio.sleep(1)
        if not has_place:
            waiter.cancel()
    if has_place:
        waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert limit._running == 0
    async with limit.slot():
        assert limit._running == 1


@in_virtual_time
async def test_nothing_is_sent_when_no_time_is_left() -> None:
    """What somebody asks who has given up, and whose ten seconds have passed."""
    sent = []

    async def request() -> None:
        sent.append(1)

    brief = requests().brief()
    await asyncio.sleep(11)
    with pytest.raises(StorageError, match="no time is left"):
        await brief.run("remove", "a", request)
    assert not sent


@in_virtual_time
async def test_who_is_in_a_hurry_waits_no_longer_for_a_place() -> None:
    """Another save has all of them, for what a store that is away does not answer."""
    loop, limit, sent = asyncio.get_running_loop(), RequestLimit(1), []

    async def request() -> None:
        sent.append(loop.time())

    brief = requests(limit=limit).brief()
    async with asyncio.TaskGroup() as group, limit.slot():
        for _ in range(2):  # also when all of that time has passed
            with pytest.raises(StorageError, match="no time is left"):
                await brief.run("remove", "a", request)
            assert loop.time() == 10
        group.create_task(requests(limit=limit).run("look at", "b", request))
        await asyncio.sleep(20)
    assert sent == [30]
    assert limit._running == 0


@in_virtual_time
async def test_places_are_given_in_turn() -> None:
    """Who came first is served first, also before one that comes just as a place is free."""
    limit = RequestLimit(2)
    order = []

    async def one(number: int) -> None:
        await asyncio.sleep(number / 100)
        async with limit.slot():
            order.append(number)
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(one(number))
    assert order == list(range(20))


@in_virtual_time
async def test_a_store_that_asks_for_less_gets_half_and_more_again_later() -> None:
    """Half as many after a refusal, once for all refused together, and back with answers."""
    limit = RequestLimit(16)
    run = requests(limit=limit, max_retries=1)
    slow = TransientError("slow down", slow_down=True)
    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(run.run("write", "a", failing(slow)))
    assert limit.allowed >= 8
    seen = []
    for _ in range(3):
        with pytest.raises(TransientError):
            await run.once(failing(slow))
        seen.append(limit.allowed)
    assert seen == [limit.allowed * 4, limit.allowed * 2, limit.allowed]
    for _ in range(200):
        await run.once(failing())
    assert limit.allowed == 16
    for _ in range(20):
        with pytest.raises(TransientError):
            await run.once(failing(slow))
    assert limit.allowed == 1
    assert await run.run("write", "a", failing()) == "done"


def test_fewer_run_where_what_is_sent_takes_too_long() -> None:
    """The way is narrow: as many as before would all be late again. Looks slow nothing down."""

    async def scenario() -> None:
        limit, running = RequestLimit(16), 0
        run = requests(limit=limit, max_retries=8, request_timeout_s=8.0)

        async def send() -> None:
            nonlocal running
            running += 1
            try:
                left_nbytes = 50.0
                while left_nbytes > 0:
                    await asyncio.sleep(0.5)
                    left_nbytes -= 25.0 / running  # all that run share the way
            finally:
                running -= 1

        async with asyncio.TaskGroup() as group:
            for number in range(16):
                group.create_task(run.run("write", str(number), send, has_body=True))
        assert limit.allowed < 16

    run_virtual(scenario(), seed=0)

    async def look() -> None:
        limit = RequestLimit(16)
        with pytest.raises(TransientError, match="no answer"):
            await requests(limit=limit).once(lambda: asyncio.sleep(100))
        assert limit.allowed == 16

    run_virtual(look(), seed=0)


def test_what_became_of_a_request_is_asked_soon_and_then_now_and_then() -> None:
    """After a fifth of a second, twice as much each time, and at most five seconds."""
    waits = [settling_wait_s(tries) for tries in range(1, 9)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


@in_virtual_time
async def test_who_hurries_twice_gets_no_more_time() -> None:
    """Clean-up within clean-up ends with it."""
    loop = asyncio.get_running_loop()
    brief = requests(retry_timeout_s=1000.0, max_retries=1000).brief()
    await asyncio.sleep(6)
    with pytest.raises(StorageError):
        await brief.brief().run("remove", "a", failing(*[TransientError("broke")] * 100))
    assert 8 < loop.time() <= 10


@in_virtual_time
async def test_one_request_that_gets_no_answer_leaves_time_for_others_in_a_hurry() -> None:
    """It is given a third of the ten seconds."""
    brief = requests(request_timeout_s=60.0).brief()
    with pytest.raises(TransientError, match=r"no answer within 3\.33333 s"):
        await brief.once(asyncio.get_running_loop().create_future)


@in_virtual_time
async def test_the_log_says_nothing_of_what_fails_at_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However long it is that the program runs."""
    await asyncio.sleep(1000)
    error = TransientError("broke")
    assert await requests().run("read", "a", failing(error, error)) == "done"
    assert not caplog.records


@pytest.mark.parametrize("outlive", [False, True])
def test_what_makes_something_is_waited_for_when_it_is_cancelled(*, outlive: bool) -> None:
    """What only looks is not: it ends at once."""

    async def scenario() -> float:
        async def request() -> None:
            await asyncio.sleep(5)

        task = asyncio.get_running_loop().create_task(requests().once(request, outlive=outlive))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario(), seed=0) == pytest.approx(5 if outlive else 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [(TransientError("away"), errno.ETIMEDOUT), (RefusedError("denied"), errno.EIO)],
)
@in_virtual_time
async def test_an_error_tells_what_may_get_better_from_what_will_not(
    error: StoreError, code: int
) -> None:
    """By its `errno`; and it counts tries where there were several."""
    run = requests(max_retries=1)
    with pytest.raises(StorageError, match="cannot read 'a'") as raised:
        await run.run("read", "a", failing(error, error))
    assert raised.value.errno == code
    assert ("(2 tries)" in str(raised.value)) == (code == errno.ETIMEDOUT)
    assert "(1 tries)" not in str(raised.value)


@in_virtual_time
async def test_a_place_that_its_waiter_does_not_take_goes_to_the_next() -> None:
    """Who was given one and is cancelled in that turn holds nobody up."""
    limit = RequestLimit(1)

    async def wait() -> None:
        async with limit.slot():
            await asyncio.sleep(1)

    async with limit.slot():
        first, second = (asyncio.get_running_loop().create_task(wait()) for _ in range(2))
        await asyncio.sleep(1)
    first.cancel()
    await second
    assert first.cancelled()
    assert limit._running == 0


def test_it_takes_as_many_answers_as_there_are_places_to_get_one_more() -> None:
    """What was too much is found again slowly."""
    limit = RequestLimit(8)
    limit.slow_down(0)
    allowed = []
    for _ in range(5):
        limit.answered()
        allowed.append(limit.allowed)
    assert allowed == [4, 4, 4, 4, 5]
