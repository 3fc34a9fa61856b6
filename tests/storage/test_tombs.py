"""Removals that meet: other removals, saves over the checkpoint, copies of it, and kills."""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ckptio._threads import Threads
from ckptio.errors import CheckpointNotFoundError, CommitConflictError, StorageError
from ckptio.events import CleanupFailed
from ckptio.storage import resumed
from ckptio.storage.attempt_lock import Attempts
from ckptio.storage.file_names import tomb_name
from ckptio.storage.files import NoExclusiveNames
from ckptio.storage.leftovers import boot_id, is_whole, read_summary
from ckptio.storage.tombs import forget_mistakes, put_back, put_back_mistakes, tombs_in
from ckptio.testing import Crash, EventLog, RecordingFiles
from tests.rig import (
    SAVE_IDS,
    committed,
    contents_of,
    manifest_of,
    names_in,
    root_at,
    storage_at,
    write_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptio.storage.local import LocalStorage
    from ckptio.testing import Fault, Operation

pytestmark = pytest.mark.usefixtures("no_leaks")
A, B, C = SAVE_IDS[:3]
OLD, NEW = contents_of(A, 5000, 9000), contents_of(B, 10_000)
CONTENTS = {A: OLD, B: NEW, C: contents_of(C, 10)}


class NoNames(RecordingFiles):
    """A mount that gives no name on condition."""

    def __init__(self, fault: Fault | None = None, *, has_locks: bool = True) -> None:
        super().__init__(fault, has_links=False, has_exchange=False, has_locks=has_locks)

    def rename_to_free(self, source: str, target: str) -> None:
        raise NoExclusiveNames(errno.EINVAL, f"{source} gets no name", target)


MOUNTS: dict[str, Callable[[Fault | None], RecordingFiles]] = {
    "links": RecordingFiles,
    "renames": lambda fault: RecordingFiles(fault, has_links=False),
    "no names": NoNames,
    "no exchange": lambda fault: RecordingFiles(fault, has_exchange=False),
    "no locks": lambda fault: RecordingFiles(fault, has_locks=False),
    "no names, no locks": lambda fault: NoNames(fault, has_locks=False),
}


def elsewhere(work: Callable[[Threads], object]) -> None:
    """Do something as another process would, to its end."""
    others = Threads(1, "others")
    try:
        work(others)
    finally:
        others.shutdown()


def save(path: Path, save_id: str, mount: str = "links") -> None:
    """Save, also over what is there."""

    def work(threads: Threads) -> None:
        storage = storage_at(path, threads, MOUNTS[mount](None))
        asyncio.run(write_files(storage, save_id, CONTENTS[save_id], overwrite=True))

    elsewhere(work)


def sweep(path: Path) -> None:
    elsewhere(lambda threads: asyncio.run(root_at(path.parent, threads).sweep(path.name, -1)))


def remove(path: Path, save_id: str, told: list[str], files: RecordingFiles | None = None) -> None:
    """Remove a save's checkpoint; says how that ended."""

    def work(threads: Threads) -> None:
        try:
            asyncio.run(root_at(path.parent, threads, files).remove(path.name, save_id))
        except CheckpointNotFoundError:
            told.append("gone")
        except StorageError:
            told.append("stays")
        else:
            told.append("removed")

    elsewhere(work)


def copy_again(path: Path, told: list[str], files: RecordingFiles | None = None) -> None:
    """Make a copy after all, of the files that are there; says how that ended."""

    async def copy(threads: Threads) -> None:
        storage = storage_at(path, threads, files)
        attempt = await storage.begin(A, overwrite=True, resumes=True)
        try:
            for name, data in OLD.items():
                await attempt.keep(name, len(data))
            await attempt.commit(manifest_of(A, OLD))
        except BaseException:
            await attempt.leave()
            raise

    def work(threads: Threads) -> None:
        try:
            asyncio.run(copy(threads))
        except (CommitConflictError, StorageError):
            told.append("failed")
        else:
            told.append("copied")

    elsewhere(work)


@pytest.mark.parametrize("mount", MOUNTS)
@pytest.mark.parametrize("there", ["a part of it", "another", "itself"])
def test_a_copy_is_made_again_on_any_mount(tmp_path: Path, mount: str, there: str) -> None:
    path, told = tmp_path / "c", list[str]()
    path.mkdir()
    if there != "a part of it":
        save(path, B if there == "another" else A, mount)
    for name, data in OLD.items() if there != "itself" else ():
        (path / name).write_bytes(data)
    copy_again(path, told, MOUNTS[mount](None))
    assert told == ["copied"]
    assert committed(path) == OLD
    assert names_in(path) == sorted(["manifest.json", *OLD])


def test_of_two_that_were_taken_by_mistake_one_is_put_back_and_the_other_one_stays(
    tmp_path: Path,
) -> None:
    """Nobody has replaced it: it is put back when the first one has gone."""
    path, told = tmp_path / "c", list[str]()
    path.mkdir()
    for save_id in (B, C):
        for name, data in CONTENTS[save_id].items():
            (path / name).write_bytes(data)
        (path / tomb_name(A)).write_bytes(manifest_of(save_id, CONTENTS[save_id]))
    for _ in range(2):
        put_back_mistakes(RecordingFiles(), str(path))
    (stays,) = tombs_in(str(path))
    there, other = (
        read_summary(RecordingFiles(), str(path / name))[0].save_id
        for name in ("manifest.json", stays)
    )
    assert {there, other} == {B, C}
    remove(path, there, told)
    sweep(path)
    assert told == ["removed"]
    assert committed(path) == CONTENTS[other]


@pytest.mark.parametrize("mount", ["links", "renames", "no names"])
def test_of_two_that_were_taken_by_mistake_none_is_lost_where_two_put_them_back(
    tmp_path: Path, mount: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has looked for a checkpoint before the first one put one back."""
    path, files, first = tmp_path / "c", MOUNTS[mount](None), [True]
    path.mkdir()
    for save_id in (B, C):
        for name, data in CONTENTS[save_id].items():
            (path / name).write_bytes(data)
        (path / tomb_name(A)).write_bytes(manifest_of(save_id, CONTENTS[save_id]))

    def listed(directory: str, save_id: str = "") -> list[str]:
        found = tombs_in(directory, save_id)
        if first:
            first.clear()
            put_back_mistakes(files, directory)
        return found

    monkeypatch.setattr("ckptio.storage.tombs.tombs_in", listed)
    put_back_mistakes(files, str(path))
    (stays,) = tombs_in(str(path))
    names = ("manifest.json", stays)
    assert {read_summary(files, f"{path}/{name}")[0].save_id for name in names} == {B, C}


def test_what_is_put_back_by_a_request_that_was_sent_twice_has_one_name(tmp_path: Path) -> None:
    """The second one is told that the name is taken, by the first; as on NFS."""

    class Twice(RecordingFiles):
        def publish(self, source: str, target: str) -> None:
            super().publish(source, target)
            super().publish(source, target)

    path = tmp_path / "c"
    path.mkdir()
    for name, data in CONTENTS[B].items():
        (path / name).write_bytes(data)
    (path / tomb_name(A)).write_bytes(manifest_of(B, CONTENTS[B]))
    put_back_mistakes(Twice(), str(path))
    assert committed(path) == CONTENTS[B]
    assert tombs_in(str(path)) == []


@pytest.mark.parametrize("before", ["fsync_dir", "unlink"])
def test_a_copy_of_what_is_being_replaced_is_not_made(tmp_path: Path, before: str) -> None:
    """Right behind the exchange of the two its files are there: they are about to go."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    files = RecordingFiles()

    def interrupt(operation: Operation) -> None:
        if files.kinds("exchange") and operation.kind == before and not told:
            copy_again(path, told)

    files.fault = interrupt
    elsewhere(
        lambda threads: asyncio.run(
            write_files(storage_at(path, threads, files), B, NEW, overwrite=True)
        )
    )
    assert told == ["failed"]
    assert committed(path) == NEW
    save(path, C)  # what the copy has left goes
    assert names_in(path) == sorted(["manifest.json", *CONTENTS[C]])


@pytest.mark.parametrize("before", ["exchange", "fsync_dir", "replace"])
def test_what_a_copy_has_again_is_not_removed_by_who_replaces_it(
    tmp_path: Path, before: str
) -> None:
    """Where names cannot be exchanged, a copy takes the name of what has replaced it just now."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    is_at, may_go = threading.Event(), threading.Event()

    def linger(operation: Operation) -> None:
        if operation.kind == "unlink" and f"data-{A}" in operation.path and not is_at.is_set():
            is_at.set()
            assert may_go.wait(20)

    def replace() -> None:
        files = RecordingFiles(linger, has_exchange=False)
        work = functools.partial(write_files, save_id=B, contents=NEW, overwrite=True)
        elsewhere(lambda threads: asyncio.run(work(storage_at(path, threads, files))))
        is_at.set()

    replacing = threading.Thread(target=replace)

    def interrupt(operation: Operation) -> None:
        if operation.kind in (before, "replace") and not replacing.ident:
            replacing.start()
            assert is_at.wait(20)

    copy_again(path, told, RecordingFiles(interrupt, has_exchange=False))
    if not replacing.ident:  # it has its name already: nothing is replaced
        replacing.start()
    may_go.set()
    replacing.join()
    assert committed(path) in (OLD, NEW)


@pytest.mark.parametrize("by", ["save", "copy"])
def test_what_a_dead_save_has_replaced_is_locked_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A copy of it that is committed meanwhile would list it, and find no sign of its end."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    monkeypatch.setattr(resumed, "QUIET_S", -1.0)  # the save died an hour ago, behind its exchange
    old = (path / "manifest.json").read_bytes()
    for name, data in NEW.items():
        (path / name).write_bytes(data)
    (path / f".manifest-{B}").write_bytes(old)
    (path / "manifest.json").write_bytes(manifest_of(B, NEW))
    (path / f".attempt-{B}").write_bytes(boot_id())

    def interrupt(operation: Operation) -> None:
        if operation.kind == "unlink" and f"data-{A}" in operation.path and not told:
            copy_again(path, told)

    async def begin(storage: LocalStorage) -> None:
        begun = C if by == "save" else B
        attempt = await storage.begin(begun, overwrite=True, resumes=by == "copy")
        await attempt.leave()

    files = RecordingFiles(interrupt)
    elsewhere(lambda threads: asyncio.run(begin(storage_at(path, threads, files))))
    assert told == ["failed"]
    assert committed(path) == NEW


def test_what_is_left_over_is_found_once_more_under_its_lock(tmp_path: Path) -> None:
    """A copy is committed just before, and then taken by mistake: it has no manifest to be seen."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    save(path, B)
    for name, data in OLD.items():  # of a copy that was cut off
        (path / name).write_bytes(data)
    is_taken, may_go = threading.Event(), threading.Event()

    def overtake(operation: Operation) -> None:
        if operation.kind == "replace" and not told:
            copy_again(path, told)
        elif told == ["copied"] and operation.kind == "open" and "-old-" in operation.path:
            is_taken.set()
            assert may_go.wait(20)

    removing = threading.Thread(target=remove, args=(path, B, told, RecordingFiles(overtake)))

    def interrupt(operation: Operation) -> None:
        opens = [each for each in files.operations if each.path.endswith(f".attempt-{A}")]
        is_second = len(opens) == 2  # the first looks whether it lives
        if operation.path.endswith(f".attempt-{A}") and is_second:
            removing.start()
            assert is_taken.wait(20)

    files = RecordingFiles(interrupt)

    async def begin(storage: LocalStorage) -> None:
        attempt = await storage.begin(C, overwrite=True)
        may_go.set()
        removing.join()
        await attempt.abort()

    elsewhere(lambda threads: asyncio.run(begin(storage_at(path, threads, files))))
    assert told == ["copied", "stays"]
    assert committed(path) == OLD


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
def test_who_cannot_look_at_a_lock_removes_nothing(tmp_path: Path, error: int) -> None:
    """A copy lives: a save that replaces what it is made of leaves its files."""
    path = tmp_path / "c"
    save(path, A)

    def refuse(operation: Operation) -> None:
        if operation.kind == "open" and operation.path.endswith(f".attempt-{A}"):
            raise OSError(error, os.strerror(error), operation.path)

    async def replace(storage: LocalStorage, other: LocalStorage) -> None:
        copy = await storage.begin(A, overwrite=True, resumes=True)
        await write_files(other, B, NEW, overwrite=True)
        await copy.leave()

    def work(threads: Threads) -> None:
        other = storage_at(path, threads, RecordingFiles(refuse))
        asyncio.run(replace(storage_at(path, threads), other))

    elsewhere(work)
    assert committed(path) == NEW
    assert set(OLD) < set(names_in(path))


def test_an_error_as_a_lock_is_taken_lets_it_go(tmp_path: Path) -> None:
    def fail(operation: Operation) -> None:
        if operation.kind == "pwrite":
            raise RuntimeError("no memory, say")

    files = RecordingFiles(fail)
    with (
        pytest.raises(RuntimeError),
        Attempts(files, str(tmp_path), 0o600, print, time.time).held(A),
    ):
        pass
    assert files.num_open == 0
    with Attempts(RecordingFiles(), str(tmp_path), 0o600, print, time.time).held(A) as is_held:
        assert is_held


def test_the_file_of_a_lock_that_went_as_it_was_locked_is_made_anew(tmp_path: Path) -> None:
    """A server says so, of a file that another host has removed."""

    def go(operation: Operation) -> None:
        if operation.kind == "lock" and not gone:
            gone.append(operation)
            (tmp_path / f".attempt-{A}").unlink()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), operation.path)

    gone: list[Operation] = []
    with Attempts(RecordingFiles(go), str(tmp_path), 0o600, print, time.time).held(A) as is_held:
        assert is_held
        assert (tmp_path / f".attempt-{A}").exists()


