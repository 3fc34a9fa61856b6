"""Functions that open an engine for one call.

Blocking twins of the same names are in `ckptio.sync`. A loop that saves often keeps an
`Engine`, whose pool and plans are reused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio._aio import returns_coroutine
from ckptio.api import Engine
from ckptio.engine.asked import Asked
from ckptio.handle import SaveHandle
from ckptio.runtime.core import EngineCore
from ckptio.runtime.currents import CallerCurrents

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.engine.asked import Strict, T
    from ckptio.engine.verify import VerifyReport
    from ckptio.events import Observer
    from ckptio.format.manifest import Manifest
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.loading import LoadResult
    from ckptio.runtime.slices import Index
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike


def save(
    state: Any,
    path: PathLike,
    *,
    overwrite: bool = False,
    then: PathLike | None = None,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
    ranks: RanksLike = "auto",
) -> SaveHandle:
    """Start saving a state with an engine for this one call; see `Engine.save`.

    It returns a handle, no coroutine: give `asyncio.run` one that awaits it, or call
    `ckptio.sync.save`, which blocks.

    A loop that saves often keeps an `Engine`: its pool and plans are reused. With several
    ranks, this blocks until all of them have called it, and raises what `Engine` raises.
    """
    from ckptio.runtime.saving import begin_save  # noqa: PLC0415  # imports torch

    core = EngineCore(config, observer, ranks)
    core.start()
    try:
        moments = begin_save(core, state, path, overwrite=overwrite, then=then, close_after=True)
    except BaseException:
        core.close()
        raise
    return SaveHandle(moments)


async def finish_copies(
    root: PathLike,
    *,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> tuple[str, ...]:
    """Make the copies that earlier runs owed to a second tier; see `Engine.finish_copies`."""
    async with Engine(config, observer=observer, ranks="solo") as engine:
        return await engine.finish_copies(root)


@returns_coroutine
def load(
    path: PathLike,
    into: T | None = None,
    *,
    then: PathLike | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    select: Select | None = None,
    strict: Strict = "raise",
    types: Collection[type] = (),
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
    ranks: RanksLike = "auto",
) -> Coroutine[Any, Any, T]:
    """Load a state with an engine for this one call; see `Engine.load`."""
    asked = Asked(into, device, dtype, select, strict, types, reports=False)
    return _load(path, asked, then, CallerCurrents(), config, observer, ranks)


@returns_coroutine
def load_with_report(
    path: PathLike,
    into: Any = None,
    *,
    then: PathLike | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    select: Select | None = None,
    strict: Strict = "report",
    types: Collection[type] = (),
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
    ranks: RanksLike = "auto",
) -> Coroutine[Any, Any, LoadResult]:
    """Load a state and say what was found; see `Engine.load_with_report`."""
    asked = Asked(into, device, dtype, select, strict, types, reports=True)
    return _load(path, asked, then, CallerCurrents(), config, observer, ranks)


async def _load(
    path: PathLike,
    asked: Asked,
    then: PathLike | None,
    currents: CallerCurrents,
    config: CheckpointConfig | None,
    observer: Observer | None,
    ranks: RanksLike,
) -> Any:
    """Give the result, or its state alone, as is asked for."""
    async with Engine(config, observer=observer, ranks=ranks) as engine:
        return await engine._load(path, asked, then, currents)  # noqa: SLF001  # what was current at our call


@returns_coroutine
def load_slice(
    path: PathLike,
    name: str,
    index: Index,
    *,
    device: torch.device | str | None = None,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> Coroutine[Any, Any, torch.Tensor]:
    """Load a part of one tensor with an engine for this one call; see `Engine.load_slice`."""
    return _load_slice(path, name, index, device, CallerCurrents(), config, observer)


async def _load_slice(
    path: PathLike,
    name: str,
    index: Index,
    device: torch.device | str | None,
    currents: CallerCurrents,
    config: CheckpointConfig | None,
    observer: Observer | None,
) -> torch.Tensor:
    async with Engine(config, observer=observer, ranks="solo") as engine:
        return await engine._load_slice(path, name, index, device, currents)  # noqa: SLF001  # as above


async def inspect(
    path: PathLike,
    *,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> Manifest:
    """Read what a checkpoint is made of; see `Engine.inspect`."""
    async with Engine(config, observer=observer, ranks="solo") as engine:
        return await engine.inspect(path)


async def verify(
    path: PathLike,
    *,
    compare_copies: bool = False,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> VerifyReport:
    """Compare every byte of a checkpoint with its checksums; see `Engine.verify`.

    Values that are no tensors are made once, too. Not looked at is what depends on who loads:
    classes, time zones, and what element types and devices torch has.
    """
    async with Engine(config, observer=observer, ranks="solo") as engine:
        return await engine.verify(path, compare_copies=compare_copies)
