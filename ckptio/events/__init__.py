"""What an engine tells its observer while it works.

An observer is any callable that takes one event. It is called where the event happens, on
a thread of the engine or of the caller, at times on two at once, and must return soon.
What it raises is logged and goes no further: a broken progress bar must not break a save.
The exception is a `KeyboardInterrupt` or `SystemExit` on the main thread, which is raised there,
so that the program can end.
It can neither call nor leave its own engine, whose thread it may be on (`ConfigError`).
"""

from ckptio.events.loading import (
    ExchangePlanned,
    LoadFinished,
    LoadStarted,
    RanksAwaited,
    ReadProgressed,
    ReplicaSubstituted,
    TierPassedOver,
)
from ckptio.events.observer import Event, Observer, notify
from ckptio.events.saving import (
    CopyCommitted,
    CopyEvent,
    CopyFailed,
    CopyProgressed,
    CopyQueued,
    CopyStarted,
    SaveCommitted,
    SaveFailed,
    SaveProgressed,
    SaveQueued,
    SaveStaged,
    SaveStarted,
    TieDropped,
)
from ckptio.events.storing import (
    CheckpointRemoved,
    CleanupFailed,
    DirectIORefused,
    HigherStepFound,
    LeftoversRemoved,
    PinningRefused,
    Preempted,
    RequestRetried,
    RetentionFailed,
)

__all__ = [
    "CheckpointRemoved",
    "CleanupFailed",
    "CopyCommitted",
    "CopyEvent",
    "CopyFailed",
    "CopyProgressed",
    "CopyQueued",
    "CopyStarted",
    "DirectIORefused",
    "Event",
    "ExchangePlanned",
    "HigherStepFound",
    "LeftoversRemoved",
    "LoadFinished",
    "LoadStarted",
    "Observer",
    "PinningRefused",
    "Preempted",
    "RanksAwaited",
    "ReadProgressed",
    "ReplicaSubstituted",
    "RequestRetried",
    "RetentionFailed",
    "SaveCommitted",
    "SaveFailed",
    "SaveProgressed",
    "SaveQueued",
    "SaveStaged",
    "SaveStarted",
    "TieDropped",
    "TierPassedOver",
    "notify",
]
