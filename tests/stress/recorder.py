"""A disk that writes down, in order, every block written to it and every flush.

It is a file in a FUSE mount with the bytes in memory; a file system is made and mounted on
it through a loop device, which turns every barrier of that file system into an `fsync`
here. The idea is that of Linux' dm-log-writes, without the device mapper. What is written
to a second file, the control file, goes into the log as a mark: "by now this was promised".

Run as a process: `python -m tests.stress.recorder MOUNT_POINT NBYTES LOG`; ends when the
mount point is unmounted.
"""

from __future__ import annotations

import enum
import errno
import stat
import struct
import sys
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Sequence

DISK_NAME = "disk"
CONTROL_NAME = "control"

#: The mark behind the making of the file system, before anything is promised.
READY = b"ready"

#: Before each record's bytes: its kind, its offset on the disk and its number of bytes.
HEADER = struct.Struct("<BQQ")


class Kind(enum.IntEnum):
    WRITE = 1
    FLUSH = 2
    MARK = 3


class RecordedDisk:
    """The operations of the mount, as mfusepy calls them, one at a time.

    Args:
        nbytes: Size of the disk; it begins as zeros.
        log: Where records go.
    """

    use_ns = True

    def __init__(self, nbytes: int, log: BinaryIO) -> None:
        self._bytes = bytearray(nbytes)
        self._log = log

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        del fh
        nbytes = {f"/{DISK_NAME}": len(self._bytes), f"/{CONTROL_NAME}": 0}
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        if path not in nbytes:
            raise OSError(errno.ENOENT, path)
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": nbytes[path]}

    def readdir(self, path: str, fh: int) -> Sequence[str]:
        del path, fh
        return [".", "..", DISK_NAME, CONTROL_NAME]

    def read(self, path: str, nbytes: int, offset: int, fh: int) -> bytes:
        del fh
        return bytes(self._bytes[offset : offset + nbytes]) if path == f"/{DISK_NAME}" else b""

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        del fh
        if path == f"/{CONTROL_NAME}":
            self._record(Kind.MARK, 0, data)
            return len(data)
        if offset + len(data) > len(self._bytes):
            raise OSError(errno.ENOSPC, path)
        self._bytes[offset : offset + len(data)] = data
        self._record(Kind.WRITE, offset, data)
        return len(data)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        del datasync, fh
        if path == f"/{DISK_NAME}":
            self._record(Kind.FLUSH, 0, b"")
        return 0

    def truncate(self, path: str, nbytes: int, fh: int | None = None) -> int:
        del fh
        if path == f"/{DISK_NAME}" and nbytes != len(self._bytes):
            raise OSError(errno.EPERM, path)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, nbytes: int, fh: int) -> int:
        del mode, offset, nbytes, fh
        raise OSError(errno.EOPNOTSUPP, path)  # no holes: zeros are written, and recorded

    def _record(self, kind: Kind, offset: int, data: bytes) -> None:
        self._log.write(HEADER.pack(kind, offset, len(data)))
        self._log.write(data)


def main(mount_point: str, nbytes: str, log_path: str) -> None:
    """Serve one disk until it is unmounted."""
    import mfusepy  # noqa: PLC0415  # needs libfuse; readers of logs do not

    with open(log_path, "wb") as log:
        disk = RecordedDisk(int(nbytes), log)
        mfusepy.FUSE(disk, mount_point, foreground=True, nothreads=True, direct_io=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
