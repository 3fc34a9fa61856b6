from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend "fake"

from ckptio.errors import ConfigError, PeerLostError, RankError
from ckptio.format.compose import encode_manifest
from ckptio.format.manifest import decode_manifest
from ckptio.ranks import frames
from ckptio.ranks.board import Meeting, process_began_s, this_process
from ckptio.ranks.coordinator import Coordinator
from ckptio.ranks.discover import find_place, ranks_of
from ckptio.ranks.host import addresses_towards, listen_everywhere, this_host
from ckptio.ranks.interface import Deadlines
from ckptio.ranks.join import Place, join
from ckptio.ranks.member import Member
from ckptio.ranks.solo import SoloRanks
from ckptio.ranks.store_thread import StoreThread
from tests.ranks.test_sessions import add

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    from ckptio.ranks.interface import Ranks

torch_store: Any = dist  # whose stubs leave the stores out

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")

SHORT = Deadlines(peer_s=2, meet_s=0.5)
LONG = Deadlines(peer_s=10, meet_s=20)


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """What libuv opens once for a process is open before leaks are looked for."""
    torch_store.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def store() -> Any:
    return torch_store.HashStore()


def place(store: Any, rank: int, world_size: int = 3, **more: Any) -> Place:
    return Place(rank=rank, world_size=world_size, group="g", open_store=lambda: store, **more)


def leave(store: Any, world_size: int, meeting: Meeting) -> None:
    """Leave in a store what an attempt leaves that is killed."""
    number = store.add(f"ckptio/g/{world_size}/opened", 1)
    store.set(f"ckptio/g/{world_size}/meeting/{number}", msgspec.json.encode(meeting).decode())


async def announced(store: Any, world_size: int, meeting: int = 1) -> None:
    """Wait until a rank 0 has said in a store where it is."""
    while not store.check([f"ckptio/g/{world_size}/meeting/{meeting}"]):
        await asyncio.sleep(0.001)


