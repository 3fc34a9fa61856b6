"""What strangers may send, and what becomes of a group then."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import PeerLostError
from ckptio.ranks.coordinator import Coordinator
from ckptio.ranks.frames import (
    MAX_HELLO_NBYTES,
    PREFIX,
    PROTOCOL_VERSION,
    Beat,
    Bye,
    Hello,
    Refused,
    Say,
    Taken,
    Welcome,
    decode,
    decode_verdict,
    describe,
    encode_body,
    pack_head,
    parse_head,
)
from ckptio.ranks.interface import Deadlines
from ckptio.ranks.member import Member
from ckptio.ranks.wire import Wire
from ckptio.testing.ranks import MemoryRanks, MemoryTransport
from tests.ranks.test_sessions import DEADLINES, add, run, seeds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ckptio.ranks.frames import AnyHead


class Stranger(asyncio.Protocol):
    """The other end of a connection: keeps the frames that come."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.is_over = False

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.is_over = True

    def heads(self) -> list[AnyHead]:
        found, data = [], bytes(self.received)
        while data:
            head_nbytes, body_nbytes = PREFIX.unpack_from(data)
            found.append(parse_head(data[PREFIX.size : PREFIX.size + head_nbytes]))
            data = data[PREFIX.size + head_nbytes + body_nbytes :]
        return found


class Door:
    """A coordinator of two ranks, and connections to it."""

    def __init__(self, seed: int = 0) -> None:
        self.world = MemoryRanks(2, seed=seed)
        self.leader = Coordinator(2, "secret", DEADLINES, "h0")

    def enter(self, *pieces: bytes) -> tuple[Stranger, MemoryTransport]:
        stranger = Stranger()
        end, _ = self.world.connect(stranger, self.leader.guest())
        for piece in pieces:
            end.write(piece)
        return stranger, end

    async def meet(self) -> None:
        """Let the true rank 1 come, and have a round with it."""
        member = Member(1, 2, "secret", DEADLINES, "h1")

        async def connect(make: Callable[[], asyncio.Protocol]) -> None:
            self.world.connect(make(), self.leader.guest())

        assert await member.knock(connect, 5) == ""
        await member.gather(5)
        await self.leader.gather(5)
        async with asyncio.TaskGroup() as tasks:
            for ranks in (self.leader, member):
                tasks.create_task(self.add(ranks))
        async with asyncio.TaskGroup() as tasks:
            for ranks in (self.leader, member):
                tasks.create_task(ranks.close())

    async def add(self, ranks: Any) -> None:
        async with ranks.session("s") as session:
            assert await session.round("add", 1, add) == 2


def hello(**changes: Any) -> bytes:
    fields = {
        "version": PROTOCOL_VERSION, "rank": 1, "world_size": 2, "token": "secret", "host": "h1",
    }  # fmt: skip
    return pack_head(Hello(**{**fields, **changes}), b"")


