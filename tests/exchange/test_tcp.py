from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import select
import selectors
import socket
import struct
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.config import KiB, MiB
from ckptio.errors import PeerLostError
from ckptio.exchange.door import hello
from ckptio.exchange.ends import Address
from ckptio.exchange.tcp import TcpLink, listening, tcp_link
from ckptio.staging.pool import Slab
from tests.exchange.traffic import cross

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 20.0
TOKEN = "0123456789abcdef" * 2
#: More than the sockets of a connection hold.
HUGE = 64 * MiB


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def address_of(listener: socket.socket, host: str = LOOPBACK) -> Address:
    return Address(host, listener.getsockname()[1])


def has_ipv6() -> bool:
    """Whether there is a loopback interface of IPv6: Python's own answer is about sockets alone."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


def watched() -> dict[int, int]:
    """Tell for which descriptors the loop waits, and for what."""
    loop: Any = asyncio.get_running_loop()
    return {key.fd: key.events for key in loop._selector.get_map().values()}


def timers() -> list[asyncio.TimerHandle]:
    """Give what the loop has yet to call at some time."""
    loop: Any = asyncio.get_running_loop()
    return [timer for timer in loop._scheduled if not timer.cancelled()]


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """See that a test leaves nothing behind, and that no error went to the loop or was lost."""
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: unhandled.append(said))
    before, waits = descriptors(), watched().keys()
    yield
    gc.collect()  # what nobody has heard of says so
    assert descriptors() <= before
    assert watched().keys() == waits
    assert not timers()
    assert not unhandled


@contextlib.asynccontextmanager
async def links(num_ranks: int, host: str = LOOPBACK) -> AsyncIterator[list[TcpLink]]:
    """Open the links of all ranks, in one process; what carries them are real sockets."""
    async with contextlib.AsyncExitStack() as stack:
        doors = [stack.enter_context(listening(num_ranks)) for _ in range(num_ranks)]
        addresses = [address_of(door, host) for door in doors]
        yield [
            await stack.enter_async_context(
                tcp_link(rank, addresses, TOKEN, door, timeout_s=TIMEOUT_S)
            )
            for rank, door in enumerate(doors)
        ]
        assert not any(events & selectors.EVENT_WRITE for events in watched().values())
        assert not timers()


@contextlib.contextmanager
def slab_of(data: bytes = b"", nbytes: int = 0) -> Iterator[Slab]:
    """Lend a slab, and see that nothing refers to its memory afterwards."""
    slab = Slab(max(4 * KiB, -(-max(len(data), nbytes) // 4096) * 4096))
    slab.view[: len(data)] = data
    try:
        yield slab
    finally:
        slab.close()
        assert slab._map.closed


async def take(link: TcpLink, rank: int, tag: int, nbytes: int) -> bytes:
    with slab_of(nbytes=nbytes) as room:
        async with link.receive(rank, tag, room, nbytes) as slab:
            assert slab is room
            return bytes(slab.view[:nbytes])


async def give(link: TcpLink, ranks: list[int], tag: int, data: bytes) -> None:
    with slab_of(data) as slab:
        await link.send(ranks, tag, slab, len(data))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
async def test_messages_find_their_way_by_their_tags(host: str) -> None:
    """To several takers, from several senders at a time, in whatever order they are taken."""
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with links(3, host) as opened:
        await cross(opened, give, take, 300 * KiB)


async def test_a_message_without_room_keeps_no_other_waiting() -> None:
    """It is offered first, and is more than the sockets take: it goes when it is asked for."""
    huge = os.urandom(MiB) * (HUGE // MiB)
    async with links(2) as (a, b):
        first = asyncio.create_task(give(a, [1], 1, huge))
        second = asyncio.create_task(give(a, [1], 2, b"small"))
        assert await take(b, 0, 2, 5) == b"small"
        await second
        assert not first.done()
        assert await take(b, 0, 1, HUGE) == huge
        await first


async def test_what_was_asked_for_goes_as_soon_as_it_is_there() -> None:
    """The taker is mostly first: the sender still reads."""
    async with links(2) as (a, b):
        taking = asyncio.create_task(take(b, 0, 1, 5))
        await until(lambda: 1 in a._outlets and bool(a._outlets[1]._asked))
        await give(a, [1], 1, b"small")
        assert await taking == b"small"


async def test_a_slab_is_the_senders_again_when_all_of_it_has_gone() -> None:
    """And not before: what is still to go is read from it."""
    async with links(3) as (a, b, c):
        with slab_of(nbytes=HUGE) as slab:
            sending = asyncio.create_task(a.send([1, 2], 1, slab, HUGE))
            await take(b, 0, 1, HUGE)
            assert not sending.done()
            slab.view[-1] = 7
            assert (await take(c, 0, 1, HUGE))[-1] == 7
            await sending


async def test_a_cancelled_wait_ends_at_once_and_breaks_the_link() -> None:
    """Its memory is free by then, and whoever waits for the rank hears of it."""
    async with links(3) as (a, b, c):
        waiting = asyncio.create_task(take(b, 0, 7, MiB))
        others = [asyncio.create_task(take(c, 1, 8, 10)), asyncio.create_task(take(a, 1, 9, 10))]
        await until(lambda: {0, 2} <= {r for r, o in b._outlets.items() if o._asked})
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


async def test_a_rank_is_not_blamed_for_what_a_cancellation_ended() -> None:
    """That ends all other waits, too: none of them broke the exchange off."""
    async with links(2) as (a, _):
        waits = [
            asyncio.create_task(take(a, 1, 7, 10)),
            asyncio.create_task(take(a, 1, 8, 10)),
            asyncio.create_task(give(a, [1], 9, b"x")),
        ]
        await until(lambda: bool(a._outlets))
        waits[0].cancel()
        async with asyncio.timeout(TIMEOUT_S / 2):
            await asyncio.wait(waits)
        for ended in waits[1:]:
            with pytest.raises(PeerLostError, match="broken off before") as raised:
                await ended
            assert raised.value.ranks == ()
        with pytest.raises(PeerLostError, match="broken off before"):
            await give(a, [1], 1, b"x")
        with pytest.raises(PeerLostError, match="broken off before"):
            await take(a, 1, 1, 1)


async def test_one_lost_taker_ends_a_message_for_the_other_too() -> None:
    """A send to two, of which one has gone: the slab is free when it raises."""
    async with links(3) as (a, b, c):
        waiting = asyncio.create_task(take(c, 0, 1, HUGE))
        sending = asyncio.create_task(give(a, [1, 2], 1, bytes(HUGE)))
        refused = asyncio.create_task(take(b, 0, 2, 1))
        await until(lambda: bool(a._outlets) and bool(a._outlets[1]._asked))
        b.break_off()
        async with asyncio.timeout(TIMEOUT_S / 2):
            with pytest.raises(PeerLostError, match="exchange with rank 1 broke") as raised:
                await sending
            assert raised.value.ranks == (1,)
            with pytest.raises(PeerLostError, match="exchange with rank 0 broke"):
                await waiting
        with pytest.raises(PeerLostError, match="broken off before"):
            await refused


@pytest.mark.usefixtures("no_collections")
async def test_a_send_that_failed_is_let_go_of() -> None:
    """Without a collection of garbage: its error has the frame that has its memory."""
    async with links(3) as (a, b, _):

        async def error_of_send() -> weakref.ref[BaseException]:
            sending = asyncio.create_task(give(a, [1, 2], 1, b"x"))
            giving = asyncio.create_task(give(b, [0], 2, b"x"))
            await take(a, 1, 2, 1)
            await giving
            b.break_off()
            await asyncio.wait((sending,))
            try:
                await sending
            except PeerLostError as error:
                return weakref.ref(error)
            finally:
                del sending
            raise AssertionError("it went well")

        assert (await error_of_send())() is None


async def test_who_has_gone_is_missed_by_whoever_comes_later() -> None:
    """Nobody waited for it. What needs others only goes on, and ends when something needs it."""
    async with links(3) as (a, b, c):
        moved = asyncio.create_task(take(b, 0, 1, 1))
        await give(a, [1], 1, b"x")
        await moved
        b.break_off()
        await until(lambda: 1 in a._lost)
        moved = asyncio.create_task(take(c, 0, 1, 1))
        await give(a, [2], 1, b"x")
        await moved
        waiting = asyncio.create_task(take(a, 2, 1, 1))
        await asyncio.sleep(0)
        for attempt in (give(a, [2, 1], 2, b"x"), take(a, 1, 2, 1), give(a, [2], 3, b"x")):
            with pytest.raises(PeerLostError, match="with rank 1 broke off: its conn") as raised:
                await attempt
            assert raised.value.ranks == (1,)
        with pytest.raises(PeerLostError, match="exchange with rank 1 broke off"):
            await waiting


class Peer:
    """Rank 1, as bytes on sockets, beside a link of rank 0."""

    def __init__(self, stack: contextlib.ExitStack, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._stack = stack
        self._listener = listener

    async def called(self) -> socket.socket:
        """Be called by rank 0, which says hello."""
        connection, _ = await self._loop.sock_accept(self._listener)
        self._stack.enter_context(connection)
        assert await self.read(connection, 52) == hello(TOKEN.encode(), 0)
        return connection

    async def call(self, door: Address, said: bytes) -> socket.socket:
        """Call rank 0, and say something."""
        connection = self._stack.enter_context(socket.socket())
        connection.settimeout(0)
        await self._loop.sock_connect(connection, door)
        await self._loop.sock_sendall(connection, said)
        return connection

    async def read(self, connection: socket.socket, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = await self._loop.sock_recv(connection, nbytes - len(data))
            if not piece:
                raise EOFError(data)
            data += piece
        return data

    async def say(self, connection: socket.socket, data: bytes) -> None:
        await self._loop.sock_sendall(connection, data)

    async def has_ended(self, connection: socket.socket) -> bool:
        with contextlib.suppress(ConnectionResetError):
            while await self._loop.sock_recv(connection, MiB):
                pass
        return True


@contextlib.asynccontextmanager
async def link_and_peer() -> AsyncIterator[tuple[TcpLink, Address, Peer]]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        listener.settimeout(0)
        door = stack.enter_context(listening(2))
        addresses = [address_of(door), address_of(listener)]
        async with (
            asyncio.timeout(TIMEOUT_S),
            tcp_link(0, addresses, TOKEN, door, timeout_s=TIMEOUT_S) as link,
        ):
            yield link, addresses[0], Peer(stack, listener)


ASK = struct.Struct("<I")
HEAD = struct.Struct("<IQ")


async def test_nothing_waits_for_more_to_send() -> None:
    """Questions and heads are small, and somebody waits for each: they go out at once."""
    async with links(2) as (a, b):
        taking = asyncio.create_task(take(b, 0, 1, 1))
        await give(a, [1], 1, b"x")
        await taking
        for connection in (a._outlets[1]._connection, b._inlets[0]._connection):
            assert connection is not None
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            # nor does anybody wait for ever where a firewall has forgotten the connection
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 240


@pytest.mark.parametrize(("timeout_s", "silence_s"), [(0.5, 120), (600.0, 600), (1e9, 2147483.647)])
async def test_what_was_sent_is_not_sent_again_for_ever(timeout_s: float, silence_s: float) -> None:
    """Where large packets are lost alone, a connection that is tried seems to be there."""
    with listening(2) as own, listening(2) as other:
        addresses = [address_of(own), address_of(other)]
        async with (
            tcp_link(0, addresses, TOKEN, own, timeout_s=timeout_s) as a,
            tcp_link(1, addresses, TOKEN, other, timeout_s=timeout_s) as b,
        ):
            taking = asyncio.create_task(take(b, 0, 1, 1))
            await give(a, [1], 1, b"x")
            await taking
            for connection in (a._outlets[1]._connection, b._inlets[0]._connection):
                assert connection is not None
                limit_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert limit_ms == round(silence_s * 1000)


async def test_what_goes_over_the_wire() -> None:
    """In whatever pieces it comes."""
    async with link_and_peer() as (link, door, peer):
        taking = asyncio.create_task(take(link, 1, 258, 5))
        called = await peer.called()
        assert await peer.read(called, 4) == ASK.pack(258)
        for byte in HEAD.pack(258, 5) + b"hello":
            await peer.say(called, bytes([byte]))
            await asyncio.sleep(0)
        assert await taking == b"hello"
        giving = asyncio.create_task(give(link, [1], 77, b"back"))
        calling = await peer.call(door, b"")
        for byte in hello(TOKEN.encode(), 1) + ASK.pack(77):
            await peer.say(calling, bytes([byte]))
            await asyncio.sleep(0)
        assert await peer.read(calling, 16) == HEAD.pack(77, 4) + b"back"
        await giving


@pytest.mark.parametrize("cut", [1, 16, 51])
async def test_what_is_asked_right_behind_the_rest_of_a_hello_is_heard(cut: int) -> None:
    """What says who calls may come in two pieces, and the second with more behind it."""
    async with link_and_peer() as (link, door, peer):
        said = hello(TOKEN.encode(), 1) + ASK.pack(7)
        giving = asyncio.create_task(give(link, [1], 7, b"x"))
        calling = await peer.call(door, said[:cut])
        for _ in range(20):  # the loop lets it in, and hears that much
            await asyncio.sleep(0)
        await peer.say(calling, said[cut:])
        assert await peer.read(calling, 13) == HEAD.pack(7, 1) + b"x"
        await giving


async def test_what_comes_as_it_is_cancelled_does_no_harm() -> None:
    """The task has not heard of that yet: its memory is still its own."""
    async with link_and_peer() as (link, _, peer):
        taking = asyncio.create_task(take(link, 1, 1, 1))
        called = await peer.called()
        inlet = link._inlets[1]
        assert inlet._connection is not None
        asyncio.get_running_loop().remove_reader(inlet._connection)
        await peer.say(called, HEAD.pack(1, 1) + b"x")
        taking.cancel()
        for _ in range(2):
            inlet._hear()
        with pytest.raises(asyncio.CancelledError):
            await taking


@pytest.mark.parametrize("ends", ["taking is cancelled", "giving is cancelled", "peer goes"])
async def test_who_is_in_the_middle_of_a_message_ends_with_the_link(ends: str) -> None:
    """Both ways; nothing refers to the memory of slabs then, and nothing waits."""
    async with link_and_peer() as (link, door, peer):
        taking = asyncio.create_task(take(link, 1, 1, HUGE))
        giving = asyncio.create_task(give(link, [1], 1, bytes(HUGE)))
        called = await peer.called()
        await peer.say(called, HEAD.pack(1, HUGE) + bytes(MiB))
        calling = await peer.call(door, hello(TOKEN.encode(), 1) + ASK.pack(1))
        await peer.read(calling, MiB)
        more = [
            asyncio.create_task(take(link, 1, 2, 1)),
            asyncio.create_task(give(link, [1], 2, b"x")),
        ]
        await until(lambda: link._inlets[1]._tag == 1 and 2 in link._outlets[1]._offered)
        ends_of_both = link._inlets[1], link._outlets[1]  # what they had goes, if they do not
        if ends == "peer goes":
            calling.close()
        else:
            (taking if ends.startswith("taking") else giving).cancel()
        done, _ = await asyncio.wait((taking, giving), timeout=TIMEOUT_S / 2)
        assert len(done) == 2
        assert all(
            isinstance(e, PeerLostError)
            for e in await asyncio.gather(*more, return_exceptions=True)
        )
        assert not any(end.is_open or end.is_awaited for end in ends_of_both)
        for task, own_end in ((taking, "taking is cancelled"), (giving, "giving is cancelled")):
            if ends == own_end:
                assert task.cancelled()
            else:
                why = "with rank 1 broke off" if ends == "peer goes" else "broken off before"
                with pytest.raises(PeerLostError, match=why):
                    await task
        if ends != "peer goes":
            assert await peer.has_ended(calling)
        assert await peer.has_ended(called)


@pytest.mark.parametrize("turn_nbytes", [8 * MiB, 100])
@pytest.mark.parametrize("said", [b"", HEAD.pack(1, HUGE), HEAD.pack(1, HUGE) + b"x" * KiB])
async def test_a_loop_need_not_tell_twice_that_a_connection_was_reset(
    monkeypatch: pytest.MonkeyPatch, said: bytes, turn_nbytes: int
) -> None:
    """Whatever came before lies unread, in however many turns it is read: uvloop tells once."""
    monkeypatch.setattr("ckptio.exchange.ends._HEARD_NBYTES", turn_nbytes)
    async with link_and_peer() as (link, _, peer):
        taking = asyncio.create_task(take(link, 1, 1, HUGE))
        called = await peer.called()
        inlet = link._inlets[1]
        assert inlet._connection is not None
        await peer.read(called, 4)
        asyncio.get_running_loop().remove_reader(inlet._connection)
        await peer.say(called, said)
        called.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        called.close()
        poller = select.poll()
        poller.register(inlet._connection, 0)
        await until(lambda: bool(poller.poll(0)))  # the system may take a moment to tell
        inlet._hear()
        with pytest.raises(PeerLostError, match="rank 1 broke off: Connection reset"):
            await taking


async def test_nobody_waits_to_send_over_what_was_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may refuse that, as uvloop does; it ends with what the socket says."""

    def refuse(*_: object) -> None:
        raise RuntimeError("the handler is closed")

    async with link_and_peer() as (link, _, peer):
        taking = asyncio.create_task(take(link, 1, 1, 1))
        called = await peer.called()
        await peer.read(called, 4)
        called.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        called.close()
        monkeypatch.setattr(asyncio.get_running_loop(), "add_writer", refuse)
        with pytest.raises(PeerLostError, match="rank 1 broke off: Connection reset"):
            await take(link, 1, 2, 1)
        with pytest.raises(PeerLostError, match="rank 1 broke off: Connection reset"):
            await taking


