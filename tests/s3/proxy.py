"""A proxy before a server: counts requests, keeps what they looked like, and gets in their way.

It lives on the loop of the test. Every request has a connection of its own, and is read to
its end before anything is decided, unless the answer is to come early.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from tests.s3.servers import Server


@dataclass(slots=True, kw_only=True)
class Request:
    """A request as it came in, and what came of it.

    Attributes:
        method: HTTP's word.
        key: The path behind the bucket.
        query: Parameters; of those that come once.
        headers: By name in small letters.
        nbytes: Bytes of the body.
        answer_nbytes: Bytes of body that were sent back.
    """

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    nbytes: int = 0
    answer_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What to do instead of passing a request on and its answer back.

    Attributes:
        answer: Sent back instead of the server's; a status line with headers, and a body.
        early: Answer before the body is read.
        early_nbytes: Bytes of the body that are read before, where `early`.
        forward: Pass the request on all the same.
        reset: Break the connection instead of answering, or behind `keep_nbytes`.
        keep_nbytes: Cut the server's answer behind as many bytes of its body.
        flip_at: Change a bit of this byte of the answer's body, or of its last one.
        hold: Do not go on before this is set.
        late: Do not answer before this is set.
    """

    answer: bytes = b""
    early: bool = False
    early_nbytes: int = 0
    forward: bool = False
    reset: bool = False
    keep_nbytes: int | None = None
    flip_at: int | None = None
    hold: asyncio.Event | None = None
    late: asyncio.Event | None = None


def answer(status: int, code: str = "") -> bytes:
    """Make an answer, with an error in its body if that has a code."""
    error = f"<Error><Code>{code}</Code><Message>as told</Message><Key>some/key</Key></Error>"
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{error}'.encode() if code else b""
    head = f"HTTP/1.1 {status} So\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Proxy:
    """Stands before a server for as long as its `async with` block lasts.

    Args:
        upstream: Where requests go.
        tls: How to speak TLS with clients; plain HTTP if not given.
    """

    def __init__(self, upstream: Server, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = upstream
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests: list[Request] = []
        self.decide: Callable[[Request], Fault | None] = lambda _: None

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, ssl=self._tls, limit=1 << 20
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._listener.wait_closed()

    @property
    def server(self) -> Server:
        """What clients are to talk to."""
        port = self._listener.sockets[0].getsockname()[1]
        scheme = "https" if self._tls else "http"
        return dataclasses.replace(self._upstream, endpoint=f"{scheme}://127.0.0.1:{port}")

    def count(self, method: str, key_end: str = "") -> int:
        """Count requests by method, and by what their key ends in."""
        return len(self.sent(method, key_end))

    def sent(self, method: str, key_end: str = "") -> Sequence[Request]:
        """Give requests by method, and by what their key ends in."""
        return [r for r in self.requests if r.method == method and r.key.endswith(key_end)]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # nobody else cancels it than the end of the block, which waits for it
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request = _request_of(head)
        self.requests.append(request)
        fault = self.decide(request) or Fault(forward=True)
        if "expect" in request.headers and (fault.early_nbytes or not fault.early):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.early:
            await reader.readexactly(fault.early_nbytes)
            writer.write(fault.answer)
            await writer.drain()
            return
        body = await reader.readexactly(int(request.headers.get("content-length", "0")))
        request.nbytes = len(body)
        if fault.hold is not None:
            await fault.hold.wait()
        found = await self._forward(head, body) if fault.forward else b""
        if fault.late is not None:
            await fault.late.wait()
        if fault.reset and fault.keep_nbytes is None:
            _reset(writer)
            return
        found = fault.answer or found
        head, _, body = found.partition(b"\r\n\r\n")
        body = body[: 0 if request.method == "HEAD" else fault.keep_nbytes]
        if fault.flip_at is not None and body:
            at = min(fault.flip_at, len(body) - 1)
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        request.answer_nbytes = len(body)
        writer.write(head + b"\r\n\r\n" + body)
        await writer.drain()
        if fault.reset:
            _reset(writer)

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        """Send a request to the server, and read all that comes back."""
        line, *headers = head[:-4].split(b"\r\n")
        kept = [h for h in headers if not h.lower().startswith((b"expect:", b"connection:"))]
        there = urlsplit(self._upstream.endpoint)
        reader, writer = await asyncio.open_connection(there.hostname, there.port)
        try:
            writer.write(b"\r\n".join([line, *kept, b"Connection: close", b"", b""]) + body)
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


def _request_of(head: bytes) -> Request:
    line, *headers = head[:-4].decode("latin1").split("\r\n")
    method, target, _ = line.split(" ")
    split = urlsplit(target)
    return Request(
        method=method,
        key=unquote(split.path).lstrip("/").partition("/")[2],
        query={
            name: values[0]
            for name, values in parse_qs(split.query, keep_blank_values=True).items()
        },
        headers={
            name.strip().lower(): value.strip()
            for name, _, value in (header.partition(":") for header in headers)
        },
    )


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection so that the other side notices."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
