"""The ends of the connections of a TCP link: who calls takes, who is called sends.

Over a connection goes a hello, once, and then what is asked for one way and messages the
other way. Numbers are little-endian.

    hello     16 bytes that say what this is, the token of the exchange (32), the rank (u32)
    ask       the tag of a message (u32), for which there is room
    message   its tag (u32), its size in bytes (u64), its bytes

Sockets are read and written in callbacks of the loop, straight from and to the memory of
slabs. Rejected: transports, which copy what they cannot send at once (before Python 3.12)
and keep it when nobody wants it any more; and tasks around `loop.sock_recv_into` and
`loop.sock_sendall`, which take two system calls more for every piece of a message.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ckptio.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

_HELLO = struct.Struct("<16s32sI")
_ASK = struct.Struct("<I")
_HEAD = struct.Struct("<IQ")
_GREETING = b"ckptio exchange\n"
#: Of requests at a time; a lane has one.
_ASKED_NBYTES = 4096


class Address(NamedTuple):
    """Where a rank is called.

    Attributes:
        host: An IP address, in digits: no name is looked up.
        port: A port.
    """

    host: str
    port: int


def hello(token: bytes, rank: int) -> bytes:
    """Say what a rank says when it calls."""
    return _HELLO.pack(_GREETING, token, rank)


class End:
    """One end of a connection, which another rank may have yet to open.

    Args:
        lose: Called with this and the reason when the connection has ended, or must.
    """

    def __init__(self, lose: Callable[[End, str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = None
        self._lose = lose
        self._awaits_space = False
        self._futures: dict[int, asyncio.Future[None]] = {}

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a message to come or go."""
        return bool(self._futures)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, or one is on its way."""
        return self._connection is not None

    def close(self, why: str, ranks: tuple[int, ...]) -> None:
        """Let go of the connection and of all memory; whoever waits hears why."""
        if self._connection is not None:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
            self._connection = None
        for future in self._futures.values():
            if not future.done():
                future.set_exception(PeerLostError(why, ranks=ranks))
                future.exception()  # there may be nobody any more who waits for it
        self._futures.clear()

    def _open(self, connection: socket.socket) -> None:
        """Begin to read and write."""
        self._connection = connection
        self._loop.add_reader(connection, self._try, self._read)
        self._try(self._write)

    def _try(self, step: Callable[[socket.socket], None]) -> None:
        """Do something with the socket, or as much as can be done now. Any error ends it."""
        if self._connection is None:
            return
        try:
            step(self._connection)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._lose(self, _text_of(error))

    def _read(self, connection: socket.socket) -> None:
        raise NotImplementedError

    def _write(self, connection: socket.socket) -> None:
        raise NotImplementedError

    def _await_space(self, connection: socket.socket, *, wanted: bool) -> None:
        """Have the loop call `_write` when the socket takes more, or not any longer."""
        if wanted and not self._awaits_space:
            self._loop.add_writer(connection, self._try, self._write)
        elif self._awaits_space and not wanted:
            self._loop.remove_writer(connection)
        self._awaits_space = wanted

    def _expect(self, tag: int) -> asyncio.Future[None]:
        """Make what becomes done with a message."""
        self._futures[tag] = self._loop.create_future()
        return self._futures[tag]

    def _finish(self, tag: int) -> None:
        """Tell who waits for a message that its memory is free; it may be about to be cancelled."""
        future = self._futures.pop(tag)
        if not future.done():
            future.set_result(None)


class Inlet(End):
    """The end of a rank that takes what another one sends. It calls when something is wanted.

    Args:
        address: Where the other rank is called.
        greeting: What to say first.
        timeout_s: How long it may take until somebody answers there.
        lose: As above.
    """

    def __init__(
        self, address: Address, greeting: bytes, timeout_s: float, lose: Callable[[End, str], None]
    ) -> None:
        super().__init__(lose)
        self._address = address
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = bytearray(greeting)
        self._rooms: dict[int, memoryview] = {}
        self._head = bytearray(_HEAD.size)
        self._rest = memoryview(self._head)  # what is to be filled next
        self._tag: int | None = None  # of the message that fills it

    def take(self, tag: int, room: memoryview) -> asyncio.Future[None]:
        """Ask for a message that fills a room, and is written there until the future is done."""
        self._rooms[tag] = room
        self._unsent += _ASK.pack(tag)
        taken = self._expect(tag)
        if self._connection is None:
            self._call()
        elif self._timer is None:
            self._try(self._write)
        return taken

    def close(self, why: str, ranks: tuple[int, ...]) -> None:
        """Let go of the connection and of all memory; whoever waits hears why."""
        if self._timer is not None:
            self._timer.cancel()
        self._rooms.clear()
        self._rest = memoryview(self._head)
        super().close(why, ranks)

    def _call(self) -> None:
        """Begin to connect."""
        try:
            family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
            self._connection = socket.socket(family)
            self._connection.settimeout(0)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._timer = self._loop.call_later(
                self._timeout_s, self._miss, f"no answer within {self._timeout_s:g} s"
            )
            self._loop.add_writer(self._connection, self._answered)
            self._connection.connect(self._address)
        except BlockingIOError:
            pass  # it is on its way
        except OSError as error:
            self._miss(_text_of(error))

    def _answered(self) -> None:
        """Go on with a connection, or say why there is none."""
        connection, timer = self._connection, self._timer
        assert connection is not None  # noqa: S101  # it has no writer without one
        assert timer is not None  # noqa: S101  # it runs until somebody answers
        if number := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._miss(os.strerror(number))
            return
        timer.cancel()
        self._timer = None
        self._loop.remove_writer(connection)
        self._open(connection)

    def _miss(self, why: str) -> None:
        """Give up, and say where it was looked for: there may be a firewall between."""
        host, port = self._address
        self._lose(
            self,
            f'it cannot be reached at {host}, port {port}: {why}; exchange="off" does'
            " without, and lets each rank read for itself",
        )

    def _write(self, connection: socket.socket) -> None:
        """Say what is asked for."""
        try:
            if self._unsent:
                del self._unsent[: connection.send(self._unsent)]
        finally:
            self._await_space(connection, wanted=bool(self._unsent))

    def _read(self, connection: socket.socket) -> None:
        """Take what is there of the head of a message, or of its bytes."""
        count = connection.recv_into(self._rest)
        if not count:
            raise ConnectionError("its connection ended")
        self._rest = self._rest[count:]
        if self._rest:
            return
        if self._tag is None:
            tag, nbytes = _HEAD.unpack(self._head)
            room = self._rooms.pop(tag, None)
            if room is None or len(room) != nbytes:
                raise ConnectionError("it sent something else than was planned")
            self._tag, self._rest = tag, room
        else:
            tag, self._tag, self._rest = self._tag, None, memoryview(self._head)
            self._finish(tag)


class Outlet(End):
    """The end of a rank that sends what another one asks for, once that one has called."""

    def __init__(self, lose: Callable[[End, str], None]) -> None:
        super().__init__(lose)
        self._words = b""
        self._asked: set[int] = set()
        self._offered: dict[int, memoryview] = {}
        self._leaving: deque[int] = deque()
        self._parts: list[memoryview] = []  # what is left of the first one of them

    def open(self, connection: socket.socket) -> bool:
        """Take the connection of the rank, but not a second one."""
        if self._connection is not None:
            return False
        self._open(connection)
        return True

    def offer(self, tag: int, memory: memoryview) -> asyncio.Future[None]:
        """Send a message when it is asked for; it is read from there until the future is done."""
        self._offered[tag] = memory
        sent = self._expect(tag)
        self._match(tag)
        return sent

    def close(self, why: str, ranks: tuple[int, ...]) -> None:
        """Let go of the connection and of all memory; whoever waits hears why."""
        self._offered.clear()
        self._leaving.clear()
        self._parts.clear()
        super().close(why, ranks)

    def _read(self, connection: socket.socket) -> None:
        """Take what is asked for."""
        data = connection.recv(_ASKED_NBYTES)
        if not data:
            raise ConnectionError("its connection ended")
        words = self._words + data
        usable = len(words) // _ASK.size * _ASK.size
        self._words = words[usable:]
        for (tag,) in _ASK.iter_unpack(words[:usable]):
            self._asked.add(tag)
            self._match(tag)

    def _match(self, tag: int) -> None:
        """Have a message leave if both sides are ready for it."""
        if tag in self._asked and tag in self._offered:
            self._asked.remove(tag)
            self._leaving.append(tag)
            if not self._awaits_space:
                self._try(self._write)

    def _write(self, connection: socket.socket) -> None:
        """Send what leaves, as much of it as the socket takes."""
        try:
            while self._leaving:
                self._send_first(connection)
        finally:
            self._await_space(connection, wanted=bool(self._leaving))

    def _send_first(self, connection: socket.socket) -> None:
        """Send what the socket takes of the first message; `BlockingIOError` if it is full."""
        tag = self._leaving[0]
        if not self._parts:
            memory = self._offered.pop(tag)
            self._parts = [memoryview(_HEAD.pack(tag, len(memory))), memory]
        count = connection.sendmsg(self._parts)
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.pop(0))
        if self._parts:
            self._parts[0] = self._parts[0][count:]
        else:
            self._leaving.popleft()
            self._finish(tag)


class Door:
    """Where other ranks call; lets in who knows the token.

    Args:
        listener: Non-blocking; closed in the end.
        token: Of the exchange.
        welcome: Takes a rank and its connection; whether it did.
        fail: Called with why nobody can be let in any more, and the ranks to blame: none.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        welcome: Callable[[int, socket.socket], bool],
        fail: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._token = token
        self._welcome = welcome
        self._fail = fail
        self._guests: dict[socket.socket, bytearray] = {}
        self._loop.add_reader(listener, self._answer)

    def close(self) -> None:
        """Let nobody in any more, nor keep anybody who has not said who it is. May be repeated."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for guest in self._guests:
            self._loop.remove_reader(guest)
            guest.close()
        self._guests.clear()

    def _answer(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # it has gone again
        except OSError as error:  # too many files are open, say: it would be tried without end
            self.close()
            self._fail(f"other ranks cannot be answered: {_text_of(error)}", ())
            return
        guest.settimeout(0)
        self._guests[guest] = bytearray()
        self._loop.add_reader(guest, self._hear, guest)

    def _hear(self, guest: socket.socket) -> None:
        """Take what is there of a hello. Who says something else, or goes, is let go."""
        said = self._guests[guest]
        try:
            heard = guest.recv(_HELLO.size - len(said))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            heard = b""
        said += heard
        if heard and len(said) < _HELLO.size:
            return
        del self._guests[guest]
        self._loop.remove_reader(guest)
        if not (heard and self._is_let_in(guest, bytes(said))):
            guest.close()

    def _is_let_in(self, guest: socket.socket, said: bytes) -> bool:
        greeting, token, rank = _HELLO.unpack(said)
        is_known = greeting == _GREETING and hmac.compare_digest(token, self._token)
        return is_known and self._welcome(rank, guest)


def _text_of(error: OSError) -> str:
    return error.strerror or str(error)