def test_a_copy_whose_file_another_copy_has_begun_anew_does_not_stay(tmp_path: Path) -> None:
    """Where there are no locks: a removal took the file away, and it is there, and too short."""
    path, told, mount = tmp_path / "c", list[str](), "no locks"
    save(path, A)

    def interrupt(operation: Operation) -> None:
        if operation.kind == "exchange" and not told:
            remove(path, A, told, MOUNTS[mount](None))
            path.mkdir(exist_ok=True)
            for name in OLD:
                (path / name).touch()

    copy_again(path, told, RecordingFiles(interrupt, has_locks=False))
    assert told == ["removed", "failed"]
    assert committed(path) is None


@pytest.mark.parametrize("mount", ["no locks", "no names, no locks"])
@pytest.mark.parametrize("comes", [False, True])
def test_a_copy_that_lost_its_files_takes_back_no_manifest_but_its_own(
    tmp_path: Path, mount: str, *, comes: bool
) -> None:
    """Though another is committed right before it is taken away."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)

    def interrupt(operation: Operation) -> None:
        takes_away = operation.kind == "replace" and "-old-" in operation.path
        takes_away |= operation.kind == "unlink" and operation.path.endswith("/manifest.json")
        if operation.kind == "exchange" and not told:
            remove(path, A, told, MOUNTS[mount](None))
        elif comes and takes_away and len(told) == 1:
            told.append("")
            save(path, B, mount)

    files = MOUNTS[mount](None)
    files.fault = interrupt
    copy_again(path, told, files)
    assert told == ["removed", *[""] * comes, "failed"]
    assert committed(path) == (NEW if comes else None)


@pytest.mark.parametrize("mount", MOUNTS)
@pytest.mark.parametrize("first", ["removal", "copy"])
def test_a_copy_that_is_made_again_and_a_removal_of_it_leave_all_or_nothing(
    tmp_path: Path, first: str, mount: str
) -> None:
    """They have one id, and so the same files. Either comes before each operation of the other."""
    ends = set[tuple[str, ...]]()
    for number in itertools.count():
        path, told = tmp_path / str(number), list[str]()
        save(path, A)

        def interrupt(
            operation: Operation, at: int = number, path: Path = path, told: list[str] = told
        ) -> None:
            if operation.number == at and first == "removal":
                copy_again(path, told, MOUNTS[mount](None))
            elif operation.number == at:
                remove(path, A, told, MOUNTS[mount](None))

        files = MOUNTS[mount](interrupt)
        (remove(path, A, told, files) if first == "removal" else copy_again(path, told, files))
        ends.add(tuple(told))
        assert committed(path) in (None, OLD)  # raises if it is there in part
        if told[-1] == "copied" and len(told) == 1:
            assert committed(path) == OLD
        sweep(path)
        assert committed(path) in (None, OLD)
        if len(told) == 1:
            break
    assert {("failed", "removed"), ("removed", "failed")} & ends


def test_a_copy_is_not_begun_where_its_like_is_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a removal may put back goes then; what a dead one left is taken over."""
    path = tmp_path / "c"
    save(path, A)
    (path / "manifest.json").rename(path / tomb_name(A))
    before = names_in(path)
    told: list[str] = []
    copy_again(path, told)
    assert told == ["failed"]
    assert names_in(path) == before
    monkeypatch.setattr(resumed, "QUIET_S", -1.0)  # as if it had been renamed long ago
    copy_again(path, told)
    assert told == ["failed", "copied"]
    assert committed(path) == OLD
    assert tombs_in(str(path)) == []


