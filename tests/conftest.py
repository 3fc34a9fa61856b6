from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from ckptio import sync
from ckptio.storage import locks
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ckptio.config import CheckpointConfig

_JOIN_S = 10.0
_LOOK_S = 0.01

# the same examples for everybody who runs the tests: what fails is due to the change at hand;
# the stress session looks for new ones
settings.register_profile("few", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=300, deadline=None, database=None)
settings.load_profile("few")


def pytest_collection_finish() -> None:
    """Leave out of every collection of garbage what is here by now, and stays: most of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def config() -> CheckpointConfig:
    """Small slabs, blocks and buckets: a few hundred KB go through every path."""
    return SMALL


@pytest.fixture
def url() -> Iterator[str]:
    """A URL below which nothing is, in fsspec's store in memory."""
    import fsspec  # noqa: PLC0415  # 50 ms

    name = f"test-{secrets.token_hex(8)}"
    yield f"memory://{name}/run"
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread or an open file behind."""
    threads = set(threading.enumerate())
    files = open_files()
    yield
    let_end(set(threading.enumerate()) - threads)
    assert set(threading.enumerate()) - threads == set()
    assert still_open_beside(files) == set()
    open_fds = {fd for fd, _ in open_files()}
    assert locks._locked.keys() <= open_fds, "a locked file was closed otherwise"


@pytest.fixture
def no_collections() -> Iterator[None]:
    """No garbage is collected, as in trainers that do it when it suits them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def no_tasks() -> AsyncIterator[None]:
    """Fail a coroutine test that leaves a task behind on its loop."""
    before = asyncio.all_tasks()
    yield
    assert {t for t in asyncio.all_tasks() - before if t is not asyncio.current_task()} == set()


def let_end(threads: set[threading.Thread]) -> None:
    """Wait for threads: one that has said its last word may still be on its way out.

    One that is just being born, by another, cannot be joined yet.
    """
    end_s = time.monotonic() + _JOIN_S
    for thread in threads:
        while thread.ident is None and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        thread.join(_JOIN_S)


def still_open_beside(files: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Give what else is open, and stays: threads that are not Python's may be closing one."""
    end_s = time.monotonic() + _JOIN_S
    while open_files() - files and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return open_files() - files


def open_files() -> set[tuple[int, str]]:
    """Name every file descriptor and what it is open on, but those of a device's driver."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the directory listing's own
            continue
    return {file for file in found if not file[1].startswith("/dev/nvidia")}


@pytest.fixture(scope="module")
def engine() -> Iterator[sync.Engine]:
    """An engine that the tests of a module share."""
    with sync.Engine(SMALL) as engine:
        yield engine