async def test_what_has_come_is_taken_though_the_rank_has_gone() -> None:
    """It leaves when it is through, and its other connection may tell of that first."""
    async with link_and_peer() as (link, door, peer):
        giving = asyncio.create_task(give(link, [1], 1, b"x"))
        calling = await peer.call(door, hello(TOKEN.encode(), 1) + ASK.pack(1))
        await giving
        taking = asyncio.create_task(take(link, 1, 1, 1))
        called = await peer.called()
        assert await peer.read(called, 4) == ASK.pack(1)  # else closing it takes back what it says
        calling.close()
        await until(lambda: 1 in link._lost)
        await peer.say(called, HEAD.pack(1, 1) + b"y")
        called.close()
        assert await taking == b"y"


async def test_nor_is_a_rank_waited_for_that_has_gone_before_it_called() -> None:
    """Its other connection tells of that, as none of its own can."""
    async with link_and_peer() as (link, _, peer):
        giving = asyncio.create_task(give(link, [1], 1, b"x"))
        taking = asyncio.create_task(take(link, 1, 1, 1))
        called = await peer.called()
        await peer.say(called, HEAD.pack(1, 1) + b"y")
        assert await taking == b"y"
        called.close()
        with pytest.raises(PeerLostError, match="exchange with rank 1 broke off"):
            await giving


