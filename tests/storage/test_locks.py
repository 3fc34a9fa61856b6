"""Locks of files, where processes are forked while they are held."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckptio.storage.files import PosixFiles
from ckptio.storage.locks import _locked

if TYPE_CHECKING:
    from pathlib import Path

LOCKED = """
import os, signal, sys
from ckptio.storage.files import PosixFiles
files, path = PosixFiles(), sys.argv[1]
fd = files.open(path, direct=False, writable=True)
assert files.lock(fd)
"""
#: A child is forked that lives until its standard input ends; then the parent goes on.
FORKED = """
if not os.fork():
    os.write(1, b"child\\n")
    sys.stdin.read()
    os._exit(0)
"""
LET_GO = """
files.close(fd)
os.write(1, b"parent\\n")
sys.stdin.read()
"""
KILLED = """
os.write(1, b"parent\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def locks(path: Path) -> bool:
    """Whether somebody who comes now gets the lock."""
    files = PosixFiles()
    fd = files.open(str(path), direct=False, writable=True)
    try:
        return files.lock(fd)
    finally:
        files.close(fd)


@pytest.mark.parametrize("end", [LET_GO, KILLED], ids=["let-go", "killed"])
def test_a_forked_child_keeps_no_lock(tmp_path: Path, end: str) -> None:
    """As workers of a DataLoader would, which live as long as the run."""
    path = tmp_path / "file"
    path.touch()
    command = [sys.executable, "-c", LOCKED + FORKED + end, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = {process.stdout.readline() for _ in range(2)}
        assert said == {b"child\n", b"parent\n"}
        if end is KILLED:
            process.wait(30)
        assert locks(path)
        process.communicate()


#: Another file has the number of the locked one, and is locked, too.
LOCKED_AGAIN = """
files.close(fd)
other = files.open(path, direct=False, writable=True)
assert other == fd
third = files.open(path, direct=False, writable=True)
assert files.lock(other) and not files.lock(third)
closed, kept = other, third
"""
#: It was closed behind the back of this program, and its number is that of a pipe.
REUSED = """
os.close(fd)
closed, kept = -1, os.pipe()[0]
assert kept == fd
"""
CHILD = """
pid = os.fork()
if not pid:
    os.fstat(kept)
    try:
        os.fstat(closed)
    except OSError:
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


@pytest.mark.parametrize("before", [LOCKED_AGAIN, REUSED], ids=["again", "reused"])
def test_a_child_closes_what_is_locked_and_nothing_else(tmp_path: Path, before: str) -> None:
    path = tmp_path / "file"
    path.touch()
    command = [sys.executable, "-c", LOCKED + before + CHILD, str(path)]
    subprocess.run(command, check=True, timeout=60)


def test_the_lock_of_an_open_file_lasts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    files = PosixFiles()
    fd = files.open(str(path), direct=False, writable=True)
    assert files.lock(fd)
    assert not locks(path)
    files.close(fd)
    assert locks(path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EWOULDBLOCK])
def test_a_lock_that_cannot_be_had_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Where there are no locks that is said: nobody may take a save for dead by its lock."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "file"
    path.touch()
    files = PosixFiles()
    fd = files.open(str(path), direct=False, writable=True)
    monkeypatch.setattr(fcntl, "flock", refuse)
    try:
        if code == errno.EWOULDBLOCK:
            assert not files.lock(fd)
        else:
            with pytest.raises(OSError, match=os.strerror(code)):
                files.lock(fd)
        assert fd not in _locked
    finally:
        files.close(fd)


def test_a_lock_that_was_lost_keeps_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was away says so as it is taken off."""
    (tmp_path / "file").touch()
    files = PosixFiles()
    fd = files.open(f"{tmp_path}/file", direct=False, writable=True)
    assert files.lock(fd)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        files.close(fd)
    assert fd not in _locked
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


def test_a_lock_ends_though_something_else_has_the_file_open(tmp_path: Path) -> None:
    """A child that was made by other means than a fork of Python's, say."""
    path = tmp_path / "file"
    path.touch()
    files = PosixFiles()
    fd = files.open(str(path), direct=False, writable=True)
    assert files.lock(fd)
    copy = os.dup(fd)
    try:
        assert not locks(path)
        files.close(fd)
        assert locks(path)
    finally:
        os.close(copy)
