"""File operations that are counted, and that fail, stop or fall short on demand.

These are the real ones with a gate in front: what passes the gate happens to a real file
system, so that what is found afterwards is what a real crash or a real full disk would
have left. Rejected: a simulated file system, which would be a second opinion about what
`link`, `flock` and `O_EXCL` do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Literal

from ckptio.storage.files import PosixFiles
from ckptio.storage.linux import DirectAlignment
from ckptio.testing.faults import Operation

if TYPE_CHECKING:
    import mmap

    from ckptio.testing.faults import Fault

RefuseDirect = Literal["", "open", "open-after-create", "align", "write", "read"]


class RecordingFiles(PosixFiles):
    """The real operations, behind a gate. Thread-safe.

    Args:
        fault: Looks at each operation before it happens, and raises if it must not.
        refuse_direct: Where direct I/O is refused, as file systems do: at `"open"`; at
            open, with the file made nevertheless; by `"align"`, asking for what nobody
            can give; at the first `"write"`; or at the first `"read"`.
        max_transfer_nbytes: Bytes that one write or read moves at most.
        has_exchange: Whether two names can be exchanged.
        has_links: Whether a file can have two names.
        has_locks: Whether files can be locked.
        has_leases: Whether what is in the page cache may be lent, without `pread`.

    Attributes:
        operations: What was asked for, in order; the one that failed included. Questions about
            alignment and leases are not among them, and no fault is shown them.
    """

    def __init__(
        self,
        fault: Fault | None = None,
        *,
        refuse_direct: RefuseDirect = "",
        max_transfer_nbytes: int | None = None,
        has_exchange: bool = True,
        has_links: bool = True,
        has_locks: bool = True,
        has_leases: bool = False,
    ) -> None:
        self.operations: list[Operation] = []
        self.fault = fault
        self._refuse_direct = refuse_direct
        self._max_transfer_nbytes = max_transfer_nbytes
        self._has_exchange = has_exchange
        self._has_links = has_links
        self._has_locks = has_locks
        self._has_leases = has_leases
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._direct_fds: set[int] = set()

    @property
    def num_open(self) -> int:
        """Files that are open."""
        return len(self._paths)

    def kinds(self, *wanted: str) -> list[tuple[str, str]]:
        """Give kind and file name of each operation so far, of the kinds `wanted` if given."""
        return [
            (op.kind, os.path.basename(op.path))
            for op in self.operations
            if not wanted or op.kind in wanted
        ]

    def bury(self) -> None:
        """Close what a crashed process had open, as its kernel would: locks go free."""
        for fd in list(self._paths):
            with contextlib.suppress(OSError):
                super().close(fd)
        self._paths.clear()

    def _step(self, kind: str, path: str = "", nbytes: int = 0) -> None:
        with self._lock:
            operation = Operation(len(self.operations), kind, path, nbytes)
            self.operations.append(operation)
        if self.fault is not None:
            self.fault(operation)

    def _opened(self, fd: int, path: str, *, direct: bool) -> int:
        with self._lock:
            self._paths[fd] = path
            (self._direct_fds.add if direct else self._direct_fds.discard)(fd)
        return fd

    def create(self, path: str, mode: int, *, direct: bool) -> int:
        """Make a new file; see `PosixFiles`."""
        self._step("create", path)
        if direct and self._refuse_direct == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        if direct and self._refuse_direct == "open-after-create":
            os.close(super().create(path, mode, direct=False))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        # a direct file is only played here, so that tests do not depend on the file system
        really = direct and not self._refuse_direct
        return self._opened(super().create(path, mode, direct=really), path, direct=direct)

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        """Open a regular file; see `PosixFiles`."""
        self._step("open", path)
        if direct and self._refuse_direct == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        really = direct and not self._refuse_direct
        return self._opened(
            super().open(path, direct=really, writable=writable), path, direct=direct
        )

    def close(self, fd: int) -> None:
        """Close a file. A failed close has closed it, as with the real one."""
        path = self._paths.get(fd, "")
        try:
            self._step("close", path)
        except OSError:
            self._forget(fd)
            super().close(fd)
            raise
        self._forget(fd)
        super().close(fd)

    def _forget(self, fd: int) -> None:
        with self._lock:
            self._paths.pop(fd, None)
            self._direct_fds.discard(fd)

    def alignment(self, fd: int) -> DirectAlignment | None:
        """Ask what direct I/O needs; see `PosixFiles`."""
        if self._refuse_direct == "align":
            return DirectAlignment(0, 0)
        return None if self._refuse_direct else super().alignment(fd)

    def allocate(self, fd: int, nbytes: int) -> bool:
        """Reserve room; see `PosixFiles`."""
        self._step("allocate", self._paths.get(fd, ""), nbytes)
        return super().allocate(fd, nbytes)

    def set_buffered(self, fd: int) -> None:
        """Turn direct I/O off; see `PosixFiles`."""
        self._step("set_buffered", self._paths.get(fd, ""))
        with self._lock:
            self._direct_fds.discard(fd)
        super().set_buffered(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data`; see `PosixFiles`."""
        self._step("pwrite", self._paths.get(fd, ""), len(data))
        if self._refuse_direct == "write" and fd in self._direct_fds:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().pwrite(fd, data[: self._max_transfer_nbytes], offset)

    def pread(self, fd: int, room: memoryview, offset: int) -> int:
        """Read some bytes; see `PosixFiles`."""
        self._step("pread", self._paths.get(fd, ""), len(room))
        if self._refuse_direct == "read" and fd in self._direct_fds:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().pread(fd, room[: self._max_transfer_nbytes], offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set the size of a file; see `PosixFiles`."""
        self._step("truncate", self._paths.get(fd, ""), nbytes)
        super().truncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        """Make a file durable; see `PosixFiles`."""
        self._step("fsync", self._paths.get(fd, ""))
        super().fsync(fd)

    def fsync_dir(self, path: str) -> None:
        """Make the names in a directory durable; see `PosixFiles`."""
        self._step("fsync_dir", path)
        super().fsync_dir(path)

    def mkdir(self, path: str, mode: int) -> None:
        """Make a directory; see `PosixFiles`."""
        self._step("mkdir", path)
        super().mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory; see `PosixFiles`."""
        self._step("rmdir", path)
        super().rmdir(path)

    def unlink(self, path: str) -> None:
        """Remove a file; see `PosixFiles`."""
        self._step("unlink", path)
        super().unlink(path)

    def publish(self, source: str, target: str) -> None:
        """Give a file a free name; see `PosixFiles`."""
        self._step("publish", target)
        if self._has_links:
            super().publish(source, target)
        else:
            self.rename_to_free(source, target)

    def exchange(self, source: str, target: str) -> bool:
        """Exchange two names; see `PosixFiles`."""
        self._step("exchange", target)
        if not self._has_exchange:
            if not os.path.lexists(target):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target)
            return False
        return super().exchange(source, target)

    def replace(self, source: str, target: str) -> None:
        """Give a file another's name; see `PosixFiles`."""
        self._step("replace", target)
        super().replace(source, target)

    def lock(self, fd: int) -> bool:
        """Take a file's lock; see `PosixFiles`."""
        self._step("lock", self._paths.get(fd, ""))
        if not self._has_locks:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return super().lock(fd)

    def take_lease(self, fd: int) -> bool:
        """Keep others from writing to a file; see `PosixFiles`."""
        return self._has_leases and super().take_lease(fd)

    def map(self, fd: int, offset: int, nbytes: int) -> mmap.mmap:
        """Map a range of a file; see `PosixFiles`."""
        self._step("map", self._paths.get(fd, ""), nbytes)
        return super().map(fd, offset, nbytes)