@pytest.mark.parametrize(
    "said", [HEAD.pack(1, 4), HEAD.pack(2, 5), HEAD.pack(1, 2**63), HEAD.pack(1, 5) + b"12345" * 9]
)
async def test_what_is_not_what_was_planned_is_refused(said: bytes) -> None:
    """Another size, another message, or more than one: the rest of a slab stays as it is."""
    async with link_and_peer() as (link, _, peer):
        with slab_of(b"." * 100) as room:

            async def land() -> None:
                async with link.receive(1, 1, room, 5):
                    pass
                await take(link, 1, 3, 1)

            taking = asyncio.create_task(land())
            called = await peer.called()
            await peer.say(called, said)
            with pytest.raises(PeerLostError, match="rank 1 broke off: it sent something else"):
                await taking
            assert bytes(room.view[5:100]) == b"." * 95


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(99),
        hello(TOKEN.encode(), 1)[:-1],
        hello(TOKEN[::-1].encode(), 1),
        hello(TOKEN.encode(), 2),
        b"C" + hello(TOKEN.encode(), 1)[1:],
    ],
)
@pytest.mark.parametrize("stays", [False, True])
async def test_a_stranger_at_the_door_does_no_harm(said: bytes, *, stays: bool) -> None:
    """Who says nothing, or something else, is let go, at the latest when the link is left."""
    async with link_and_peer() as (link, door, peer):
        stranger = await peer.call(door, said)
        if not stays:
            stranger.close()
        giving = asyncio.create_task(give(link, [1], 1, b"x"))
        calling = await peer.call(door, hello(TOKEN.encode(), 1) + ASK.pack(1))
        again = await peer.call(door, hello(TOKEN.encode(), 1) + ASK.pack(1))
        assert await peer.has_ended(again)
        assert await peer.read(calling, 13) == HEAD.pack(1, 1) + b"x"
        await giving
        if stays and len(said) >= 52:
            assert await peer.has_ended(stranger)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_who_calls_too_late_is_let_go(*, is_lost: bool) -> None:
    """Its rank was lost, or the link broke: nobody would close what it calls over."""
    async with link_and_peer() as (link, door, peer):
        if is_lost:
            (await peer.call(door, hello(TOKEN.encode(), 1))).close()
            await until(lambda: 1 in link._lost)
        else:
            link.break_off()
        assert await peer.has_ended(await peer.call(door, hello(TOKEN.encode(), 1)))
        assert not any(outlet.is_open for outlet in link._outlets.values())


