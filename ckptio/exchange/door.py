"""The door of a rank: where those that want something of it call, and say who they are."""

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
#: Strangers that may be at the door besides all ranks. A rank says who it is at once.
_MAX_STRANGERS = 64


def hello(token: bytes, rank: int) -> bytes:
    """Say what a rank says when it calls."""
    return _HELLO.pack(_GREETING, token, rank)


class Door:
    """Where other ranks call; lets in who knows the token.

    Args:
        listener: Non-blocking; closed in the end.
        num_callers: Ranks that may call.
        token: Of the exchange.
        welcome: Takes a rank and its connection; whether it did.
        fail: Called with why nobody can be let in any more, and the ranks to blame: none.
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
        """Let nobody in any more, nor keep anybody who has not said who it is. May be repeated."""
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
