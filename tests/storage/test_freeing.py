"""What is freed behind the end of a save: the blocks of large files, as their names go at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.storage import freeing, linux
from ckptio.storage.files import PosixFiles
from ckptio.storage.freeing import Freeing, wait_until_free, with_room
from tests.rig import (
    SAVE_IDS,
    committed,
    contents_of,
    fill_attempt,
    manifest_of,
    names_in,
    storage_at,
    write_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks")
A, B, C = SAVE_IDS[:3]
OLD, NEW, NEWER = contents_of(A, 5000, 9000), contents_of(B, 10_000), contents_of(C, 7000)


class Late(ThreadPoolExecutor):
    """Threads that free nothing before they are told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.late: list[Callable[[], object]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if isinstance(getattr(function, "__self__", None), Freeing):
            self.late.append(function)
            return Future()
        return super().submit(function, *args, **kwargs)

    def free(self) -> None:
        while self.late:
            self.late.pop(0)()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """Data files are large, and on a disk of this host."""
    monkeypatch.setattr(freeing, "_MIN_NBYTES", 5000)
    monkeypatch.setattr(linux, "is_of_this_host", lambda _: True)
    with Late() as executor:
        yield executor
        executor.free()


def held() -> list[str]:
    """Name the files that this process has open and that have no name any more."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # it was that of the list
            continue
        if "/data-" in path and path.endswith(" (deleted)"):
            found.append(os.path.basename(path).removesuffix(" (deleted)"))
    return sorted(found)


async def test_a_save_does_not_wait_until_what_it_replaced_is_free(
    tmp_path: Path, late: Late
) -> None:
    await write_files(storage_at(tmp_path / "c", late), A, OLD)
    await write_files(storage_at(tmp_path / "c", late), B, NEW, overwrite=True)
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *NEW])
    assert held() == sorted(OLD)
    late.free()
    assert held() == []
    assert committed(tmp_path / "c") == NEW


async def test_nor_does_an_end_wait_until_what_was_written_is_free(
    tmp_path: Path, late: Late
) -> None:
    attempt = await storage_at(tmp_path / "c", late).begin(A, overwrite=False)
    await fill_attempt(attempt, OLD)
    await attempt.abort()
    assert not (tmp_path / "c").exists()
    assert held() == sorted(OLD)


async def test_nor_does_a_save_wait_until_what_a_killed_one_left_is_free(
    tmp_path: Path, late: Late
) -> None:
    (tmp_path / "c").mkdir()
    for name, data in OLD.items():
        (tmp_path / "c" / name).write_bytes(data)
    attempt = await storage_at(tmp_path / "c", late).begin(B, overwrite=False)
    assert held() == sorted(OLD)
    await attempt.abort()
    assert names_in(tmp_path / "c") == []


async def test_while_the_disk_is_behind_a_save_frees_what_it_replaces(
    tmp_path: Path, late: Late
) -> None:
    """Back to back, saves would leave more and more to be freed."""
    storage = storage_at(tmp_path / "c", late)
    await write_files(storage, A, OLD)
    await write_files(storage, B, NEW, overwrite=True)
    await write_files(storage, C, NEWER, overwrite=True)
    assert held() == sorted(OLD)
    late.free()
    await write_files(storage, A, OLD, overwrite=True)
    assert held() == sorted(NEWER)


@pytest.mark.parametrize(
    "why", ["it is small", "other hosts write there, too", "so many are held already"]
)
async def test_files_are_freed_as_they_are_removed(
    tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "it is small":
        monkeypatch.setattr(freeing, "_MIN_NBYTES", 100_000)
    elif why == "so many are held already":
        monkeypatch.setattr(freeing, "_MAX_HELD", 0)
    else:
        monkeypatch.setattr(linux, "is_of_this_host", lambda _: False)
    await write_files(storage_at(tmp_path / "c", late), A, OLD)
    await write_files(storage_at(tmp_path / "c", late), B, NEW, overwrite=True)
    assert late.late == []
    assert held() == []
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *NEW])


async def test_no_more_is_held_than_there_is_room_besides(
    tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks write the next save at once, and know nothing of what this process holds."""

    class Room:
        f_bavail, f_frsize = 12, 1000

    monkeypatch.setattr(os, "statvfs", lambda _: Room)
    names = [f"data-{number}" for number in range(3)]
    for name in names:
        (tmp_path / name).write_bytes(bytes(6000))
    with Freeing(PosixFiles(), late) as block:
        for name in names:
            block.unlink(str(tmp_path / name))
    assert names_in(tmp_path) == []
    assert held() == names[:2]


class Slow(PosixFiles):
    """Somebody who finds no room comes while a name is being taken away."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.executor = executor
        self.names: Future[list[str]] | None = None
        self.waits: list[bool] = []

    def unlink(self, path: str) -> None:
        self.waits += [block._lock.locked() for block in freeing._under_way]
        self.names = self.executor.submit(with_room, self.act, os.path.dirname(path))
        super().unlink(path)

    def act(self, directory: str) -> list[str]:
        if held() or names_in(directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return names_in(directory)


def test_who_finds_no_room_waits_for_a_name_that_is_being_taken_away(
    tmp_path: Path, late: Late
) -> None:
    """What is held by then would be closed for nothing, and the room come too late."""
    (tmp_path / "data-0").write_bytes(bytes(6000))
    files = Slow(late)
    with Freeing(files, late) as block:
        block.unlink(str(tmp_path / "data-0"))
    assert files.waits == [True]
    assert files.names is not None
    assert files.names.result() == []


@pytest.mark.usefixtures("late")
def test_what_goes_behind_the_block_waits_for_nothing_that_is_being_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that goes on with an earlier one removes files behind what dead saves left."""
    for number in range(2):
        (tmp_path / f"data-{number}").write_bytes(bytes(6000))
    is_closing, closes, close = threading.Event(), threading.Event(), os.close

    def close_slowly(fd: int) -> None:
        if any(fd == held for held, _ in freeing._held):
            is_closing.set()
            closes.wait(60)
        close(fd)

    monkeypatch.setattr(os, "close", close_slowly)
    with ThreadPoolExecutor(2) as threads:
        with Freeing(PosixFiles(), threads) as block:
            block.unlink(str(tmp_path / "data-0"))
        assert is_closing.wait(60)
        try:
            threads.submit(block.unlink, str(tmp_path / "data-1")).result(10)
        finally:
            closes.set()
    assert names_in(tmp_path) == []


class Full(PosixFiles):
    """There is no room until all is free."""

    def create(self, path: str, mode: int, *, direct: bool) -> int:
        self._require_room()
        return super().create(path, mode, direct=direct)

    def allocate(self, fd: int, nbytes: int) -> bool:
        self._require_room()
        return super().allocate(fd, nbytes)

    def _require_room(self) -> None:
        if held():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Filled(Full):
    """There is room for what is small."""

    def create(self, path: str, mode: int, *, direct: bool) -> int:
        return PosixFiles.create(self, path, mode, direct=direct)


@pytest.mark.parametrize("files", [Full(), Filled()], ids=["full", "filled"])
async def test_a_save_that_finds_no_room_waits_for_what_is_being_freed(
    tmp_path: Path, late: Late, files: PosixFiles
) -> None:
    """It frees it where no thread has begun: all of them may be waiting, too."""
    await write_files(storage_at(tmp_path / "c", late), A, OLD)
    await write_files(storage_at(tmp_path / "c", late), B, NEW, overwrite=True)
    assert held()
    await write_files(storage_at(tmp_path / "other", late, files), C, NEWER)
    assert committed(tmp_path / "other") == NEWER


class Short(PosixFiles):
    """Once told to, it has no room for one operation until all is free."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.is_short = False

    def _require_room(self, operation: str) -> None:
        if self.is_short and operation == self.operation and held():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def create(self, path: str, mode: int, *, direct: bool) -> int:
        self._require_room(f"create {os.path.basename(path)[:5]}")
        return super().create(path, mode, direct=direct)

    def allocate(self, fd: int, nbytes: int) -> bool:
        del fd, nbytes
        return False  # as ext4 does with files that have no extents

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._require_room(f"pwrite {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))[:5]}")
        return super().pwrite(fd, data, offset)

    def mkdir(self, path: str, mode: int) -> None:
        self._require_room("mkdir")
        super().mkdir(path, mode)


@pytest.mark.parametrize(
    "operation",
    ["create data-", "pwrite data-", "create .mani", "pwrite .mani", "pwrite .copy", "mkdir"],
)
async def test_whatever_finds_no_room_waits_for_what_is_being_freed(
    tmp_path: Path, late: Late, operation: str
) -> None:
    """Not only what reserves room: the manifest is written after that, and not all disks can."""
    files = Short(operation)
    await write_files(storage_at(tmp_path / "c", late), A, OLD)
    attempt = await storage_at(tmp_path / "other", late, files).begin(C, overwrite=False)
    rank = storage_at(
        tmp_path / "more" if operation == "mkdir" else tmp_path / "other", late, files
    )
    await write_files(storage_at(tmp_path / "c", late), B, NEW, overwrite=True)
    assert held()
    files.is_short = True
    await (await rank.join(C)).leave()
    await fill_attempt(attempt, NEWER)
    note = await attempt.note(b"note")
    await attempt.commit(manifest_of(C, NEWER))
    await note.drop()
    assert committed(tmp_path / "other") == NEWER
    assert held() == []


async def test_who_finds_no_room_frees_what_a_save_holds_that_is_not_through(
    tmp_path: Path, late: Late
) -> None:
    """It may have hundreds of files still to remove, of which it holds no more than some."""
    (tmp_path / "data-file").write_bytes(bytes(5000))
    with Freeing(PosixFiles(), late) as block:
        block.unlink(str(tmp_path / "data-file"))
        assert held() == ["data-file"]
        await write_files(storage_at(tmp_path / "other", late, Filled()), C, NEWER)
    assert committed(tmp_path / "other") == NEWER


async def test_who_finds_no_room_looks_again_where_it_is_free_by_now(
    tmp_path: Path, late: Late
) -> None:
    """Of two that find none, the first frees it before the second looks what there is to free."""
    (tmp_path / "data-file").write_bytes(bytes(5000))
    with Freeing(PosixFiles(), late) as block:
        block.unlink(str(tmp_path / "data-file"))
    answers = ["none", "some"]

    def look() -> str:
        answer = answers.pop(0)
        if answer == "none":
            late.free()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return answer

    assert with_room(look) == "some"


async def test_what_a_thread_has_begun_to_free_is_waited_for(
    tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    class Close:
        """What there is of `os` that frees."""

        def close(self, fd: int) -> None:
            begun.set()
            go_on.wait()
            os.close(fd)
            order.append("free")

    def wait() -> None:
        wait_until_free()
        order.append("waited")

    await write_files(storage_at(tmp_path / "c", late), A, NEWER)
    await write_files(storage_at(tmp_path / "c", late), B, NEW, overwrite=True)
    monkeypatch.setattr(freeing, "os", Close())
    threads = [threading.Thread(target=late.free), threading.Thread(target=wait)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    threads[1].join(0.05)
    go_on.set()
    for thread in threads:
        thread.join()
    assert order == ["free", "waited"]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
async def test_a_file_of_which_nothing_can_be_told_is_removed(
    tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A server may answer so for what is open, and yet remove its name."""

    class Unsure:
        """What there is of `os` that looks at a file to remove."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def fstat(self, fd: int) -> os.stat_result:
            raise OSError(code, os.strerror(code), fd)

    (tmp_path / "data-file").write_bytes(bytes(5000))
    monkeypatch.setattr(freeing, "os", Unsure())
    with Freeing(PosixFiles(), late) as block:
        block.unlink(str(tmp_path / "data-file"))
    assert names_in(tmp_path) == []
    assert held() == []


@pytest.mark.usefixtures("late")
async def test_threads_that_have_ended_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5000))
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    with Freeing(PosixFiles(), ended) as block:
        block.unlink(str(tmp_path / "file"))
    assert not wait_until_free()  # and `no_leaks` sees what is open


async def test_what_goes_behind_the_block_is_freed_as_it_goes(tmp_path: Path, late: Late) -> None:
    """Nobody would close it."""
    (tmp_path / "data-file").write_bytes(bytes(5000))
    with Freeing(PosixFiles(), late) as block:
        pass
    block.unlink(str(tmp_path / "data-file"))
    assert held() == []


async def test_what_is_free_is_not_closed_again(tmp_path: Path, late: Late) -> None:
    """Its number may be another file's by then: who waited has closed it before the thread."""
    (tmp_path / "data-file").write_bytes(bytes(5000))
    with Freeing(PosixFiles(), late) as block:
        block.unlink(str(tmp_path / "data-file"))
    assert wait_until_free()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(8)]
    late.free()
    for fd in others:
        os.close(fd)


