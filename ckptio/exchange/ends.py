"""The two ends of a connection of a TCP link: `Inlet` calls and takes, `Outlet` sends.

The `Inlet` sends a hello, once, and then what it asks for; the `Outlet` answers with messages.
Numbers are little-endian.

    hello     16 bytes that say what this is, the token of the exchange (32), the rank (u32)
    ask       the tag of a message (u32), for which there is room
    message   its tag (u32), its size in bytes (u64), its bytes

Memory that is given to `take` or `offer` is used until its future ends with a result or an error.
Cancelling the future frees nothing: whoever does has to `close` the end.

Sockets are read and written in callbacks of the loop, straight from and to the memory of slabs.
Rejected: transports, which copy what they cannot send at once (before Python 3.12) and keep it
when nobody wants it any more; and tasks around `loop.sock_recv_into` and `loop.sock_sendall`,
which take two system calls more for every piece of a message.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ckptio.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

_ASK = struct.Struct("<I")
_HEAD = struct.Struct("<IQ")
#: Of requests at a time; a lane has one.
_ASKED_NBYTES = 4096
#: Read of a connection before others have their turn.
_HEARD_NBYTES = 8 << 20
#: Seconds without anything before a connection is tried, then between tries; and how many.
_IDLE_S, _TRY_S, _NUM_TRIES = 60, 15, 4
_MAX_MS = 2**31 - 1


class Address(NamedTuple):
    """Where a rank is called.

    Attributes:
        host: An IP address, in digits: no name is looked up.
        port: A port.
    """

    host: str
    port: int


class End(abc.ABC):
    """One end of a connection, which another rank may have yet to open.

    Args:
        lose: Called with this and the reason when the connection has ended, or must.
    """

    def __init__(self, lose: Callable[[End, str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = None
        self._lose = lose
        self._awaits_space = False
        self._is_to_hear = False
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
            end(self._connection)
            self._connection = None
        for future in self._futures.values():
            if not future.done():
                future.set_exception(PeerLostError(why, ranks=ranks))
                future.exception()  # there may be nobody any more who waits for it
        self._futures.clear()

    def _open(self, connection: socket.socket) -> None:
        """Begin to read and write."""
        self._connection = connection
        self._loop.add_reader(connection, self._hear)
        self._flush()

    def _hear(self) -> None:
        """Read all that is there, in turns: uvloop tells but once of one that was reset."""
        num_left = _HEARD_NBYTES
        try:
            while self._connection is not None and num_left > 0:
                num_left -= self._read(self._connection)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(self, text_of(error))
            return
        if self._connection is not None and not self._is_to_hear:
            self._is_to_hear = True
            self._loop.call_soon(self._hear_on)

    def _hear_on(self) -> None:
        """Go on reading."""
        self._is_to_hear = False
        self._hear()

    def _flush(self) -> None:
        """Send what the socket takes, and have the loop call again while there is more."""
        if (connection := self._connection) is None:
            return
        try:
            has_more = self._write(connection)
        except (BlockingIOError, InterruptedError):
            has_more = True
        except OSError as error:
            self._lose(self, text_of(error))
            return
        if has_more and not self._awaits_space:
            self._loop.add_writer(connection, self._flush)
        elif self._awaits_space and not has_more:
            self._loop.remove_writer(connection)
        self._awaits_space = has_more

    @abc.abstractmethod
    def _read(self, connection: socket.socket) -> int:
        """Read once; gives how many bytes.

        Raises:
            OSError: The connection has ended, or must; `BlockingIOError` if nothing is there.
        """

    @abc.abstractmethod
    def _write(self, connection: socket.socket) -> bool:
        """Send what there is to send; whether some is left.

        Raises:
            OSError: The connection has ended; `BlockingIOError` if the socket is full.
        """

    def _expect(self, tag: int) -> asyncio.Future[None]:
        """Make what becomes done with a message."""
        self._futures[tag] = self._loop.create_future()
        return self._futures[tag]

    def _finish(self, tag: int) -> None:
        """Tell who waits for a message that its memory is free; it may be about to be cancelled."""
        if not (future := self._futures.pop(tag)).done():
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
        """Ask for a message that fills `room`; the future has a result when it does.

        Raises:
            OSError: This rank can open no connection, which no other one is to blame for.
        """
        self._rooms[tag] = room
        self._unsent += _ASK.pack(tag)
        taken = self._expect(tag)
        if self._connection is None:
            self._call()
        elif self._timer is None:
            self._flush()
        return taken

    def close(self, why: str, ranks: tuple[int, ...]) -> None:
        """Let go of the connection and of all memory; whoever waits hears why."""
        if self._timer is not None:
            self._timer.cancel()
        self._rooms.clear()
        self._rest = memoryview(self._head)
        super().close(why, ranks)

    def _call(self) -> None:
        """Begin to connect; `OSError` if this rank has too many files open for that, say."""
        family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        self._connection = socket.socket(family)
        try:
            self._connection.settimeout(0)
            tune(self._connection)
            limit_silence(self._connection, self._timeout_s)
            self._timer = self._loop.call_later(
                self._timeout_s, self._miss, f"no answer within {self._timeout_s:g} s"
            )
            self._loop.add_writer(self._connection, self._answered)
            self._connection.connect(self._address)
        except BlockingIOError:
            pass  # it is on its way
        except OSError as error:
            self._miss(text_of(error))

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

    def _write(self, connection: socket.socket) -> bool:
        """Say what is asked for; whether there is more to say."""
        if self._unsent:
            del self._unsent[: connection.send(self._unsent)]
        return bool(self._unsent)

    def _read(self, connection: socket.socket) -> int:
        """Take what is there of the head of a message, or of its bytes; gives how much."""
        count = connection.recv_into(self._rest)
        if not count:
            raise ConnectionError("its connection ended")
        self._rest = self._rest[count:]
        if self._rest:
            return count
        if self._tag is None:
            tag, nbytes = _HEAD.unpack(self._head)
            room = self._rooms.pop(tag, None)
            if room is None or len(room) != nbytes:
                raise ConnectionError("it sent something else than was planned")
            self._tag, self._rest = tag, room
        else:
            tag, self._tag, self._rest = self._tag, None, memoryview(self._head)
            self._finish(tag)
        return count


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
        """Send a message when it is asked for; the future has a result when all of it is sent."""
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

    def _read(self, connection: socket.socket) -> int:
        """Take what is asked for; gives how many bytes say so."""
        data = connection.recv(_ASKED_NBYTES)
        if not data:
            raise ConnectionError("its connection ended")
        words = self._words + data
        self._words = words[len(words) // _ASK.size * _ASK.size :]
        for (tag,) in _ASK.iter_unpack(words[: len(words) - len(self._words)]):
            self._asked.add(tag)
            self._match(tag)
        return len(data)

    def _match(self, tag: int) -> None:
        """Have a message leave if both sides are ready for it."""
        if tag in self._asked and tag in self._offered:
            self._asked.remove(tag)
            self._leaving.append(tag)
            if not self._awaits_space:
                self._flush()

    def _write(self, connection: socket.socket) -> bool:
        """Send what leaves, all of it; `BlockingIOError` if the socket does not take that."""
        while self._leaving:
            self._send_first(connection)
        return False

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


def tune(connection: socket.socket) -> None:
    """Send without delay (TCP_NODELAY), and probe a silent connection (keepalive).

    While ranks read, nothing may be sent for minutes. A firewall may forget the connection by then,
    and drop all that comes later: without probes, whoever waits for a message would wait for ever.

    Args:
        connection: One, or a socket that listens; those that it accepts are tuned then, too.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _TRY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_TRIES)


def limit_silence(connection: socket.socket, timeout_s: float) -> None:
    """End a connection whose peer does not acknowledge what was sent (TCP_USER_TIMEOUT).

    Keepalive probes do not help there: the system sends none while data is under way, and resends
    that for a quarter of an hour. (A route that loses only large packets, as its MTU is smaller
    than both ends believe, would answer them anyway.)

    Args:
        connection: One that is open, or about to be.
        timeout_s: For how long a rank may take nothing; two minutes if this is less.
    """
    silence_ms = 1000 * max(timeout_s, _IDLE_S + _NUM_TRIES * _TRY_S)
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(round(silence_ms), _MAX_MS)
    )


def end(connection: socket.socket) -> None:
    """Close a socket, and end its connection even if a forked child still has it open."""
    with contextlib.suppress(OSError):  # there is no connection, or it has ended
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def text_of(error: OSError) -> str:
    """Say what went wrong, as the system does."""
    return error.strerror or str(error)
