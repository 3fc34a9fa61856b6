"""Accept connections of other ranks, once each has shown the token and said its rank.

Made by `tcp.tcp_link`, on each rank. Nothing here waits: it runs in callbacks of the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from typing import TYPE_CHECKING

from ckptio.exchange.ends import end, text_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_HELLO = struct.Struct("<16s32sI")
_GREETING = b"ckptio exchange\n"
#: Connections that may be waiting to say who they are, besides those of all ranks. Beyond that,
#: the oldest is closed: a rank says who it is at once.
_MAX_STRANGERS = 64


def hello(token: bytes, rank: int) -> bytes:
    """Give the bytes that a rank sends first."""
    return _HELLO.pack(_GREETING, token, rank)


class Door:
    """Accepts connections, and passes on those that know the token.

    Args:
        listener: Non-blocking; `close` closes it.
        num_callers: Ranks that may call.
        token: Of the exchange.
        welcome: Given a rank and its connection; returns whether it took the connection, which is
            closed if not.
        fail: Called with the reason if no connection can be accepted any more, and with the ranks
            to blame, which are none.
    """

    def __init__(
        self,
        listener: socket.socket,
        num_callers: int,
        token: bytes,
        welcome: Callable[[int, socket.socket], bool],
        fail: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._max_guests = num_callers + _MAX_STRANGERS
        self._token = token
        self._welcome = welcome
        self._fail = fail
        self._guests: dict[socket.socket, bytearray] = {}
        self._loop.add_reader(listener, self._answer)

    def close(self) -> None:
        """Stop accepting, and close connections that have not said who they are. Repeatable."""
        for each in (self._listener, *self._guests):
            if each.fileno() >= 0:
                self._loop.remove_reader(each)
                end(each)
        self._guests.clear()

    def _answer(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # it has gone again
        except OSError as error:  # too many files are open, say: it would be tried without end
            self.close()
            self._fail(f"other ranks cannot be answered: {text_of(error)}", ())
            return
        while len(self._guests) >= self._max_guests:
            self._part(next(iter(self._guests)))  # it has said nothing for the longest time
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
        if heard and self._is_let_in(guest, bytes(said)):
            del self._guests[guest]
        else:
            self._part(guest)

    def _part(self, guest: socket.socket) -> None:
        """Let somebody go who was not let in."""
        del self._guests[guest]
        self._loop.remove_reader(guest)
        end(guest)

    def _is_let_in(self, guest: socket.socket, said: bytes) -> bool:
        greeting, token, rank = _HELLO.unpack(said)
        if greeting != _GREETING or not hmac.compare_digest(token, self._token):
            return False
        self._loop.remove_reader(guest)  # whoever takes it reads from it
        return self._welcome(rank, guest)