@pytest.mark.parametrize("mount", MOUNTS)
def test_what_is_saved_over_the_one_that_goes_stays(tmp_path: Path, mount: str) -> None:
    """Before each operation of the removal; whatever the file system can do."""
    for number in itertools.count():
        path, told = tmp_path / str(number), list[str]()
        save(path, A)

        def interrupt(operation: Operation, at: int = number, path: Path = path) -> None:
            if operation.number == at:
                save(path, B, mount)

        files = MOUNTS[mount](interrupt)
        remove(path, A, told, files)
        if len(files.operations) <= number:
            break
        assert committed(path) == NEW
        sweep(path)
        save(path, C, mount)
        assert committed(path) == CONTENTS[C]
        assert names_in(path) == sorted(["manifest.json", *CONTENTS[C]])


@pytest.mark.parametrize("mount", ["links", "renames"])
def test_two_removals_do_not_lose_what_is_saved_over_meanwhile(tmp_path: Path, mount: str) -> None:
    """Without locks both take it by mistake; the second when it is back, and the first not done."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    has_read, has_put_back, has_taken = (threading.Event() for _ in range(3))

    def second(operation: Operation) -> None:
        if operation.kind == "replace":
            has_read.set()
            has_put_back.wait(30)
        elif has_read.is_set() and not has_taken.is_set():
            has_taken.set()

    def first(operation: Operation) -> None:
        if operation.kind == "replace":
            save(path, B)
        elif operation.kind == "unlink" and "-old-" in operation.path:
            has_put_back.set()
            has_taken.wait(30)

    def files_of(fault: Fault) -> RecordingFiles:
        return RecordingFiles(fault, has_links=mount == "links", has_locks=False)

    late = threading.Thread(target=remove, args=(path, A, told, files_of(second)))
    late.start()
    has_read.wait(30)
    remove(path, A, told, files_of(first))
    late.join()
    assert committed(path) == NEW
    assert told == ["stays", "stays"]


def test_a_removal_leaves_what_another_one_took_by_mistake(tmp_path: Path) -> None:
    """That is a checkpoint still, and comes back when this one has gone."""
    path, told = tmp_path / "c", list[str]()
    save(path, C)
    (path / "manifest.json").rename(tmp_path / "taken")
    save(tmp_path / "other", B)
    (tmp_path / "taken").rename(path / tomb_name(A))
    for name in ("manifest.json", *NEW):
        (tmp_path / "other" / name).rename(path / name)
    remove(path, B, told)
    assert told == ["removed"]
    sweep(path)
    assert committed(path) == CONTENTS[C]


@pytest.mark.parametrize("code", [0, errno.EBADMSG, errno.EIO])
def test_what_a_removal_left_that_is_no_checkpoint_goes_if_it_can_be_read(
    tmp_path: Path, code: int
) -> None:
    """At once, but no file: who makes the same again has it. What cannot be read is told of."""
    path, log = tmp_path / "c", EventLog()
    path.mkdir()
    data = b"damaged" if code == errno.EBADMSG else manifest_of(A, OLD)
    tomb, file = tomb_name(B), next(iter(OLD))
    (path / tomb).write_bytes(data)
    (path / file).write_bytes(OLD[file])

    def fail(operation: Operation) -> None:
        if code == errno.EIO and operation.path.endswith(tomb):
            raise OSError(code, os.strerror(code), operation.path)

    def work(threads: Threads) -> None:
        root = root_at(tmp_path, threads, RecordingFiles(fail), log)
        asyncio.run(root.sweep("c", 3600))

    elsewhere(work)
    assert names_in(path) == [tomb] * bool(code) + [file]
    told = [(event.file, getattr(event.error, "errno", None)) for event in log.of(CleanupFailed)]
    assert told == [(tomb, code)] * bool(code)


@pytest.mark.parametrize("mount", MOUNTS)
def test_what_is_put_back_beside_a_newer_one_is_none(tmp_path: Path, mount: str) -> None:
    """It was committed since somebody looked: that one stands."""
    path, tomb = tmp_path / "c", tomb_name(A)
    save(path, B)
    (path / tomb).write_bytes(manifest_of(C, {}))
    put_back(MOUNTS[mount](None), str(path), tomb)
    assert committed(path) == NEW
    assert tombs_in(str(path)) == []


def test_of_two_that_were_taken_by_mistake_a_sweep_loses_none(tmp_path: Path) -> None:
    """One is put back, and the other stays beside it until that one has gone."""
    path, told = tmp_path / "c", list[str]()
    for save_id in (B, C):
        save(tmp_path / save_id, save_id)
    path.mkdir()
    for save_id in (B, C):
        for name in CONTENTS[save_id]:
            (tmp_path / save_id / name).rename(path / name)
        (tmp_path / save_id / "manifest.json").rename(path / tomb_name(A))
    sweep(path)
    found = [committed(path)]
    remove(path, B if found == [NEW] else C, told)
    sweep(path)
    found.append(committed(path))
    assert told == ["removed"]
    assert found in ([NEW, CONTENTS[C]], [CONTENTS[C], NEW])


def test_what_a_killed_removal_left_goes_with_the_next_save(tmp_path: Path) -> None:
    """Its manifest lies under a name of its own: no checkpoint, though it is whole."""
    path = tmp_path / "c"
    save(path, A)
    (path / "manifest.json").rename(path / tomb_name(A))
    save(path, B)
    assert names_in(path) == sorted(["manifest.json", *NEW])


def test_what_another_removal_of_the_same_has_taken_is_left_to_it(tmp_path: Path) -> None:
    """Where there are no locks both are at it; the other finds in it which files go."""
    path = tmp_path / "c"
    save(path, A)
    commit = (path / "manifest.json").read_bytes()
    (path / "manifest.json").rename(path / tomb_name(A))
    (path / tomb_name(B)).write_bytes(commit)
    forget_mistakes(RecordingFiles(), str(path), A, commit)
    assert tombs_in(str(path)) == tombs_in(str(path), A)
    assert len(tombs_in(str(path))) == 1


def test_what_was_made_again_keeps_its_files_as_an_earlier_removal_goes_on(tmp_path: Path) -> None:
    """Committed just before the sweep had the lock, under the id of what had been removed."""
    path = tmp_path / "c"
    save(path, A)
    commit = (path / "manifest.json").read_bytes()
    (path / "manifest.json").rename(path / tomb_name(A))

    def interrupt(operation: Operation) -> None:
        if "/.attempt-" in operation.path and not (path / "manifest.json").exists():
            (path / "manifest.json").write_bytes(commit)

    files = RecordingFiles(interrupt)
    elsewhere(
        lambda threads: asyncio.run(root_at(path.parent, threads, files).sweep(path.name, 3600))
    )
    assert committed(path) == OLD
    assert names_in(path) == sorted(["manifest.json", *OLD])


def test_a_removal_leaves_files_that_are_of_another_save(tmp_path: Path) -> None:
    """A manifest that names them has not made them."""
    path, told = tmp_path / "c", list[str]()
    path.mkdir()
    for name, data in (OLD | NEW).items():
        (path / name).write_bytes(data)
    (path / "manifest.json").write_bytes(manifest_of(A, OLD | NEW))
    remove(path, A, told)
    assert told == ["removed"]
    assert names_in(path) == sorted(NEW)


def test_a_removal_lists_what_it_could_not_remove(tmp_path: Path) -> None:
    """What it has taken stays as long as a file does: whoever goes on finds it there."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)

    def fail(operation: Operation) -> None:
        if operation.kind == "unlink" and operation.path.endswith(next(iter(OLD))):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), operation.path)

    remove(path, A, told, RecordingFiles(fail))
    assert told == ["removed"]
    assert names_in(path) == sorted([*tombs_in(str(path), A), next(iter(OLD))])
    assert len(names_in(path)) == 2


