"""crc32c of the blocks of a file.

Every byte of every data file lies under a checksum of its fixed-size block, header and
padding too. Checksums per tensor were the alternative: they cost a call and a manifest
entry for each of 20,000 small tensors, and leave headers unchecked. The price of blocks
is that a tensor smaller than one is read with its neighbours, a block or two.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["crc32c", "pack_checksums", "unpack_checksums"]


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Pack checksums as little-endian 32-bit words."""
    return struct.pack(f"<{len(checksums)}I", *checksums)


def unpack_checksums(packed: bytes) -> tuple[int, ...]:
    """Undo `pack_checksums`; `packed` has a multiple of 4 bytes."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)
