"""Which files of a directory nobody needs: those of killed saves and of replaced manifests.

A living save holds the lock of its attempt file (`storage.locks`); the kernel frees the lock of
a dead one.
The file says under which boot of which kernel it was made. On the same one the lock
decides. A mount may not carry locks from host to host, so the attempt of another host, or
of this one before a reboot, counts as alive until it has been quiet for an hour: by the clock
that dates files there, as that of this host may differ from a server's, or have been set. So it
is with that of another mount of FUSE on this host, as in another container: SeaweedFS carries no
locks from mount to mount.

The files of a save of many ranks are covered by the lock of the rank that leads it. Another
rank may be ahead of that one, so without any attempt its files too are left for an hour.

The order matters: list first, then look at locks, then read the manifest. A save that was
alive when its lock was looked at is left alone; one that had ended by then has its
manifest in place before that manifest is read.

What is needed is what the manifest lists, and what a living save may still put back in its
place: the manifest that it has replaced is beside it until its own is durable.

What a killed removal took by mistake is a checkpoint still (`storage.tombs`), and is put back
before anybody looks for leftovers; where another one stands, it stays beside that.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING

from ckptio.errors import CheckpointExistsError, FormatError
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, OPENING
from ckptio.format.summary import decode_summary
from ckptio.storage import linux
from ckptio.storage.anew import look_anew
from ckptio.storage.file_names import (
    ATTEMPT_PREFIX,
    NEW_MANIFEST_PREFIX,
    NOTE_PREFIX,
    QUIET_S,
    REPLACED_SUFFIX,
    TOMB,
)
from ckptio.storage.files import follow_pointer, read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ckptio.format.summary import Summary
    from ckptio.storage.files import PosixFiles

_FIRST_RANK = "-00000-"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OURS = re.compile(
    r"(?:data-|\.attempt-|\.copy-|\.?manifest-)([0-9a-f]{32})"
    r"(?:-\d{5}-\d{5}\.safetensors|-old(?:-[0-9a-f]{8})?|-was|\.json)?"
)


def owner_of(name: str) -> str:
    """Give the id of the save that a file's name says it is of; empty if it is of none."""
    match = _OURS.fullmatch(name)
    return match[1] if match else ""


def files_of(directory: str, save_id: str) -> list[str]:
    """Name the data files of a save, of all its ranks; none if they cannot be listed."""
    prefix = f"data-{save_id}-"
    with contextlib.suppress(OSError):
        return sorted(name for name in os.listdir(directory) if name.startswith(prefix))
    return []


def notes_of(directory: str, save_id: str) -> list[str]:
    """Name the note of a save, if there is one."""
    name = NOTE_PREFIX + save_id
    return [name] if os.path.lexists(f"{directory}/{name}") else []


def read_summary(files: PosixFiles, path: str) -> tuple[Summary, list[str]]:
    """Read the summary of a manifest, whatever its name at the moment.

    Args:
        files: Operations to use.
        path: The manifest, or a pointer to it, in the directory of its checkpoint.

    Returns:
        The summary, and the name of the file that has the manifest if that is another one.

    Raises:
        FormatError: It is damaged.
        OSError: It cannot be read; it, or what it points to, may be gone.
    """
    commit = read_regular(files, path, MAX_MANIFEST_NBYTES)
    data, pointed = follow_pointer(files, os.path.dirname(path), commit)
    return decode_summary(data), pointed


def is_whole(directory: str, summary: Summary) -> bool:
    """Whether all data files of a manifest are there, with their sizes."""
    with contextlib.suppress(FileNotFoundError):
        return all(
            os.stat(f"{directory}/{file.name}", follow_symlinks=False).st_size == file.nbytes
            for file in summary.files
        )
    return False


def is_committed(files: PosixFiles, directory: str, save_id: str) -> bool:
    """Whether the checkpoint that is there is a save's.

    Raises:
        OSError: That cannot be told.
    """
    try:
        there, _ = read_summary(files, f"{directory}/{MANIFEST_NAME}")
    except (FileNotFoundError, FormatError):
        return False
    return there.save_id == save_id


def require_free(files: PosixFiles, directory: str) -> None:
    """Check that no checkpoint is there, nor anything in its place.

    Raises:
        CheckpointExistsError: It is; says so if it may be another program's.
    """
    path = f"{directory}/{MANIFEST_NAME}"
    if not os.path.lexists(path):
        return
    head = OPENING
    with contextlib.suppress(OSError):
        fd = files.open(path, direct=False)
        try:
            head = os.pread(fd, len(OPENING), 0)
        finally:
            files.close(fd)
    if OPENING.startswith(head):  # or cut short
        raise CheckpointExistsError(directory)
    raise CheckpointExistsError(
        directory,
        "save to another place, or pass overwrite=True to replace the file",
        f"{MANIFEST_NAME} is here, and does not begin as ckptio's do",
    )


