"""A mount whose server is gone: whatever looks at it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from ckptio.storage.files import PosixFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

_CALLS = (
    "access",
    "link",
    "listdir",
    "lstat",
    "mkdir",
    "open",
    "readlink",
    "rename",
    "replace",
    "rmdir",
    "scandir",
    "stat",
    "unlink",
)
_PATIENCE_S = 60.0


class Mount:
    """A directory that can hang, for all threads but those of which none may wait for it.

    These are the main thread, which is the caller's, and any with a loop: they go on, and are
    found guilty when `hanging` ends.

    Args:
        root: The directory.
        monkeypatch: Puts calls of `os` back.

    Attributes:
        root: The directory.
        waited: What hangs, or did: calls.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = str(root)
        self._is_hanging = False
        self._only = ""
        self._answers = threading.Event()
        self._guilty: list[str] = []
        self.waited: list[str] = []
        self._changed = threading.Condition()
        for name in _CALLS:
            monkeypatch.setattr(os, name, self._hung(name, getattr(os, name)))

    def _hung(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def hung(path: Any = ".", *args: Any, **options: Any) -> Any:
            if self._is_hanging and not isinstance(path, int):
                text = os.fsdecode(path)
                is_in = text == self.root or text.startswith(f"{self.root}/")
                if is_in and self._only in text:
                    self.wait(f"{name} {text}")
            return call(path, *args, **options)

        return hung

    def wait(self, what: str) -> None:
        """Hang, until it answers."""
        has_loop = asyncio._get_running_loop() is not None
        if has_loop or threading.current_thread() is threading.main_thread():
            self._guilty.append(f"{what} on {threading.current_thread().name}")
            return
        with self._changed:
            self.waited.append(what)
            self._changed.notify_all()
        if not self._answers.wait(_PATIENCE_S):
            self._guilty.append(f"{what} is waited for")

    def wait_until_hung(self, *parts: str, num: int = 1) -> None:
        """Wait until a call hangs that has some text in it, or so many of them do."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(all(part in what for part in parts) for what in self.waited) >= num,
                _PATIENCE_S,
            )

    def hang(self) -> None:
        """Hang from now on, until `hanging` ends."""
        self._is_hanging = True

    def answer(self) -> None:
        """Hang no more."""
        self._is_hanging = False
        self._answers.set()

    @contextlib.contextmanager
    def hanging(self, *, at_once: bool = True, only: str = "") -> Iterator[None]:
        """Hang, and look at the end whether anybody waited who may not.

        Args:
            at_once: Or when `hang` is called.
            only: Where this is in the path, and nowhere else.
        """
        self._is_hanging, self._only = at_once, only
        try:
            yield
        finally:
            self.answer()
        assert self._guilty == [], self._guilty


class HangingFiles(PosixFiles):
    """Hang where data files on a mount are opened to be read, read, written, synced or closed.

    It is one of these, and of those that are closed those that were read.

    Args:
        mount: The mount, which says where and how long.
        call: Which.
    """

    def __init__(self, mount: Mount, call: str) -> None:
        self._mount = mount
        self._call = call
        self._were_read: set[int] = set()

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        if direct:  # not to look at its size
            self._wait_at(path, "open")
        return super().open(path, direct=direct, writable=writable)

    def close(self, fd: int) -> None:
        if fd in self._were_read:
            self._were_read.discard(fd)
            self._wait(fd, "close")
        super().close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._wait(fd, "pwrite")
        return super().pwrite(fd, data, offset)

    def pread(self, fd: int, room: memoryview, offset: int) -> int:
        self._wait(fd, "pread")
        self._were_read.add(fd)
        return super().pread(fd, room, offset)

    def fsync(self, fd: int) -> None:
        self._wait(fd, "fsync")
        super().fsync(fd)

    def _wait(self, fd: int, what: str) -> None:
        self._wait_at(os.readlink(f"/proc/self/fd/{fd}"), what)

    def _wait_at(self, path: str, what: str) -> None:
        if what == self._call and path.startswith(f"{self._mount.root}/") and "/data-" in path:
            self._mount.wait(f"{what} {path}")
