"""Where a save of DCP goes, and what of it outlives the calls that DCP makes.

    local    the attempt, which holds a lock: it says that the save lives
    remote   nothing: connections belong to a loop, and each call has its own

All that a save to an object store is, is its id, and what lies in the store under it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ckptio.adapters.dcp.calls import ask, storage_at, wait_for
from ckptio.storage.objects import ObjectStorage
from ckptio.storage.resolve import remote_url

if TYPE_CHECKING:
    from ckptio.config import CheckpointConfig
    from ckptio.events import Observer
    from ckptio.runtime.core import EngineCore
    from ckptio.storage.interface import Attempt, Storage

#: What a writer that goes away spends on a store that does not answer.
_LAST_TIMEOUT_S = 5.0


def place_at(
    path: str, config: CheckpointConfig, observer: Observer | None
) -> _LocalPlace | _RemotePlace:
    """Find the place for a path or a URL: where a save goes."""
    if remote_url(path) is None:
        return _LocalPlace(path, config, observer)
    return _RemotePlace(path, config, observer)


class _LocalPlace:
    """A local or mounted file system; its storage needs no engine."""

    def __init__(self, path: str, config: CheckpointConfig, observer: Observer | None) -> None:
        self._storage = storage_at(path, config, observer)
        self._attempt: Attempt | None = None

    @property
    def path(self) -> str:
        """What the user called it."""
        return self._storage.path

    def begin(self, save_id: str, *, overwrite: bool) -> None:
        """Begin a save. Blocks; errors are those of `storage.interface.Storage.begin`."""
        self._attempt = wait_for(self._storage.begin(save_id, overwrite=overwrite))

    def storage(self, core: EngineCore) -> Storage:
        """Give the storage, for the length of a call that has an engine."""
        del core
        return self._storage

    async def attempt(self, storage: Storage) -> Attempt:
        """Give the save that was begun, for as long as the storage is there."""
        del storage
        assert self._attempt is not None  # noqa: S101  # it was begun
        return self._attempt

    def abandon(self) -> None:
        """Remove what the save that was begun left. Blocks."""
        if self._attempt is not None:
            wait_for(self._attempt.abort())


class _RemotePlace:
    """An object store; see `_LocalPlace`."""

    def __init__(self, path: str, config: CheckpointConfig, observer: Observer | None) -> None:
        self.path = path
        self._config = config
        self._observer = observer
        self._save_id = ""
        self._overwrite = False

    def begin(self, save_id: str, *, overwrite: bool) -> None:
        ask(
            self.path,
            self._config,
            self._observer,
            lambda storage: storage.begin(save_id, overwrite=overwrite),
        )
        self._save_id, self._overwrite = save_id, overwrite

    def storage(self, core: EngineCore) -> Storage:
        return core.own_storage(self.path)

    async def attempt(self, storage: Storage) -> Attempt:
        assert isinstance(storage, ObjectStorage)  # noqa: S101  # of a URL
        return await storage.resume(self._save_id, overwrite=self._overwrite)

    def abandon(self) -> None:
        config = dataclasses.replace(
            self._config,
            request_timeout_s=min(self._config.request_timeout_s, _LAST_TIMEOUT_S),
            retry_timeout_s=_LAST_TIMEOUT_S,
        )

        async def abort(storage: Storage) -> None:
            await (await self.attempt(storage)).abort()

        if self._save_id:
            ask(self.path, config, self._observer, abort)
