"""What happens to what is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckptio.events.observer import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectIORefused(Event):
    """A file system does not take direct I/O; the page cache is used instead.

    Attributes:
        reason: What it answered.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningRefused(Event):
    """The staging pool cannot be pinned for CUDA: copies to and from devices take longer.

    Or it cannot be unpinned at the end, and the process keeps that memory. The pool belongs to the
    engine and not to a checkpoint, so `path` is empty.

    Attributes:
        reason: What the system answered; and how much memory is kept, if any is.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetried(Event):
    """A request to an object store failed, and is tried again after a while.

    Attributes:
        operation: What it does.
        object: Key of the object.
        num_tries: How often it was tried.
        wait_s: Seconds until it is tried again.
        error: Why it failed.
    """

    operation: str
    object: str
    num_tries: int
    wait_s: float
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoversRemoved(Event):
    """Files that a killed save or a replaced checkpoint had left were removed.

    Attributes:
        files: Their names inside the checkpoint's directory.
    """

    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanupFailed(Event):
    """A file that is no longer needed could not be removed; nothing else is wrong.

    Where somebody has the lock of what was replaced (`EBUSY`), all files of it stay: they may be
    those of another copy that is being made. The next save removes what is left over.

    Attributes:
        file: Its name inside the checkpoint's directory; the first one, if files of a save stay.
            It is empty where no single file is meant: a whole step or its directory could not be
            removed, or the note of a copy.
        error: Why.
    """

    is_trouble: ClassVar[bool] = True
    file: str
    error: OSError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved(Event):
    """A step was removed from the place where it was stored, `path`.

    No retention policy keeps it, `discard_after` was called, or the second tier has it and
    `keep_local` does not keep it on the first.

    Attributes:
        step: Its step.
        nbytes: Bytes of its data files.
    """

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFailed(Event):
    """Steps under `path` were not looked after to the end; some that are not kept may be there yet.

    It could not be decided which to remove, and then none was. Or the storage did not answer; steps
    that were removed before that have their events.

    Attributes:
        error: Why.
    """

    is_trouble: ClassVar[bool] = True
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class HigherStepFound(Event):
    """A step was saved, and a higher one is there from before: that is what `load` takes.

    This is what happens after going back to an earlier step. `Checkpointer.discard_after`
    removes the steps that the run went back from.

    A load sends it, too, if it takes the highest step of one tier although the other tier has a
    lower step that was saved later.

    Attributes:
        step: The step that was saved. From a load: the highest step of the other tier.
        highest: The highest of the others. From a load: the step that is loaded.
    """

    is_trouble: ClassVar[bool] = True
    step: int
    highest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(Event):
    """A run is about to be ended, and ranks have agreed at which step to save last.

    It is the first step about which no rank had asked `should_save` yet.

    Attributes:
        reason: What said so: the name of a signal, or what `preempt` was given.
    """

    reason: str
