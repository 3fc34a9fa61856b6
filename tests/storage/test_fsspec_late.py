"""Calls of a file system that were given up, and happen all the same."""

from __future__ import annotations

import asyncio
import secrets
import threading
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptio.storage.fsspec import FsspecStore
from ckptio.storage.store import ObjectMissingError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


async def test_what_is_removed_is_not_written_afterwards(slow: SlowFileSystem) -> None:
    """A removal waits for a write that was given up."""
    store, key = FsspecStore(slow, "memory", 2), f"/late/{secrets.token_hex(8)}/a"
    try:
        await give_up_a_put(store, slow, key)
        removal = asyncio.create_task(store.delete([key]))
        await asyncio.sleep(0)
        slow.let_go.set()
        await removal
        await store.settled(key)
        with pytest.raises(ObjectMissingError):
            await store.head(key)
    finally:
        await store.close()
