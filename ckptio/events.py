"""What an engine tells its observer while it works.

An observer is any callable that takes one event. It is called where the event happens, on
a thread of the engine or of the caller, at times on two at once, and must return soon.
What it raises is logged and goes no further: a broken progress bar must not break a save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_log = logging.getLogger("ckptio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened to a checkpoint.

    Attributes:
        path: Path or URL of the checkpoint.
    """

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveQueued(Event):
    """A save waits because `max_saves` are in flight already.

    Attributes:
        num_in_flight: Saves that are in its way.
    """

    num_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """A save has its plan and begins to copy and write.

    Attributes:
        save_id: The save's own id, in every file name of it.
        nbytes: Bytes of data files to write.
        num_tensors: Tensors (and arrays) among them.
        num_files: Data files to write.
        plan_reused: The plan of an earlier save of the same structure was used.
    """

    save_id: str
    nbytes: int
    num_tensors: int
    num_files: int
    plan_reused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged(Event):
    """Every byte is copied: the source may change.

    Attributes:
        save_id: The save's own id.
        elapsed_s: Seconds since `save` was called.
    """

    save_id: str
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgressed(Event):
    """A slab was written.

    Attributes:
        save_id: The save's own id.
        written_nbytes: Bytes written so far.
        nbytes: Bytes to write in all.
    """

    save_id: str
    written_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted(Event):
    """The checkpoint exists.

    Attributes:
        save_id: The save's own id.
        nbytes: Bytes of data files.
        elapsed_s: Seconds since `save` was called.
    """

    save_id: str
    nbytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A save ended without a commit; what was at the path is untouched.

    Attributes:
        save_id: The save's own id.
        error: What ended it; a `CancelledError` if it was aborted.
    """

    save_id: str
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEvent(Event):
    """Something happened to the copy of a checkpoint; `path` is its first tier.

    Attributes:
        to: Path or URL of the second tier.
        save_id: The save's own id, which is the copy's too.
    """

    to: str
    save_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyQueued(CopyEvent):
    """A copy waits because `max_tier_copies` are under way already. Nobody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStarted(CopyEvent):
    """A copy to the second tier begins.

    Attributes:
        nbytes: Bytes that this rank is to send; what is there already is not.
        num_files: Data files that these are.
        is_resumed: An earlier run owed it.
    """

    nbytes: int
    num_files: int
    is_resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProgressed(CopyEvent):
    """A slab was copied.

    Attributes:
        sent_nbytes: Bytes sent so far.
        nbytes: Bytes to send in all.
    """

    sent_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCommitted(CopyEvent):
    """The checkpoint exists at the second tier, too.

    Attributes:
        sent_nbytes: Bytes that this rank sent.
        elapsed_s: Seconds since it was asked for.
    """

    sent_nbytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFailed(CopyEvent):
    """A copy ended without a commit. The first tier's checkpoint is untouched.

    Attributes:
        error: What ended it; a `CancelledError` if it was stopped.
    """

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPassedOver(Event):
    """The first tier, `path`, does not have the checkpoint whole; the second one is read.

    Attributes:
        to: Path or URL of the second tier.
        error: What is wrong with the first.
    """

    to: str
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectIORefused(Event):
    """A file system does not take direct I/O; the page cache is used instead.

    Attributes:
        reason: What it answered.
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
class TieDropped(Event):
    """Tensors that may share memory are saved apart, and will come back apart.

    Their common storage is larger than all of them together, so that storing it once
    would write more than storing them apart.

    Attributes:
        fqns: Their names.
    """

    fqns: tuple[str, ...]


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

    Attributes:
        file: Its name inside the checkpoint's directory.
        error: Why.
    """

    file: str
    error: OSError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved(Event):
    """A checkpoint was removed because its retention policy no longer keeps it.

    Attributes:
        step: Its step.
        nbytes: Bytes of its data files.
    """

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFailed(Event):
    """It could not be decided which checkpoints under `path` to remove; none was.

    Attributes:
        error: Why.
    """

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(Event):
    """A run is about to be ended: the next `should_save` asks every rank for the last save.

    Attributes:
        reason: What said so: the name of a signal.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksAwaited(Event):
    """This rank has been waiting for others for a while, and goes on waiting.

    Some are slower, or never come: `save` and `load` have to be called on every rank.

    Attributes:
        phase: What they have to come to.
        absent: Those that have not come, as far as this rank knows: rank 0 does.
        waited_s: Seconds so far.
    """

    phase: str
    absent: tuple[int, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSubstituted(Event):
    """A file of a checkpoint is lost; everything in it is read from copies in others.

    Attributes:
        file: The lost file.
        error: What is wrong with it.
    """

    file: str
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlanned(Event):
    """It is decided which rank of a job reads what. Rank 0 says so, for all.

    Nobody does where `exchange` is `"off"`: each rank then reads what it wants and tells
    nobody.

    Attributes:
        is_exchanged: Whether ranks pass on what they read; if not, each reads what it wants.
        read_nbytes: Bytes that each rank reads.
        sent_nbytes: Bytes that go from rank to rank.
        explainer: Does what `explain` does. It keeps the plan in memory, as long as it lives.
    """

    is_exchanged: bool
    read_nbytes: tuple[int, ...]
    sent_nbytes: int
    explainer: Callable[[Collection[str] | None], str] = field(repr=False)

    def explain(self, names: Collection[str] | None = None) -> str:
        """Say which rank reads which bytes of which file, for whom and why, a line each.

        Costs nothing until it is called; then a line for each range of each file.

        Args:
            names: Only what holds bytes of these tensors; everything if not given.
        """
        return self.explainer(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStarted(Event):
    """A load has its plan and begins to read.

    Attributes:
        nbytes: Bytes to read.
        num_tensors: Tensors to fill.
        num_files: Files they come from.
    """

    nbytes: int
    num_tensors: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgressed(Event):
    """A range was read and its checksums agreed.

    Attributes:
        read_nbytes: Bytes read so far.
        nbytes: Bytes to read in all.
    """

    read_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFinished(Event):
    """Every wanted tensor is filled.

    Attributes:
        nbytes: Bytes read.
        elapsed_s: Seconds since `load` was called.
    """

    nbytes: int
    elapsed_s: float


Observer = Callable[[Event], None]


def notify(observer: Observer | None, event: Event) -> None:
    """Give `event` to `observer`, and log what it raises."""
    if observer is None:
        return
    try:
        observer(event)
    except Exception:  # an observer's bug is its own; the log has it, the save goes on
        _log.exception("the observer raised on %r", event)
