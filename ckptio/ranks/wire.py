"""One connection to one peer: frames in, frames out, and when it was last heard of.

A plain `asyncio.Protocol`, without a task: a coordinator of ten thousand ranks has ten
thousand of these, and what they do fits between two waits. Frames leave in small slices as
the peer takes them, so that a slow peer holds a slice, and otherwise a reference to a body
that all share.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from ckptio.ranks.frames import MAX_FRAME_NBYTES, PREFIX, pack_head, parse_head
from ckptio.ranks.host import is_loopback

if TYPE_CHECKING:
    from ckptio.ranks.frames import AnyHead, Head

_SLICE_NBYTES = 64 << 10


class Receiver(Protocol):
    """Takes what comes over a wire, until `wire_lost`, `hang_up` or `cut`; nothing after that."""

    def frame(self, wire: Wire, head: AnyHead, body: bytes) -> None:
        """Take a frame; `msgspec.MsgspecError` or `ValueError` if it is nonsense."""

    def wire_lost(self, wire: Wire, reason: str) -> None:
        """Take note that the connection ended, unless this end had ended it before. Once."""


class Wire(asyncio.Protocol):
    """A connection.

    Args:
        receiver: Takes what comes.
        max_nbytes: A longer frame ends the connection.

    Attributes:
        receiver: As given.
        max_nbytes: As given; may be raised.
        last_heard_s: When a byte came last, on the loop's clock.
        last_sent_s: When a frame was last given to `send`.
    """

    def __init__(self, receiver: Receiver, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self.receiver = receiver
        self.max_nbytes = max_nbytes
        self._loop = asyncio.get_running_loop()
        self.last_heard_s = self.last_sent_s = self._loop.time()
        self._transport: asyncio.Transport | None = None
        self._is_deaf = False  # no frames come or go any more
        self._is_ending = False
        self._has_ended = False
        self._paused = False
        self._received = bytearray()
        self._out: collections.deque[memoryview] = collections.deque()
        self._gone: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin. Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)
        self.last_heard_s = self._loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """End. Called by the loop."""
        if not self._gone.done():
            self._gone.set_result(None)
        self._lose(f"its connection ended: {exc}" if exc else "its connection ended")

    def eof_received(self) -> bool:
        """Answer the peer's end of file with our own. Called by the loop."""
        self._lose("its connection ended")
        return False  # and the transport closes, which sends what it has

    def pause_writing(self) -> None:
        """Hold frames back. Called by the transport."""
        self._paused = True

    def resume_writing(self) -> None:
        """Send on. Called by the transport."""
        self._paused = False
        self._pump()

    def data_received(self, data: bytes) -> None:
        """Take bytes apart. Called by the loop."""
        if self._is_deaf:
            return
        self.last_heard_s = self._loop.time()
        self._received += data
        try:
            while (frame := self._take()) is not None and not self._is_deaf:
                self.receiver.frame(self, *frame)
        except (
            msgspec.MsgspecError,
            ValueError,
            RecursionError,
        ) as error:  # it is told
            self.abort(f"it sent what is no frame: {error}")

    def _take(self) -> tuple[AnyHead, bytes] | None:
        """Cut the next frame off what was received, if all of it is there."""
        buffer = self._received
        if len(buffer) < PREFIX.size:
            return None
        head_nbytes, body_nbytes = PREFIX.unpack_from(buffer)
        if head_nbytes + body_nbytes > self.max_nbytes:
            raise ValueError(f"{head_nbytes + body_nbytes} bytes, {self.max_nbytes} at most")
        body_start = PREFIX.size + head_nbytes
        stop = body_start + body_nbytes
        if len(buffer) < stop:
            return None
        with memoryview(buffer) as view:
            head, body = bytes(view[PREFIX.size : body_start]), bytes(view[body_start:stop])
        del buffer[:stop]
        return parse_head(head), body

    def send(self, head: Head, body: bytes = b"") -> None:
        """Send a frame, or keep it until the peer takes it; nothing after the end."""
        if self._is_deaf:
            return
        self.last_sent_s = self._loop.time()
        packed = pack_head(head, body)
        if len(body) <= _SLICE_NBYTES:
            self._out.append(memoryview(packed + body))
        else:
            self._out.append(memoryview(packed))
            self._out.append(memoryview(body))
        self._pump()

    def _pump(self) -> None:
        """Give the transport slices until it has enough; when all is sent, end the sending."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        while self._out and not self._paused:
            view = self._out.popleft()
            if len(view) > _SLICE_NBYTES:
                self._out.appendleft(view[_SLICE_NBYTES:])
            transport.write(view[:_SLICE_NBYTES])
        if self._is_ending and not self._out and not self._has_ended:
            self._has_ended = True
            with contextlib.suppress(OSError):  # it was reset, as the loop is to hear
                transport.write_eof()

    def _lose(self, reason: str) -> None:
        self._received.clear()
        if not self._is_deaf:
            self._is_deaf = True
            self._out.clear()
            self.receiver.wire_lost(self, reason)

    def abort(self, reason: str) -> None:
        """End at once, and tell the receiver."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def hang_up(self, last: Head, body: bytes = b"") -> None:
        """Take no more frames, send those that wait and a last one, and end.

        The end is half of one, until the peer ends as well: closing a socket that has
        unread bytes makes the system drop what is still to be sent.
        """
        if not self._is_deaf:
            self.send(last, body)
            self._is_deaf = self._is_ending = True
            self._received.clear()
            self._pump()

    @property
    def own_address(self) -> str:
        """This end's address; empty if there is none that another machine could reach."""
        return self._address("sockname")

    @property
    def peer_address(self) -> str:
        """The other end's address; empty if that is on this machine."""
        return self._address("peername")

    def _address(self, key: str) -> str:
        name = None if self._transport is None else self._transport.get_extra_info(key)
        address = str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""
        return "" if is_loopback(address) else address

    async def gone(self) -> None:
        """Wait for the end of the connection."""
        if self._transport is not None:
            await asyncio.shield(self._gone)

    def cut(self) -> None:
        """End at once, and tell nobody."""
        self._is_deaf = True
        self._out.clear()
        if self._transport is not None:
            self._transport.abort()