@given(data=st.binary(max_size=200), seed=seeds)
def test_strangers_do_not_keep_a_group_from_meeting(data: bytes, seed: int) -> None:
    """Whatever bytes come first, the group meets and works."""

    async def scenario() -> None:
        door = Door(seed)
        door.enter(data)
        door.enter(PREFIX.pack(len(data), 0), data)
        await door.meet()

    run(scenario(), seed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token": "guess"}, "not a member of this group"),
        ({"token": "guess", "version": 99}, "not a member of this group"),
        ({"token": "sécret"}, "not a member of this group"),
        ({"version": 99}, f"protocol 99 instead of {PROTOCOL_VERSION}; run one version of ckptio"),
        ({"world_size": 3}, "rank 1 of 3 in a world of 2"),
        ({"rank": 0}, "rank 0 of 2 in a world of 2"),
        ({"rank": -1}, "rank -1 of 2 in a world of 2"),
        ({"rank": 2}, "rank 2 of 2 in a world of 2"),
    ],
)
def test_a_wrong_hello_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Those who do not know the token learn nothing else; the group goes on."""

    async def scenario() -> None:
        door = Door()
        stranger, _ = door.enter(hello(**changes))
        await asyncio.sleep(1)
        assert stranger.heads() == [Refused(reason)]
        assert stranger.is_over
        await door.meet()

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(MAX_HELLO_NBYTES + 1, 0),
        PREFIX.pack(10, 1 << 60),
        PREFIX.pack(2, 0) + b"{}",
        PREFIX.pack(16, 0) + b'{"type":"magic"}',
        PREFIX.pack(4000, 0) + b"[" * 4000,
        pack_head(Beat(), b""),
        pack_head(Say("s", "p"), b"1") + b"1",
        hello()[:-1] + b',"more":1}',
    ],
    ids=range(8),
)
def test_what_is_no_hello_ends_the_connection(data: bytes) -> None:
    """Too long, no JSON, another kind, unknown fields: refused, or cut off unread."""

    async def scenario() -> None:
        door = Door()
        stranger, _ = door.enter(data)
        await asyncio.sleep(1)
        assert stranger.is_over
        await door.meet()

    run(scenario())


def test_a_slow_peer_holds_little_of_a_large_message() -> None:
    """It goes on as the peer takes it, and is whole in the end."""

    async def scenario() -> None:
        receiver: Any = None
        wire, stranger = Wire(receiver), Stranger()
        end, _ = MemoryRanks(2).connect(wire, stranger)
        end.hold(held=True)
        body = bytes(1 << 20)
        wire.send(Say("s", "p"), body)
        await asyncio.sleep(1)
        assert 0 < end.sent_nbytes <= len(body) / 4
        end.hold(held=False)
        await asyncio.sleep(1)
        assert len(stranger.received) == len(pack_head(Say("s", "p"), body)) + len(body)
        wire.cut()

    run(scenario())


def test_a_guest_that_says_nothing_is_shown_out() -> None:
    """A byte now and then does not help it."""

    async def scenario() -> None:
        door = Door()
        data = hello()
        await asyncio.sleep(6)
        stranger, end = door.enter(data[:4])
        for start in range(4, 20):  # so that nothing of it is wrong
            assert start > 12 or not stranger.is_over
            await asyncio.sleep(1)
            end.write(data[start : start + 1])
        assert stranger.is_over
        await door.meet()

    run(scenario())


def test_rank_0_leaves_without_waiting_for_a_guest() -> None:
    """Who says who it is as rank 0 gives up is not taken any more, but looks again."""

    async def scenario() -> None:
        door, loop = Door(), asyncio.get_running_loop()
        door.enter()
        late, end = door.enter()
        with pytest.raises(PeerLostError, match="rank 1 did not come"):
            await door.leader.gather(1.0)
        end.write(hello())
        await door.leader.close()
        assert loop.time() < 1.1
        await asyncio.sleep(1)
        assert late.is_over
        assert late.heads() == []

    run(scenario())


def test_a_rank_is_let_in_once_and_again_when_it_has_gone() -> None:
    """Until all are there, a rank that lost its connection may come back."""

    async def scenario() -> None:
        door = Door()
        door.leader.world_size = 3
        first, end = door.enter(hello(world_size=3))
        await asyncio.sleep(1)
        second, _ = door.enter(hello(world_size=3))
        await asyncio.sleep(1)
        assert first.heads() == [Taken()]
        assert second.heads() == [Refused("rank 1 is here already")]
        end.abort()
        await asyncio.sleep(1)
        third, _ = door.enter(hello(world_size=3), hello(world_size=3, rank=2))
        await asyncio.sleep(1)
        assert Taken() in third.heads()
        await door.leader.close()

    run(scenario())


@pytest.mark.parametrize(
    ("way", "reason", "within_s"),
    [
        ("ends", "reset by peer", 1.0),
        ("refuses", "refused: not a member of this group", 1.0),
        ("is silent", "no answer within 5 s", 5.0),
        ("does not let in", "no answer within 5 s", 5.0),
        ("cannot be reached", "no route", 1.0),
    ],
)
def test_who_is_not_taken_knows_why_in_time(way: str, reason: str, within_s: float) -> None:
    """Another program may be there, or nobody; it may be tried elsewhere then."""

    async def scenario() -> None:
        door = Door()
        member = Member(1, 2, "guess", DEADLINES, "h1")

        async def connect(make: Callable[[], asyncio.Protocol]) -> None:
            if way == "does not let in":
                await asyncio.Event().wait()
            if way == "cannot be reached":
                raise OSError("no route")
            there = door.leader.guest() if way == "refuses" else Stranger()
            _, end = door.world.connect(make(), there)
            if way == "ends":
                end.abort()

        assert reason in await member.knock(connect, 5)
        assert asyncio.get_running_loop().time() <= within_s
        assert member.address == member.rank_0_address == ""
        await member.close()
        await door.meet()

    run(scenario())


def test_who_takes_long_to_connect_says_first_who_it_is() -> None:
    """Not that it lives: as for a stranger that says something else, there is no place for it."""

    async def scenario() -> None:
        door = Door()
        member = Member(1, 2, "secret", DEADLINES, "h1")

        async def connect(make: Callable[[], asyncio.Protocol]) -> None:
            wire = make()
            await asyncio.sleep(1.1 * DEADLINES.beat_s)
            door.world.connect(wire, door.leader.guest())

        assert await member.knock(connect, DEADLINES.peer_s) == ""
        await member.close()
        await door.leader.close()

    run(scenario())


def test_who_was_taken_does_not_wait_for_ever_for_the_others() -> None:
    """Nor for rank 0, where that does not say who has not come."""

    async def scenario() -> None:
        door = Door()
        door.leader.world_size = 3
        member = Member(1, 3, "secret", DEADLINES, "h1")

        async def connect(make: Callable[[], asyncio.Protocol]) -> None:
            door.world.connect(make(), door.leader.guest())

        assert await member.knock(connect, 5) == ""
        with pytest.raises(PeerLostError, match="rank 0: it did not begin within 7 s") as caught:
            await member.gather(7)
        assert caught.value.ranks == (0,)
        await member.close()
        await door.leader.close()

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(2, 1 << 40),
        pack_head(Hello(version=1, rank=1, world_size=2, token="", host=""), b""),
        pack_head(Welcome("", []), b""),
        pack_head(Say("s", "add"), b"{") + b"{",
        pack_head(Say("s", "add"), b"[" * 9000) + b"[" * 9000,
    ],
    ids=["length", "hello", "welcome", "json", "depth"],
)
def test_a_member_that_sends_nonsense_is_lost(data: bytes) -> None:
    """Its connection ends, and the others are told."""

    async def scenario() -> None:
        door = Door()
        stranger, end = door.enter(hello())
        await door.leader.gather(5)
        end.write(data)
        with pytest.raises(ConnectionError, match="rank 1: lost, it sent what is no frame"):
            await door.add(door.leader)
        await asyncio.sleep(1)
        assert stranger.is_over
        await door.leader.close()

    run(scenario())


def test_who_did_not_come_is_named_on_every_rank() -> None:
    """By rank 0 to those who came, in the same words."""

    async def scenario() -> None:
        door = Door()
        await door.leader.close()
        door.leader = leader = Coordinator(4, "secret", DEADLINES, "h0")
        stranger, _ = door.enter(hello(world_size=4, rank=2))
        with pytest.raises(ConnectionError) as caught:
            await leader.gather(5)
        assert str(caught.value).startswith("ranks 1, 3 did not come within 5 s; every rank of")
        await asyncio.sleep(1)
        assert encode_body(str(caught.value)) in stranger.received
        await leader.close()
        await asyncio.sleep(1)
        assert stranger.is_over

    run(scenario())


def test_a_verdict_is_parsed_strictly() -> None:
    """It comes from another machine."""
    assert decode_verdict(b'{"kind":"lost","what":"w","text":"t","lost":[1]}').lost == [1]
    for data in (
        b"{}",
        b'{"kind":"lost","text":"t"}',
        b'{"kind":"lost","what":"w","text":"t","x":1}',
        b'{"kind":"other","what":"w","text":"t"}',
    ):
        with pytest.raises(msgspec.MsgspecError, match=r"(?i)object|invalid"):
            decode_verdict(data)
    assert parse_head(b'{"type":"bye"}') == Bye()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("127.0.0.1", ""),
        ("::1", ""),
        ("fe80::1%eth0", ""),
    ],
)
async def test_a_wire_knows_where_its_ends_are(host: str, address: str) -> None:
    """As other machines reach them; not at all if they do not."""
    receiver: Any = None
    wire = Wire(receiver)
    assert wire.own_address == wire.peer_address == ""
    wire.connection_made(asyncio.Transport({"sockname": (host, 1), "peername": ("10.9.9.9", 2)}))
    assert (wire.own_address, wire.peer_address) == (address, "10.9.9.9")
    wire.connection_made(asyncio.Transport({"sockname": ("10.9.9.9", 2), "peername": (host, 1)}))
    assert (wire.own_address, wire.peer_address) == ("10.9.9.9", address)


@contextlib.asynccontextmanager
async def met() -> AsyncIterator[tuple[Coordinator, socket.socket]]:
    """Give a coordinator of two, and the connection of rank 1, which has read all that came."""
    loop, stranger = asyncio.get_running_loop(), Stranger()
    leader = Coordinator(2, "secret", Deadlines(peer_s=4.0, meet_s=1.0), "h0")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as rank_1:
        listener.settimeout(0)
        rank_1.settimeout(0)
        await loop.sock_connect(rank_1, listener.getsockname())
        accepted, _ = await loop.sock_accept(listener)
        await loop.connect_accepted_socket(leader.guest, accepted)
        await loop.sock_sendall(rank_1, hello())
        while len(stranger.heads()) < 2:
            stranger.data_received(await loop.sock_recv(rank_1, MAX_HELLO_NBYTES))
        await leader.gather(5.0)
        async with asyncio.timeout(5.0):
            yield leader, rank_1


async def test_a_rank_that_is_dead_before_its_last_words_are_read_is_lost() -> None:
    """What it is told then is reset, which keeps nobody else from hearing of it."""
    async with met() as (leader, rank_1):
        rank_1.send(pack_head(Bye(), b""))
        rank_1.close()
        with pytest.raises(PeerLostError) as raised:
            async with leader.session("s") as session:
                await session.round("add", 1, add)
        assert raised.value.ranks == (1,)
        await leader.close()


async def test_who_leaves_as_rank_0_dies_is_told_of_no_sockets() -> None:
    """It leaves as if it had heard of that."""
    loop = asyncio.get_running_loop()
    member = Member(1, 2, "secret", Deadlines(peer_s=4.0), "h1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        knocking = asyncio.create_task(
            member.knock(lambda make: loop.create_connection(make, *listener.getsockname()), 5.0)
        )
        rank_0, _ = await loop.sock_accept(listener)
        with rank_0:
            assert await loop.sock_recv(rank_0, MAX_HELLO_NBYTES)
            await loop.sock_sendall(rank_0, pack_head(Taken(), b""))
            assert await knocking == ""
        async with asyncio.timeout(5.0):
            await member.close()


def test_what_went_wrong_is_told_in_a_short_text_that_any_peer_can_read() -> None:
    """The first error of a group; names of files that are no text are escaped."""
    error = ExceptionGroup("many", [ExceptionGroup("few", [OSError(5, "no", "a\udcff")])])
    text = describe(error)
    assert text.startswith("OSError: [Errno 5] no: ")
    assert decode(encode_body(text)) == text
    assert describe(ValueError()) == "ValueError"
    assert describe(asyncio.CancelledError()) == "it was cancelled there"
    text = describe(ValueError("x" * 5000))
    assert text.endswith("xxx...")
    assert len(text) == 1000

    class Mute(Exception):  # noqa: N818  # nobody raises it by that name
        def __str__(self) -> str:
            raise TypeError("it cannot be said")

    assert describe(Mute()) == "Mute"
