"""What a manifest says of tensors and of files, from what it is read as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio.format.checksum import crc32c
from ckptio.format.compose import encode_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.format.manifest import Chunk, TensorEntry


def block_checksums(data: memoryview, block_nbytes: int) -> list[int]:
    """Give the crc32c of each block of `data`; the last block may be short."""
    return [
        crc32c(data[start : start + block_nbytes]) for start in range(0, len(data), block_nbytes)
    ]


def encode_tensors(tensors: Sequence[TensorEntry]) -> bytes:
    """Write the tensor table of a manifest. Defaults of chunks are left out."""
    return encode_rows(
        [(t.name, t.dtype, t.shape, [_short(chunk) for chunk in t.chunks]) for t in tensors]
    )


def _short(chunk: Chunk) -> tuple[Any, ...]:
    """Leave out what a chunk does not need: copies it has not, the place of a whole tensor."""
    if chunk.copies:
        return (chunk.file, chunk.start, chunk.global_offset, chunk.local_shape, chunk.copies)
    if chunk.global_offset is None:
        return (chunk.file, chunk.start)
    return (chunk.file, chunk.start, chunk.global_offset, chunk.local_shape)
