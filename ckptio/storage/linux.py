"""System calls that Python has no name for, each with a way to say that it is not there.

Numbers and layouts are from the kernel's user headers (`linux/stat.h`, `linux/mman.h`,
`linux/fs.h`); they are the same on x86-64 and on 64-bit Arm.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
from dataclasses import dataclass

_AT_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
#: Who owns, in a user namespace, what is of nobody in it: root there has no power over that.
_UNMAPPED = 65534
_CAP_FOWNER, _CAP_VERSION = 3, 0x20080522
_STATX_NBYTES = 256
_SYS_CACHESTAT = 451
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_ALL = 7

_MADV_POPULATE_READ = 22
_STATFS_NBYTES = 256
#: What is told of room that cannot be reserved, not of a file system that does not do so.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
#: btrfs, ext2 to ext4, f2fs, tmpfs and XFS.
_LOCAL_FILE_SYSTEMS = frozenset({0x9123683E, 0xEF53, 0xF2F52010, 0x01021994, 0x58465342})
_FUSE, _OVERLAY = 0x65735546, 0x794C7630
_SMB = frozenset({0xFE534D42, 0xFF534D42})
_MOUNTS = "/proc/self/mountinfo"
#: File systems of devices without a disk: a server may be asked for what `fstatfs` says.
_file_systems: dict[int, int] = {}

#: Made once: each is a class, which is a reference cycle, and ctypes keeps none.
_Statx = ctypes.c_uint32 * (_STATX_NBYTES // 4)
_StatFS = ctypes.c_uint64 * (_STATFS_NBYTES // 8)
_CacheSpan = ctypes.c_uint64 * 2
_CacheCounts = ctypes.c_uint64 * 5
_CapHeader, _CapData = ctypes.c_uint32 * 2, ctypes.c_uint32 * 6

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """What direct I/O on a file asks for, in bytes.

    Attributes:
        memory: Addresses are multiples of this.
        offset: Offsets and lengths are multiples of this.
    """

    memory: int
    offset: int


def direct_alignment(fd: int) -> DirectAlignment | None:
    """Ask `statx` what direct I/O on an open file needs; `None` where it does not say."""
    statx = getattr(_libc, "statx", None)
    if statx is None:
        return None
    buffer = _Statx()
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(buffer)) != 0:
        return None
    if not buffer[0] & _STATX_DIOALIGN:
        return None
    # struct statx: stx_dio_mem_align at byte 0x98, stx_dio_offset_align at 0x9c
    return DirectAlignment(buffer[0x98 // 4], buffer[0x9C // 4])


def set_buffered(fd: int) -> None:
    """Turn direct I/O off on a file that is open for reading and writing.

    It is opened anew, and `fd` is that from then on: mounts in user space (mergerfs) have the file
    below open as this one was at first, whatever its flags are later. They go where it cannot be
    opened: nobody may write to it any more, or there is no `/proc`.
    """
    try:
        anew = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return
    try:
        os.dup2(anew, fd, inheritable=False)
    finally:
        os.close(anew)


def num_cached_pages(fd: int, offset: int, nbytes: int) -> int | None:
    """Count the pages of a range that are in the page cache; `None` if nobody tells.

    Before Linux 6.5, and of files of overlayfs, which have their pages in the file system below, a
    map of the range is asked. That tells those who own a file, or may write to it (mincore(2)).
    """
    span = _CacheSpan(offset, nbytes)
    result = _CacheCounts()
    failed = _libc.syscall(
        _SYS_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(result), ctypes.c_uint(0)
    )
    if failed or (not result[0] and _diskless(fd) == _OVERLAY):
        return _num_mapped_pages(fd, offset, nbytes)
    return int(result[0])


def _num_mapped_pages(fd: int, offset: int, nbytes: int) -> int | None:
    """Count them by a map that nobody reads; see `num_cached_pages`."""
    try:
        owner = os.fstat(fd).st_uid
    except OSError:
        return None
    is_told = os.geteuid() == owner or (owner != _UNMAPPED and has_power_of_owners())
    if not is_told and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        return None  # the kernel would say of all that they are there
    start = offset % mmap.PAGESIZE
    size, first = ctypes.c_size_t(start + nbytes), ctypes.c_int64(offset - start)
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, first)
    if address == _MAP_FAILED:
        return None
    pages = bytearray(-(-size.value // mmap.PAGESIZE))
    try:
        answer = ctypes.byref(ctypes.c_char.from_buffer(pages))
        return None if _libc.mincore(ctypes.c_void_p(address), size, answer) else pages.count(1)
    finally:
        _libc.munmap(ctypes.c_void_p(address), size)


def has_power_of_owners() -> bool:
    """Whether this thread may do what owners of files may: root of some containers may not."""
    data = _CapData()
    # struct __user_cap_data_struct: what is in effect is its first word
    failed = _libc.capget(_CapHeader(_CAP_VERSION, 0), data)
    return not failed and bool(data[0] >> _CAP_FOWNER & 1)


def is_of_this_host(fd: int) -> bool:
    """Whether a file is on a file system that is known to be written to by this host alone."""
    return _file_system(fd) in _LOCAL_FILE_SYSTEMS


def is_on_fuse(fd: int) -> bool:
    """Whether a file is on a mount of FUSE."""
    return _diskless(fd) == _FUSE


def is_on_smb(fd: int) -> bool:
    """Whether a file or directory is on a mount of SMB."""
    return _diskless(fd) in _SMB


def is_eio_of_fuse(error: OSError, path: str) -> bool:
    """Whether an error is EIO, and of a file on FUSE: rclone says so of all that it has not."""
    if error.errno != errno.EIO:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_on_fuse(fd)
    finally:
        os.close(fd)


def _diskless(fd: int) -> int | None:
    """Give the kind of a file system that has no disk; `None` of any other.

    The answer is kept by the number of the device, which another mount may have later.
    """
    try:
        device = os.fstat(fd).st_dev
    except OSError:
        return None
    if os.major(device):
        return None
    kind = _file_systems.get(device)
    if kind is None and (kind := _file_system(fd)) is not None:  # a server that is away may be back
        _file_systems[device] = kind
    return kind


def _file_system(fd: int) -> int | None:
    """Give the kind of the file system of a file; `None` if that cannot be told."""
    buffer = _StatFS()
    # struct statfs: f_type is its first word
    return None if _libc.fstatfs(fd, ctypes.byref(buffer)) else buffer[0]


def take_read_lease(fd: int) -> bool:
    """Take a read lease of a file; false if somebody has it open for writing, or it is not ours.

    Whoever waits for its end is announced by SIGURG, which does nothing unless the program says
    so: left alone it would be SIGIO, which ends the program.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True


