"""Calls of a file system that were given up, and happen all the same."""

from __future__ import annotations

import asyncio
import secrets
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptio._threads import Threads
from ckptio.config import CheckpointConfig
from ckptio.storage.fsspec import FsspecBackend, FsspecStore
from ckptio.storage.fsspec_upload import FsspecUpload
from ckptio.storage.store import ObjectMissingError
from tests.storage.filesystems import SyncFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

pytestmark = pytest.mark.usefixtures("no_leaks")


class SlowFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Writes begin at once, and take effect when they are let go."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.begun.set()
        self.let_go.wait()
        super().pipe_file(path, value, mode=mode, **options)


@pytest.fixture
def slow() -> Iterator[SlowFileSystem]:
    made = SlowFileSystem()
    yield made
    made.let_go.set()


async def give_up_a_put(store: FsspecStore, slow: SlowFileSystem, key: str) -> None:
    """Begin to write an object, and leave when a thread is at it."""
    put = asyncio.create_task(store.put(key, b"late"))
    await asyncio.to_thread(slow.begun.wait)
    put.cancel()
    await asyncio.wait((put,))
    assert put.cancelled()


async def come_behind(store: FsspecStore) -> None:
    """Look behind what others have asked for by now, on the one thread that is left."""
    for _ in range(3):
        with pytest.raises(ObjectMissingError):
            await store.head("/late/nothing")


async def test_what_is_removed_is_not_written_afterwards(slow: SlowFileSystem) -> None:
    """A removal waits for a write that was given up."""
    store, key = FsspecStore(slow, "memory", 2), f"/late/{secrets.token_hex(8)}/a"
    try:
        await give_up_a_put(store, slow, key)
        removal = asyncio.create_task(store.delete([key]))
        await asyncio.sleep(0)
        await come_behind(store)
        assert not removal.done()
        slow.let_go.set()
        await removal
        await store.settled(key)
        with pytest.raises(ObjectMissingError):
            await store.head(key)
    finally:
        await store.close()


class SlowToMake(MemoryFileSystem):  # type: ignore[misc]  # as above
    """Is made when it is let go."""

    cachable = False
    begun = threading.Event()
    let_go = threading.Event()

    def __init__(self, **options: Any) -> None:
        self.begun.set()
        self.let_go.wait()
        super().__init__(**options)


