"""Locks of attempts, as they are held by who removes files; `test_tombs` has removals that meet."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptio._threads import Threads
from ckptio.errors import CommitConflictError, StorageError
from ckptio.events import CleanupFailed
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage import attempt_lock, leftovers, linux, resumed, tombs
from ckptio.storage.attempt_lock import Attempts, time_there
from ckptio.storage.file_names import QUIET_S
from ckptio.storage.files import PosixFiles
from ckptio.storage.leftovers import boot_id, find_leftovers
from ckptio.testing import EventLog, RecordingFiles, fail_at
from tests.rig import (
    SAVE_IDS,
    committed,
    contents_of,
    fill_attempt,
    manifest_of,
    names_in,
    root_at,
    storage_at,
    write_files,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from concurrent.futures import Executor
    from pathlib import Path

    from ckptio.storage.attempt import LocalAttempt
    from ckptio.testing import Operation

pytestmark = pytest.mark.usefixtures("no_leaks")
A, B, C = SAVE_IDS[:3]
OLD, NEW, LAST = contents_of(A, 5000, 9000), contents_of(B, 10_000), contents_of(C, 10)
ELSEWHERE = b"of another boot"


def attempts_of(path: Path, files: RecordingFiles, told: list[str] | None = None) -> Attempts:
    def stays(name: str, _: OSError) -> None:
        (told if told is not None else []).append(os.path.basename(name))

    return Attempts(files, str(path), 0o600, stays, time.time)


def save_elsewhere(path: Path, save_id: str, contents: dict[str, bytes], log: EventLog) -> None:
    """Save over what is there, as another process would, to its end."""
    others = Threads(1, "others")
    try:
        storage = storage_at(path, others, log=log)
        asyncio.run(write_files(storage, save_id, contents, overwrite=True))
    finally:
        others.shutdown()


async def begun_elsewhere(path: Path, executor: Executor) -> LocalAttempt:
    """Begin a copy of what is saved there, as another host would, whose lock this one sees."""
    await write_files(storage_at(path, executor), A, OLD)
    copy = await storage_at(path, executor).begin(A, overwrite=True, resumes=True)
    (path / f".attempt-{A}").write_bytes(ELSEWHERE)
    return copy


def age(path: Path) -> None:
    """Let all that is there have been quiet for longer than a living save is."""
    for name in names_in(path):
        os.utime(path / name, (time.time() - QUIET_S - 100,) * 2)


async def test_a_second_copy_that_cannot_begin_removes_nothing_of_the_first(
    tmp_path: Path, executor: Executor
) -> None:
    """It has the id of what is there, and so its files."""
    for number in range(100):
        path = tmp_path / str(number)
        await write_files(storage_at(path, executor), A, OLD)
        (path / f"data-{B}-00000-00000.safetensors").write_bytes(b"left over")
        files = RecordingFiles(fail_at(number, errno.EIO))
        try:
            begun = await storage_at(path, executor, files).begin(A, overwrite=True, resumes=True)
        except StorageError:
            pass
        else:
            await begun.abort()
        assert committed(path) == OLD
        assert set(OLD) < set(names_in(path))
        await write_files(storage_at(path, executor), C, LAST, overwrite=True)
        assert names_in(path) == sorted([*LAST, MANIFEST_NAME])
        if number >= len(files.operations):
            break
    assert number > 3


async def test_what_is_replaced_while_its_save_cleans_up_stays_and_is_told_of(
    tmp_path: Path, executor: Executor
) -> None:
    """The save has its lock yet; the next one finds the files."""
    path, log = tmp_path / "c", EventLog()
    await write_files(storage_at(path, executor), A, OLD)

    def replace(operation: Operation) -> None:
        is_first = operation.kind == "unlink" and f"data-{A}" in operation.path
        if is_first and committed(path) == NEW:
            save_elsewhere(path, C, LAST, log)

    await write_files(storage_at(path, executor, RecordingFiles(replace)), B, NEW, overwrite=True)
    assert committed(path) == LAST
    assert names_in(path) == sorted([*LAST, *NEW, MANIFEST_NAME])
    assert [event.file for event in log.of(CleanupFailed)] == [min(NEW)]
    await write_files(storage_at(path, executor), A, OLD, overwrite=True)
    assert names_in(path) == sorted([*OLD, MANIFEST_NAME])


@pytest.mark.parametrize("has_exchange", [True, False])
async def test_what_is_replaced_stays_if_a_copy_of_it_is_committed_meanwhile(
    tmp_path: Path, executor: Executor, *, has_exchange: bool
) -> None:
    """Before any operation of the save that replaces it: whatever has the name has its files."""
    ends = set[str]()
    for number in itertools.count():
        path, told = tmp_path / str(number), list[str]()
        await write_files(storage_at(path, executor), A, OLD)

        def meet(
            operation: Operation, number: int = number, path: Path = path, told: list[str] = told
        ) -> None:
            if operation.number == number:
                told.append(copy_elsewhere(path))

        files = RecordingFiles(meet, has_exchange=has_exchange)
        with contextlib.suppress(StorageError):
            await write_files(storage_at(path, executor, files), B, NEW, overwrite=True)
        assert committed(path) in (OLD, NEW)
        if number >= len(files.operations):
            break
        ends |= {f"{told[0]}, then {'old' if committed(path) == OLD else 'new'}"}
    assert "copied, then old" in ends


def copy_elsewhere(path: Path) -> str:
    """Make a copy of what was there once more, as another process would, to its end."""
    others = Threads(1, "others")

    async def copy() -> None:
        attempt = await storage_at(path, others).begin(A, overwrite=True, resumes=True)
        try:
            await fill_attempt(attempt, OLD)
            await attempt.commit(manifest_of(A, OLD))
        except BaseException:
            await attempt.abort()
            raise

    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(copy())).result()
    except StorageError as error:
        return type(error).__name__
    else:
        return "copied"
    finally:
        others.shutdown()


async def test_files_that_stay_of_what_was_replaced_are_told_of(
    tmp_path: Path, executor: Executor
) -> None:
    """By names that are there; of a copy that is being made, and where nobody can tell."""
    for is_busy in (True, False):
        path, log = tmp_path / str(is_busy), EventLog()
        await write_files(storage_at(path, executor), A, OLD)

        def fail(operation: Operation) -> None:
            if operation.kind == "open" and operation.path.endswith(f".attempt-{A}"):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), operation.path)

        copy = await storage_at(path, executor).begin(A, overwrite=True, resumes=True)
        files = RecordingFiles() if is_busy else RecordingFiles(fail)
        await write_files(storage_at(path, executor, files, log), B, NEW, overwrite=True)
        told = [event.file for event in log.of(CleanupFailed)]
        assert committed(path) == NEW
        assert set(OLD) < set(names_in(path))
        assert told == [min(OLD)]
        await copy.leave()


async def test_the_lock_of_a_host_that_died_keeps_nothing_that_was_replaced(
    tmp_path: Path, executor: Executor
) -> None:
    """A server may keep it; it is given up where all was quiet for an hour."""
    path = tmp_path / "c"
    copy = await begun_elsewhere(path, executor)
    age(path)
    await write_files(storage_at(path, executor), B, NEW, overwrite=True)
    assert set(names_in(path)) - {f".attempt-{A}"} == {MANIFEST_NAME, *NEW}
    await copy.leave()


async def test_the_lock_of_another_host_is_kept_while_its_save_writes(
    tmp_path: Path, executor: Executor
) -> None:
    """Its own file may be old: a save writes to that as it begins, and to its data from then on."""
    path = tmp_path / "c"
    copy = await begun_elsewhere(path, executor)
    age(path)
    os.utime(path / min(OLD))
    with pytest.raises(StorageError, match="copied once more"):
        await root_at(path.parent, executor).remove("c", A)
    assert committed(path) == OLD
    await copy.leave()


async def test_what_was_replaced_stays_if_it_is_committed_again(
    tmp_path: Path, executor: Executor
) -> None:
    """Looked at under the lock, by whoever comes to remove it."""
    path, removed = tmp_path / "c", list[str]()
    await write_files(storage_at(path, executor), A, OLD)
    attempts_of(path, RecordingFiles()).remove_replaced(A, list(OLD), removed.extend)
    assert removed == []
    attempts_of(path, RecordingFiles()).remove_replaced(B, list(NEW), removed.extend)
    assert removed == list(NEW)


async def test_a_copy_begun_while_another_cleans_up_is_refused_at_once(
    tmp_path: Path, executor: Executor
) -> None:
    """They have the names of their files in common, also that of the manifest on its way."""
    path, told = tmp_path / "c", list[str]()
    await write_files(storage_at(path, executor), B, NEW)
    others = Threads(1, "others")

    def begin(operation: Operation) -> None:
        if operation.kind == "unlink" and "data-" in operation.path and not told:
            storage = storage_at(path, others)
            try:
                asyncio.run(storage.begin(A, overwrite=True, resumes=True))
            except CommitConflictError as error:
                told.append(type(error).__name__)

    copy = await storage_at(path, executor, RecordingFiles(begin)).begin(A, overwrite=True)
    for name, data in OLD.items():
        (path / name).write_bytes(data)
    await copy.commit(manifest_of(A, OLD))
    others.shutdown()
    assert told == ["CommitConflictError"]
    assert committed(path) == OLD
    assert names_in(path) == sorted([*OLD, MANIFEST_NAME])


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("there", ["a link", "a directory", "nothing that may be read"])
async def test_an_abort_removes_the_files_of_ranks_that_died(
    tmp_path: Path, executor: Executor, there: str, *, is_ahead: bool
) -> None:
    """Whatever is in the manifest's place, and whoever came first: the save's id is its own."""
    path = tmp_path / "c"
    path.mkdir()
    if there == "a link":
        (path / MANIFEST_NAME).symlink_to("nowhere")
    elif there == "a directory":
        (path / MANIFEST_NAME).mkdir()
    else:
        await write_files(storage_at(path, executor), A, OLD)
    before = names_in(path)

    def fail(operation: Operation) -> None:
        if operation.kind == "open" and operation.path.endswith(MANIFEST_NAME):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), operation.path)

    files = RecordingFiles(fail if there.startswith("nothing") else None)
    attempts: dict[int, LocalAttempt] = {}
    for rank in (1, 0) if is_ahead else (0, 1):
        storage = storage_at(path, executor, files)
        attempts[rank] = await (storage.join(B) if rank else storage.begin(B, overwrite=True))
        writer = await attempts[rank].create(f"data-{B}-0000{rank}-00000.safetensors", 10)
        writer.pwrite(0, memoryview(b"0123456789"))
        writer.close()
    await attempts[0].abort()
    assert names_in(path) == before


@pytest.mark.parametrize("how", ["keeps", "creates"])
async def test_an_abort_leaves_what_was_there_of_the_same_save(
    tmp_path: Path, executor: Executor, how: str
) -> None:
    """Also where no manifest can be read, and where this one wanted to make it."""
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)

    def fail(operation: Operation) -> None:
        is_at_end = operation.kind == "create" and "manifest" in operation.path
        if is_at_end or (operation.kind == "open" and operation.path.endswith(MANIFEST_NAME)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), operation.path)

    storage = storage_at(path, executor, RecordingFiles(fail))
    copy = await storage.begin(A, overwrite=True, resumes=True)
    for name, data in OLD.items():
        if how == "keeps":
            await copy.keep(name, len(data))
        else:
            await copy.create(name, len(data))
    with pytest.raises(StorageError):
        await copy.commit(manifest_of(A, OLD))
    await copy.abort()
    assert committed(path) == OLD
    await write_files(storage_at(path, executor), C, LAST, overwrite=True)
    assert names_in(path) == sorted([*LAST, MANIFEST_NAME])


async def test_an_abort_keeps_its_lock_until_its_files_are_gone(
    tmp_path: Path, executor: Executor
) -> None:
    """Also those of an earlier attempt: who takes them over meanwhile would lose them again."""
    path, told = tmp_path / "c", list[BaseException | None]()
    path.mkdir()
    for name, data in OLD.items():
        (path / name).write_bytes(data)

    async def take_over(others: Executor) -> None:
        copy = await storage_at(path, others).begin(A, overwrite=True, resumes=True)
        for name, data in OLD.items():
            await copy.keep(name, len(data))
        await copy.commit(manifest_of(A, OLD))

    def meet(operation: Operation) -> None:
        if operation.kind == "unlink" and "data-" in operation.path and not told:
            others = Threads(1, "others")
            try:
                asyncio.run(take_over(others))
                told.append(None)
            except CommitConflictError as error:
                told.append(error)
            finally:
                others.shutdown()

    files = RecordingFiles(meet)
    begun = await storage_at(path, executor, files).begin(A, overwrite=True, resumes=True)
    await begun.abort()
    assert isinstance(told[0], CommitConflictError)
    assert not path.exists() or names_in(path) == []


@pytest.mark.parametrize("how", ["keeps", "creates"])
@pytest.mark.parametrize(
    "who", ["a rank that joins", "a leader that came first", "a leader that came last"]
)
async def test_an_abort_leaves_what_another_copy_has_committed_meanwhile(
    tmp_path: Path, executor: Executor, who: str, how: str
) -> None:
    """Under the same id: it wanted to make files of these names, too."""
    path = tmp_path / "c"
    storage = storage_at(path, executor, RecordingFiles(has_locks=False))
    leads = "leader" in who

    async def enter() -> LocalAttempt:
        return await (storage.begin(A, overwrite=True) if leads else storage.join(A))

    is_last = who == "a leader that came last"
    copy = None if is_last else await enter()
    other = await storage_at(path, executor, RecordingFiles(has_locks=False)).begin(
        A, overwrite=True, resumes=True
    )
    for name, data in OLD.items():
        (path / name).write_bytes(data)
        await other.keep(name, len(data))
    await other.commit(manifest_of(A, OLD))
    copy = copy or await enter()
    for name, data in OLD.items():
        if how == "keeps":
            await copy.keep(name, len(data))
        else:
            await copy.create(name, len(data))
    await copy.abort()
    assert committed(path) == OLD
    assert names_in(path) == sorted([*OLD, MANIFEST_NAME])


@pytest.mark.parametrize("who", ["a save", "a removal"])
async def test_a_lock_is_kept_until_its_file_has_no_name(
    tmp_path: Path, executor: Executor, who: str
) -> None:
    """Else a copy gets it that begins just then, and loses the file that says it is alive."""
    path, others = tmp_path / "c", PosixFiles()
    is_free = list[bool]()

    def look(operation: Operation) -> None:
        if operation.kind == "unlink" and operation.path.endswith(f".attempt-{A}"):
            fd = others.open(operation.path, direct=False, writable=True)
            is_free.append(others.lock(fd))
            others.close(fd)
            with open(operation.path, "rb") as file:
                assert file.read() == boot_id()  # so whoever finds it goes by its lock

    files = RecordingFiles(look)
    await write_files(storage_at(path, executor, files), A, OLD)
    if who == "a removal":
        is_free.clear()
        await root_at(path.parent, executor, files).remove("c")
    assert is_free == [False]


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOSPC])
async def test_a_removal_whose_lock_somebody_else_makes_goes_no_further(
    tmp_path: Path, executor: Executor, code: int
) -> None:
    """A copy that begins just then has the files. But where no file can be made, nobody copies."""
    path, others, taken = tmp_path / "c", RecordingFiles(), list[int]()
    await write_files(storage_at(path, executor), A, OLD)

    def meet(operation: Operation) -> None:
        if operation.kind == "create" and operation.path.endswith(f".attempt-{A}"):
            if code == errno.ENOSPC:
                raise OSError(code, os.strerror(code), operation.path)
            taken.append(others.create(operation.path, 0o600, direct=False))
            assert others.lock(taken[0])
            os.pwrite(taken[0], boot_id(), 0)

    log = EventLog()
    root = root_at(path.parent, executor, RecordingFiles(meet), log)
    if code == errno.ENOSPC:
        await root.remove("c")
        assert not path.exists()
    else:
        with pytest.raises(StorageError) as caught:
            await root.remove("c")
        assert caught.value.errno == errno.EBUSY
        assert committed(path) == OLD
    others.bury()
    assert not log.of(CleanupFailed)


async def test_a_lock_whose_file_stays_is_an_event(tmp_path: Path, executor: Executor) -> None:
    """The checkpoint is removed all the same."""
    path, log = tmp_path / "c", EventLog()
    await write_files(storage_at(path, executor), A, OLD)

    def fail(operation: Operation) -> None:
        if operation.kind == "unlink" and operation.path.endswith(f".attempt-{A}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    assert await root_at(path.parent, executor, RecordingFiles(fail), log).remove("c") > 0
    assert names_in(path) == [f".attempt-{A}"]
    assert {event.file for event in log.of(CleanupFailed)} == {f".attempt-{A}"}


async def test_a_lock_whose_file_is_gone_is_none(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of SMB gives what was removed a name for as long as it is open."""
    path, log = tmp_path / "c", EventLog()
    await write_files(storage_at(path, executor), A, OLD)
    monkeypatch.setattr("ckptio.storage.attempt_lock.is_at", lambda *_: True)
    assert await root_at(path.parent, executor, RecordingFiles(), log).remove("c") > 0
    assert not path.exists()
    assert not log.of(CleanupFailed)