def address_in(buffer: mmap.mmap, start: int = 0) -> int:
    """Give the address of byte `start` of a writable map; good until the map is closed."""
    # what ctypes makes here keeps the map open, and goes when this returns
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer, start))


def populate(pages: mmap.mmap) -> None:
    """Bring all pages of a private map in. Lets the GIL go, which `mmap.madvise` does not.

    Raises:
        OSError: One cannot be read, or the system cannot tell (before Linux 5.14).
    """
    address, nbytes = address_in(pages), len(pages)
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def allocate(fd: int, nbytes: int) -> bool:
    """Reserve the blocks of a file of `nbytes`.

    glibc's `posix_fallocate` writes zeros where the file system cannot; this does not.

    Returns:
        Whether it did. Mounts give many reasons for not doing so, numbers that programs should
        never see among them; what is written later will do without.

    Raises:
        OSError: There is no room, the disk fails, or the file is not open.
    """
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_ROOM:
        raise OSError(code, os.strerror(code))
    return False


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Start writing a range of the page cache to the disk.

    Raises:
        OSError: Writing failed; the system tells it once, so it must not be lost.
    """
    _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def finish_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Wait until a range of the page cache is on the disk. Best effort.

    This makes nothing durable (no metadata, no disk cache flush): `fsync` does, later.

    Raises:
        OSError: Writing failed. A later `fsync` would not tell it again.
    """
    _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_ALL)


def _sync_file_range(fd: int, offset: int, nbytes: int, flags: int) -> None:
    if _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), flags) != 0:
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code))


def link(source: str, target: str) -> None:
    """Give a file a second name, which must be free.

    Not on SeaweedFS: another mount that has seen `source` finds no file under `target` once
    `source` is removed, and had not after 151 s (4.48).

    Raises:
        FileExistsError: `target` exists.
        OSError: The file system cannot, or not so that it lasts (`EOPNOTSUPP`); or another failure.
    """
    if _is_on_seaweedfs(source):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), source, None, target)
    os.link(source, target)


def _is_on_seaweedfs(path: str) -> bool:
    """Whether a file is on a mount of SeaweedFS, as far as that can be told."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_on_fuse(fd) and _type_of_mount(os.fstat(fd).st_dev) == b"fuse.seaweedfs"
    finally:
        os.close(fd)


def _type_of_mount(device: int) -> bytes:
    """Name the type of the mounts of a device; nothing if that cannot be told."""
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    try:
        with open(_MOUNTS, "rb") as mounts:
            # proc(5): number of the device third, and the type behind a dash and what may be there
            found = [fields for line in mounts if (fields := line.split())[2] == number]
    except OSError:
        return b""
    return found[0][found[0].index(b"-", 6) + 1] if found else b""


def rename_noreplace(source: str, target: str) -> None:
    """Rename, unless `target` exists.

    Raises:
        FileExistsError: `target` exists.
        OSError: The file system cannot (`EINVAL`, `ENOSYS`), or another failure.
    """
    _renameat2(source, target, _RENAME_NOREPLACE)


def rename_exchange(source: str, target: str) -> None:
    """Exchange two names in one step.

    Raises:
        FileNotFoundError: One of them does not exist.
        OSError: The file system cannot (`EINVAL`, `ENOSYS`), or another failure.
    """
    _renameat2(source, target, _RENAME_EXCHANGE)


def _renameat2(source: str, target: str, flags: int) -> None:
    function = getattr(_libc, "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), source, None, target)