class SlowToOpen(MemoryFileSystem):  # type: ignore[misc]  # as above
    """The first file that is opened, or written, is when it is let go; counts them."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.opened = threading.Event()
        self.num_begun = 0

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            self.wait()
        file = super().open(path, mode, **options)
        self.opened.set()
        return file

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.wait()
        super().pipe_file(path, value, mode=mode, **options)

    def wait(self) -> None:
        self.num_begun += 1
        if self.num_begun == 1:
            self.begun.set()
            self.let_go.wait()


async def write_in_parts(store: FsspecStore, key: str) -> None:
    """Write an object as an upload."""
    upload = await store.upload(key)
    await upload.write(0, memoryview(b"whole"))
    await upload.complete()


async def write_at_once(store: FsspecStore, key: str) -> None:
    """Write an object in one request."""
    await store.put(key, b"whole")


@pytest.mark.parametrize("write", [write_in_parts, write_at_once])
async def test_what_is_written_again_is_not_undone_by_the_first_try(
    write: Callable[[FsspecStore, str], Coroutine[Any, Any, None]],
) -> None:
    """A file is opened again when the thread that was given up has ended with it."""
    fs, key = SlowToOpen(), f"/late/{secrets.token_hex(8)}/a"
    store = FsspecStore(fs, "memory", 2)
    try:
        first = asyncio.create_task(write(store, key))
        await asyncio.to_thread(fs.begun.wait)
        first.cancel()
        await asyncio.wait((first,))
        second = asyncio.create_task(write(store, key))
        await asyncio.sleep(0)
        await come_behind(store)
        assert fs.num_begun == 1
        fs.let_go.set()
        await second
        await store.settled(key)
        assert (await store.get(key, 100))[1] == b"whole"
    finally:
        fs.let_go.set()
        await store.delete([key])
        await store.close()


class LateFiles(SyncFileSystem):
    """A file is opened when it is let go; one that is not closed sends what it has at its end."""

    protocol = "latefiles"
    cachable = False
    files: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.opened: list[Any] = []

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.begun.set()
        self.let_go.wait()
        self.opened.append(super().open(path, mode, **options))
        return self.opened[-1]


async def test_a_file_that_opens_late_makes_no_object() -> None:
    """Whoever wanted it was cancelled, and has removed what there was."""
    fs = LateFiles()
    store = FsspecStore(fs, "latefiles", 2)
    try:
        task = asyncio.create_task(store.upload("latefiles/a"))
        await asyncio.to_thread(fs.begun.wait)
        task.cancel()
        await asyncio.wait((task,))
        fs.let_go.set()
        await store.settled("latefiles/a")
        assert fs.opened.pop().closed
        assert fs.files == {}
    finally:
        fs.let_go.set()
        await store.close()


@pytest.mark.parametrize("end", [FsspecUpload.complete, FsspecUpload.abort])
async def test_an_upload_that_is_ended_again_waits_for_the_first_try(
    end: Callable[[FsspecUpload], Coroutine[Any, Any, None]],
) -> None:
    """Two threads would be at one file."""
    fs, key = MemoryFileSystem(), f"/late/{secrets.token_hex(8)}/a"
    store = FsspecStore(fs, "memory", 2)
    begun, let_go = threading.Event(), threading.Event()
    try:
        upload = await store.upload(key)
        await upload.write(0, memoryview(b"whole"))
        close = upload._file.close

        def close_late() -> None:
            if not begun.is_set():
                begun.set()
                let_go.wait()
            close()

        upload._file.close = close_late
        first = asyncio.create_task(upload.complete())
        await asyncio.to_thread(begun.wait)
        first.cancel()
        await asyncio.wait((first,))
        second = asyncio.create_task(end(upload))
        await asyncio.sleep(0)
        await come_behind(store)
        assert not second.done()
        let_go.set()
        await second
        assert fs.exists(key) == (end is FsspecUpload.complete)
    finally:
        let_go.set()
        await store.delete([key])
        await store.close()


async def test_a_file_that_was_opened_for_nobody_is_dropped() -> None:
    """Cancelled between the end of the thread and the loop's hearing of it."""
    fs, key = SlowToOpen(), f"/late/{secrets.token_hex(8)}/a"
    fs.let_go.set()
    store = FsspecStore(fs, "memory", 2)
    try:
        task = asyncio.create_task(store.upload(key))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        fs.opened.wait()  # the loop stands still
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        await store.settled(key)
        with pytest.raises(ObjectMissingError):
            await store.head(key)
    finally:
        await store.close()


async def test_any_number_may_wait_for_what_was_given_up(slow: SlowFileSystem) -> None:
    """Each of them until the last thread has ended."""
    store, key = FsspecStore(slow, "memory", 2), f"/late/{secrets.token_hex(8)}/a"
    first, second = Future[None](), Future[None]()
    store._note(key, first)
    store._note(key, second)
    waiters = [asyncio.create_task(store.settled(key)) for _ in range(3)]
    await asyncio.sleep(0)
    first.set_result(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    second.set_result(None)
    await asyncio.gather(*waiters)
    assert store._given_up == {}
    await store.close()


async def test_opening_a_file_system_is_given_up() -> None:
    """One whose server does not answer holds nobody up."""
    made, backend, threads = SlowToMake, FsspecBackend("late"), Threads(1, "test")
    fsspec.register_implementation("late", made, clobber=True)
    opening = asyncio.create_task(backend.open("late://a", {}, CheckpointConfig(), threads))
    await asyncio.to_thread(made.begun.wait)
    opening.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    is_over = opening.done()
    made.let_go.set()
    await asyncio.wait((opening,))
    threads.shutdown()
    assert is_over
    assert opening.cancelled()