async def test_where_nobody_says_which_boot_it_is_a_save_is_dead_when_it_is_quiet(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its lock is free: that of another host may look so."""
    monkeypatch.setattr(leftovers, "_BOOT_ID", f"{tmp_path}/nothing")
    path = tmp_path / "c"
    attempt = await storage_at(path, executor).begin(A, overwrite=False)
    await fill_attempt(attempt, OLD)
    await attempt.leave()
    assert find_leftovers(RecordingFiles(), str(path), B) == []
    age(path)
    assert find_leftovers(RecordingFiles(), str(path), B) == sorted([f".attempt-{A}", *OLD])


async def test_what_a_dead_copy_left_blocks_no_other_for_long(
    tmp_path: Path, executor: Executor
) -> None:
    """It is of nobody, as the lock says: the first one that fails removes it."""
    path, name = tmp_path / "c", min(OLD)
    path.mkdir()
    (path / name).write_bytes(b"left over")
    with pytest.raises(StorageError):
        await write_files(storage_at(path, executor), A, OLD)
    await write_files(storage_at(path, executor), A, OLD)
    assert committed(path) == OLD


async def test_a_copy_goes_on_beside_what_it_cannot_read_under_a_name_of_its_own(
    tmp_path: Path, executor: Executor
) -> None:
    """As of another user; it goes, as the manifest is written there."""
    path = tmp_path / "c"
    path.mkdir()
    (path / f".manifest-{A}").symlink_to("nowhere")
    copy = await storage_at(path, executor).begin(A, overwrite=True, resumes=True)
    for name, data in OLD.items():
        (path / name).write_bytes(data)
        await copy.keep(name, len(data))
    await copy.commit(manifest_of(A, OLD))
    assert committed(path) == OLD


@pytest.mark.parametrize("kind", ["lock", "open"])
async def test_where_a_lock_keeps_changing_nothing_goes(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nobody can tell whether somebody has it."""
    monkeypatch.setattr(attempt_lock, "_WAIT_S", 0.0)
    path, log = tmp_path / "c", EventLog()
    await write_files(storage_at(path, executor), A, OLD)
    copy = await storage_at(path, executor).begin(A, overwrite=True, resumes=True)

    def fail(operation: Operation) -> None:
        if operation.kind == kind and operation.path.endswith(f".attempt-{A}"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), operation.path)

    files = RecordingFiles(fail)
    await write_files(storage_at(path, executor, files, log), B, NEW, overwrite=True)
    assert set(OLD) < set(names_in(path))
    assert [event.file for event in log.of(CleanupFailed)] == [min(OLD)]
    assert files.num_open == 0
    await copy.leave()