class WatchedStore:
    """A store that tells when a rank has looked into it some times: and knocked in between."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.looks = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        number: int = self._store.add(key, amount)
        if not amount:
            self.looks.release()
        return number

    async def looked(self, times: int = 3) -> None:
        for _ in range(times):
            assert await asyncio.to_thread(self.looks.acquire, timeout=10)


async def together(*steps: Any) -> list[Any]:
    """Run steps at a time; give what each returned or raised."""

    async def one(step: Any) -> Any:
        try:
            return await step
        except (RankError, ConfigError) as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(step)) for step in steps]
    return [task.result() for task in running]


async def use(ranks: Ranks, key: str = "s") -> object:
    async with ranks.session(key) as session:
        return await session.round("add", 1, add)


async def test_ranks_meet_through_a_store(store: Any, threads: Executor) -> None:
    """They find each other on this machine, and each knows the host of all."""
    for expected in ("again", "and again"):
        groups = await together(
            *(
                join(place(store, r, host=f"h{r}"), deadlines=LONG, executor=threads)
                for r in range(3)
            )
        )
        assert [g.hosts for g in groups] == [("h0", "h1", "h2")] * 3
        assert len({g.nonce for g in groups}) == 1
        assert await together(*(use(g, expected) for g in groups)) == [3, 3, 3]
        await together(*(g.close() for g in groups))


async def test_several_engines_of_a_group_meet_their_likes(store: Any, threads: Executor) -> None:
    """The n-th that a rank opens meets the n-th of the others, while the first are open."""
    first = await together(
        *(join(place(store, r, 2), deadlines=LONG, executor=threads) for r in range(2))
    )
    second = await together(
        *(join(place(store, r, 2), deadlines=LONG, executor=threads) for r in range(2))
    )
    assert first[0].nonce == first[1].nonce != second[0].nonce == second[1].nonce
    done = await together(*(use(g) for g in (*second, *first)))
    assert done == [2, 2, 2, 2]
    await together(*(g.close() for g in (*first, *second)))


async def test_who_does_not_come_is_named_by_all(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """By those who came in time, and by who comes too late, soon."""
    errors = await together(
        *(join(place(store, r), deadlines=SHORT, executor=threads) for r in (0, 2))
    )
    assert len({str(e) for e in errors}) == 1
    assert all(isinstance(e, PeerLostError) and e.ranks == (1,) for e in errors)
    assert str(errors[0]).startswith("rank 1 did not come within 0.")
    began_s = time.monotonic()
    monkeypatch.setattr("ckptio.ranks.search._GRACE_S", 0.1)
    with pytest.raises(PeerLostError, match="rank 0 waits no longer: rank 1 did not") as caught:
        await join(place(store, 1), deadlines=LONG, executor=threads)
    assert (caught.value.ranks, list(caught.value.causes)) == ((0,), [0])
    assert time.monotonic() - began_s < LONG.meet_s / 2
    with pytest.raises(PeerLostError, match=r"^rank 0 did not come within"):  # that is no news now
        await join(place(store, 1), deadlines=SHORT, executor=threads)


async def test_what_another_version_says_in_the_store_is_refused_as_such(
    store: Any, threads: Executor
) -> None:
    """The ranks cannot find out what is meant, nor does anybody wait for it to change."""
    number = store.add("ckptio/g/2/opened", 1)
    store.set(f"ckptio/g/2/meeting/{number}", '{"process":"p","at_s":1.0,"way":"new"}')
    with pytest.raises(RankError, match="run one version of ckptio on all ranks"):
        await join(place(store, 1, 2), deadlines=LONG, executor=threads)


async def test_who_has_met_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: Any, threads: Executor
) -> None:
    """And the log says nothing of it."""
    calls: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def note(delay_s: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        calls.append(call_later(delay_s, *args, **options))
        return calls[-1]

    monkeypatch.setattr(loop, "call_later", note)
    monkeypatch.setattr("ckptio.ranks.join._PATIENCE_S", 1234.0)
    group = await together(
        *(join(place(store, r, 2), deadlines=LONG, executor=threads) for r in range(2))
    )
    waits = [call for call in calls if call.when() > loop.time() + 1000]
    assert len(waits) == 2
    assert all(call.cancelled() for call in waits)
    assert not caplog.messages
    await together(*(g.close() for g in group))


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
async def test_ranks_meet_though_rank_0_knows_no_address_of_its_own(
    store: Any, threads: Executor, hosts: tuple[str, str]
) -> None:
    """On its own machine, and on that of the store, which all of them reach."""

    class NamedStore:
        host = "127.0.0.1" if len(set(hosts)) == 2 else ""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    places = [place(NamedStore(), r, 2, host=hosts[r], addresses=[]) for r in range(2)]
    deadlines = Deadlines(peer_s=2, meet_s=5)
    groups = await together(*(join(p, deadlines=deadlines, executor=threads) for p in places))
    assert await together(*map(use, groups)) == [2, 2]
    await together(*(group.close() for group in groups))


async def test_a_store_is_asked_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """And once more when the time is over, no later. Pauses pass at once here."""
    pauses_s, sleep = list[float](), asyncio.sleep
    loop = asyncio.get_running_loop()
    now_s = loop.time

    async def pause(time_s: float) -> None:
        pauses_s.append(time_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pause)
    monkeypatch.setattr(loop, "time", lambda: now_s() + sum(pauses_s))
    monkeypatch.setattr("ckptio.ranks.search._FIRST_PAUSE_S", 20.0)
    monkeypatch.setattr("ckptio.ranks.search._MAX_PAUSE_S", 80.0)
    with pytest.raises(PeerLostError):
        await join(place(store, 1), deadlines=Deadlines(peer_s=2, meet_s=500), executor=threads)
    assert pauses_s[:-1] == [20, 40, 80, 80, 80, 80, 80]
    assert 0 < pauses_s[-1] <= 40


async def test_who_comes_when_all_have_met_is_told_that_nobody_waits(
    store: Any, threads: Executor
) -> None:
    """As a rank that was started again alone: nobody knocks at a port that is closed."""
    groups = await together(
        *(join(place(store, r, 2), deadlines=LONG, executor=threads) for r in range(2))
    )
    with pytest.raises(PeerLostError, match=r"^rank 0 did not come within 0\.5 s; every"):
        await join(place(store, 1, 2), deadlines=SHORT, executor=threads)
    await together(*(group.close() for group in groups))


async def test_a_rank_0_that_does_not_begin_is_waited_for_no_longer_than_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """It is there, and was told to wait longer, by a variable that only it has."""
    loop, passed_s = asyncio.get_running_loop(), [0.0]
    now_s = loop.time

    async def hear_nothing(_: Member, wait_s: float) -> bool:
        passed_s.append(wait_s)
        return False

    monkeypatch.setattr(Member, "has_news", hear_nothing)
    monkeypatch.setattr(loop, "time", lambda: now_s() + sum(passed_s))
    patient = Deadlines(peer_s=10, meet_s=500)
    leading = asyncio.create_task(join(place(store, 0), deadlines=patient, executor=threads))
    await announced(store, 3)
    with pytest.raises(PeerLostError, match=r"rank 0: lost, it did not begin within 20 s"):
        await join(place(store, 1), deadlines=LONG, executor=threads)
    assert sum(passed_s) <= LONG.meet_s + LONG.peer_s
    leading.cancel()
    await asyncio.wait((leading,))


async def test_a_rank_0_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    store: Any,
    threads: Executor,
) -> None:
    """Nobody else can say so. The log says meanwhile that it is waited for."""
    monkeypatch.setattr("ckptio.ranks.join._PATIENCE_S", 0.0)
    with pytest.raises(PeerLostError, match=r"rank 0 did not come within 0\.5 s") as caught:
        await join(place(store, 1), deadlines=SHORT, executor=threads)
    assert caught.value.ranks == (0,)
    assert caplog.messages == [
        "rank 1 waits for the engines of other ranks, up to 0.5 s: all of them have to open one"
    ]


async def test_a_rank_0_that_cannot_be_reached_is_named(store: Any, threads: Executor) -> None:
    """With every address that was tried, and what came of it."""
    leave(store, 2, Meeting(process="p", at_s=time.time(), addresses=["127.0.0.1"], port=1))
    with pytest.raises(PeerLostError, match=r"rank 0: lost, cannot be reached on port 1 \(127"):
        await join(place(store, 1, 2), deadlines=SHORT, executor=threads)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("alone", [0, 1])
async def test_ranks_meet_again_after_one_came_alone(
    store: Any, threads: Executor, alone: int, world_size: int
) -> None:
    """However often: nobody is one engine behind or ahead of the others from then on."""
    for _ in range(3):
        with pytest.raises(PeerLostError):
            await join(place(store, alone, world_size), deadlines=SHORT, executor=threads)
    for _ in range(2):
        groups = await together(
            *(
                join(place(store, r, world_size), deadlines=LONG, executor=threads)
                for r in range(world_size)
            )
        )
        assert await together(*map(use, groups)) == [world_size] * world_size
        await together(*(group.close() for group in groups))


async def test_ranks_meet_again_after_some_came_without_another(
    store: Any, threads: Executor
) -> None:
    """Those who met rank 0 and waited in vain, and who came too late."""
    await together(*(join(place(store, r), deadlines=SHORT, executor=threads) for r in (0, 2)))
    await together(*(join(place(store, r), deadlines=SHORT, executor=threads) for r in (1, 2)))
    groups = await together(
        *(join(place(store, r), deadlines=LONG, executor=threads) for r in range(3))
    )
    assert await together(*map(use, groups)) == [3, 3, 3]
    await together(*(group.close() for group in groups))


@contextlib.asynccontextmanager
async def listener(how: str, executor: Executor) -> AsyncIterator[int]:
    """Have something at a port: nobody, a program that hangs up, or a rank 0 of other ranks."""
    if how == "nobody":
        yield 1
    elif how == "a program":
        async with await asyncio.start_server(
            lambda _, writer: writer.close(), "127.0.0.1", 0
        ) as server:
            yield server.sockets[0].getsockname()[1]
    else:
        other = WatchedStore(torch_store.HashStore())
        leading = asyncio.create_task(
            join(
                place(other, 0, 2, addresses=[], process="other"),
                deadlines=LONG,
                executor=executor,
            )
        )
        await announced(other, 2)
        yield msgspec.json.decode(other.get("ckptio/g/2/meeting/1"))["port"]
        leading.cancel()
        await asyncio.wait((leading,))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", ["nobody", "a program", "another group"])
async def test_what_a_killed_attempt_left_is_passed_over(
    store: Any, threads: Executor, how: str, first: int
) -> None:
    """Whoever is there first, and whatever is at the old port now."""
    store = WatchedStore(store)
    async with listener(how, threads) as port:
        for _ in range(2):
            old = Meeting(process="old", at_s=1.0, addresses=["127.0.0.1"], port=port)
            leave(store, 2, old)
        async with asyncio.TaskGroup() as tasks:
            ranks = [
                tasks.create_task(join(place(store, r, 2), deadlines=LONG, executor=threads))
                for r in ([0] if first == 0 else [1])
            ]
            if first == 1:
                await store.looked()
            ranks.append(
                tasks.create_task(
                    join(place(store, 1 - first, 2), deadlines=LONG, executor=threads)
                )
            )
    groups = [task.result() for task in ranks]
    assert await together(*map(use, groups)) == [2, 2]
    await together(*(group.close() for group in groups))


async def meet_late(store: WatchedStore, threads: Executor) -> list[Any]:
    """Have rank 0 come when the other rank has looked for it; gives the groups of both."""
    async with asyncio.TaskGroup() as tasks:
        member = tasks.create_task(join(place(store, 1, 2), deadlines=LONG, executor=threads))
        await store.looked()
        leader = tasks.create_task(join(place(store, 0, 2), deadlines=LONG, executor=threads))
    return [leader.result(), member.result()]


async def test_why_an_earlier_attempt_gave_up_is_no_news(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """A rank that is there before its rank 0 waits for that as long as without."""
    monkeypatch.setattr("ckptio.ranks.search._GRACE_S", 0.0)
    store = WatchedStore(store)
    leave(store, 2, Meeting(process="old", at_s=process_began_s() - 60, gone="it was cancelled"))
    await together(*(group.close() for group in await meet_late(store, threads)))


async def test_who_was_told_of_a_failure_waits_for_the_next_engine_as_for_the_first(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """Though the note about it is what the store has."""
    monkeypatch.setattr("ckptio.ranks.search._GRACE_S", 0.0)
    store = WatchedStore(store)
    await together(*(join(place(store, r), deadlines=SHORT, executor=threads) for r in (0, 2)))
    async with asyncio.TaskGroup() as tasks:
        ranks = [tasks.create_task(join(place(store, 2), deadlines=LONG, executor=threads))]
        await store.looked(6)
        ranks.append(tasks.create_task(join(place(store, 0), deadlines=LONG, executor=threads)))
        await announced(store, 3, meeting=2)
        ranks.append(tasks.create_task(join(place(store, 1), deadlines=LONG, executor=threads)))
    await together(*(task.result().close() for task in ranks))


async def test_nor_is_it_told_where_nobody_comes(store: Any, threads: Executor) -> None:
    """It would pass for what this rank 0 said."""
    leave(store, 2, Meeting(process="old", at_s=process_began_s() - 60, gone="it was cancelled"))
    with pytest.raises(PeerLostError, match=r"^rank 0 did not come within 0\.5 s; every"):
        await join(place(store, 1, 2), deadlines=SHORT, executor=threads)


async def test_who_waits_with_rank_0_needs_the_store_no_more(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """A look that fails says nothing of rank 0."""
    monkeypatch.setattr("ckptio.ranks.search._WATCH_S", 0.01)

    class LostStore(WatchedStore):
        """Of a rank that was cut off from it when it had found rank 0."""

        def add(self, key: str, amount: int) -> int:
            number = super().add(key, amount)
            if number and self.found:
                raise RuntimeError("the store was lost")
            self.found = bool(number)
            return number

        found = False

    lost = LostStore(store)
    async with asyncio.TaskGroup() as tasks:
        ranks = [tasks.create_task(join(place(store, 0), deadlines=LONG, executor=threads))]
        await announced(store, 3)
        ranks.append(tasks.create_task(join(place(lost, 1), deadlines=LONG, executor=threads)))
        await lost.looked(4)
        ranks.append(tasks.create_task(join(place(store, 2), deadlines=LONG, executor=threads)))
    groups = [task.result() for task in ranks]
    assert await together(*map(use, groups)) == [3, 3, 3]
    await together(*(group.close() for group in groups))


async def test_who_waits_with_a_rank_0_of_an_earlier_attempt_goes_over_to_the_new_one(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """Though the old one lives, and took it."""
    monkeypatch.setattr("ckptio.ranks.search._WATCH_S", 0.01)
    store = WatchedStore(store)
    async with asyncio.TaskGroup() as tasks:
        old = tasks.create_task(
            together(join(place(store, 0, process="old"), deadlines=LONG, executor=threads))
        )
        ranks = [tasks.create_task(join(place(store, 1), deadlines=LONG, executor=threads))]
        await store.looked(6)
        new = place(store, 0, process="new")
        ranks.append(tasks.create_task(join(new, deadlines=LONG, executor=threads)))
        await announced(store, 3, meeting=2)
        ranks.append(tasks.create_task(join(place(store, 2), deadlines=LONG, executor=threads)))
        await asyncio.wait(ranks)
        old.cancel()
    groups = sorted((task.result() for task in ranks), key=lambda group: group.rank)
    assert await together(*map(use, groups)) == [3, 3, 3]
    await together(*(group.close() for group in groups))


async def test_a_rank_0_that_dies_before_all_have_come_may_come_again(
    store: Any, threads: Executor
) -> None:
    """Who waited with it waits for the next."""
    store = WatchedStore(store)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        taken = frames.pack_head(frames.Taken(), b"")
        writer.write(taken)
        await writer.drain()
        writer.transport.abort()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        killed = Meeting(process="old", at_s=time.time(), addresses=["127.0.0.1"], port=port)
        leave(store, 2, killed)
        groups = await meet_late(store, threads)
    assert await together(*map(use, groups)) == [2, 2]
    await together(*(group.close() for group in groups))


@contextlib.asynccontextmanager
async def dead_hosts(num_hosts: int = 3) -> AsyncIterator[tuple[list[str], int]]:
    """Have addresses where nobody answers, nor refuses, all with one port."""
    addresses = [f"127.0.0.{2 + n}" for n in range(num_hosts)]
    with contextlib.ExitStack() as sockets:
        port = 0
        for address in addresses:
            silent = sockets.enter_context(socket.socket())
            silent.bind((address, port))
            silent.listen()
            port = silent.getsockname()[1]
        yield addresses, port


async def test_who_knocks_at_a_host_that_has_died_sees_the_new_rank_0(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """Before it has tried all addresses of the old one, which take their time."""
    monkeypatch.setattr("ckptio.ranks.search._HEAD_START_S", 0.01)
    store = WatchedStore(store)
    async with dead_hosts() as (addresses, port):
        leave(store, 2, Meeting(process="old", at_s=1.0, addresses=addresses, port=port))
        groups = await meet_late(store, threads)
    assert await together(*map(use, groups)) == [2, 2]
    await together(*(group.close() for group in groups))


async def test_addresses_that_do_not_answer_keep_from_none_that_does(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """As those of networks that other machines are not on."""
    monkeypatch.setattr("ckptio.ranks.search._HEAD_START_S", 0.01)
    async with dead_hosts() as (addresses, port):
        token = "t"  # noqa: S105  # of which rank 0 has told the store
        leader = Coordinator(2, token, LONG, "h0")
        server = await asyncio.get_running_loop().create_server(leader.guest, "127.0.0.1", port)
        with contextlib.closing(server):  # of its connections, Python 3.12 would wait for the end
            meeting = Meeting(
                process="p", at_s=1.0, addresses=[*addresses, "127.0.0.1"], port=port, token=token
            )
            leave(store, 2, meeting)
            # one after the other they would take longer than that
            soon = Deadlines(peer_s=LONG.peer_s, meet_s=LONG.peer_s / 2)
            group = await join(place(store, 1, 2), deadlines=soon, executor=threads)
            await leader.gather(10)
        assert await together(use(leader), use(group)) == [2, 2]
        await together(leader.close(), group.close())


async def test_an_address_that_is_none_is_as_one_that_does_not_answer(
    store: Any, threads: Executor
) -> None:
    """Python refuses names that Linux takes: of 64 letters, where nobody allows more than 63."""
    first = place(store, 0, 2, host="here", addresses=["n" * 64, "127.0.0.1"])
    second = place(store, 1, 2, host="there")
    groups = await together(
        *(join(each, deadlines=LONG, executor=threads) for each in (first, second))
    )
    assert [group.hosts for group in groups] == [("here", "there")] * 2
    await together(*(group.close() for group in groups))


@pytest.mark.parametrize("deadlines", [SHORT, Deadlines(peer_s=0.4, meet_s=20)])
async def test_a_host_that_has_died_is_waited_for_no_longer_than_ranks_are(
    store: Any, threads: Executor, deadlines: Deadlines
) -> None:
    """However long it may take to answer."""
    async with dead_hosts(1) as (addresses, port):
        leave(store, 2, Meeting(process="p", at_s=time.time(), addresses=addresses, port=port))
        async with asyncio.timeout(10):
            with pytest.raises(PeerLostError, match=r"127\.0\.0\.2: no answer within 0\.[1-5]"):
                await join(place(store, 1, 2), deadlines=deadlines, executor=threads)


async def test_a_last_look_that_is_cut_short_hides_nothing_found_before(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """A knock in little time would say that nobody answered, where another program did."""
    times_s = list[float]()

    async def knock(_group: Member, _connect: object, timeout_s: float) -> str:
        times_s.append(timeout_s)
        if len(times_s) == 1:
            return "another program"
        await asyncio.sleep(timeout_s)
        return f"no answer within {timeout_s:g} s"

    monkeypatch.setattr(Member, "knock", knock)
    leave(store, 2, Meeting(process="p", at_s=time.time(), addresses=["a"], port=9))
    with pytest.raises(PeerLostError, match="a: another program"):
        await join(place(store, 1, 2), deadlines=SHORT, executor=threads)
    assert all(times_s[1:])


async def test_rank_0_is_not_blamed_where_a_rank_cannot_call_it(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """It may be there: this rank has too many files open to see."""

    async def connect(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    leave(store, 2, Meeting(process="p", at_s=time.time(), addresses=["127.0.0.1"], port=9))
    words = "on rank 1: it cannot call rank 0: Too many open files; .*ulimit"
    with pytest.raises(RankError, match=words) as raised:
        await join(place(store, 1, 2), deadlines=SHORT, executor=threads)
    assert not isinstance(raised.value, PeerLostError)


async def test_a_rank_that_is_cancelled_while_it_knocks_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """At several addresses at a time."""
    monkeypatch.setattr("ckptio.ranks.search._HEAD_START_S", 0.01)
    store = WatchedStore(store)
    async with dead_hosts() as (addresses, port), asyncio.TaskGroup() as tasks:
        leave(store, 2, Meeting(process="p", at_s=1.0, addresses=addresses, port=port))
        joining = tasks.create_task(join(place(store, 1, 2), deadlines=LONG, executor=threads))
        await store.looked(5)
        joining.cancel()


async def test_an_address_that_looks_old_is_told_where_nobody_else_comes(
    store: Any, threads: Executor
) -> None:
    """It may be the right one, said before this process began, behind a wall."""
    old = Meeting(process="p", at_s=1.0, addresses=["127.0.0.1"], port=1)
    leave(store, 2, old)
    with pytest.raises(
        PeerLostError, match=r"did not come within 0\.5 s.*reached on port 1"
    ) as told:
        await join(place(store, 1, 2), deadlines=SHORT, executor=threads)
    assert (told.value.ranks, list(told.value.causes)) == ((0,), [0])


async def test_ranks_of_other_worlds_do_not_meet(store: Any, threads: Executor) -> None:
    """What is left of a job of more ranks is not even knocked at."""
    leave(store, 3, Meeting(process="old", at_s=time.time(), addresses=["127.0.0.1"], port=1))
    with pytest.raises(PeerLostError, match=r"rank 0 did not come within 0\.5 s"):
        await join(place(store, 1, 2), deadlines=SHORT, executor=threads)


async def test_engines_that_are_opened_at_a_time_meet(store: Any, threads: Executor) -> None:
    """Each with its like: their order is that of the calls."""
    groups = await together(
        *(
            join(place(store, r, 2), deadlines=LONG, executor=threads)
            for _ in range(3)
            for r in range(2)
        )
    )
    assert [g.nonce for g in groups[::2]] == [g.nonce for g in groups[1::2]]
    assert len({g.nonce for g in groups}) == 3
    assert await together(*map(use, groups)) == [2] * 6
    await together(*(group.close() for group in groups))


@pytest.mark.parametrize("late", [1, 2])
async def test_a_second_engine_does_not_overtake_the_first(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor, late: int
) -> None:
    """Though rank 0 could say sooner where it waits with that one, and ranks come one by one."""
    store, may_answer = WatchedStore(store), threading.Event()
    slow = iter([True])

    def addresses(near: str) -> list[str]:
        if next(slow, False):
            may_answer.wait(10)
        return addresses_towards(near)

    monkeypatch.setattr("ckptio.ranks.join.addresses_towards", addresses)
    async with asyncio.TaskGroup() as tasks:

        def open_two(rank: int) -> list[asyncio.Task[Any]]:
            where = place(store, rank)
            return [
                tasks.create_task(join(where, deadlines=LONG, executor=threads)) for _ in range(2)
            ]

        opened = [*open_two(0), *open_two(3 - late)]
        await store.looked(4)
        may_answer.set()
        opened += open_two(late)
    groups = [task.result() for task in opened]
    assert [g.nonce for g in groups[2:]] == [g.nonce for g in groups[:2]] * 2
    assert await together(*map(use, groups)) == [3] * 6
    await together(*(group.close() for group in groups))


async def test_who_waits_for_an_earlier_engine_does_not_wait_for_ever(
    store: Any, threads: Executor
) -> None:
    """The first may have more time."""
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(join(place(store, 0, 2), deadlines=LONG, executor=threads))
        await asyncio.sleep(0)
        with pytest.raises(RankError, match=r"within 0\.5 s: another one that this process opened"):
            await join(place(store, 0, 2), deadlines=SHORT, executor=threads)
        member = tasks.create_task(join(place(store, 1, 2), deadlines=LONG, executor=threads))
    await together(first.result().close(), member.result().close())


def test_a_process_knows_its_name_and_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same each time; and nothing where the system does not say."""
    assert this_process() == this_process()
    before_s = time.time()
    code = "from ckptio.ranks.board import process_began_s as s; print(s())"
    began_s = float(subprocess.check_output([sys.executable, "-c", code]))
    assert began_s == 0.0 or before_s - 1 < began_s <= time.time()

    def refuse(_: int) -> float:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(time, "clock_gettime", refuse)
    assert process_began_s() == 0.0


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_cancelled_rank_leaves_nothing_open(
    store: Any, threads: Executor, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others need not wait for it."""
    store = WatchedStore(store)
    joining = asyncio.create_task(join(place(store, rank), deadlines=LONG, executor=threads))
    await (announced(store, 3) if rank == 0 else store.looked())
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    monkeypatch.setattr("ckptio.ranks.search._GRACE_S", 0.1)
    if rank == 0:
        with pytest.raises(PeerLostError, match="rank 0 waits no longer: it was cancelled"):
            await join(place(store, 1), deadlines=LONG, executor=threads)


async def test_who_waits_with_a_rank_0_that_is_cancelled_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """And no timer of either goes on."""
    monkeypatch.setattr("ckptio.ranks.search._GRACE_S", 0.1)
    monkeypatch.setattr("ckptio.ranks.search._WATCH_S", 0.01)
    store = WatchedStore(store)
    before = {id(each) for each in gc.get_objects() if isinstance(each, Coordinator | Member)}
    joining = [
        asyncio.create_task(join(place(store, r), deadlines=LONG, executor=threads))
        for r in range(2)
    ]
    await store.looked(6)  # rank 1 waits with it
    joining[0].cancel()
    async with asyncio.timeout(LONG.peer_s / 2):
        with pytest.raises(PeerLostError, match="rank 0 waits no longer: it was cancelled"):
            await joining[1]
    await asyncio.wait(joining)
    del joining
    gc.collect()
    now = [each for each in gc.get_objects() if isinstance(each, Coordinator | Member)]
    assert not [each for each in now if id(each) not in before]


async def test_a_rank_0_that_is_cancelled_as_it_begins_to_listen_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """Nobody knocks at a port behind which nobody is any more."""
    loop = asyncio.get_running_loop()

    def listen(backlog: int) -> socket.socket:
        loop.call_soon_threadsafe(joining.cancel)
        return listen_everywhere(backlog)

    monkeypatch.setattr("ckptio.ranks.join.listen_everywhere", listen)
    joining = asyncio.create_task(join(place(store, 0), deadlines=LONG, executor=threads))
    with pytest.raises(asyncio.CancelledError):
        await joining


async def test_who_calls_as_all_have_come_is_let_go(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """Left neither to Python's collector nor to a handler of the loop's errors."""
    doors, unhandled = list[socket.socket](), list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, said: unhandled.append(said))

    def listen(backlog: int) -> socket.socket:
        doors.append(listen_everywhere(backlog))
        return doors[0]

    async def gather(*_: object) -> None:
        stranger.connect(("127.0.0.1", doors[0].getsockname()[1]))
        await asyncio.sleep(0)

    monkeypatch.setattr("ckptio.ranks.join.listen_everywhere", listen)
    monkeypatch.setattr(Coordinator, "gather", gather)
    with socket.socket() as stranger:
        group = await join(place(store, 0), deadlines=LONG, executor=threads)
        await group.close()
    gc.collect()  # what was left says so now
    assert not unhandled


async def test_a_broken_store_is_said_so(threads: Executor) -> None:
    """What the store said is in the error, and its cause."""

    def fail() -> Any:
        raise RuntimeError("connection to the store was reset")

    with pytest.raises(RankError, match="cannot meet: RuntimeError: connection to the") as caught:
        await join(
            Place(rank=1, world_size=2, group="g", open_store=fail), deadlines=SHORT,
            executor=threads,
        )  # fmt: skip
    assert isinstance(caught.value.__cause__, RuntimeError)


class SilentStore:
    """A store of a process that has died: a call does not come back before it is let go."""

    def __init__(self, store: Any, silent: str) -> None:
        self._store = store
        self._silent = silent
        self.num_asked = 0
        self.is_asked, self.may_fail = threading.Event(), threading.Event()

    def open(self) -> Any:
        self._wait("open")
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._wait(name)
            return getattr(self._store, name)(*args)

        return call

    def _wait(self, name: str) -> None:
        if name == self._silent:
            self.num_asked += 1
            self.is_asked.set()
            self.may_fail.wait(10)
            raise RuntimeError("the store was lost")


@pytest.mark.parametrize(("rank", "silent"), [(0, "open"), (1, "open"), (0, "set"), (1, "check")])
async def test_a_store_that_does_not_answer_is_waited_for_as_ranks_are(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor, rank: int, silent: str
) -> None:
    """Not for as long as the job waits. The thread that hangs keeps nothing from ending."""
    monkeypatch.setattr("ckptio.ranks.store_thread._LEAST_S", 0.05)
    lost = SilentStore(store, silent)
    where = Place(rank=rank, world_size=2, group="g", open_store=lost.open, addresses=[])
    deadlines = Deadlines(peer_s=2, meet_s=0.1)
    with pytest.raises(RankError, match=r"within 0\.1 s.* the job's store does not") as caught:
        await join(where, deadlines=deadlines, executor=threads)
    lost_ranks = [0] if rank == 1 else []
    assert isinstance(caught.value, PeerLostError) == (rank == 1)
    assert list(getattr(caught.value, "ranks", ())) == list(caught.value.causes) == lost_ranks
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("ckptio-store"))
    assert thread.daemon
    lost.may_fail.set()


async def test_a_store_that_was_slow_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all the time there is to meet, but for what can be done without."""
    monkeypatch.setattr("ckptio.ranks.store_thread._LEAST_S", 0.01)
    thread, goes_on = StoreThread(asyncio.get_running_loop().time() + 20), threading.Event()
    with contextlib.closing(thread):
        assert await thread.ask_briefly(goes_on.wait, 10) is None
        assert await thread.ask_briefly(int, "6") is None
        asking = asyncio.create_task(thread.ask(int, "7"))
        await asyncio.sleep(0)
        goes_on.set()
        assert await asking == 7


@pytest.mark.parametrize(("rank", "silent"), [(0, "open"), (1, "open"), (0, "set"), (1, "check")])
async def test_who_is_cancelled_leaves_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor, rank: int, silent: str
) -> None:
    """Soon, however long there was to meet."""
    monkeypatch.setattr("ckptio.ranks.store_thread._LEAST_S", 0.05)
    lost = SilentStore(store, silent)
    where = Place(rank=rank, world_size=2, group="g", open_store=lost.open, addresses=[])
    joining = asyncio.create_task(join(where, deadlines=LONG, executor=threads))
    assert await asyncio.to_thread(lost.is_asked.wait, 10)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert lost.num_asked == 1  # and nobody has waited until it could be asked again
    lost.may_fail.set()


