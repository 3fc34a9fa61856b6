from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.config import KiB
from ckptio.errors import PeerLostError
from ckptio.exchange.shared import SharedLink, shared_link
from tests.exchange.traffic import NUM_MESSAGES, cross

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

SLAB = 64 * KiB
TIMEOUT_S = 20.0


@contextlib.asynccontextmanager
async def links(num_ranks: int, num_slabs: int = 2) -> AsyncIterator[list[SharedLink]]:
    """Open the links of all ranks, in one process; sockets and memory are as between several."""
    token = uuid.uuid4().hex
    opened: dict[int, SharedLink] = {}
    until, ready = asyncio.Event(), asyncio.Barrier(num_ranks + 1)

    async def hold(rank: int) -> None:
        async with shared_link(
            rank, num_ranks, token, num_slabs=num_slabs, slab_nbytes=SLAB, timeout_s=TIMEOUT_S
        ) as link:
            opened[rank] = link
            await ready.wait()
            await until.wait()

    before = set(os.listdir("/proc/self/fd"))
    async with asyncio.TaskGroup() as group:
        for rank in range(num_ranks):
            group.create_task(hold(rank))
        await ready.wait()
        try:
            yield [opened[rank] for rank in range(num_ranks)]
        finally:
            until.set()
    assert set(os.listdir("/proc/self/fd")) <= before


async def give(link: SharedLink, ranks: Sequence[int], tag: int, data: bytes, slot: int) -> None:
    slab = link.slabs[slot]
    slab.view[: len(data)] = data
    await link.send(ranks, tag, slab, len(data))


async def take(link: SharedLink, rank: int, tag: int, nbytes: int) -> bytes:
    async with link.receive(rank, tag, None, nbytes) as slab:
        return bytes(slab.view[:nbytes])


async def test_messages_find_their_way_by_their_tags() -> None:
    """To several takers, from several senders at a time, in whatever order they are taken."""

    async def give_of_its_slab(link: SharedLink, ranks: list[int], tag: int, data: bytes) -> None:
        await give(link, ranks, tag, data, tag)

    async with links(3, num_slabs=NUM_MESSAGES) as opened:
        await cross(opened, give_of_its_slab, take, 10 * KiB)


async def test_a_slab_is_the_senders_again_when_all_have_looked() -> None:
    """Not before: takers look at the very memory."""
    async with links(3) as (a, b, c):
        sending = asyncio.create_task(give(a, [1, 2], 1, b"first", 0))
        async with b.receive(0, 1, None, 5) as slab:
            assert await take(c, 0, 1, 5) == b"first"
            while not a._taken[2, 1].done():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not sending.done()
            a.slabs[0].view[:5] = b"other"
            assert bytes(slab.view[:5]) == b"other"
        await sending


@pytest.mark.parametrize("takes", [True, False])
async def test_a_cancelled_wait_breaks_the_link(*, takes: bool) -> None:
    """Whoever waits for the rank hears of it at once."""
    async with links(3) as (a, b, c):
        waiting = asyncio.create_task(take(b, 0, 7, 10) if takes else give(b, [0], 7, b"x", 1))
        others = [asyncio.create_task(take(c, 1, 8, 10)), asyncio.create_task(take(a, 1, 9, 10))]
        giving = asyncio.create_task(give(a, [1], 3, b"x", 0))
        waits = b._offers if takes else b._taken
        while (0, 3) not in b._offers or (0, 7) not in waits or (1, 8) not in c._offers:
            await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(TIMEOUT_S / 2):
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(PeerLostError, match="exchange with rank 0"):
                await give(b, [0], 1, b"x", 0)
            for other in (*others, giving):
                with pytest.raises(PeerLostError, match="exchange with rank"):
                    await other
            with pytest.raises(PeerLostError, match="exchange with rank 0"):
                await take(b, 0, 1, 1)


async def test_what_is_not_what_was_planned_is_refused() -> None:
    """Another size than expected: the plans of the ranks differ."""
    async with links(2) as (a, b):
        giving = asyncio.create_task(give(a, [1], 1, b"12345", 0))
        with pytest.raises(PeerLostError, match="something else than was planned"):
            await take(b, 0, 1, 4)
        with pytest.raises(PeerLostError):
            await giving