@pytest.mark.parametrize("where", ["open", "look"])
async def test_a_removal_goes_on_where_a_server_says_that_a_lock_has_just_gone(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)
    failed: list[str] = []

    def fail(place: str) -> None:
        if place == where and not failed:
            failed.append(place)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), place)

    def fault(operation: Operation) -> None:
        if operation.path.endswith(f".attempt-{A}"):
            fail(operation.kind)

    def look(fd: int, name: str) -> bool:
        fail("look")
        return leftovers.is_at(fd, name)

    monkeypatch.setattr(attempt_lock, "is_at", look)
    await root_at(path.parent, executor, RecordingFiles(fault)).remove("c", A)
    assert failed == [where]
    assert not path.exists()


async def test_a_copy_does_not_begin_where_its_lock_has_just_gone(
    tmp_path: Path, executor: Executor
) -> None:
    """It went on without one, and the next save took all that it wrote."""
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)
    (path / f".attempt-{A}").write_bytes(boot_id())

    def fail(operation: Operation) -> None:
        if operation.kind == "lock":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), operation.path)

    with pytest.raises(CommitConflictError):
        await storage_at(path, executor, RecordingFiles(fail)).begin(
            A, overwrite=True, resumes=True
        )
    assert committed(path) == OLD


@pytest.mark.parametrize("kind", ["link", "directory", "FIFO"])
async def test_what_is_no_file_holds_up_no_removal(
    tmp_path: Path, executor: Executor, kind: str
) -> None:
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)
    marker = path / f".attempt-{A}"
    if kind == "link":
        marker.symlink_to("nowhere")
    elif kind == "directory":
        marker.mkdir()
    else:
        os.mkfifo(marker)
    await root_at(path.parent, executor).remove("c", A)
    assert MANIFEST_NAME not in names_in(path)
    assert not set(OLD) & set(names_in(path))