ENV = {
    "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "0"}])
async def test_a_rank_without_others_is_alone(environ: dict[str, str], threads: Executor) -> None:
    """No process group, and no word of torchrun: a world of one."""
    ranks = await ranks_of(environ=environ, deadlines=SHORT, executor=threads)
    assert isinstance(ranks, SoloRanks)
    assert ranks.hosts == (this_host(),)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"RANK": "2"}, "WORLD_SIZE is 2 and RANK is '2'; .*set RANK from 0 to 1"),
        ({"RANK": "-1"}, "WORLD_SIZE is 2 and RANK is '-1'; .*set RANK from 0 to 1"),
        ({"RANK": None}, "RANK is None"),
        ({"RANK": "one"}, "RANK must be an int, not 'one'"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, "init_process_group first, or pass ranks='s"),
        ({"TORCHELASTIC_USE_AGENT_STORE": None}, "there are 2 ranks and no store"),
        ({"MASTER_ADDR": None}, "no store where they can meet"),
        ({"MASTER_PORT": None}, "no store where they can meet"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535, not '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be from 1 to 65535, not '65536'"),
    ],
)
def test_several_ranks_that_cannot_meet_are_an_error(
    changes: dict[str, str | None], problem: str
) -> None:
    """Rather than n ranks that write n checkpoints to one path."""
    environ = {k: v for k, v in {**ENV, **changes}.items() if v is not None}
    with pytest.raises(ConfigError, match=problem):
        find_place(None, environ, timeout_s=1)


