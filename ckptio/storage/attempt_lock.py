"""The lock of a save's attempt, held by who removes what the save has committed, or has left.

A copy to another place has the id of what it copies, and its files. So whoever removes files holds
the lock of the save that they are of: a removal, a save that has replaced a checkpoint, and who
clears what killed saves left. Who removed them without it, after a look, took the files of a copy
that was begun, and committed, just behind that look.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from ckptio.storage.file_names import ATTEMPT_PREFIX, QUIET_S
from ckptio.storage.files import MAX_TRIES
from ckptio.storage.leftovers import boot_id, files_of, is_at, newest_s, owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ckptio.storage.files import PosixFiles

#: How often, and for how many seconds, a lock is waited for.
_NUM_WAITS, _WAIT_S = 5, 0.01


@contextlib.contextmanager
def held_leftovers(
    files: PosixFiles,
    directory: str,
    find: Callable[[Collection[str]], list[str]],
    mode: int,
    stays: Callable[[str, OSError], object],
    among: Collection[str] | None = None,
) -> Iterator[list[str]]:
    """Hold the locks of dead attempts while what they left is removed.

    A copy, or a conversion, that was cut off is taken up under its old id, by whoever gets the
    lock; and what has no attempt's file any more may be made again. So nobody does meanwhile, and
    nothing goes that somebody took up since it was called dead.

    Args:
        files: Operations to use.
        directory: A checkpoint's directory.
        find: Finds what is left over, with the saves whose locks are held; asked once before, and
            once behind: it may have been committed meanwhile, or taken by mistake.
        mode: As in `held_attempt`, as is `stays`.
        stays: See there.
        among: Nothing else is removed, if given.

    Yields:
        What may be removed, in this order: an attempt's own file comes last.

    Raises:
        OSError: What is there cannot be read.
    """
    names = set(find(()) if among is None else among)
    held, taken = set[str](), set[str]()
    with contextlib.ExitStack() as stack:
        for owner in sorted({owner_of(name) for name in names}):
            try:
                if stack.enter_context(held_attempt(files, directory, owner, mode, stays)):
                    held.add(owner)
            except OSError as error:  # somebody has it; or nobody can tell, and is told
                taken.add(owner)
                if error.errno != errno.EBUSY:
                    stays(f"{directory}/{ATTEMPT_PREFIX}{owner}", error)
        again = find(held) if names else []
        free = [name for name in again if name in names and owner_of(name) not in taken]
        yield sorted(free, key=lambda name: name.startswith(ATTEMPT_PREFIX))


@contextlib.contextmanager
def held_attempt(
    files: PosixFiles,
    directory: str,
    save_id: str,
    mode: int,
    stays: Callable[[str, OSError], object],
) -> Iterator[bool]:
    """Hold the lock of a save's attempt while what it has committed goes.

    Another copy of the same checkpoint has its id, and its files: none is begun meanwhile, and what
    is there counts as living, so that nobody else removes some of it. The file is made if it is not
    there, and goes at the end.

    Args:
        files: Operations to use.
        directory: A checkpoint's directory.
        save_id: The save's id.
        mode: Permissions of the file.
        stays: Told of the file where it cannot be removed, and why; it is left over.

    Yields:
        Whether it is held: not where there are no locks, or no file can be made.

    Raises:
        OSError: `EBUSY`: somebody has it. Such a copy is being made, it is being removed already,
            or the save is not through. Not if it is on another host, and was quiet for an hour: a
            server may keep the lock of one that has died. Or the file cannot be opened now.
    """
    path = f"{directory}/{ATTEMPT_PREFIX}{save_id}"
    fd = _taken(files, path, mode, stays)
    try:
        yield fd >= 0
    finally:
        if fd >= 0:
            try:
                if is_at(fd, path):
                    files.unlink(path)
            except OSError as error:
                stays(path, error)
            finally:
                with contextlib.suppress(OSError):  # closing is all that was left to do
                    files.close(fd)


def _taken(files: PosixFiles, path: str, mode: int, stays: Callable[[str, OSError], object]) -> int:
    """Take the lock of an attempt's file, which is made if need be; less than 0 if none can be."""
    for _ in range(MAX_TRIES):
        try:
            fd, is_new = _opened(files, path, mode)
        except FileExistsError:  # it was made just now
            continue
        if fd < 0:
            return -1
        is_held: bool | None = False
        is_through = False
        try:
            is_held = _is_held(files, fd, path)
            if is_held:
                with contextlib.suppress(OSError):  # the disk is full
                    files.pwrite(fd, memoryview(boot_id()), 0)
            elif is_held is None and is_new:
                _unlink(files, path, stays)
            is_through = True
        finally:
            if not (is_held and is_through):
                with contextlib.suppress(OSError):  # closing is all that was left to do
                    files.close(fd)
        if is_held:
            return fd
        if is_held is None:
            return -1
    return -1


def _unlink(files: PosixFiles, path: str, stays: Callable[[str, OSError], object]) -> None:
    try:
        files.unlink(path)
    except FileNotFoundError:
        pass  # somebody else has
    except OSError as error:
        stays(path, error)


def _opened(files: PosixFiles, path: str, mode: int) -> tuple[int, bool]:
    """Open an attempt's file, or make it; gives whether it is new. Less than 0 if none can be.

    Raises:
        FileExistsError: Somebody has made it just now.
        OSError: It is there, and cannot be opened now.
    """
    try:
        return files.open(path, direct=False, writable=True), False
    except FileNotFoundError:
        pass
    except PermissionError:  # another user's
        return -1, False
    try:
        return files.create(path, mode, direct=False), True
    except FileExistsError:
        raise
    except OSError:  # the disk is full, say
        return -1, True


def _is_held(files: PosixFiles, fd: int, path: str) -> bool | None:
    """Lock an attempt's file; `None` where there are no locks, false if it is another by now.

    Raises:
        OSError: Somebody has the lock.
    """
    try:
        is_free = files.lock(fd)
        for _ in range(_NUM_WAITS):  # who looks for leftovers has it for a moment
            if is_free:
                break
            time.sleep(_WAIT_S)
            is_free = files.lock(fd)
    except OSError as error:
        return False if error.errno == errno.ESTALE else None  # removed just now, on a server
    if is_free:
        return is_at(fd, path)
    boot = os.pread(fd, 64, 0)
    directory, marker = os.path.split(path)
    names = [marker, *files_of(directory, marker.removeprefix(ATTEMPT_PREFIX))]
    is_quiet = newest_s(directory, names) + QUIET_S < time.time()
    if boot != boot_id() and is_quiet:
        return None
    raise OSError(
        errno.EBUSY, "it is being removed, or copied once more, or its save is not through"
    )