async def test_ranks_that_do_not_come_are_named() -> None:
    """And nothing is left open."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerLostError, match="did not come") as caught:
        async with shared_link(
            1, 3, uuid.uuid4().hex, num_slabs=1, slab_nbytes=SLAB, timeout_s=0.2
        ):
            raise AssertionError("there is nobody else")
    assert caught.value.ranks == (0, 2)
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("does", ["stay", "leave", "say no more", "hand one", "hand two"])
async def test_a_stranger_at_the_door_does_no_harm(does: str) -> None:
    """Who connects and says nothing, or nonsense, is let go; ranks that come later are taken."""
    token = uuid.uuid4().hex

    async def hold(rank: int) -> None:
        async with shared_link(
            rank, 2, token, num_slabs=1, slab_nbytes=SLAB, timeout_s=TIMEOUT_S
        ) as link:
            if rank:
                await give(link, [0], 1, b"hello", 0)
            else:
                assert await take(link, 1, 1, 5) == b"hello"

    first = asyncio.create_task(hold(0))
    with socket.socket(socket.AF_UNIX) as stranger:
        while stranger.connect_ex(f"\0ckptio-{token}-0"):
            await asyncio.sleep(0)
        if does.startswith("hand"):  # what cannot be mapped, or is too much: no limit of this rank
            ends = os.pipe()
            said, handed = (b"nonsense" * 2, ends[:1]) if does == "hand one" else (bytes(16), ends)
            socket.send_fds(stranger, [said], handed)
            for end in ends:
                os.close(end)
            for _ in range(10):
                await asyncio.sleep(0)
        elif does != "stay":
            stranger.sendall(b"nonsense")
            stranger.shutdown(socket.SHUT_WR)
        if does == "leave":
            stranger.close()
        async with asyncio.timeout(TIMEOUT_S / 2), asyncio.TaskGroup() as group:
            group.create_task(hold(1))
            await first


@pytest.mark.parametrize("frozen", [0, 1, 3])
async def test_a_rank_that_is_called_and_says_nothing_alone_is_named(frozen: int) -> None:
    """Whoever waits for it meets the others meanwhile, and they meet that one."""
    token = uuid.uuid4().hex

    async def missed_by(rank: int) -> Sequence[int]:
        with pytest.raises(PeerLostError, match="did not come") as caught:
            async with shared_link(
                rank, 4, token, num_slabs=1, slab_nbytes=SLAB, timeout_s=TIMEOUT_S / 10
            ):
                raise AssertionError("not all have come")
        return caught.value.ranks

    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"\0ckptio-{token}-{frozen}")
        door.listen(4)
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(missed_by(rank)) for rank in range(4) if rank != frozen]
    assert [task.result() for task in waiting] == [(frozen,)] * 3


async def test_who_finds_others_waiting_at_a_full_door_comes_again() -> None:
    """Nothing that did not even get into its queue is taken for a connection."""
    token = uuid.uuid4().hex

    async def come() -> None:
        async with shared_link(1, 2, token, num_slabs=1, slab_nbytes=SLAB, timeout_s=TIMEOUT_S):
            raise AssertionError("nobody has answered")

    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as stranger:
        door.bind(f"\0ckptio-{token}-0")
        door.listen(0)
        stranger.connect(f"\0ckptio-{token}-0")
        coming = asyncio.create_task(come())
        for _ in range(10):
            await asyncio.sleep(0)
        door.accept()[0].close()
        door.settimeout(TIMEOUT_S)
        guest, _ = await asyncio.to_thread(door.accept)
        with guest:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await coming


async def test_ranks_meet_though_a_user_has_too_many_descriptors_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the ranks of one machine have, if they are many: each sends its memory to all others."""
    send, receive, under_way = socket.send_fds, socket.recv_fds, list[int]()

    def send_one(connection: socket.socket, *what: Any) -> int:
        if under_way:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        under_way.append(connection.fileno())
        return send(connection, *what)

    def receive_one(connection: socket.socket, *sizes: int) -> Any:
        under_way.clear()
        return receive(connection, *sizes)

    monkeypatch.setattr(socket, "send_fds", send_one)
    monkeypatch.setattr(socket, "recv_fds", receive_one)
    async with asyncio.timeout(TIMEOUT_S / 2), links(3) as opened:
        assert [link.peers for link in opened] == [{1, 2}, {0, 2}, {0, 1}]


async def test_no_rank_is_blamed_where_too_many_files_are_open() -> None:
    """It has come: this rank cannot take its memory, and does not wait for it."""
    token, limits = uuid.uuid4().hex, resource.getrlimit(resource.RLIMIT_NOFILE)

    async def come() -> None:
        async with shared_link(1, 2, token, num_slabs=1, slab_nbytes=SLAB, timeout_s=TIMEOUT_S):
            raise AssertionError("nothing was taken")

    with socket.socket(socket.AF_UNIX) as door, contextlib.ExitStack() as restoring:
        door.bind(f"\0ckptio-{token}-0")
        door.listen()
        coming = asyncio.create_task(come())
        for _ in range(10):
            await asyncio.sleep(0)
        guest, _ = door.accept()
        restoring.enter_context(guest)
        restoring.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        socket.send_fds(guest, [bytes(16)], [door.fileno()])
        with pytest.raises(OSError, match="Too many open files") as caught:
            await coming
        assert not isinstance(caught.value, PeerLostError)


async def test_who_comes_to_the_door_as_it_closes_is_let_go() -> None:
    """No connection is left to Python's collector, nor to a handler of the loop's errors."""
    token, is_over = uuid.uuid4().hex, asyncio.Event()
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: unhandled.append(said))

    async def hold(rank: int) -> None:
        async with shared_link(rank, 2, token, num_slabs=1, slab_nbytes=SLAB, timeout_s=TIMEOUT_S):
            is_over.set()

    async def knock() -> None:
        with contextlib.ExitStack() as strangers:
            while not is_over.is_set():
                stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
                stranger.settimeout(0)
                stranger.connect_ex(f"\0ckptio-{token}-0")
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for step in (hold(0), hold(1), knock()):
            group.create_task(step)
    gc.collect()  # what was left says so now
    assert not unhandled
