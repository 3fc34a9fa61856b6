"""Asyncio-native checkpoint I/O for PyTorch.

`await ckptio.save(state, path)` and `await ckptio.load(path)` in async code, the same
names in `ckptio.sync` elsewhere, and `ckptio.Engine` for a loop that saves often.

Names are resolved when they are used: importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptio._version import __version__

if TYPE_CHECKING:
    from ckptio import errors, events, sync
    from ckptio.api import Engine
    from ckptio.cache import CacheStatistics
    from ckptio.calls import (
        finish_copies,
        inspect,
        load,
        load_slice,
        load_with_report,
        save,
        verify,
    )
    from ckptio.checkpointer import Checkpointer
    from ckptio.config import CheckpointConfig
    from ckptio.conversion.convert import ConvertReport, convert
    from ckptio.engine.restore import LoadReport
    from ckptio.engine.verify import VerifyReport
    from ckptio.errors import (
        CheckpointChangedError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        CommitConflictError,
        ConfigError,
        CorruptionError,
        EngineClosedError,
        FormatError,
        FormatVersionError,
        MismatchError,
        PeerLostError,
        PlanError,
        RankError,
        RankFormatError,
        SaveAbortedError,
        StagingError,
        StateError,
        StorageError,
        TargetError,
        UnsupportedLeafError,
    )
    from ckptio.handle import CheckpointInfo, SaveHandle
    from ckptio.plan.retention import (
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepIf,
        KeepLast,
        KeepSteps,
        Retention,
        StepRecord,
    )
    from ckptio.plan.schedule import SaveEvery
    from ckptio.runtime.flows import LoadResult
    from ckptio.shards import PerRank, Shard
    from ckptio.staging.pool import PoolStatistics

_HOMES = {
    "ckptio.api": ("Engine",),
    "ckptio.cache": ("CacheStatistics",),
    "ckptio.calls": (
        "finish_copies",
        "inspect",
        "load",
        "load_slice",
        "load_with_report",
        "save",
        "verify",
    ),
    "ckptio.checkpointer": ("Checkpointer",),
    "ckptio.config": ("CheckpointConfig",),
    "ckptio.conversion.convert": ("ConvertReport", "convert"),
    "ckptio.runtime.flows": ("LoadResult",),
    "ckptio.engine.restore": ("LoadReport",),
    "ckptio.engine.verify": ("VerifyReport",),
    "ckptio.errors": (
        "CheckpointChangedError",
        "CheckpointError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CommitConflictError",
        "ConfigError",
        "CorruptionError",
        "EngineClosedError",
        "FormatError",
        "FormatVersionError",
        "MismatchError",
        "PeerLostError",
        "PlanError",
        "RankError",
        "RankFormatError",
        "SaveAbortedError",
        "StagingError",
        "StateError",
        "StorageError",
        "TargetError",
        "UnsupportedLeafError",
    ),
    "ckptio.handle": ("CheckpointInfo", "SaveHandle"),
    "ckptio.plan.schedule": ("SaveEvery",),
    "ckptio.plan.retention": (
        "KeepAll",
        "KeepBest",
        "KeepEvery",
        "KeepIf",
        "KeepLast",
        "KeepSteps",
        "Retention",
        "StepRecord",
    ),
    "ckptio.shards": ("PerRank", "Shard"),
    "ckptio.staging.pool": ("PoolStatistics",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("errors", "events", "sync")

__all__ = [
    "CacheStatistics",
    "CheckpointChangedError",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "Checkpointer",
    "CommitConflictError",
    "ConfigError",
    "ConvertReport",
    "CorruptionError",
    "Engine",
    "EngineClosedError",
    "FormatError",
    "FormatVersionError",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepIf",
    "KeepLast",
    "KeepSteps",
    "LoadReport",
    "LoadResult",
    "MismatchError",
    "PeerLostError",
    "PerRank",
    "PlanError",
    "PoolStatistics",
    "RankError",
    "RankFormatError",
    "Retention",
    "SaveAbortedError",
    "SaveEvery",
    "SaveHandle",
    "Shard",
    "StagingError",
    "StateError",
    "StepRecord",
    "StorageError",
    "TargetError",
    "UnsupportedLeafError",
    "VerifyReport",
    "__version__",
    "convert",
    "errors",
    "events",
    "finish_copies",
    "inspect",
    "load",
    "load_slice",
    "load_with_report",
    "save",
    "sync",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import what is asked for, and no more."""
    if name in _MODULES:
        return import_module(f"ckptio.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptio' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """List what can be asked for."""
    return list(__all__)