async def test_ranks_meet_through_the_store_of_torchrun(threads: Executor) -> None:
    """Without a process group; every rank is a client of the agent's store."""
    agent = torch_store.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {**ENV, "MASTER_PORT": str(agent.port)}
    environs = [
        # two agents, of which one has had a failure: each counts its own
        {**common, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(rank)}
        for rank in range(2)
    ]
    groups = await together(
        *(ranks_of(environ=e, deadlines=LONG, executor=threads) for e in environs)
    )
    assert await together(*(use(group) for group in groups)) == [2, 2]
    await together(*(group.close() for group in groups))


def test_jobs_do_not_meet_in_a_store_that_they_share() -> None:
    """Each has names of its own there, by the id of its run."""
    agent = torch_store.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {**ENV, "MASTER_PORT": str(agent.port)}
    stores = []
    for job in "ab":
        place = find_place(None, {**common, "TORCHELASTIC_RUN_ID": job}, timeout_s=5)
        assert place is not None
        stores.append(place.open_store())
        stores[-1].set("key", job)
    assert [store.get("key") for store in stores] == [b"a", b"b"]


class OneConnection(dist.Store):  # type: ignore[misc, name-defined]  # torch says so to nobody
    """A store that torch cannot clone, as it can a `FakeStore` from 2.15 on."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value


def test_a_group_is_met_by_its_ranks_in_whatever_store_the_job_has() -> None:
    """Equal ones by one name, and no two others; all ranks together are the world."""
    store = OneConnection()
    dist.init_process_group("fake", store=store, rank=1, world_size=3)
    found = set()
    try:
        for ranks in (None, [0, 1, 2], [0, 1], [1, 0], [1, 2]):
            place = find_place(ranks and dist.new_group(ranks), {}, timeout_s=1)
            assert place is not None
            place.open_store().set(place.group, "there")
            found.add((place.group, place.rank, place.world_size))
    finally:
        dist.destroy_process_group()
    assert sorted(place[1:] for place in found) == [(0, 2), (1, 2), (1, 3)]
    assert len({name for name, *_ in found}) == len(store.values) == 3


def test_what_is_no_process_group_is_refused() -> None:
    """As is a group that this rank is not in, which torch shows as an object of its own."""
    for group in ("group", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ConfigError, match=f"group that this rank is in, not {group!r}"):
            find_place(group, {}, timeout_s=1)


def test_a_process_group_that_was_destroyed_is_refused(tmp_path: Path) -> None:
    """Before another one is initialised, and when that has the ranks that it had."""

    def initialise(name: str) -> None:
        where = f"file://{tmp_path}/{name}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)

    def require_refused() -> None:
        for group in groups:
            with pytest.raises(ConfigError, match="that torch does not know; was it destroyed"):
                find_place(group, {}, timeout_s=1)

    initialise("before")
    groups = dist.group.WORLD, dist.new_group([0])
    dist.destroy_process_group()
    require_refused()
    initialise("after")
    try:
        require_refused()
    finally:
        dist.destroy_process_group()


async def test_a_process_group_of_one_is_alone(tmp_path: Path, threads: Executor) -> None:
    """Initialised or given, in whatever world torchrun speaks of."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        for group in (None, dist.group.WORLD):
            ranks = await ranks_of(group, environ=ENV, deadlines=SHORT, executor=threads)
            assert isinstance(ranks, SoloRanks)
    finally:
        dist.destroy_process_group()


