from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from ckptio.config import KiB, MiB
from ckptio.errors import PeerLostError
from ckptio.exchange.gloo import (
    _LAST_TAG,
    GlooLink,
    StoreAddress,
    gloo_link,
    is_available,
    serve_store,
)
from ckptio.staging.pool import Slab

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 20.0


def test_gloo_is_there() -> None:
    """On Linux it comes with every build of torch: nothing below is skipped."""
    assert is_available()


def link_of(
    rank: int, num_ranks: int, address: StoreAddress, timeout_s: float = TIMEOUT_S
) -> AbstractAsyncContextManager[GlooLink]:
    return gloo_link(rank, num_ranks, address, LOOPBACK, timeout_s, peer_timeout_s=TIMEOUT_S)


@contextlib.asynccontextmanager
async def links(num_ranks: int) -> AsyncIterator[list[GlooLink]]:
    """Open the links of all ranks, in one process; what carries them are real sockets."""
    async with serve_store(LOOPBACK, TIMEOUT_S) as address:
        stack = contextlib.AsyncExitStack()
        opened: dict[int, GlooLink] = {}

        async def hold(rank: int, until: asyncio.Event, ready: asyncio.Barrier) -> None:
            async with link_of(rank, num_ranks, address) as link:
                opened[rank] = link
                await ready.wait()
                await until.wait()

        async with stack, asyncio.TaskGroup() as group:
            until, ready = asyncio.Event(), asyncio.Barrier(num_ranks + 1)
            for rank in range(num_ranks):
                group.create_task(hold(rank, until, ready))
            await ready.wait()
            try:
                yield [opened[rank] for rank in range(num_ranks)]
            finally:
                until.set()


