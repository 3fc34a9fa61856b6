"""Deterministic loop, storages that fail on demand, an observer that remembers: for tests."""

from ckptio.testing.bucket import MemoryBucket
from ckptio.testing.faults import Crash, Fault, Operation, crash_at, fail_at, fail_kind
from ckptio.testing.files import RecordingFiles
from ckptio.testing.loop import DeadlockError, VirtualLoop, run_virtual
from ckptio.testing.memory import MemoryStorage
from ckptio.testing.objects import MemoryBackend, MemoryStore, hit
from ckptio.testing.observer import EventLog
from ckptio.testing.ranks import MemoryRanks

__all__ = [
    "Crash",
    "DeadlockError",
    "EventLog",
    "Fault",
    "MemoryBackend",
    "MemoryBucket",
    "MemoryRanks",
    "MemoryStorage",
    "MemoryStore",
    "Operation",
    "RecordingFiles",
    "VirtualLoop",
    "crash_at",
    "fail_at",
    "fail_kind",
    "hit",
    "run_virtual",
]