def find_leftovers(
    files: PosixFiles,
    directory: str,
    save_id: str,
    clock: Callable[[], float] = time.time,
    held: Collection[str] = (),
) -> list[str]:
    """Name the files in `directory` that belong to no living save and to no checkpoint.

    Args:
        files: Operations to use.
        directory: A checkpoint's directory.
        save_id: The save that asks; its own files are not leftovers.
        clock: Says what time it is where files are dated; that of this host if not given.
        held: Saves whose locks the caller has: they are dead.

    Returns:
        Names; none of a save whose lock cannot be asked for, and none at all where the manifest
        cannot be read.

    Raises:
        OSError: The directory cannot be read.
    """
    owners: dict[str, list[str]] = {}
    listed = sorted(os.listdir(directory))
    for name in listed:
        if (owner := owner_of(name)) and owner != save_id:
            owners.setdefault(owner, []).append(name)
    if not owners:
        return []
    living = {
        owner
        for owner, names in owners.items()
        if owner not in held
        and _is_alive(files, directory, f"{ATTEMPT_PREFIX}{owner}", names, clock)
    }
    try:
        needed = _needed(files, directory, MANIFEST_NAME)
        if not needed and MANIFEST_NAME in listed:
            return []  # taken out of its place just now, or the mount is behind
        for owner in living:
            for suffix in ("", REPLACED_SUFFIX):
                needed |= _needed(files, directory, NEW_MANIFEST_PREFIX + owner + suffix)
        for tomb in filter(TOMB.fullmatch, listed):
            needed |= _needed_by_mistake(files, directory, tomb)
    except (OSError, FormatError):
        return []  # damaged, or of a newer version: whatever it needs stays
    return [
        name
        for owner, names in owners.items()
        for name in names
        if owner not in living and name not in needed
    ]


def is_at(fd: int, path: str) -> bool:
    """Whether an open file is still what has a name."""
    look_anew(path)
    mine = os.fstat(fd)
    with contextlib.suppress(FileNotFoundError):
        there = os.stat(path, follow_symlinks=False)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
    return False


def _needed(files: PosixFiles, directory: str, manifest: str) -> set[str]:
    """Name the files of a manifest; none if it is not there."""
    try:
        commit = read_regular(files, f"{directory}/{manifest}", MAX_MANIFEST_NBYTES)
    except FileNotFoundError:
        return set()
    data, pointed = follow_pointer(files, directory, commit)
    return _names_in(decode_summary(data), pointed)


def _needed_by_mistake(files: PosixFiles, directory: str, tomb: str) -> set[str]:
    """Name the files of a checkpoint that was taken by mistake; none if that is none."""
    try:
        summary, pointed = read_summary(files, f"{directory}/{tomb}")
    except FormatError:
        return set()
    except FileNotFoundError:
        if os.path.lexists(f"{directory}/{tomb}"):
            return set()  # what it points to is gone
        raise  # it was put back, or removed, just now
    if summary.save_id in tomb or not is_whole(directory, summary):
        return set()
    return {tomb, *_names_in(summary, pointed)}


def _names_in(summary: Summary, pointed: list[str]) -> set[str]:
    names = (entry.name for entry in summary.files)
    return {*pointed, *names, NOTE_PREFIX + summary.save_id}


def boot_id() -> bytes:
    """Name this boot of this kernel; empty where the system does not say."""
    with contextlib.suppress(OSError), open(_BOOT_ID, "rb") as file:
        return file.read(64).strip()
    return b""


def home_of(fd: int) -> bytes:
    """Name what the locks of a file reach: this boot of this kernel, and the mount if it is FUSE.

    Empty where the system does not say. Of one length: a later one is written over it.

    Raises:
        OSError: Nobody can tell.
    """
    boot = boot_id()
    if boot and linux.is_on_fuse(fd):
        return b"%s/%08x" % (boot, os.fstat(fd).st_dev)
    return boot


def mark(files: PosixFiles, fd: int) -> None:
    """Say in an attempt's file, which is locked, what its lock reaches; others see it from here on.

    Raises:
        OSError: It cannot be written.
    """
    files.pwrite(fd, memoryview(home_of(fd)), 0)
    if linux.is_on_fuse(fd):
        with contextlib.suppress(OSError):  # a disk that fails says so of what is written next
            files.fsync(fd)  # SeaweedFS shows nobody else what is new and open before that


def is_at_home(fd: int) -> bool:
    """Whether what an attempt's file says is that its lock reaches here.

    Raises:
        OSError: It cannot be read.
    """
    said = os.pread(fd, 64, 0)
    return bool(said) and said in (home_of(fd), boot_id())  # as earlier versions wrote it


def _is_alive(
    files: PosixFiles, directory: str, marker: str, names: list[str], clock: Callable[[], float]
) -> bool:
    """Whether a save is, or may be, still under way."""
    try:
        fd = files.open(f"{directory}/{marker}", direct=False, writable=True)
    except FileNotFoundError:
        leads = all(_FIRST_RANK in name for name in names if name.startswith("data-"))
        return not leads and not _is_quiet(directory, names, clock)
    except OSError:
        return True
    try:
        # written once the lock is held: an empty one is being made at this moment, or its
        # maker was killed just then; its lock must not be touched
        if not is_at_home(fd):
            return not _is_quiet(directory, names, clock)
        return not files.lock(fd)
    except OSError:
        return True
    finally:
        files.close(fd)


def _is_quiet(directory: str, names: list[str], clock: Callable[[], float]) -> bool:
    """Whether none of some files was written to for long."""
    return newest_s(directory, names) + QUIET_S < clock()


def newest_s(directory: str, names: Collection[str]) -> float:
    """Say when one of some files in a directory was last written to; 0 if none is there."""
    times = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            times.append(os.stat(f"{directory}/{name}", follow_symlinks=False).st_mtime)
    return max(times, default=0.0)