def test_what_was_taken_by_mistake_stays_beside_the_one_that_stands(tmp_path: Path) -> None:
    """Nobody puts it back before that has gone, nor takes it away."""
    path = tmp_path / "c"
    save(path, C)
    (path / "manifest.json").rename(path / tomb_name(A))
    (path / "manifest.json").write_bytes(manifest_of(B, {}))
    put_back_mistakes(RecordingFiles(), str(path))
    assert len(tombs_in(str(path))) == 1
    (path / "manifest.json").unlink()
    put_back_mistakes(RecordingFiles(), str(path))
    assert committed(path) == CONTENTS[C]
    assert tombs_in(str(path)) == []


def test_what_was_put_back_and_is_then_removed_does_not_come_back(tmp_path: Path) -> None:
    """A removal was killed behind its mistake, and another one right behind the manifest."""
    path = tmp_path / "c"
    save(path, B)
    manifest = (path / "manifest.json").read_bytes()
    (path / tomb_name(A)).write_bytes(manifest)
    stop = RecordingFiles(lambda operation: _crash_on(operation, "fsync_dir"))
    with pytest.raises(Crash):
        remove(path, B, [], stop)
    assert len(tombs_in(str(path))) == 1
    # as an earlier look would have it: both are there
    (path / tomb_name(A)).write_bytes(manifest)
    put_back_mistakes(RecordingFiles(), str(path))
    assert committed(path) is None
    sweep(path)
    assert not path.exists()