def test_addresses_of_this_machine_are_no_loopback() -> None:
    """Others would reach themselves under one; a peer that does not exist does not matter."""
    for peer in ("", "127.0.0.1", "no-such-host.invalid"):
        assert not any(a.startswith("127.") or a == "::1" for a in addresses_towards(peer))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        assert this_host().endswith(file.read(8))


@pytest.mark.parametrize("name", ["n" * 64, "a..b", "n\udcff"])
def test_a_name_that_nobody_can_look_up_is_no_address(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep others from being found: Linux calls a machine by any bytes."""
    known = addresses_towards("127.0.0.2")
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert set(addresses_towards(name)) <= set(known)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("büro 1\n", "b-ro-1-"),
        ("", "localhost"),
        ("n" * 300, "n" * 200),
        ("gpu-17.site", "gpu-17.site"),
    ],
)
def test_a_host_has_a_name_that_a_manifest_takes(
    given: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever somebody has called it: nobody loses a checkpoint for the name of a machine."""
    monkeypatch.setattr(socket, "gethostname", lambda: given)
    host = this_host()
    assert host.startswith(name)
    assert host.removeprefix(name)[:1] in {"", "-"}
    manifest = encode_manifest(
        writer="1", save_id="0" * 32, created="", block_nbytes=4096, files=[],
        tensors=b"[]", tree=b"0", hosts=[host, "other"],
    )  # fmt: skip
    assert decode_manifest(manifest).hosts[0] == host


async def test_a_rank_0_that_may_not_open_a_file_for_each_rank_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """Nobody waits for ranks that call in vain; the others hear why."""
    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_open + 1, num_open + 1))
    errors = await together(
        *(join(place(store, r), deadlines=LONG, executor=threads) for r in range(3))
    )
    for error in errors:
        assert isinstance(error, RankError)
        assert "to each of 2 other ranks" in str(error)
        assert "raise that limit" in str(error)
    assert [type(error) for error in errors] == [RankError, PeerLostError, PeerLostError]


