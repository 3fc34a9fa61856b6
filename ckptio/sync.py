"""The same names, blocking: for classic loops, scripts, notebooks and threads.

These work without an event loop, inside a running one (whose thread they block), and from
several threads at once. The engine has its own loop either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio.engine.core import EngineCore
from ckptio.engine.verify import VerifyReport, run_verify

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from ckptio.api import RanksLike, Strict
    from ckptio.cache import CacheStatistics
    from ckptio.config import CheckpointConfig
    from ckptio.engine.flow import LoadResult
    from ckptio.engine.slices import Index
    from ckptio.events import Observer
    from ckptio.format.manifest import Manifest
    from ckptio.handle import CheckpointInfo, SaveHandle
    from ckptio.staging.pool import PoolStatistics
    from ckptio.state.tree import Select
    from ckptio.storage.resolve import PathLike


class Engine:
    """The blocking twin of `ckptio.Engine`: `with Engine(config) as engine:`.

    `save` waits for the commit. `start_save` returns the handle at once, for a loop that
    trains on: `handle.staged.wait()`, then change the state; `handle.result()` is the commit.

    Args:
        config: Options; the defaults if not given.
        observer: Called with each event, on any thread; must return soon. See `ckptio.events`.
        ranks: Who takes part: `"auto"`, `"solo"` or a process group; see `ckptio.Engine`.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        observer: Observer | None = None,
        ranks: RanksLike = "auto",
    ) -> None:
        self._core = EngineCore(config, observer, ranks)

    def __enter__(self) -> Self:
        """Start the engine's thread."""
        self._core.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what is in flight, or abort it; then give everything back."""
        self._core.close(abort=error is not None)
        unseen = self._core.unseen_failure()
        if unseen is not None and error is None:
            raise unseen

    def save(self, state: Any, path: PathLike, *, overwrite: bool = False) -> CheckpointInfo:
        """Save a state and wait for the commit; see `ckptio.Engine.save`."""
        return _result(self.start_save(state, path, overwrite=overwrite))

    def start_save(self, state: Any, path: PathLike, *, overwrite: bool = False) -> SaveHandle:
        """Start saving a state and return at once; see `ckptio.Engine.save`."""
        from ckptio.engine.flow import begin_save  # noqa: PLC0415  # imports torch

        return begin_save(self._core, state, path, overwrite=overwrite)

    def load(
        self,
        path: PathLike,
        into: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "raise",
        types: Sequence[type] = (),
    ) -> Any:
        """Load a state; see `ckptio.Engine.load`."""
        from ckptio.engine import flow  # noqa: PLC0415  # imports torch

        request = flow.make_request(into, device, dtype, select, strict, types, reports=False)
        return flow.drive_blocking(
            self._core, flow.load_flow(self._core, path, request), f"load {path!s}"
        ).state

    def load_with_report(
        self,
        path: PathLike,
        into: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "report",
        types: Sequence[type] = (),
    ) -> LoadResult:
        """Load a state and say what was found; see `ckptio.Engine.load_with_report`."""
        from ckptio.engine import flow  # noqa: PLC0415  # imports torch

        request = flow.make_request(into, device, dtype, select, strict, types, reports=True)
        return flow.drive_blocking(
            self._core, flow.load_flow(self._core, path, request), f"load {path!s}"
        )

    def load_slice(
        self,
        path: PathLike,
        name: str,
        index: Index,
        *,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Load a part of one tensor; see `ckptio.Engine.load_slice`."""
        from ckptio.engine import flow, slices  # noqa: PLC0415  # imports torch

        return flow.drive_blocking(
            self._core, slices.slice_flow(self._core, path, name, index, device), f"load {path!s}"
        )

    def inspect(self, path: PathLike) -> Manifest:
        """Read what a checkpoint is made of; see `ckptio.Engine.inspect`."""
        storage = self._core.storage(path)
        return self._core.call_blocking(lambda context: context.cache.get(storage), "inspect")

    def verify(self, path: PathLike) -> VerifyReport:
        """Compare every byte with its checksum; see `ckptio.Engine.verify`."""
        storage = self._core.storage(path)
        return self._core.call_blocking(lambda context: run_verify(storage, context), "verify")

    def prewarm(self, nbytes: int | None = None) -> None:
        """Take memory for the staging pool now; see `ckptio.Engine.prewarm`."""
        from ckptio.api import prewarm_step  # noqa: PLC0415

        self._core.call_blocking(lambda context: prewarm_step(context, nbytes), "prewarm")

    def statistics(self) -> PoolStatistics:
        """Say what the staging pool has and has done."""
        return self._core.context.pool.statistics()

    def cache_statistics(self) -> CacheStatistics:
        """Say what the metadata cache has and has done."""
        return self._core.context.cache.statistics()


def save(
    state: Any,
    path: PathLike,
    *,
    overwrite: bool = False,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
    ranks: RanksLike = "auto",
) -> CheckpointInfo:
    """Save a state and wait for the commit; see `ckptio.save`."""
    with Engine(config, observer=observer, ranks=ranks) as engine:
        return engine.save(state, path, overwrite=overwrite)


def load(
    path: PathLike,
    into: Any = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    select: Select | None = None,
    strict: Strict = "raise",
    types: Sequence[type] = (),
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
    ranks: RanksLike = "auto",
) -> Any:
    """Load a state; see `ckptio.load`."""
    with Engine(config, observer=observer, ranks=ranks) as engine:
        return engine.load(
            path, into, device=device, dtype=dtype, select=select, strict=strict, types=types
        )


def load_with_report(
    path: PathLike,
    into: Any = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    select: Select | None = None,
    strict: Strict = "report",
    types: Sequence[type] = (),
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
    ranks: RanksLike = "auto",
) -> LoadResult:
    """Load a state and say what was found; see `ckptio.load_with_report`."""
    with Engine(config, observer=observer, ranks=ranks) as engine:
        return engine.load_with_report(
            path, into, device=device, dtype=dtype, select=select, strict=strict, types=types
        )


def load_slice(
    path: PathLike,
    name: str,
    index: Index,
    *,
    device: torch.device | str | None = None,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Load a part of one tensor; see `ckptio.load_slice`."""
    with Engine(config, observer=observer, ranks="solo") as engine:
        return engine.load_slice(path, name, index, device=device)


def inspect(
    path: PathLike,
    *,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> Manifest:
    """Read what a checkpoint is made of; see `ckptio.inspect`."""
    with Engine(config, observer=observer, ranks="solo") as engine:
        return engine.inspect(path)


def verify(
    path: PathLike,
    *,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> VerifyReport:
    """Compare every byte of a checkpoint with its checksums; see `ckptio.verify`."""
    with Engine(config, observer=observer, ranks="solo") as engine:
        return engine.verify(path)


def _result(handle: SaveHandle) -> CheckpointInfo:
    """Wait for a commit; an interrupt aborts the save and waits until nothing of it is left."""
    try:
        return handle.result()
    except BaseException:
        if not handle.done():
            handle.abort()
            handle.committed.wait_done()
        raise
