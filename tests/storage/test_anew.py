"""What clients of NFS and mounts of FUSE keep of the past, played on a local file system.

The real thing is in tests/stress/test_mounts.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
)
from ckptio.storage import linux
from ckptio.storage.anew import KEPT_S
from ckptio.storage.leftovers import is_at
from ckptio.storage.local import LocalStorage
from ckptio.testing import EventLog, RecordingFiles
from tests.rig import (
    SAVE_IDS,
    FilesCore,
    config_with,
    contents_of,
    engine_on,
    fill_attempt,
    manifest_of,
    read_files,
    root_at,
    storage_at,
    write_files,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from ckptio.testing import Operation

pytestmark = pytest.mark.usefixtures("no_leaks")
A, B = SAVE_IDS[:2]
OLD, NEW = contents_of(A, 5000, 9000), contents_of(B, 10_000)


class Client:
    """Answers as a client of NFS does, in front of the system's calls.

    Attributes:
        lacks: What it looked for too early: it is not there, nor is anything below it, until
            somebody opens the directory that has it.
        kept: What it knows of files until somebody opens them, or the directory that has them.
        links: Where links lead, until somebody opens the directory that has them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lacks: set[str] = set()
        self.kept: dict[str, os.stat_result] = {}
        self.links: dict[str, str] = {}
        for name in ("open", "stat", "lstat", "readlink", "scandir", "listdir"):
            monkeypatch.setattr(os, name, functools.partial(self._ask, name, getattr(os, name)))

    def _ask(self, call: str, real: Callable[..., Any], path: Any, *args: Any, **more: Any) -> Any:
        asked = f"{path}/"
        if any(asked.startswith(f"{lacked}/") for lacked in self.lacks):
            raise FileNotFoundError(errno.ENOENT, "kept by the client", path)
        if call in ("stat", "lstat") and path in self.kept:
            return self.kept[path]
        if call == "readlink" and path in self.links:
            return self.links[path]
        found = real(path, *args, **more)
        if call == "open":
            for kept in [kept for kept in self.kept if str(path) in (kept, os.path.dirname(kept))]:
                del self.kept[kept]
            self.lacks = {lacked for lacked in self.lacks if os.path.dirname(lacked) != str(path)}
            for link in [link for link in self.links if os.path.dirname(link) == str(path)]:
                del self.links[link]
        return found