async def test_a_link_ends_though_a_forked_child_has_its_sockets() -> None:
    """A worker of a DataLoader, say, which lives on: descriptors of the same connections."""
    with contextlib.ExitStack() as child:
        async with links(2) as (a, b):
            waits = [
                asyncio.create_task(take(a, 1, 1, 1)),
                asyncio.create_task(give(a, [1], 2, b"x")),
                asyncio.create_task(take(b, 0, 3, 1)),
            ]
            outlets = (a._outlets, b._outlets)
            await until(lambda: [len(o._asked) for of in outlets for o in of.values()] == [1, 1])
            for end in (b._inlets[0], b._outlets[0]):
                assert end._connection is not None
                child.enter_context(end._connection.dup())
            b.break_off()
            async with asyncio.timeout(TIMEOUT_S):
                for wait in waits[:2]:
                    with pytest.raises(PeerLostError, match="exchange with rank 1 broke off"):
                        await wait
                with pytest.raises(PeerLostError, match="broken off before"):
                    await waits[2]
            child.close()


async def test_nobody_calls_a_door_that_a_forked_child_has() -> None:
    """It was closed: whoever calls hears that at once, and does not wait for an answer."""
    with listening(2) as own, listening(2) as other, contextlib.ExitStack() as child:
        addresses = [address_of(own), address_of(other)]
        child.enter_context(other.dup())
        async with tcp_link(1, addresses, TOKEN, other, timeout_s=TIMEOUT_S):
            pass
        async with tcp_link(0, addresses, TOKEN, own, timeout_s=TIMEOUT_S) as link:
            with pytest.raises(PeerLostError, match=r"rank 1 .*refused"):
                async with asyncio.timeout(TIMEOUT_S):
                    await take(link, 1, 1, 1)


