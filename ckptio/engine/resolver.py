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
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike
    from ckptio.storage.root_interface import Root
    from ckptio.storage.stores import Stores


class Resolver:
    """Finds storages and roots. From any thread; touches nothing.

    Args:
        config: Durability, and limits of requests.
        executor: Threads for calls that block.
        observer: Takes the events of the places.
        stores: Object stores, on the loop on which the places are used.
        far: Threads for second tiers; the same if not given.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        executor: Executor,
        observer: Observer | None,
        stores: Stores,
        far: Executor | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._far = far or executor
        self._emit = functools.partial(notify, observer)
        self._stores = stores

    def storage(self, path: PathLike, *, is_second: bool = False) -> Storage:
        """Find the storage for a path, of checkpoints in any format.

        Args:
            path: The checkpoint.
            is_second: It is on a second tier, which may hang: what blocks there has threads of
                its own, so that nothing else waits for it.

        Raises:
            ConfigError: The path is none, or a URL that nobody knows.
        """
        own = self.own_storage(path, is_second=is_second)
        return AnyStorage(own, self._config, self._threads(is_second=is_second))

    def own_storage(self, path: PathLike, *, is_second: bool = False) -> Storage:
        """Find the storage for a path, of checkpoints of ours; see `storage`."""
        threads = self._threads(is_second=is_second)
        return resolve_storage(path, self._config, threads, self._emit, self._stores)

    def _threads(self, *, is_second: bool) -> Executor:
        return self._far if is_second else self._executor

    def root(self, path: PathLike) -> Root:
        """Find the root of the checkpoints under a path; raises as `storage`."""
        return resolve_root(path, self._config, self._executor, self._emit, self._stores)
