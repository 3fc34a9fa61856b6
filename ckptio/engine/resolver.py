"""Find the place that a path or a URL names, for callers and for what runs on the loop.

It is a part of the engine, and there until that is gone: callers ask it through the engine's
core, which refuses them once the block is left; what is in flight then asks it itself, and is
finished.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ckptio.events import notify
from ckptio.foreign.storage import AnyStorage
from ckptio.storage.resolve import resolve_storage
from ckptio.storage.root import resolve_root

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Observer
    from ckptio.storage.interface import Root, Storage
    from ckptio.storage.resolve import PathLike
    from ckptio.storage.stores import Stores


class Resolver:
    """Finds storages and roots. From any thread; touches nothing.

    Args:
        config: Durability, and limits of requests.
        executor: Threads for calls that block.
        observer: Takes the events of the places.
        stores: Object stores, on the loop on which the places are used.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        executor: Executor,
        observer: Observer | None,
        stores: Stores,
    ) -> None:
        self._config = config
        self._executor = executor
        self._emit = functools.partial(notify, observer)
        self._stores = stores

    def storage(self, path: PathLike) -> Storage:
        """Find the storage for a path, of checkpoints in any format.

        Raises:
            ConfigError: The path is none, or a URL that nobody knows.
        """
        return AnyStorage(self.own_storage(path), self._config, self._executor)

    def own_storage(self, path: PathLike) -> Storage:
        """Find the storage for a path, of checkpoints of ours; raises as `storage`."""
        return resolve_storage(path, self._config, self._executor, self._emit, self._stores)

    def root(self, path: PathLike) -> Root:
        """Find the root of the checkpoints under a path; raises as `storage`."""
        return resolve_root(path, self._config, self._executor, self._emit, self._stores)