async def test_a_disk_that_fails_as_a_file_is_freed_holds_up_nobody(
    tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no name any more; and the others are freed."""
    with Freeing(PosixFiles(), late) as block:
        for number in range(2):
            (tmp_path / f"data-{number}").write_bytes(bytes(5000))
            block.unlink(str(tmp_path / f"data-{number}"))
    close = os.close

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fail)
        assert wait_until_free()
    assert held() == []
    assert not wait_until_free()


async def test_a_process_that_may_open_no_more_frees_as_it_removes(
    tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data-file").write_bytes(bytes(5000))

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with Freeing(PosixFiles(), late) as block, monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        block.unlink(str(tmp_path / "data-file"))
    assert names_in(tmp_path) == []
    assert not wait_until_free()


def test_what_a_link_leads_to_is_not_held(tmp_path: Path, late: Late) -> None:
    """It stays, and so does its room."""
    (tmp_path / "data-file").write_bytes(bytes(5000))
    (tmp_path / "link").symlink_to("data-file")
    with Freeing(PosixFiles(), late) as block:
        block.unlink(str(tmp_path / "link"))
    assert not wait_until_free()
    assert names_in(tmp_path) == ["data-file"]


@pytest.mark.parametrize(
    ("codes", "num_calls"),
    [([errno.ENOSPC], 2), ([errno.ENOSPC, errno.EDQUOT], 2), ([errno.EIO], 1)],
)
async def test_room_is_reserved_once_more_where_something_was_freed(
    tmp_path: Path, late: Late, codes: list[int], num_calls: int
) -> None:
    """And a disk that is full all the same, or fails, says so."""
    (tmp_path / "data-file").write_bytes(bytes(5000))
    with Freeing(PosixFiles(), late) as block:
        block.unlink(str(tmp_path / "data-file"))
    answers = [*codes]

    class Full(PosixFiles):
        num_calls = 0

        def allocate(self, fd: int, nbytes: int) -> bool:
            self.num_calls += 1
            if answers:
                raise OSError(answers.pop(0), "no room")
            return super().allocate(fd, nbytes)

    files = Full()
    with open(tmp_path / "new", "wb") as file:
        is_told = len(codes) == num_calls
        with pytest.raises(OSError, match="no room") if is_told else nullcontext():
            with_room(files.allocate, file.fileno(), 8192)
    assert files.num_calls == num_calls


HOLDER = """
import os, sys
from concurrent.futures import Executor
from ckptio.storage import freeing, linux
from ckptio.storage.files import PosixFiles
class Never(Executor):
    def submit(self, *_): pass
def unlink(path):
    with freeing.Freeing(PosixFiles(), Never()) as block:
        block.unlink(path)
def held():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(f) and "(deleted)" in os.readlink(f) for f in links)
freeing._MIN_NBYTES, freeing._MAX_HELD, linux.is_of_this_host = 1, 1, lambda _: True
unlink(sys.argv[1])
"""
CHILD = """
assert held() == 1
if not os.fork():
    is_clean = not held() and not freeing.wait_until_free()
    unlink(sys.argv[2])
    os._exit(not is_clean or held() != 1)
