"""`Engine` for classic loops: the same names, blocking."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, overload

from ckptio.engine.asked import Asked
from ckptio.engine.verify import VerifyReport, run_verify
from ckptio.errors import ConfigError
from ckptio.handle import SaveHandle
from ckptio.runtime.core import EngineCore
from ckptio.runtime.drive import drive_blocking, load_name
from ckptio.runtime.gauges import Gauges
from ckptio.runtime.leaving import end_saves, is_breaking_off
from ckptio.runtime.prewarm import prewarm

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType
    from typing import Self

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.engine.asked import Strict, T
    from ckptio.events import Observer
    from ckptio.format.manifest import Manifest
    from ckptio.moments import CheckpointInfo
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.loading import LoadResult
    from ckptio.runtime.slices import Index
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike


class Engine(Gauges):
    """The blocking twin of `ckptio.Engine`: `with Engine(config) as engine:`.

    `save` waits for the commit. `start_save` returns the handle at once, for a loop that
    trains on: `handle.staged.wait()`, then change the state; `handle.result()` is the commit.

    Args:
        config: Options; the defaults if not given.
        observer: Called with each event, on any thread; must return soon. See `ckptio.events`.
        ranks: Who takes part: `"auto"`, `"solo"` or a process group; see `ckptio.Engine`.
            Entering blocks until all of them have come.
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
        """Wait for what is in flight, or abort it; then give everything back.

        Raises:
            ConfigError: This is an observer on one of the engine's own threads.
        """
        try:
            self._core.close(abort=is_breaking_off(error))
        except ConfigError:
            raise
        except BaseException:  # an interrupt: it may not have begun
            self._core.close(abort=True)
            raise
        end_saves(list(self._core.saves), error)

    def save(
        self,
        state: Any,
        path: PathLike,
        *,
        overwrite: bool = False,
        then: PathLike | None = None,
    ) -> CheckpointInfo:
        """Save a state and wait for the commit, on all ranks; see `ckptio.Engine.save`.

        Raises:
            CheckpointExistsError: There is a checkpoint and `overwrite` is off.
            RankError: It failed on some rank, and so on all of them; or a rank did not come.
            PeerLostError: A rank died, froze or closed its engine.
            CheckpointError: As `ckptio.Engine.save`; what was at the path is untouched, unless
                the error's `in_doubt` says that the commit may have happened.
        """
        return committed(self.start_save(state, path, overwrite=overwrite, then=then))

    def start_save(
        self,
        state: Any,
        path: PathLike,
        *,
        overwrite: bool = False,
        then: PathLike | None = None,
    ) -> SaveHandle:
        """Start saving a state and return at once; see `ckptio.Engine.save`.

        Raises:
            CheckpointError: As `ckptio.Engine.save` when it is called. What comes later is raised
                by the waits of the handle.
        """
        from ckptio.runtime.saving import begin_save  # noqa: PLC0415  # imports torch

        return SaveHandle(begin_save(self._core, state, path, overwrite=overwrite, then=then))

    def finish_copies(self, root: PathLike) -> tuple[str, ...]:
        """Make the copies that earlier runs owed; see `ckptio.Engine.finish_copies`."""
        from ckptio.runtime.owed_copies import finish_copies  # noqa: PLC0415  # where it is needed

        step = functools.partial(finish_copies, root)
        return self._core.call_blocking(step, "finish copies")

    @overload
    def load(
        self,
        path: PathLike,
        into: None = None,
        *,
        then: PathLike | None = ...,
        device: torch.device | str | None = ...,
        dtype: torch.dtype | None = ...,
        select: Select | None = ...,
        strict: Strict = ...,
        types: Collection[type] = ...,
    ) -> Any: ...

    @overload
    def load(
        self,
        path: PathLike,
        into: T,
        *,
        then: PathLike | None = ...,
        device: torch.device | str | None = ...,
        dtype: torch.dtype | None = ...,
        select: Select | None = ...,
        strict: Strict = ...,
        types: Collection[type] = ...,
    ) -> T: ...

    def load(
        self,
        path: PathLike,
        into: T | None = None,
        *,
        then: PathLike | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "raise",
        types: Collection[type] = (),
    ) -> T:
        """Load a state; see `ckptio.Engine.load`."""
        asked = Asked(into, device, dtype, select, strict, types, reports=False)
        state: T = self._load(path, asked, then).state
        return state

    def load_with_report(
        self,
        path: PathLike,
        into: Any = None,
        *,
        then: PathLike | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "report",
        types: Collection[type] = (),
    ) -> LoadResult:
        """Load a state and say what was found; see `ckptio.Engine.load_with_report`."""
        return self._load(
            path, Asked(into, device, dtype, select, strict, types, reports=True), then
        )

    def _load(self, path: PathLike, asked: Asked, then: PathLike | None) -> LoadResult:
        from ckptio.runtime.loading import load_flow  # noqa: PLC0415  # imports torch

        load = load_flow(self._core, path, asked, then)
        return drive_blocking(self._core, load, load_name(path))

    def load_slice(
        self,
        path: PathLike,
        name: str,
        index: Index,
        *,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Load a part of one tensor; see `ckptio.Engine.load_slice`."""
        from ckptio.runtime import slices  # noqa: PLC0415  # imports torch

        return drive_blocking(
            self._core, slices.slice_flow(self._core, path, name, index, device), load_name(path)
        )

    def inspect(self, path: PathLike) -> Manifest:
        """Read what a checkpoint is made of; see `ckptio.Engine.inspect`."""
        storage = self._core.storage(path)
        return self._core.call_blocking(lambda context: context.cache.get(storage), "inspect")

    def verify(self, path: PathLike, *, compare_copies: bool = False) -> VerifyReport:
        """Compare every byte with its checksum; see `ckptio.Engine.verify`."""
        storage = self._core.storage(path)
        return self._core.call_blocking(
            lambda context: run_verify(storage, context, compare_copies=compare_copies), "verify"
        )

    def prewarm(self, nbytes: int | None = None, *, at: PathLike | None = None) -> None:
        """Take memory for the staging pool now; see `ckptio.Engine.prewarm`."""
        self._core.pin_if_cuda()
        self._core.call_blocking(lambda context: prewarm(context, nbytes, at), "prewarm")


def committed(handle: SaveHandle) -> CheckpointInfo:
    """Wait for a commit; an interrupt aborts the save and waits until nothing of it is left."""
    try:
        return handle.result()
    except BaseException:
        if not handle.done():
            handle.abort()
            handle.committed.wait_done()
        raise
    finally:
        del handle  # the error refers to this frame: no reference cycle
