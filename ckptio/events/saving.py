"""What happens to a save, and to what is copied of it to a second tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckptio.events.observer import Event


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
    """A part of a file was written, no larger than a slab.

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
    """A save failed. What was at the path is untouched, unless `error` is in doubt.

    Attributes:
        save_id: The save's own id.
        error: What ended it; a `CancelledError` if it was aborted. The commit may have happened
            if it is a `StorageError` or a `RankError` whose `in_doubt` is set.
    """

    save_id: str
    error: BaseException


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
    """A copy waits because `max_tier_copies` are under way already.

    The checkpoint is committed by then: only who asks for `durable`, or leaves the block, waits.
    """


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
        elapsed_s: Seconds since the copy was asked for.
    """

    sent_nbytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFailed(CopyEvent):
    """A copy failed. The first tier's checkpoint is untouched.

    Where nobody could find out whether a copy is owed, or where to, `to` is empty, and so is
    `save_id` where the checkpoint could not be read; of a directory that cannot be listed,
    `path` is that.

    Attributes:
        error: What ended it; a `CancelledError` if it was stopped. If its `in_doubt` is set,
            the copy may have been committed.
    """

    is_trouble: ClassVar[bool] = True
    error: BaseException
