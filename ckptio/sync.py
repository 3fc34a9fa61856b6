"""The same names, blocking: for classic loops, scripts, notebooks and threads.

These work without an event loop, inside a running one (whose thread they block), and from
several threads at once. The engine has its own loop either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ckptio.blocking import Engine
from ckptio.checkpointer.blocking import Checkpointer
from ckptio.engine.asked import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.conversion.convert import ConvertReport, Format
    from ckptio.engine.asked import Strict, T
    from ckptio.engine.verify import VerifyReport
    from ckptio.events import Observer
    from ckptio.format.manifest import Manifest
    from ckptio.moments import CheckpointInfo
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.loading import LoadResult
    from ckptio.runtime.slices import Index
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike

__all__ = [
    "Checkpointer",
    "Engine",
    "convert",
    "finish_copies",
    "inspect",
    "load",
    "load_slice",
    "load_with_report",
    "save",
    "verify",
]


def save(
    state: Any,
    path: PathLike,
    *,
    overwrite: bool = False,
    then: PathLike | None = None,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
    ranks: RanksLike = "auto",
) -> CheckpointInfo:
    """Save a state and wait for the commit, on both tiers; see `ckptio.save`."""
    with Engine(config, observer=observer, ranks=ranks) as engine:
        return engine.save(state, path, overwrite=overwrite, then=then)


def finish_copies(
    root: PathLike,
    *,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> tuple[str, ...]:
    """Make the copies that earlier runs owed; see `ckptio.finish_copies`."""
    with Engine(config, observer=observer, ranks="solo") as engine:
        return engine.finish_copies(root)


@overload
def load(
    path: PathLike,
    into: None = None,
    *,
    then: PathLike | None = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
    select: Select | None = ...,
    strict: Strict = ...,
    types: Collection[type] = ...,
    config: CheckpointConfig | None = ...,
    observer: Observer | None = ...,
    ranks: RanksLike = ...,
) -> Any: ...


@overload
def load(
    path: PathLike,
    into: T,
    *,
    then: PathLike | None = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
    select: Select | None = ...,
    strict: Strict = ...,
    types: Collection[type] = ...,
    config: CheckpointConfig | None = ...,
    observer: Observer | None = ...,
    ranks: RanksLike = ...,
) -> T: ...


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
) -> T:
    """Load a state; see `ckptio.load`."""
    asked = Asked(into, device, dtype, select, strict, types, reports=False)
    with Engine(config, observer=observer, ranks=ranks) as engine:
        state: T = engine._load(path, asked, then).state  # noqa: SLF001  # two faces of one call
        return state


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
) -> LoadResult:
    """Load a state and say what was found; see `ckptio.load_with_report`."""
    asked = Asked(into, device, dtype, select, strict, types, reports=True)
    with Engine(config, observer=observer, ranks=ranks) as engine:
        return engine._load(path, asked, then)  # noqa: SLF001  # as above


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
    compare_copies: bool = False,
    config: CheckpointConfig | None = None,
    observer: Observer | None = None,
) -> VerifyReport:
    """Compare every byte of a checkpoint with its checksums; see `ckptio.verify`."""
    with Engine(config, observer=observer, ranks="solo") as engine:
        return engine.verify(path, compare_copies=compare_copies)


def convert(
    source: PathLike,
    path: PathLike,
    *,
    to: Format,
    select: Select | None = None,
    strip: str = "",
    overwrite: bool = False,
    drop_values: bool = False,
    max_shard_nbytes: int | None = None,
    dtype: torch.dtype | None = None,
    config: CheckpointConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Convert a checkpoint of any known format into one of another; see `ckptio.convert`."""
    from ckptio.conversion.convert import run_convert  # noqa: PLC0415  # imports torch

    return run_convert(
        source,
        path,
        to=to,
        select=select,
        strip=strip,
        overwrite=overwrite,
        drop_values=drop_values,
        max_shard_nbytes=max_shard_nbytes,
        dtype=dtype,
        config=config,
        progress=progress,
    )