class FullDoor(socket.socket):
    """No file can be opened, some times, for whoever calls behind the first."""

    num_tries = num_refusals = 0

    def accept(self) -> tuple[socket.socket, object]:
        found = super().accept() if not 1 <= self.num_tries <= self.num_refusals else None
        self.num_tries += 1
        if found is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return found


@pytest.mark.parametrize("num_refusals", [2, 10**9])
async def test_rank_0_says_that_it_could_not_answer_others(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    store: Any,
    threads: Executor,
    num_refusals: int,
) -> None:
    """Once, and to all, if that does not pass: who called in vain has not stayed away."""

    def listen(backlog: int) -> socket.socket:
        door = FullDoor()
        door.bind(("127.0.0.1", 0))
        door.listen(backlog)
        door.num_refusals = num_refusals
        return door

    monkeypatch.setattr("ckptio.ranks.join.listen_everywhere", listen)
    monkeypatch.setattr("ckptio.ranks.join._AGAIN_S", 0.001)
    deadlines = SHORT if num_refusals > 2 else LONG
    ended = await together(
        *(join(place(store, r), deadlines=deadlines, executor=threads) for r in range(3))
    )
    assert [record.name for record in caplog.records] == ["ckptio"]
    if num_refusals > 2:
        assert [type(error) for error in ended] == [RankError, PeerLostError, PeerLostError]
        assert ended[1].ranks == ended[2].ranks == (0,)
        words = "on rank 0: it could not answer ranks that called: Too many open files"
        assert words in str(ended[0])
        assert any(words in str(error) for error in ended[1:])  # whoever it could answer
    else:
        assert await together(*(use(group) for group in ended)) == [3, 3, 3]
        await together(*(group.close() for group in ended))


async def test_nobody_else_is_blamed_where_rank_0_could_answer_in_the_end(
    monkeypatch: pytest.MonkeyPatch, store: Any, threads: Executor
) -> None:
    """Who has not come has not come."""

    def listen(backlog: int) -> socket.socket:
        door = FullDoor()
        door.bind(("127.0.0.1", 0))
        door.listen(backlog)
        door.num_refusals = 2
        return door

    monkeypatch.setattr("ckptio.ranks.join.listen_everywhere", listen)
    monkeypatch.setattr("ckptio.ranks.join._AGAIN_S", 0.001)
    ended = await together(
        *(join(place(store, r, 4), deadlines=SHORT, executor=threads) for r in range(3))
    )
    assert [error.ranks for error in ended] == [(3,)] * 3
