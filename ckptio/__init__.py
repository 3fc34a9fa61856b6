"""Asyncio-native checkpoint I/O for PyTorch.

`await ckptio.save(state, path)` and `await ckptio.load(path)` in async code, the same
names in `ckptio.sync` elsewhere, and `ckptio.Engine` for a loop that saves often. Where to look:

    help(ckptio.Engine.save)        what a save takes, and the errors that it raises
    help(ckptio.Engine.load)        the same for a load: into=, select=, strict=, device=, dtype=
    help(ckptio.SaveHandle)         what a save returns, and its moments
    help(ckptio.Checkpointer)       a run with steps: retention, resuming, preemption
    help(ckptio.CheckpointConfig)   all options
    help(ckptio.errors)             what can go wrong; every error is a CheckpointError
    help(ckptio.events)             what an observer is told
    load_slice, inspect, verify, convert, finish_copies      calls for one checkpoint
    PerRank, Shard, RandomStates, SaveEvery, KeepLast, ...   what they are given

Names are resolved when they are used: importing this package imports no torch. The types of
arguments and results (`PathLike`, `Select`, `Manifest`) are among them, for annotations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._gc import import_module
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
    from ckptio.config import CheckpointConfig, DirectIO, Durability, Exchange, Replicate, S3Client
    from ckptio.conversion.convert import ConvertReport, Format, convert
    from ckptio.conversion.safetensors import Written
    from ckptio.engine.asked import Strict
    from ckptio.engine.restoration import LoadReport
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
        OutOfStepError,
        PeerLostError,
        PlanError,
        RankError,
        RankFormatError,
        SaveAbortedError,
        StagingError,
        StalePlanError,
        StateError,
        StorageError,
        TargetError,
        UnknownFormatError,
        UnsupportedLeafError,
    )
    from ckptio.events import Observer
    from ckptio.format.manifest import FileEntry, Manifest, TensorEntry
    from ckptio.handle import Milestone, SaveHandle
    from ckptio.moments import CheckpointInfo
    from ckptio.plan.retention import (
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepIf,
        KeepLast,
        KeepSteps,
        Mode,
        Retention,
        StepRecord,
    )
    from ckptio.plan.schedule import SaveEvery
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.loading import LoadResult
    from ckptio.runtime.slices import Index
    from ckptio.shards import PerRank, Shard
    from ckptio.staging.pool import PoolStatistics
    from ckptio.state.random_states import RandomStates
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike

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
    "ckptio.config": (
        "CheckpointConfig",
        "DirectIO",
        "Durability",
        "Exchange",
        "Replicate",
        "S3Client",
    ),
    "ckptio.conversion.convert": ("ConvertReport", "Format", "convert"),
    "ckptio.conversion.safetensors": ("Written",),
    "ckptio.engine.asked": ("Strict",),
    "ckptio.engine.restoration": ("LoadReport",),
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
        "OutOfStepError",
        "PeerLostError",
        "PlanError",
        "RankError",
        "RankFormatError",
        "SaveAbortedError",
        "StagingError",
        "StalePlanError",
        "StateError",
        "StorageError",
        "TargetError",
        "UnknownFormatError",
        "UnsupportedLeafError",
    ),
    "ckptio.events": ("Observer",),
    "ckptio.format.manifest": ("FileEntry", "Manifest", "TensorEntry"),
    "ckptio.handle": ("Milestone", "SaveHandle"),
    "ckptio.moments": ("CheckpointInfo",),
    "ckptio.plan.retention": (
        "KeepAll",
        "KeepBest",
        "KeepEvery",
        "KeepIf",
        "KeepLast",
        "KeepSteps",
        "Mode",
        "Retention",
        "StepRecord",
    ),
    "ckptio.plan.schedule": ("SaveEvery",),
    "ckptio.ranks.discover": ("RanksLike",),
    "ckptio.runtime.loading": ("LoadResult",),
    "ckptio.runtime.slices": ("Index",),
    "ckptio.shards": ("PerRank", "Shard"),
    "ckptio.staging.pool": ("PoolStatistics",),
    "ckptio.state.random_states": ("RandomStates",),
    "ckptio.state.select": ("Select",),
    "ckptio.storage.resolve": ("PathLike",),
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
    "DirectIO",
    "Durability",
    "Engine",
    "EngineClosedError",
    "Exchange",
    "FileEntry",
    "Format",
    "FormatError",
    "FormatVersionError",
    "Index",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepIf",
    "KeepLast",
    "KeepSteps",
    "LoadReport",
    "LoadResult",
    "Manifest",
    "Milestone",
    "MismatchError",
    "Mode",
    "Observer",
    "OutOfStepError",
    "PathLike",
    "PeerLostError",
    "PerRank",
    "PlanError",
    "PoolStatistics",
    "RandomStates",
    "RankError",
    "RankFormatError",
    "RanksLike",
    "Replicate",
    "Retention",
    "S3Client",
    "SaveAbortedError",
    "SaveEvery",
    "SaveHandle",
    "Select",
    "Shard",
    "StagingError",
    "StalePlanError",
    "StateError",
    "StepRecord",
    "StorageError",
    "Strict",
    "TargetError",
    "TensorEntry",
    "UnknownFormatError",
    "UnsupportedLeafError",
    "VerifyReport",
    "Written",
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