print(os.waitstatus_to_exitcode(os.wait()[1]), held())
"""
REOPENED = """
close, flags = os.close, int(sys.argv[3])
def close_and_fork(fd):
    os.close = close
    close(fd)
    assert os.open(sys.argv[2], flags) == fd
    if not os.fork():
        os._exit(not os.path.exists(f"/proc/self/fd/{fd}"))
    print(os.waitstatus_to_exitcode(os.wait()[1]))
os.close = close_and_fork
freeing.wait_until_free()
"""


def run(program: str, *given: object) -> str:
    """Run one in which a file is held: the first that is given."""
    command = [sys.executable, "-c", HOLDER + program, *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_forked_child_holds_nothing(tmp_path: Path) -> None:
    """A worker of a DataLoader lives as long as the run, and the disk would be as full.

    It may hold as much of its own.
    """
    files = [tmp_path / "file", tmp_path / "own"]
    for file in files:
        file.write_bytes(b"bytes")
    assert run(CHILD, *files) == "0 1\n"


@pytest.mark.parametrize("flags", [os.O_PATH, os.O_RDONLY])
def test_a_forked_child_keeps_what_was_opened_meanwhile(tmp_path: Path, flags: int) -> None:
    """Under the number of what was just freed: another's inode, or the same, of another file."""
    (tmp_path / "file").write_bytes(b"bytes")
    if flags == os.O_PATH:
        (tmp_path / "new").write_bytes(b"bytes")
    else:
        os.link(tmp_path / "file", tmp_path / "new")
    assert run(REOPENED, tmp_path / "file", tmp_path / "new", flags) == "0\n"
