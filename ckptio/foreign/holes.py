"""A file in memory that has holes where the tensors of an archive are.

`torch.load` is given it instead of the archive, and maps it. So it makes all tensors without
reading their data: they lie over holes, which take no memory. Where a tensor lies in the map says
where its bytes are in the archive; they are read from there, later and by ranges.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING

from ckptio.errors import StorageError
from ckptio.foreign.archive import UTF8_FLAG, ZIP

if TYPE_CHECKING:
    import zipfile

#: Names the file in the list of maps.
NAME = "ckptio-torch-save"


class NoRoomError(StorageError):
    """No file in memory can be as long as an archive; a local one can still be loaded whole."""


def file_of_holes(nbytes: int, path: str) -> int:
    """Make a file in memory that is one hole, and give its descriptor.

    Args:
        nbytes: Its size. It takes no memory, but the limit of file sizes (`ulimit -f`) holds.
        path: The archive that it stands for; for messages.

    Raises:
        NoRoomError: The system refuses.
    """
    fd = -1
    try:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        what = f"cannot make a file in memory of its size: {error.strerror or error}"
        raise NoRoomError(what, path=path, code=error.errno or errno.EIO) from error
    return fd


def header_of(name: bytes, info: zipfile.ZipInfo) -> bytes:
    """Make the header that a member of an archive begins with."""
    large = 0xFFFFFFFF
    sizes = (info.file_size, info.file_size) if info.file_size < large else (large, large)
    flags = info.flag_bits & UTF8_FLAG
    fixed = struct.pack("<4s5H3L2H", ZIP, 20, flags, 0, 0, 0, info.CRC, *sizes, len(name), 0)
    return fixed + name


def mapped(fd: int) -> list[tuple[int, int, int]]:
    """List where a file is mapped: first and last address, and offset in the file."""
    inode = os.fstat(fd).st_ino
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, _, offset, _, number, *path = line.split(maxsplit=5)
            if int(number) == inode and path and path[0].startswith(f"/memfd:{NAME}"):
                first, _, stop = addresses.partition("-")
                found.append((int(first, 16), int(stop, 16), int(offset, 16)))
    return found
