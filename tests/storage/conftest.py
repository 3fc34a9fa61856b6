from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptio._threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """Threads for a storage."""
    with ThreadPoolExecutor(4, thread_name_prefix="ckptio") as threads:
        yield threads


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Give one thread, as the engine makes them."""
    made = Threads(1, "ckptio")
    yield made
    made.shutdown()


@pytest.fixture
def umask() -> Iterator[Callable[[int], object]]:
    """Set the umask; it is put back at the end."""
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """Give a directory on a file system in memory."""
    shm = "/dev/shm"  # noqa: S108  # a real tmpfs is the point
    if not os.access(shm, os.W_OK):
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(dir=shm) as directory:
        yield Path(directory)