async def test_strangers_do_not_fill_the_door() -> None:
    """Who has said nothing for the longest time goes when too many are there; no rank waits."""
    async with link_and_peer() as (link, door, peer):
        strangers = [await peer.call(door, b"") for _ in range(70)]
        calling = await peer.call(door, hello(TOKEN.encode(), 1) + ASK.pack(1))
        await give(link, [1], 1, b"x")
        assert await peer.read(calling, 13) == HEAD.pack(1, 1) + b"x"
        assert await peer.has_ended(strangers[0])
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)


class FullDoor(socket.socket):
    """Somebody calls, and no more files can be opened."""

    num_tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_who_cannot_answer_says_so_once() -> None:
    """It would be tried without end, as somebody still calls."""
    with FullDoor() as door, socket.socket() as caller:
        door.settimeout(0)
        door.bind((LOOPBACK, 0))
        door.listen()
        addresses = [address_of(door)] * 2
        async with tcp_link(0, addresses, TOKEN, door, timeout_s=TIMEOUT_S) as link:
            giving = asyncio.create_task(give(link, [1], 1, b"x"))
            caller.connect(addresses[0])
            with pytest.raises(PeerLostError, match="cannot be answered: Too many open") as raised:
                await giving
            assert raised.value.ranks == ()
            for _ in range(9):
                await asyncio.sleep(0)
            assert door.num_tries == 1


