"""`ckptio doctor`: what a file system and this machine can do, and what dead saves left.

Nothing is written but inside a directory that is made for it and removed. Without torch.
Of a URL the same is told by `doctor_store`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import shutil
import tempfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckptio.cli.config import config_for
from ckptio.cli.find import find_checkpoints
from ckptio.cli.findings import Finding, Leftover
from ckptio.cli.mounts import file_system_of
from ckptio.cli.outcome import FAILED, FINE
from ckptio.cli.terminal import Terminal
from ckptio.cli.text import count, fold, format_nbytes, pad, visible
from ckptio.config import PAGE_NBYTES
from ckptio.errors import ConfigError
from ckptio.staging import moves
from ckptio.storage import linux
from ckptio.storage.files import NoExclusiveNames, PosixFiles, absolute
from ckptio.storage.keys import shown_url
from ckptio.storage.leftovers import find_leftovers
from ckptio.storage.lending import Lender
from ckptio.storage.resolve import local_path, remote_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptio.cli.findings import State

    Json = dict[str, Any]

_STYLES = {"yes": "green", "slow": "yellow", "no": "bold red"}


def run(path: str, *, storage_options: Sequence[str], as_json: bool) -> int:
    """Look at a path or URL, and give the exit code: 2 if saves cannot work there."""
    terminal = Terminal()
    result: Json = {
        "path": shown_url(path),
        "file_system": None,
        "free_nbytes": None,
        "error": None,
    }
    result |= {"findings": [], "leftovers": []}
    try:
        config = config_for([path], storage_options)
        top = remote_url(path) or absolute(local_path(path))
        if remote_url(path) is not None:
            from ckptio.cli.doctor_store import look_at_store  # noqa: PLC0415  # where there is one

            result["file_system"] = top.partition("://")[0]
            findings, leftovers = asyncio.run(look_at_store(top, config))
        else:
            free = os.statvfs(top)
            result["file_system"] = file_system_of(top)
            result["free_nbytes"] = free.f_bavail * free.f_frsize
            leftovers = list(find_dead(top))
            findings = probe(top)
    except (ConfigError, OSError) as error:
        problem = str(error.strerror) if isinstance(error, OSError) else str(error)
        result["error"] = problem
        terminal.message(f"{result['path']}: {problem}")
        if as_json:
            terminal.json(result)
        return FAILED
    if as_json:
        result["findings"] = [asdict(finding) for finding in findings]
        result["leftovers"] = [asdict(leftover) for leftover in leftovers]
        terminal.json(result)
    else:
        _print(top, result, findings, leftovers, terminal)
    return FAILED if any(finding.state == "no" for finding in findings) else FINE


def find_dead(top: str) -> Iterator[Leftover]:
    """Look for files of saves that ended without a commit, at and below a directory."""
    files = PosixFiles()
    for found in find_checkpoints(top, depth=4, hidden=True):
        names: list[str] = []
        with contextlib.suppress(OSError):  # it went away, or may not be listed
            names = find_leftovers(files, found.path, "")
        if names:
            sizes = [_nbytes(f"{found.path}/{name}") for name in names]
            yield Leftover(path=found.path, names=tuple(names), nbytes=sum(sizes))


def _nbytes(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def probe(top: str) -> list[Finding]:
    """Try what a save does, inside a directory that is removed afterwards.

    Raises:
        OSError: No directory can be made there.
    """
    folder = tempfile.mkdtemp(prefix=".ckptio-doctor-", dir=top)
    try:
        return [_try(name, check, folder) for name, check in _CHECKS.items()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _try(name: str, check: Callable[[str], tuple[State, str]], folder: str) -> Finding:
    try:
        state, detail = check(folder)
    except OSError as error:
        state, detail = "no", f"failed: {error.strerror}"
    return Finding(name=name, state=state, detail=detail)


def _direct(folder: str) -> tuple[State, str]:
    files = PosixFiles()
    page = mmap.mmap(-1, PAGE_NBYTES)
    try:
        fd = files.create(f"{folder}/direct", 0o600, direct=True)
    except OSError as error:
        return "slow", f"O_DIRECT is refused ({error.strerror}): writes go through the page cache"
    try:
        os.pwrite(fd, page, 0)
        found = os.preadv(fd, [page], 0)
        alignment = files.alignment(fd)
    except OSError as error:
        return "slow", f"a direct transfer fails ({error.strerror}): the page cache serves"
    finally:
        os.close(fd)
    if found != PAGE_NBYTES:
        return "slow", f"a direct read gave {found} bytes of {PAGE_NBYTES}"
    if alignment is None:
        return "yes", "O_DIRECT works; the kernel does not say which alignment it needs"
    detail = f"O_DIRECT works; memory on {alignment.memory}, offsets on {alignment.offset} bytes"
    if max(alignment.memory, alignment.offset) > PAGE_NBYTES:
        return "slow", f"{detail}, more than a page of {PAGE_NBYTES}: the page cache serves"
    return "yes", detail


def _allocate(folder: str) -> tuple[State, str]:
    fd = PosixFiles().create(f"{folder}/room", 0o600, direct=False)
    try:
        if linux.allocate(fd, 1 << 20):
            return "yes", "room is reserved before the first write: a full disk is known at once"
    finally:
        os.close(fd)
    return "slow", "fallocate is not there: a full disk is known when it is full"


def _publish(folder: str) -> tuple[State, str]:
    for name in ("made", "taken"):
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o600))
    files = PosixFiles()
    try:
        files.publish(f"{folder}/made", f"{folder}/taken")
    except FileExistsError:
        files.publish(f"{folder}/made", f"{folder}/free")
        return "yes", "a name is taken by one writer alone: commits exclude each other"
    except NoExclusiveNames:
        return "no", "two writers may be given one name: only overwrite=True saves here"
    return "no", "a name that was taken was given again: two saves may overwrite each other"


def _exchange(folder: str) -> tuple[State, str]:
    for name in ("old", "new"):
        with open(f"{folder}/{name}", "w", encoding="ascii") as file:
            file.write(name)
    if not PosixFiles().exchange(f"{folder}/new", f"{folder}/old"):
        return "slow", "RENAME_EXCHANGE is not there: an overwrite replaces by plain rename"
    with open(f"{folder}/old", encoding="ascii") as file:
        if file.read() != "new":
            return "no", "RENAME_EXCHANGE did not exchange"
    try:
        open(f"{folder}/new", encoding="ascii").close()
    except FileNotFoundError:
        return "slow", "RENAME_EXCHANGE is a plain rename: an overwrite notices no other one"
    return "yes", "RENAME_EXCHANGE works: an overwrite notices that another one came first"


def _lock(folder: str) -> tuple[State, str]:
    files = PosixFiles()
    first = files.create(f"{folder}/lock", 0o600, direct=False)
    second = files.open(f"{folder}/lock", direct=False, writable=True)
    try:
        held, taken = files.lock(first), files.lock(second)
    except OSError as error:
        return "slow", f"no locks ({error.strerror}): what dead saves left stays for an hour"
    finally:
        files.close(first)
        files.close(second)
    if held and not taken:
        return "yes", "flock works: what dead saves left is known, and removed by the next save"
    return "no", "two holders have one lock: files of living saves may be taken for dead ones"


def _sync(folder: str) -> tuple[State, str]:
    files = PosixFiles()
    fd = files.create(f"{folder}/synced", 0o600, direct=False)
    try:
        os.write(fd, b"x")
        files.fsync(fd)
    finally:
        os.close(fd)
    try:
        files.fsync_dir(folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            reason = os.strerror(error.errno)
            return "no", f"fsync of a directory fails ({reason}): use durability='file'"
        raise
    return "yes", "fsync of files and of directories works"


def _page_cache(folder: str) -> tuple[State, str]:
    fd = PosixFiles().create(f"{folder}/cached", 0o600, direct=False)
    try:
        os.write(fd, b"x" * PAGE_NBYTES)
        pages = linux.num_cached_pages(fd, 0, PAGE_NBYTES)
    finally:
        os.close(fd)
    if pages is None:
        return "slow", "nobody tells what is in the page cache: loads read the disk"
    return "yes", "the kernel tells what is in the page cache: loads take it from there"


def _lease(folder: str) -> tuple[State, str]:
    files = PosixFiles()
    path = f"{folder}/leased"
    with open(path, "wb") as file:
        file.write(bytes(PAGE_NBYTES))
    fd = files.open(path, direct=False)
    try:
        with Lender(files, fd).lend(0, PAGE_NBYTES) as lent:
            is_lent = lent is not None
    finally:
        files.close(fd)
    if not is_lent:
        return "slow", "no read leases: loads copy what is in the page cache once more"
    return "yes", "read leases work: loads take what is in the page cache where it lies"


def _stream(_: str) -> tuple[State, str]:
    if moves.can_stream():
        return "yes", "large copies go past the cache, which stays the training step's"
    return "slow", "no such loop for this processor, or a policy forbids it: memmove copies"


def _share(_: str) -> tuple[State, str]:
    if moves.can_share():
        return "yes", "process_vm_readv works: small tensors are copied a thousand at a time"
    return "slow", "process_vm_readv is not allowed: small tensors are copied one by one"


_CHECKS: dict[str, Callable[[str], tuple[State, str]]] = {
    "direct I/O": _direct,
    "reserving room": _allocate,
    "exclusive names": _publish,
    "exchange": _exchange,
    "locks": _lock,
    "fsync": _sync,
    "page cache": _page_cache,
    "leases": _lease,
    "copies": _stream,
    "small copies": _share,
}


def _print(
    top: str, result: Json, findings: list[Finding], leftovers: list[Leftover], terminal: Terminal
) -> None:
    """Say what was seen."""
    about = [visible(top), str(result["file_system"] or "unknown file system")]
    if result["free_nbytes"] is not None:
        about.append(f"{format_nbytes(result['free_nbytes'])} free")
    terminal.lines(fold(about, terminal.width))
    first = max(len(finding.name) for finding in findings)
    for finding in findings:
        parts = [pad(finding.state, 4), pad(finding.name, first), finding.detail]
        for line in fold(parts, terminal.width, hang="  "):
            terminal.styled(line, _STYLES[finding.state])
    for leftover in leftovers:
        what = count(len(leftover.names), "file")
        parts = ["left", visible(leftover.path), f"{what} of dead saves"]
        parts.append(format_nbytes(leftover.nbytes))
        terminal.lines(fold(parts, terminal.width, hang="  "))
    if not leftovers:
        is_store = result["free_nbytes"] is None  # nobody can ask whether a save still lives
        when = " that are over an hour old" if is_store else ""
        terminal.lines([f"nothing left by dead saves{when}"])