async def test_a_sweep_goes_on_behind_what_cannot_be_opened_now(
    tmp_path: Path, executor: Executor
) -> None:
    path, log = tmp_path / "c", EventLog()
    path.mkdir()
    for save_id, contents in ((A, OLD), (B, NEW)):
        await write_files(storage_at(tmp_path / save_id, executor), save_id, contents)
        (tmp_path / save_id / MANIFEST_NAME).rename(path / f".manifest-{save_id}-old")
        for name in contents:
            (tmp_path / save_id / name).rename(path / name)

    def fail(operation: Operation) -> None:
        if operation.kind == "open" and operation.path.endswith(f".attempt-{A}"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), operation.path)

    await root_at(path.parent, executor, RecordingFiles(fail), log).sweep("c", -1)
    assert names_in(path) == sorted([f".manifest-{A}-old", *OLD])
    assert log.of(CleanupFailed)[0].file == f".manifest-{A}-old"


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EMFILE])
async def test_a_save_begins_beside_what_is_taken_up_as_it_is_cleared(
    tmp_path: Path, executor: Executor, code: int
) -> None:
    """The rest goes; an event says what stays, but not of what lives."""
    path, log = tmp_path / "c", EventLog()
    path.mkdir()
    for save_id in (A, B):
        (path / f".attempt-{save_id}").write_bytes(boot_id())
        for name in contents_of(save_id, 10):
            (path / name).touch()
    looks, others = list[str](), PosixFiles()
    taken = list[int]()

    def meet(operation: Operation) -> None:
        if operation.kind != "open" or not operation.path.endswith(f".attempt-{A}"):
            return
        looks.append(operation.path)
        if len(looks) > 1 and code == errno.EMFILE:
            raise OSError(code, os.strerror(code), operation.path)
        if len(looks) == 2:
            taken.append(others.open(operation.path, direct=False, writable=True))
            assert others.lock(taken[0])

    attempt = await storage_at(path, executor, RecordingFiles(meet), log).begin(C, overwrite=False)
    for fd in taken:
        others.close(fd)
    left = [f".attempt-{A}", *contents_of(A, 10)]
    assert names_in(path) == sorted([*left, f".attempt-{C}"])
    assert [event.file for event in log.of(CleanupFailed)] == left[:1] * (code == errno.EMFILE)
    await attempt.abort()


