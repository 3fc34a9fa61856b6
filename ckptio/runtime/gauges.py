"""What an engine says of itself at once: the same for both of its faces, as nobody waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptio.cache import CacheStatistics
    from ckptio.runtime.core import EngineCore
    from ckptio.staging.pool import PoolStatistics


class Gauges:
    """Of an engine: what its parts count. From any thread."""

    _core: EngineCore

    def statistics(self) -> PoolStatistics:
        """Say what the staging pool has and has done.

        Raises:
            EngineClosedError: The engine is not open.
        """
        return self._core.context.pool.statistics()

    def cache_statistics(self) -> CacheStatistics:
        """Say what the metadata cache has and has done.

        Raises:
            EngineClosedError: The engine is not open.
        """
        return self._core.context.cache.statistics()