QUESTIONS: dict[str, Callable[[Path, Executor], Awaitable[Any]]] = {
    "version": lambda path, executor: storage_at(path, executor).version(),
    "read": lambda path, executor: storage_at(path, executor).read_manifest(),
    "peek": lambda path, executor: storage_at(path, executor).peek_manifest(),
    "find": lambda path, executor: root_at(path.parent, executor).find(),
    "look": lambda path, executor: root_at(path.parent, executor).look([path.name]),
    "names": lambda path, executor: root_at(path.parent, executor).names(),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("lacked", ["run", "run/step", "run/step/manifest.json"])
async def test_what_another_host_made_meanwhile_is_found(
    question: str, lacked: str, tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client keeps that it was not there; as it would for a minute."""
    path = tmp_path / "run" / "step"
    await write_files(storage_at(path, executor), A, OLD)
    expected = await QUESTIONS[question](path, executor)
    client = Client(monkeypatch)
    client.lacks.add(str(tmp_path / lacked))
    assert await QUESTIONS[question](path, executor) == expected


async def test_a_data_file_that_another_host_made_meanwhile_is_found(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_at(tmp_path / "c", executor)
    await write_files(storage, A, OLD)
    client = Client(monkeypatch)
    client.lacks.update(str(tmp_path / "c" / name) for name in OLD)
    assert await storage.sizes(list(OLD)) == [5000, 9000]


async def test_what_is_not_there_is_not_there_at_the_second_look(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a directory that nobody may list, or that is none, is no other error."""
    storage = storage_at(tmp_path / "a" / "b" / "c", executor)
    for read in (storage.version, storage.read_manifest, storage.peek_manifest):
        with pytest.raises(CheckpointNotFoundError):
            await read()
    assert await root_at(tmp_path / "a" / "b", executor).find() == []
    await write_files(storage, A, OLD)
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "nobody may list it", path)
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert await storage.sizes([*OLD, "data-none"]) == [5000, 9000, None]


async def test_a_manifest_that_was_replaced_has_another_version_at_once(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stat says may be a minute old: it is the opened file that counts."""
    storage = storage_at(tmp_path / "c", executor)
    await write_files(storage, A, OLD)
    before, status = await storage.version(), (tmp_path / "c" / "manifest.json").stat()
    await write_files(storage, B, NEW, overwrite=True)
    client = Client(monkeypatch)
    client.kept[str(tmp_path / "c" / "manifest.json")] = status
    found = await storage.version()
    assert found != before
    assert found == (await storage.read_manifest())[0]


async def overwritten_at(folder: Path, executor: Executor) -> tuple[Path, Path, Path]:
    """Overwrite a checkpoint; gives its path, its manifest, and a copy of the one before."""
    path, old = folder / "c", folder / "old"
    await write_files(storage_at(path, executor), A, OLD)
    shutil.copy(path / "manifest.json", old)
    await write_files(storage_at(path, executor), B, NEW, overwrite=True)
    return path, path / "manifest.json", old


@pytest.mark.parametrize("question", ["version", "read", "peek"])
async def test_on_fuse_a_manifest_that_was_replaced_is_read_at_once(
    question: str, tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel opens what it knows to have the name, until somebody lists the directory."""
    path, manifest, old = await overwritten_at(tmp_path, executor)
    expected = await QUESTIONS[question](path, executor)
    real, real_list, known = os.open, os.listdir, {str(manifest): str(old)}

    def list_anew(path: Any) -> list[str]:
        where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        known.pop(f"{where}/manifest.json", None)
        return real_list(path)

    def open_known(path: Any, *args: Any) -> int:
        return real(known.get(path, path), *args)

    monkeypatch.setattr(os, "open", open_known)
    monkeypatch.setattr(os, "listdir", list_anew)
    assert await QUESTIONS[question](path, executor) != expected
    monkeypatch.setattr(linux, "is_on_fuse", lambda fd: os.fstat(fd).st_dev == path.stat().st_dev)
    assert await QUESTIONS[question](path, executor) == expected
    assert not known


async def test_smb_is_waited_for_where_data_is_missing(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a second it says that the manifest is there whose data has gone: it is no damage."""
    path, manifest, old = await overwritten_at(tmp_path, executor)
    real, waits = os.open, list[float]()
    known = {str(manifest): str(old)}

    def open_known(path: Any, *args: Any) -> int:
        return real(known.get(path, path), *args)

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)
        known.clear()

    monkeypatch.setattr(os, "open", open_known)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    storage = storage_at(path, executor)
    before = await storage.version()
    assert await storage.sizes([*OLD]) == [None] * len(OLD)
    assert await storage.version() == before
    monkeypatch.setattr(linux, "is_on_smb", lambda fd: os.fstat(fd).st_ino == path.stat().st_ino)
    assert await storage.sizes([*NEW]) == [len(data) for data in NEW.values()]
    assert waits == []
    assert await storage.sizes([*OLD]) == [None] * len(OLD)
    assert await storage.version() != before
    assert waits == [KEPT_S]
    assert await storage_at(tmp_path / "none", executor).sizes([*OLD]) == [None] * len(OLD)
    assert waits == [KEPT_S]


@pytest.mark.parametrize("kind", [0xFF534D42, 0xFE534D42])
def test_what_is_on_smb_is_known(
    kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        monkeypatch.setattr(os, "major", lambda _: 0)
        monkeypatch.setattr(linux, "_file_systems", {})
        assert not linux.is_on_smb(file.fileno())
        monkeypatch.setattr(linux, "_file_systems", {})
        monkeypatch.setattr(linux, "_file_system", lambda _: kind)
        assert linux.is_on_smb(file.fileno())
        assert not linux.is_on_fuse(file.fileno())


def test_what_is_on_fuse_is_known(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has a disk is not; of any other one a server may be asked, and is once."""
    with tempfile.TemporaryFile(dir=tmpfs) as file:
        monkeypatch.setattr(linux, "_file_systems", {})
        assert not linux.is_on_fuse(file.fileno())
        answers = iter([None, 0x65735546])
        monkeypatch.setattr(linux, "_file_systems", {})
        monkeypatch.setattr(linux, "_file_system", lambda _: next(answers))
        assert not linux.is_on_fuse(file.fileno())  # nobody tells: that is no answer to keep
        assert all(linux.is_on_fuse(file.fileno()) for _ in range(3))
    monkeypatch.setattr(os, "major", lambda _: 8)
    with tempfile.TemporaryFile(dir=tmpfs) as file:
        assert not linux.is_on_fuse(file.fileno())


@pytest.mark.parametrize("meanwhile", ["replaced", "removed"])
async def test_whoever_looks_at_a_step_is_told_of_what_another_host_did_to_it(
    meanwhile: str, tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `latest` and `follow` look: what a stat says may be a minute old."""
    path, root = tmp_path / "step", root_at(tmp_path, executor)
    await write_files(storage_at(path, executor), A, OLD)
    (before,), status = await root.look(["step"]), (path / "manifest.json").stat()
    if meanwhile == "replaced":
        await write_files(storage_at(path, executor), B, NEW, overwrite=True)
    else:
        (path / "manifest.json").unlink()
    client = Client(monkeypatch)
    client.kept[str(path / "manifest.json")] = status
    (found,) = await root.look(["step"])
    assert found.version != before.version
    assert (found.version is None) == (meanwhile == "removed")


@pytest.mark.parametrize("lacked", ["run", "run/step", "run/step/manifest.json"])
async def test_a_save_begins_by_what_is_there_now(
    lacked: str, tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the end, when all is written, is it told of a checkpoint of another host."""
    path = tmp_path / "run" / "step"
    await write_files(storage_at(path, executor), A, OLD)
    client = Client(monkeypatch)
    client.lacks.add(str(tmp_path / lacked))
    with pytest.raises(CheckpointExistsError):
        await storage_at(path, executor).begin(B, overwrite=False)


async def test_a_save_goes_where_another_host_has_removed_a_checkpoint(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    manifest = tmp_path / "c" / "manifest.json"
    client = Client(monkeypatch)
    client.kept[str(manifest)] = manifest.stat()
    manifest.unlink()
    await write_files(storage_at(tmp_path / "c", executor), B, NEW)
    assert await read_files(storage_at(tmp_path / "c", executor)) == NEW


async def test_no_manifest_names_a_file_that_another_host_has_removed(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the client has written it, and knows of nothing else."""
    config = config_with(durability="none")  # else the directory is synced, and so opened
    storage = LocalStorage(str(tmp_path / "c"), config, executor, EventLog())
    attempt = await storage.begin(A, overwrite=False)
    await fill_attempt(attempt, OLD)
    client = Client(monkeypatch)
    for name in OLD:
        path = tmp_path / "c" / name
        client.kept[str(path)] = path.stat()
        path.unlink()
    with pytest.raises(StorageError, match="cannot commit"):
        await attempt.commit(manifest_of(A, OLD))
    await attempt.abort()


def test_a_file_that_another_host_has_removed_is_at_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on it keeps nobody away."""
    path = tmp_path / "attempt"
    with path.open("w") as file:
        assert is_at(file.fileno(), str(path))
        client = Client(monkeypatch)
        client.kept[str(path)] = path.stat()
        path.unlink()
        assert not is_at(file.fileno(), str(path))


async def test_a_link_that_another_host_moved_is_followed(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` leads to where it leads now, and so does what is below it."""
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "step-2")
    (tmp_path / "step-2" / "ema").mkdir(parents=True)
    client = Client(monkeypatch)
    for name in ("", "/ema"):
        for follow in ("identify", "identity"):
            storage = storage_at(Path(f"{link}{name}"), executor)
            client.links[str(link)] = str(tmp_path / "step-1")
            found = await storage.identify() if follow == "identify" else storage.identity
            assert found == f"{tmp_path}/step-2{name}"


@pytest.mark.parametrize("kind", ["open", "pread"])
@pytest.mark.parametrize("meanwhile", ["replaced", "removed", "nothing"])
async def test_what_another_host_did_to_a_checkpoint_that_is_read_is_told(
    kind: str, meanwhile: str, tmp_path: Path
) -> None:
    """A server says only that a handle is stale; so it does where a whole mount is lost."""
    path = tmp_path / "c"
    states = [{"t": torch.full((50_000,), float(number))} for number in range(2)]
    failed: list[str] = []
    is_ready = False

    def fault(operation: Operation) -> None:
        if not is_ready or operation.kind != kind or not operation.path.endswith(".safetensors"):
            return
        if kind == "open" and not failed:  # its size is looked at
            failed.append("")
            return
        with contextlib.suppress(FileNotFoundError):  # another thread did it
            if meanwhile == "replaced":
                (tmp_path / "other" / "manifest.json").rename(path / "manifest.json")
            elif meanwhile == "removed":
                (path / "manifest.json").unlink()
        failed.append(kind)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), operation.path)

    core = FilesCore(config_with(), None, RecordingFiles(fault))
    async with engine_on(core) as engine:
        for name, state in zip(("c", "other"), states, strict=True):
            await engine.save(state, tmp_path / name)
        is_ready = True
        with pytest.raises(StorageError) as caught:
            await engine.load(path)
    kinds = {"replaced": CheckpointChangedError, "removed": CheckpointNotFoundError}
    assert type(caught.value) is kinds.get(meanwhile, StorageError)
    assert caught.value.errno == (errno.ENOENT if meanwhile == "removed" else errno.ESTALE)


async def test_a_stale_handle_of_a_data_file_is_none_of_a_file_that_is_there(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for its size looks then whether the checkpoint is still the same."""
    storage = storage_at(tmp_path / "c", executor)
    await write_files(storage, A, OLD)
    real, opened = os.fstat, 0

    def stale(fd: int) -> os.stat_result:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            nonlocal opened
            opened += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd)

    monkeypatch.setattr(os, "fstat", stale)
    assert await storage.sizes(list(OLD)) == [None, None]
    assert opened == 4


async def test_a_manifest_that_is_replaced_as_it_is_read_is_read_once_more(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that is lost is no endless matter: then the server's error is told."""
    storage = storage_at(tmp_path / "c", executor)
    await write_files(storage, A, OLD)
    expected, real = await storage.read_manifest(), LocalStorage._read_commit
    stale = [True]

    async def read(self: LocalStorage) -> Any:
        if stale and (len(stale) > 1 or stale.pop()):
            raise StorageError("no", path="", code=errno.ESTALE)
        return await real(self)

    monkeypatch.setattr(LocalStorage, "_read_commit", read)
    assert await storage.read_manifest() == expected
    stale += [True, True]
    with pytest.raises(StorageError) as caught:
        await storage.read_manifest()
    assert type(caught.value) is StorageError


@pytest.mark.parametrize("kind", ["open", "close"])
async def test_a_manifest_that_is_replaced_as_it_is_looked_at_is_looked_at_once_more(
    kind: str, tmp_path: Path, executor: Executor
) -> None:
    """The handle that a client has is stale then, once."""
    failed: list[str] = []

    def fault(operation: Operation) -> None:
        if operation.kind == kind and not failed:
            failed.append(kind)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), operation.path)

    storage = storage_at(tmp_path / "c", executor)
    await write_files(storage, A, OLD)
    expected = await storage.version()
    assert await storage_at(tmp_path / "c", executor, RecordingFiles(fault)).version() == expected
    assert failed


async def test_a_small_file_that_is_replaced_as_it_is_read_is_read_once_more(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever reads it: an overwrite that keeps a copy of what it replaces, say."""
    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    path, real = tmp_path / "c" / "manifest.json", os.pread
    is_stale = True

    def stale(fd: int, *args: Any) -> bytes:
        nonlocal is_stale
        if is_stale and os.readlink(f"/proc/self/fd/{fd}") == str(path):
            is_stale = False
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, *args)

    monkeypatch.setattr(os, "pread", stale)
    assert await storage_at(path.parent, executor).peek_manifest() == path.read_bytes()
    assert not is_stale
    is_stale = True
    assert await root_at(tmp_path, executor).read_manifest("c") == path.read_bytes()
    assert not is_stale