async def test_a_save_that_waits_says_that_it_is_alive(tmp_path: Path, executor: Executor) -> None:
    """A host that does not see its lock would clear its files after an hour."""
    path = tmp_path / "c"
    begun = await storage_at(path, executor).begin(A, overwrite=True)
    (path / f"data-{A}-00000-00000.safetensors").write_bytes(b"written long ago")
    (path / f".attempt-{A}").write_bytes(ELSEWHERE)
    age(path)
    assert find_leftovers(RecordingFiles(), str(path), B)
    await begun.stay()
    assert not find_leftovers(RecordingFiles(), str(path), B)
    await begun.abort()


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "rename"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO])
async def test_a_copy_goes_on_beside_what_is_anothers_or_gone(
    tmp_path: Path,
    executor: Executor,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    *,
    exchanges: bool,
) -> None:
    """Another save's manifest on its way; what a disk does not give may be this one's.

    What is there already stays, also on a mount that renames and says that it has exchanged.
    """
    if not exchanges:
        monkeypatch.setattr(linux, "rename_exchange", os.replace)
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)

    def fail(operation: Operation) -> None:
        if operation.kind == "open" and operation.path.endswith(f".manifest-{B}"):
            raise OSError(code, os.strerror(code), operation.path)

    storage = storage_at(path, executor, RecordingFiles(fail))
    copy = await storage.begin(A, overwrite=True, resumes=True)
    for name, data in OLD.items():
        await copy.keep(name, len(data))
    (path / f".manifest-{B}").write_bytes(b"on its way")
    if code == errno.EIO:
        with pytest.raises(StorageError, match="cannot commit"):
            await copy.commit(manifest_of(A, OLD))
        await copy.leave()
    else:
        await copy.commit(manifest_of(A, OLD))
    assert committed(path) == OLD