def _crash_on(operation: Operation, kind: str) -> None:
    if operation.kind == kind:
        raise Crash


def test_a_removal_whose_find_a_sweep_put_back_says_that_it_stays(tmp_path: Path) -> None:
    """It took another save's by mistake, and the sweep was faster."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    is_taken: list[Operation] = []

    def interrupt(operation: Operation) -> None:
        if operation.kind == "replace":
            save(path, B)
            is_taken.append(operation)
        elif is_taken and not told:
            told.append("")
            sweep(path)

    remove(path, A, told, RecordingFiles(interrupt))
    assert told == ["", "stays"]
    summary, _ = read_summary(RecordingFiles(), str(path / "manifest.json"))
    assert summary.save_id == B
    assert is_whole(str(path), summary)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_what_was_replaced_and_left_by_a_dead_save_is_no_obstacle_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_quiet: bool
) -> None:
    """Where there are no locks, it may be about to go for an hour, and no longer."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    (path / f".manifest-{B}").write_bytes((path / "manifest.json").read_bytes())
    (path / "manifest.json").unlink()
    commit_plainly(path)
    if is_quiet:
        monkeypatch.setattr(resumed, "QUIET_S", -1.0)
    copy_again(path, told, MOUNTS["no locks"](None))
    assert told == (["copied"] if is_quiet else ["failed"])
    assert committed(path) == (OLD if is_quiet else CONTENTS[C])


