"""From DCP's blocking calls to the engine, and back.

DCP calls a plug-in four or five times for one checkpoint, and does not say when one has
failed elsewhere. So nothing that needs a thread, a loop or a connection outlives a call: each
call opens an engine of its own, or a storage alone where that is enough.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio._threads import run_into
from ckptio.config import CheckpointConfig
from ckptio.errors import ConfigError
from ckptio.events import notify
from ckptio.runtime.aside import run_uninterrupted
from ckptio.runtime.running import Running
from ckptio.storage.local import LocalStorage
from ckptio.storage.resolve import local_path, resolve_storage
from ckptio.storage.stores import Stores

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

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
        run_into(future, function, *args, **kwargs)
        return future


def storage_at(path: PathLike, config: CheckpointConfig, observer: Observer | None) -> Storage:
    """Find the storage at a local path, which needs no engine.

    Raises:
        ConfigError: `path` is a URL, or no path at all.
    """
    emit = functools.partial(notify, observer)
    return LocalStorage(local_path(path), config, OnTheSpot(), emit)


def require_path(path: PathLike, config: CheckpointConfig) -> None:
    """Refuse what cannot be the place of a checkpoint. Touches nothing.

    Raises:
        ConfigError: `path` is neither a path nor a URL of a known protocol.
    """
    executor = OnTheSpot()
    resolve_storage(path, config, executor, lambda _: None, Stores(config, executor))


def is_path(path: PathLike) -> bool:
    """Whether there could be a checkpoint at `path`. Touches nothing."""
    try:
        require_path(path, CheckpointConfig())
    except ConfigError:
        return False
    return True


def ask(
    path: PathLike,
    config: CheckpointConfig,
    observer: Observer | None,
    step: Callable[[Storage], Awaitable[T]],
) -> T:
    """Run `step` with the storage at `path`, which is opened and closed for this call. Blocks.

    Raises:
        ConfigError: `path` is neither a path nor a URL, or its store cannot be opened.
    """

    async def run() -> T:
        executor = OnTheSpot()
        stores = Stores(config, executor)
        emit = functools.partial(notify, observer)
        try:
            return await step(resolve_storage(path, config, executor, emit, stores))
        finally:
            await stores.close()

    return wait_for(run())


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that needs no engine to its end, inside a running loop too. Blocks.

    An interrupt cancels it, and is raised when it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    running: Running[T] = Running()

    async def work() -> T:
        running.started()
        return await coroutine

    def run() -> None:
        try:
            result = asyncio.run(work())
        except BaseException as error:  # raised below
            running.end.set_exception(error)
        else:
            running.end.set_result(result)

    run_uninterrupted(run, "ckptio-dcp", running.abort)
    return running.end.result()