async def test_a_copy_that_takes_over_what_was_quiet_for_long_says_that_it_is_alive(
    tmp_path: Path, executor: Executor
) -> None:
    """Where there are no locks, the date of the attempt's file is all that others have."""
    path = tmp_path / "c"
    path.mkdir()
    marker = path / f".attempt-{A}"
    marker.touch()
    age(path)
    files = RecordingFiles(has_locks=False)
    copy = await storage_at(path, executor, files).begin(A, overwrite=True, resumes=True)
    assert marker.stat().st_mtime > time.time() - QUIET_S / 2
    await copy.leave()


async def test_a_copy_that_finds_all_that_it_would_write_says_that_it_is_alive(
    tmp_path: Path, executor: Executor
) -> None:
    path, (name, data) = tmp_path / "c", next(iter(OLD.items()))
    await write_files(storage_at(path, executor), A, OLD)
    (path / MANIFEST_NAME).unlink()
    copy = await storage_at(path, executor).begin(A, overwrite=True, resumes=True)
    writer = await copy.create(name, len(data))
    age(path)
    writer.pwrite(0, memoryview(data))
    assert (path / f".attempt-{A}").stat().st_mtime > time.time() - 100
    assert (path / name).stat().st_mtime < time.time() - QUIET_S
    age(path)
    writer.pwrite(0, memoryview(data))  # not each time
    assert (path / f".attempt-{A}").stat().st_mtime < time.time() - QUIET_S
    await copy.leave()