def commit_plainly(path: Path) -> None:
    """Commit, and clear nothing."""
    for name, data in CONTENTS[C].items():
        (path / name).write_bytes(data)
    (path / "manifest.json").write_bytes(manifest_of(C, CONTENTS[C]))


@pytest.mark.parametrize(
    ("boot", "told"), [(boot_id(), "stays"), (b"another", "removed"), (b"", "removed")]
)
def test_the_lock_of_a_host_that_died_is_no_obstacle_for_ever(
    tmp_path: Path, boot: bytes, told: str
) -> None:
    """A server may keep it, also before anybody wrote to it; one of this boot is alive."""
    path, ends = tmp_path / "c", list[str]()
    save(path, A)
    marker = path / f".attempt-{A}"
    marker.write_bytes(boot)
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))
    files = RecordingFiles()
    held = files.open(str(marker), direct=False, writable=True)
    assert files.lock(held)
    remove(path, A, ends)
    files.close(held)
    assert ends == [told]
    assert committed(path) == (OLD if told == "stays" else None)


def test_who_is_second_to_remove_says_that_it_is_gone(tmp_path: Path) -> None:
    """The first has the lock yet, and the manifest is out of its place."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    files = RecordingFiles()

    def interrupt(operation: Operation) -> None:
        if operation.kind == "open" and "/.attempt-" in operation.path and not held:
            (path / "manifest.json").rename(path / tomb_name(A))
            held.append(files.open(str(path / f".attempt-{A}"), direct=False, writable=True))
            assert files.lock(held[0])

    held: list[int] = []
    (path / f".attempt-{A}").write_bytes(boot_id())
    remove(path, A, told, RecordingFiles(interrupt))
    files.close(held[0])
    assert told == ["gone"]


def test_without_locks_a_file_that_went_is_no_matter(tmp_path: Path) -> None:
    """The one made for the lock is removed by somebody else before this one does."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)

    def gone(operation: Operation) -> None:
        if operation.kind == "unlink" and "/.attempt-" in operation.path:
            raise FileNotFoundError(errno.ENOENT, "it went", operation.path)

    remove(path, A, told, RecordingFiles(gone, has_locks=False))
    assert told == ["removed"]


def test_a_name_taken_by_mistake_that_somebody_else_forgets_is_no_matter(tmp_path: Path) -> None:
    """Of two that remove a checkpoint which was put back, one finds that name gone."""
    path, told = tmp_path / "c", list[str]()
    save(path, A)
    mistake = path / tomb_name(B)
    mistake.write_bytes((path / "manifest.json").read_bytes())

    def forget(operation: Operation) -> None:
        if operation.kind == "unlink" and operation.path == str(mistake):
            mistake.unlink()

    remove(path, A, told, RecordingFiles(forget))
    assert told == ["removed"]
    assert not path.exists()
