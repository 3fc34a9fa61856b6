"""The body of a request, sent as it lies in memory.

botocore takes bytes, which a part of a slab would have to be copied into, or a file. aiohttp
would read a file 64 KiB at a time, on a thread, with a hop to the loop for each. So this is a
file for botocore, which reads it to sign it, and a payload of its own for aiohttp.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import aiohttp
import aiohttp.payload

if TYPE_CHECKING:
    from typing import Self

_CHUNK_NBYTES = 256 << 10


class Body:
    """Memory that is sent; looks like a file. Let go of at the end of a `with` block.

    Args:
        data: The memory.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._view = memoryview(data)
        self._position = 0

    def __enter__(self) -> Self:
        """Give the body itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of the memory: whoever holds the body still finds nothing in it."""
        self._view.release()

    def __len__(self) -> int:
        """Bytes in all."""
        return len(self._view)

    def tell(self) -> int:
        """Say where reading goes on."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go on reading elsewhere."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self)}[whence]
        self._position = base + offset
        return self._position

    def read(self, nbytes: int | None = -1) -> bytes:
        """Read; all that is left if nothing else is said."""
        left = len(self) - self._position
        count = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        with self.chunk(self._position, count) as chunk:
            data = bytes(chunk)
        self._position += count
        return data

    def chunk(self, start: int, nbytes: int) -> memoryview:
        """Give a piece of the memory."""
        return self._view[start : start + nbytes]


class _BodyPayload(aiohttp.payload.Payload):
    """Sends a body piece by piece; beside the memory itself, one piece is copied at a time."""

    _value: Body
    _autoclose = True

    @property
    def size(self) -> int:
        """Bytes left to send."""
        return len(self._value) - self._value.tell()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Nothing to show."""
        del encoding, errors
        return ""

    async def write(self, writer: Any) -> None:
        """Send it."""
        body = self._value
        for start in range(body.tell(), len(body), _CHUNK_NBYTES):
            with body.chunk(start, _CHUNK_NBYTES) as chunk:
                data = bytes(chunk)  # what a socket does not take at once is kept by the loop
            await writer.write(data)


aiohttp.PAYLOAD_REGISTRY.register(_BodyPayload, Body)