@contextlib.contextmanager
def slab_of(data: bytes = b"", nbytes: int = 0) -> Iterator[Slab]:
    slab = Slab(max(4 * KiB, -(-max(len(data), nbytes) // 4096) * 4096))
    slab.view[: len(data)] = data
    with contextlib.closing(slab):
        yield slab


async def take(link: GlooLink, rank: int, tag: int, nbytes: int) -> bytes:
    with slab_of(nbytes=nbytes) as room:
        async with link.receive(rank, tag, room, nbytes) as slab:
            assert slab is room
            return bytes(slab.view[:nbytes])


async def give(link: GlooLink, ranks: list[int], tag: int, data: bytes) -> None:
    with slab_of(data) as slab:
        await link.send(ranks, tag, slab, len(data))


async def test_messages_find_their_way_by_their_tags() -> None:
    """To several takers, from several senders at a time, in whatever order they are taken."""
    async with links(3) as (a, b, c):
        data = {tag: os.urandom(1 + tag * 300 * KiB) for tag in range(5)}
        async with asyncio.TaskGroup() as group:
            for tag in range(5):
                group.create_task(give(a, [1, 2], tag, data[tag]))
                group.create_task(give(b, [0], tag, data[tag][::-1]))
            takes = [
                group.create_task(take(link, 0, tag, len(data[tag])))
                for link in (b, c)
                for tag in (3, 0, 4, 2, 1)
            ]
            back = [group.create_task(take(a, 1, tag, len(data[tag]))) for tag in (4, 1, 0, 2, 3)]
        assert [t.result() for t in takes] == [data[tag] for tag in (3, 0, 4, 2, 1)] * 2
        assert [t.result() for t in back] == [data[tag][::-1] for tag in (4, 1, 0, 2, 3)]


async def test_a_cancelled_wait_ends_at_once_and_breaks_the_link() -> None:
    """Its memory is free by then, and whoever waits for the rank hears of it."""
    async with links(3) as (a, b, c):
        with slab_of(nbytes=MiB) as room:

            async def wait_for_ever() -> None:
                async with b.receive(0, 7, room, MiB):
                    raise AssertionError("nothing was sent")

            waiting = asyncio.create_task(wait_for_ever())
            others = [
                asyncio.create_task(take(c, 1, 8, 10)),
                asyncio.create_task(take(a, 1, 9, 10)),
            ]
            while len(b._threads._threads) < 1:
                await asyncio.sleep(0)
            waiting.cancel()
            async with asyncio.timeout(TIMEOUT_S / 2):
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                with pytest.raises(PeerLostError, match="broken off before"):
                    await give(b, [0], 1, b"x")
                for other in others:
                    with pytest.raises(PeerLostError, match="exchange with rank 1") as caught:
                        await other
                    assert caught.value.ranks == (1,)


async def test_one_lost_taker_does_not_leave_the_slab_with_another() -> None:
    """A send to two, of which one has gone: it ends for both before it raises."""
    async with links(3) as (a, b, _):
        b._break_off()
        with slab_of(b"x" * MiB) as slab:
            async with asyncio.timeout(TIMEOUT_S / 2):
                with pytest.raises(PeerLostError, match="exchange with rank 1 broke"):
                    await a.send([1, 2], 1, slab, MiB)


async def test_what_begins_behind_a_failure_says_what_failed() -> None:
    """It may end before the failure is told, which waits for those that it has stopped."""
    async with links(2) as (a, b):
        b._break_off()
        with pytest.raises(PeerLostError) as first:
            await give(a, [1], 1, b"x" * MiB)
        a._break_off()
        with pytest.raises(PeerLostError, match=r"^the exchange with rank 1 broke off") as next_one:
            await give(a, [1], 2, b"x")
        assert str(next_one.value) == str(first.value)


class FakeGroup:
    """Loses rank 1 at once; what goes to another rank ends when that is said.

    What another rank is to send ends when the link is broken.
    """

    def __init__(self, *, knows_it: bool = False) -> None:
        self.ends, self.breaks = threading.Event(), threading.Event()
        self._knows_it = knows_it
        self.num_begun = 0

    def send(self, _: object, rank: int, __: int) -> Any:
        def lose(_: object) -> None:
            raise RuntimeError("rank 1 has gone")

        if rank == 1 and self._knows_it:
            lose(0)
        self.num_begun += 1
        return types.SimpleNamespace(wait=lose if rank == 1 else lambda _: self.ends.wait())

    def recv(self, _: object, __: int, tag: int) -> Any:
        def end(_: object) -> None:
            if tag == _LAST_TAG:
                self.breaks.set()
            self.breaks.wait()
            raise RuntimeError("the connection was closed")

        self.num_begun += 1
        return types.SimpleNamespace(wait=end)


async def test_so_it_does_while_the_failure_waits_for_the_others() -> None:
    """It is the first that the exchange hears of."""
    group = FakeGroup()
    link = GlooLink(0, 3, group)
    first = asyncio.create_task(give(link, [1, 2], 1, b"x"))
    try:
        while not link._is_broken:
            await asyncio.sleep(0)
        with pytest.raises(PeerLostError, match="with rank 1 broke off: rank 1 has"):
            await give(link, [2], 2, b"x")
        assert not first.done()
    finally:
        group.ends.set()
    with pytest.raises(PeerLostError, match="rank 1 has gone"):
        await first
    await link.close()


async def test_so_does_what_the_failure_has_ended() -> None:
    """It ends before the failure is told, of which the rank that it waited for knows nothing."""
    group = FakeGroup()
    link = GlooLink(0, 3, group)
    ended = asyncio.create_task(take(link, 2, 2, 1))
    while not group.num_begun:
        await asyncio.sleep(0)
    first = asyncio.create_task(give(link, [1, 2], 1, b"x"))
    try:
        with pytest.raises(PeerLostError, match="with rank 1 broke off: rank 1 has") as raised:
            await ended
        assert raised.value.ranks == (1,)
        assert not first.done()
    finally:
        group.ends.set()
    with pytest.raises(PeerLostError, match="rank 1 has gone"):
        await first
    await link.close()


async def test_what_cannot_begin_ends_what_began_with_it() -> None:
    """A send to two, of which gloo knows that one has gone: the other one has the memory, too."""
    group = FakeGroup(knows_it=True)
    link = GlooLink(0, 3, group)
    sending = asyncio.create_task(give(link, [2, 1], 1, b"x"))
    try:
        while not (link._is_broken or sending.done()):
            await asyncio.sleep(0)
        assert not sending.done()
    finally:
        group.ends.set()
    with pytest.raises(PeerLostError, match="with rank 1 broke off: rank 1 has gone") as raised:
        await sending
    assert raised.value.ranks == (1,)
    await link.close()


def has_gone(link: GlooLink, rank: int) -> bool:
    """Whether gloo knows it, and begins nothing with the rank any more."""
    assert link._group is not None
    try:
        link._group.send([torch.empty(1, dtype=torch.uint8)], rank, _LAST_TAG)
    except RuntimeError:
        return True
    return False


async def test_a_wait_can_be_cancelled_though_another_rank_has_gone() -> None:
    """No wait for that one runs out of time: it ends at once, and ends no other."""
    async with links(3) as (a, b, c):
        waiting = asyncio.create_task(take(a, 2, 7, 10))
        while len(a._threads._threads) < 1:
            await asyncio.sleep(0)
        b._break_off()
        while not has_gone(a, 1):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,), timeout=TIMEOUT_S / 2)
        has_ended = waiting.done()
        with contextlib.suppress(PeerLostError):  # so that it ends in any case
            await give(c, [0], 7, bytes(10))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert has_ended


async def test_a_rank_is_not_blamed_for_what_a_cancellation_ended() -> None:
    """That ends all other waits, too: none of them broke the exchange off."""
    async with links(2) as (a, _):
        waits = [asyncio.create_task(take(a, 1, tag, 10)) for tag in (7, 8)]
        while len(a._threads._threads) < len(waits):
            await asyncio.sleep(0)
        waits[0].cancel()
        async with asyncio.timeout(TIMEOUT_S / 2):
            await asyncio.wait(waits)
        with pytest.raises(PeerLostError, match="broken off before") as raised:
            await waits[1]
        assert raised.value.ranks == ()
        with pytest.raises(PeerLostError, match="broken off before"):
            await give(a, [1], 1, b"x")


class HalfWay(FakeGroup):
    """Has messages under way: gloo does not say that they end when the connections are closed."""

    def send(self, _: object, rank: int, __: int) -> Any:
        del rank
        self.num_begun += 1
        return types.SimpleNamespace(wait=lambda _: self.ends.wait())

    def recv(self, _: object, __: int, tag: int) -> Any:
        def end(_: object) -> None:
            if tag == _LAST_TAG:
                raise RuntimeError("Timed out waiting 1ms for recv operation to complete")
            self.ends.wait()

        self.num_begun += tag != _LAST_TAG
        return types.SimpleNamespace(wait=end)


async def test_who_is_in_the_middle_of_a_message_ends_with_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it was cancelled, or another was; its memory can be given back."""
    monkeypatch.setattr("ckptio.exchange.gloo._ENDS_WITHIN_S", 0.05, raising=False)
    group = HalfWay()
    link = GlooLink(0, 3, group)
    transfers = [
        asyncio.create_task(take(link, 1, 1, 10)),
        asyncio.create_task(give(link, [1, 2], 2, b"x")),
    ]
    while group.num_begun < 3:
        await asyncio.sleep(0)
    transfers[0].cancel()
    try:
        done, _ = await asyncio.wait(transfers, timeout=TIMEOUT_S / 4)
        assert len(done) == len(transfers)  # and their slabs are closed
        with pytest.raises(asyncio.CancelledError):
            await transfers[0]
        with pytest.raises(PeerLostError, match="broken off before"):
            await transfers[1]
        await link.close()
    finally:
        group.ends.set()


async def test_ranks_that_do_not_come_are_not_waited_for_for_ever() -> None:
    """The error says where they were to meet."""
    async with serve_store(LOOPBACK, 1.0) as address:
        with pytest.raises(PeerLostError, match=f"{LOOPBACK}:{address.port}"):
            async with link_of(0, 2, address, 1.0):
                raise AssertionError("there is nobody else")


async def opening(rank: int, num_ranks: int, address: StoreAddress) -> None:
    async with link_of(rank, num_ranks, address):
        raise AssertionError("there is nobody else")


async def test_who_waits_for_a_rank_that_died_can_be_cancelled() -> None:
    """As a load is when that is noticed, or by its caller: at once, and no thread is left."""
    async with serve_store(LOOPBACK, TIMEOUT_S) as address:
        waiting = [asyncio.create_task(opening(rank, 3, address)) for rank in (0, 1)]
        store = c10d.TCPStore(LOOPBACK, address.port, is_master=False, wait_for_workers=False)
        async with asyncio.timeout(TIMEOUT_S / 4):
            while store.add("here", 0) < len(waiting):
                await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=TIMEOUT_S / 4)
        assert all(task.done() for task in waiting)
        for task in waiting:
            with pytest.raises(asyncio.CancelledError):
                await task
    assert not any(thread.name.startswith("ckptio-store") for thread in threading.enumerate())


async def test_who_waits_for_a_store_that_is_frozen_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the process is that has it. The thread that hangs keeps nothing from ending."""
    monkeypatch.setattr("ckptio.ranks.store_thread._LEAST_S", 0.05)
    begun, answers = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait_for_an_answer(*_: object, **__: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        answers.wait(TIMEOUT_S)
        raise RuntimeError("the store was lost")

    monkeypatch.setattr(c10d, "TCPStore", wait_for_an_answer)
    waiting = asyncio.create_task(opening(1, 2, StoreAddress(LOOPBACK, 1)))
    async with asyncio.timeout(TIMEOUT_S / 4):
        await begun.wait()
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("ckptio-store"))
    assert thread.daemon
    waiting.cancel()
    await asyncio.wait((waiting,), timeout=TIMEOUT_S / 4)
    has_ended = waiting.done()
    answers.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert has_ended
    thread.join()