async def test_no_rank_is_blamed_where_too_many_files_are_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be there: this rank cannot call it. Whoever waits beside that ends, too."""

    class NoSocket:
        def __init__(self, *_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with link_and_peer() as (link, _, _):
        giving = asyncio.create_task(give(link, [1], 1, b"x"))
        await until(lambda: bool(link._outlets))
        with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many") as raised:
            patch.setattr(socket, "socket", NoSocket)
            with contextlib.closing(Slab(4 * KiB)) as room:  # the error's frames still have it
                await link.receive(1, 1, room, 1).__aenter__()
        assert not isinstance(raised.value, PeerLostError)
        with pytest.raises(PeerLostError, match="broken off before"):
            await giving


@pytest.mark.parametrize(
    ("host", "why"), [(LOOPBACK, "Connection refused"), ("255.255.255.255", "unreachable|denied")]
)
async def test_a_rank_that_is_not_there_is_named_with_its_address(host: str, why: str) -> None:
    """At once where somebody says so; and what would do without it."""
    with listening(2) as door, socket.create_server((LOOPBACK, 0)) as listener:
        addresses = [address_of(door), address_of(listener, host)]
        listener.close()
        async with tcp_link(0, addresses, TOKEN, door, timeout_s=TIMEOUT_S) as link:
            with pytest.raises(PeerLostError, match=rf"rank 1 .*({why}).*exchange=.off") as raised:
                await take(link, 1, 1, 1)
    assert raised.value.ranks == (1,)
    assert f"{host}, port {addresses[1].port}" in str(raised.value)


@contextlib.contextmanager
def crowded() -> Iterator[tuple[socket.socket, contextlib.ExitStack]]:
    """Listen where nobody who calls is answered, as long as some others wait there."""
    with (
        socket.create_server((LOOPBACK, 0), backlog=0) as listener,
        contextlib.ExitStack() as crowd,
    ):
        listener.settimeout(0)
        for _ in range(3):
            waiting = crowd.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex(listener.getsockname())
        yield listener, crowd


async def test_what_is_asked_before_somebody_answers_is_asked_then() -> None:
    """All of it, when the system calls again: after a second."""
    loop = asyncio.get_running_loop()
    with listening(2) as door, crowded() as (listener, crowd):
        addresses = [address_of(door), address_of(listener)]
        async with (
            asyncio.timeout(TIMEOUT_S),
            tcp_link(0, addresses, TOKEN, door, timeout_s=TIMEOUT_S) as link,
        ):
            takes = [asyncio.create_task(take(link, 1, tag, 1)) for tag in range(3)]
            await until(lambda: len(getattr(link._inlets.get(1), "_rooms", ())) == 3)
            crowd.close()
            said = b""
            while not said:
                connection, _ = await loop.sock_accept(listener)
                with connection:
                    if said := await loop.sock_recv(connection, 52):
                        assert said == hello(TOKEN.encode(), 0)
                        asked = await loop.sock_recv(connection, 3 * ASK.size)
                        assert asked == b"".join(ASK.pack(tag) for tag in range(3))
                        for tag in range(3):
                            await loop.sock_sendall(connection, HEAD.pack(tag, 1) + bytes([tag]))
                        assert [await each for each in takes] == [b"\0", b"\1", b"\2"]


async def test_nor_is_one_waited_for_that_never_answers() -> None:
    """As behind a firewall that says nothing."""
    with listening(2) as door, crowded() as (listener, _):
        addresses = [address_of(door), address_of(listener)]
        async with tcp_link(0, addresses, TOKEN, door, timeout_s=0.01) as link:
            with pytest.raises(PeerLostError, match=r"no answer within 0\.01 s"):
                await take(link, 1, 1, 1)
        async with asyncio.timeout(TIMEOUT_S):
            with listening(2) as other:
                async with tcp_link(0, addresses, TOKEN, other, timeout_s=1e6) as link:
                    taking = asyncio.create_task(take(link, 1, 1, 1))
                    await until(lambda: bool(link._inlets))
                    taking.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await taking