async def test_the_lock_of_another_host_is_judged_by_the_clock_that_dates_files(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host's may be hours ahead."""
    path = tmp_path / "c"
    copy = await begun_elsewhere(path, executor)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 2 * QUIET_S)
    with pytest.raises(StorageError, match="copied once more"):
        await root_at(path.parent, executor).remove("c", A)
    assert committed(path) == OLD
    await copy.leave()


@pytest.mark.parametrize("exchanges", [True, False])
async def test_a_copy_asks_nothing_of_what_has_taken_its_name(
    tmp_path: Path, executor: Executor, *, exchanges: bool
) -> None:
    """Whose manifest may be of a newer version: an error that no save has ended the copy with."""
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)

    files = RecordingFiles(has_exchange=exchanges)
    look = tombs.tombs_in

    def tombs_in(directory: str, save_id: str) -> list[str]:
        if committing:
            (path / MANIFEST_NAME).unlink()
            (path / MANIFEST_NAME).write_bytes(b'{"format": "of tomorrow"}')
        return look(directory, save_id)

    committing: list[bool] = []
    copy = await storage_at(path, executor, files).begin(A, overwrite=True, resumes=True)
    for name, data in OLD.items():
        await copy.keep(name, len(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resumed, "tombs_in", tombs_in)
        committing.append(True)
        await copy.commit(manifest_of(A, OLD))
    assert set(OLD) < set(names_in(path))


async def test_few_locks_are_held_at_a_time(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 dead saves took 300 open files, which a program may not have: no save could begin."""
    monkeypatch.setattr(attempt_lock, "_MAX_HELD", 3)
    path, dead = tmp_path / "c", [f"{number:032x}" for number in range(1, 21)]
    path.mkdir()
    for save_id in dead:
        (path / f".attempt-{save_id}").write_bytes(boot_id())
        (path / f"data-{save_id}-00000-00000.safetensors").write_bytes(b"left over")
    num_open, others = list[int](), PosixFiles()

    def look(operation: Operation) -> None:
        num_open.append(files.num_open)
        name = os.path.basename(operation.path)
        if operation.kind == "unlink" and name.startswith("data-"):  # each under its own lock
            marker = path / f".attempt-{name[5:37]}"
            fd = others.open(str(marker), direct=False, writable=True)
            assert not others.lock(fd)
            others.close(fd)

    files = RecordingFiles(look)
    await write_files(storage_at(path, executor, files), A, OLD)
    assert names_in(path) == sorted([*OLD, MANIFEST_NAME])
    assert max(num_open) <= 6


async def test_what_says_that_a_save_is_dead_stays_as_long_as_its_files(tmp_path: Path) -> None:
    """Without it, those of other ranks count as living for an hour."""
    marker, data = f".attempt-{B}", f"data-{B}-00001-00000.safetensors"
    (tmp_path / marker).write_bytes(boot_id())
    (tmp_path / data).write_bytes(b"left over")

    def find(held: Collection[str]) -> list[str]:
        return [] if held else [marker, data]  # the manifest cannot be read the second time

    assert not attempts_of(tmp_path, RecordingFiles()).clear(find, bool)
    assert names_in(tmp_path) == [marker, data]


def test_a_lock_is_taken_once_more_where_its_file_is_another_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says whose it is, whatever was there before."""
    monkeypatch.setattr(attempt_lock, "_WAIT_S", 0.0)
    marker = tmp_path / f".attempt-{A}"
    marker.write_bytes(ELSEWHERE)
    seen: list[Operation] = []

    def change(operation: Operation) -> None:
        if operation.kind == "lock":
            seen.append(operation)
            if len(seen) == 1:
                marker.unlink()
                marker.write_bytes(b"x" * len(boot_id()))

    with attempts_of(tmp_path, RecordingFiles(change)).held(A, is_kept=True) as is_held:
        assert is_held
        assert marker.read_bytes() == boot_id()
    assert len(seen) == 2
    assert names_in(tmp_path) == [marker.name]


@pytest.mark.parametrize("has_locks", [True, False])
async def test_only_who_has_a_lock_says_that_its_save_is_dead(
    tmp_path: Path, *, has_locks: bool
) -> None:
    """Where there are none, it is looked at once more: somebody may have taken it up."""
    (tmp_path / f".attempt-{B}").write_bytes(boot_id())
    asked = list[list[str]]()

    def find(held: Collection[str]) -> list[str]:
        asked.append(sorted(held))
        return [f".attempt-{B}"]

    assert attempts_of(tmp_path, RecordingFiles(has_locks=has_locks)).clear(find, bool)
    assert asked == [[], [B] * has_locks]


async def test_nothing_is_cleared_but_what_was_found_at_first(tmp_path: Path) -> None:
    """Or was asked for, though more is left over by then."""
    (tmp_path / f".attempt-{B}").write_bytes(boot_id())
    first, more = (f"data-{B}-0000{rank}-00000.safetensors" for rank in range(2))
    removed, num_found = list[list[str]](), list[int]()

    def find(_: Collection[str]) -> list[str]:
        num_found.append(1)
        return [first, more][: len(num_found)]

    def remove(names: list[str]) -> bool:
        removed.append(names)
        return True

    attempts = attempts_of(tmp_path, RecordingFiles())
    assert attempts.clear(find, remove)
    assert attempts.clear(find, remove, [more])
    assert removed == [[first], [more]]


async def test_an_abort_of_a_rank_leaves_the_files_of_others(
    tmp_path: Path, executor: Executor
) -> None:
    """The one that leads removes them all, once every rank has ended."""
    path = tmp_path / "c"
    ranks: list[LocalAttempt] = []
    storage = storage_at(path, executor)
    for rank in range(2):
        ranks.append(await (storage.join(B) if rank else storage.begin(B, overwrite=True)))
        writer = await ranks[rank].create(f"data-{B}-0000{rank}-00000.safetensors", 10)
        writer.pwrite(0, memoryview(b"0123456789"))
        writer.close()
    await ranks[1].abort()
    assert names_in(path) == [f".attempt-{B}", f"data-{B}-00000-00000.safetensors"]
    await ranks[0].abort()
    assert not path.exists()


async def test_an_abort_beside_a_damaged_manifest_removes_what_it_made(
    tmp_path: Path, executor: Executor
) -> None:
    """That is no checkpoint of this save."""
    (tmp_path / MANIFEST_NAME).write_bytes(b"damaged")
    attempt = await storage_at(tmp_path, executor).begin(B, overwrite=True)
    await fill_attempt(attempt, NEW)
    await attempt.abort()
    assert names_in(tmp_path) == [MANIFEST_NAME]


async def test_a_file_that_was_made_for_a_lock_goes_where_there_can_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a mount that gives a file another number at each look."""
    monkeypatch.setattr(attempt_lock, "is_at", lambda _, __: False)
    files = RecordingFiles()
    with attempts_of(tmp_path, files).held(A) as is_held:
        assert not is_held
    assert names_in(tmp_path) == []
    assert files.num_open == 0


async def test_a_sweep_that_cannot_put_a_checkpoint_back_says_so(
    tmp_path: Path, executor: Executor
) -> None:
    """It is whole, and nobody sees it."""
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)
    (path / MANIFEST_NAME).rename(path / f".manifest-{B}-old-00000000")  # taken for B's

    def fail(operation: Operation) -> None:
        if operation.kind == "publish":
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    with pytest.raises(StorageError, match="cannot sweep"):
        await root_at(path.parent, executor, RecordingFiles(fail)).sweep("c", -1)
    await root_at(path.parent, executor).sweep("c", -1)
    assert committed(path) == OLD


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_this_hosts_clock_does_where_the_disk_is_full(tmp_path: Path, code: int) -> None:
    """Where no file can be made just now, nobody can tell."""

    def fail(operation: Operation) -> None:
        if operation.kind == "create":
            raise OSError(code, os.strerror(code), operation.path)

    files = RecordingFiles(fail)
    if code == errno.ENOSPC:
        now_s = time_there(files, str(tmp_path), 0o600, may_guess=True)
        assert abs(now_s - time.time()) < 60
        assert time_there(files, str(tmp_path), 0o600, may_guess=False) == 0.0
    else:
        with pytest.raises(OSError, match="Too many open files"):
            time_there(files, str(tmp_path), 0o600, may_guess=True)
    assert names_in(tmp_path) == []
