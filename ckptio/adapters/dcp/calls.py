"""From DCP's blocking calls to the engine, and back.

DCP calls a plug-in four or five times for one checkpoint, and does not say when one has
failed elsewhere. So nothing that needs a thread or a loop outlives a call: each call opens
an engine of its own. What is held between the calls of a save is the lock of its attempt.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio.config import CheckpointConfig
from ckptio.engine.core import EngineCore
from ckptio.errors import ConfigError
from ckptio.events import notify
from ckptio.storage.local import LocalStorage
from ckptio.storage.resolve import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from ckptio.events import Observer
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike

T = TypeVar("T")


class OnTheSpot(concurrent.futures.Executor):
    """Runs what it is given on the thread that gives it, and so needs none of its own."""

    def submit(
        self, function: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[T]:
        """Run `function`, and give a future that is done."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # who waits for the future raises it
            future.set_exception(error)
        return future


@contextlib.contextmanager
def engine(config: CheckpointConfig, observer: Observer | None) -> Iterator[EngineCore]:
    """Have an engine for the length of a call. Blocks."""
    core = EngineCore(config, observer, "solo")
    core.start()
    try:
        yield core
    finally:
        core.close()


def storage_at(path: PathLike, config: CheckpointConfig, observer: Observer | None) -> Storage:
    """Find a storage that needs no engine.

    Raises:
        ConfigError: `path` is none.
    """
    emit = functools.partial(notify, observer)
    return LocalStorage(local_path(path), config, OnTheSpot(), emit)


def is_path(path: PathLike) -> bool:
    """Whether there could be a checkpoint at `path`. Touches nothing."""
    try:
        storage_at(path, CheckpointConfig(), None)
    except ConfigError:
        return False
    return True


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of such a storage to its end, inside a running loop too. Blocks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    ended: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(coroutine))
        except BaseException as error:  # raised below
            ended.set_exception(error)

    thread = threading.Thread(target=run, name="ckptio-dcp")
    thread.start()
    thread.join()
    return ended.result()
