"""Copy a committed checkpoint to a second tier, in the background.

    first tier    data, note, manifest (the commit) ............ note dropped
    second tier             data as it was, manifest (the commit)

The copy is the checkpoint: the same manifest, byte for byte, the same file names, the same
save id; and it is there by the same rule, with its manifest, written last. It is made of
the first tier's files, not of tensors, whose slabs are free by then.

The note (`storage.notes`) is older than the first commit and goes after the second one, so
a copy that is owed is never forgotten. Whoever takes it over finds what is whole at the second
tier and sends the rest. Between the second commit and the end of the note nothing is lost
either: the commit is repeated, which changes nothing.

A copy that fails or is stopped leaves what it has sent: somebody will go on with it. Only where
nobody can, since the checkpoint is gone, or older than what is there by now, does that go: at once
on a disk, and in an object store, where somebody else may be making the same copy, with a sweep.

Each rank copies the files that it wrote, and rank 0 commits when all have. A copy that an
earlier run owed is made by rank 0 alone: the ranks of that run are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptio._aio import GRACE_S, Siblings, run_blocking, shielded, take_back_cancel
from ckptio.engine.heads import read_head
from ckptio.engine.landing import Reading
from ckptio.engine.load import require_slabs
from ckptio.engine.transfer import find_whole, require_files, transfer
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    ConfigError,
    RankError,
    StorageError,
)
from ckptio.events import (
    CleanupFailed,
    CopyCommitted,
    CopyFailed,
    CopyProgressed,
    CopyQueued,
    CopyStarted,
)
from ckptio.format.manifest import decode_manifest
from ckptio.format.note import CopyNote, encode_note
from ckptio.format.summary import is_newer
from ckptio.ranks.interface import Same
from ckptio.ranks.solo import SoloRanks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.format.manifest import Manifest
    from ckptio.ranks.interface import Ranks, Session
    from ckptio.storage.interface import Attempt, Note, Storage

#: How often ranks that copy meet, as a part of how long they are waited for.
_BEAT = 0.25


@dataclass(slots=True, kw_only=True)
class CopyJob:
    """A copy to be made.

    Attributes:
        save_id: Of the checkpoint.
        key: Names the copy among those of the engine, on all ranks alike.
        source: The first tier.
        target: The second.
        overwrite: Whether a checkpoint that is there may be replaced.
        resumes: Whether an earlier copy may have left something there.
        replaced: Ids of saves that this one has replaced, as far as the note says so.
        ticket: Its number among the copies of this engine; `None` for one that was owed.
        started_s: When it was asked for, by `time.perf_counter`.
    """

    save_id: str
    key: str
    source: Storage
    target: Storage
    overwrite: bool
    resumes: bool = False
    replaced: tuple[str, ...] = ()
    ticket: int | None = None
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def name(self) -> tuple[str, str]:
        """Tell it from other copies: place and save id."""
        return self.source.identity, self.save_id

    def elapsed_s(self) -> float:
        """Seconds since it was asked for."""
        return time.perf_counter() - self.started_s

    def note(self) -> bytes:
        """Write the note that says what is owed."""
        return encode_note(CopyNote(copy_to=self.target.path, overwrite=self.overwrite))


class _OvertakenError(Exception):
    """The second tier has a newer checkpoint, which is what stays."""


def is_replaced(error: BaseException) -> bool:
    """Whether a copy failed as what was to be copied is gone, or another one; on whatever rank."""
    if isinstance(error, RankError):
        return error.was_caused_by(CheckpointChangedError)
    return isinstance(error, CheckpointChangedError)


async def make_copy(job: CopyJob, context: EngineContext, note: Note | None) -> int | None:
    """Copy a committed checkpoint. When this returns, it exists at the second tier.

    Args:
        job: The copy.
        context: The engine.
        note: The checkpoint's note, held; dropped when the copy is committed, and let go
            of if it is not. On rank 0; the others have none.

    Returns:
        Bytes that were sent, by this rank; `None` if what an earlier run owed is owed no more,
        since there is a newer checkpoint.

    Raises:
        CheckpointExistsError: There is another checkpoint and `overwrite` is off.
        CheckpointChangedError: The checkpoint was overwritten or removed meanwhile.
        CorruptionError: A block of it does not have its checksum.
        ConfigError: The second tier is the first, by another name.
        RankError: It failed on some rank.
        CheckpointError: The first failure of any part.
    """
    path, to = job.source.path, job.target.path
    try:
        try:
            sent_nbytes = await _Copy(job, context).run()
        except _OvertakenError:
            sent_nbytes = None
        if note is not None:
            await _drop(note, job, context)
    except BaseException as error:
        context.emit(CopyFailed(path=path, to=to, save_id=job.save_id, error=error))
        if note is not None:
            await shielded(note.release())
        raise
    if sent_nbytes is not None:
        elapsed_s = job.elapsed_s()
        context.emit(
            CopyCommitted(
                path=path, to=to, save_id=job.save_id, sent_nbytes=sent_nbytes, elapsed_s=elapsed_s
            )
        )
    return sent_nbytes


async def _drop(note: Note, job: CopyJob, context: EngineContext) -> None:
    """Remove the note of a copy that is made; an event, not an error, if it stays."""
    try:
        await shielded(note.drop(), grace_s=GRACE_S)
    except StorageError as error:
        context.emit(CleanupFailed(path=job.source.path, file="", error=error))
        await shielded(note.release())
    except asyncio.CancelledError:  # the copy is committed
        take_back_cancel()


class _Copy:
    """One rank's part of a copy."""

    def __init__(self, job: CopyJob, context: EngineContext) -> None:
        self._job = job
        self._context = context
        # what an earlier run owed is copied by whoever finds it, alone
        self._ranks: Ranks = SoloRanks("") if job.resumes else context.ranks
        self._attempt: Attempt | None = None
        self._manifest = b""
        self._sent_nbytes = self._total_nbytes = 0
        self._was_there = False
        self._heard: list[str] = []

    async def run(self) -> int:
        """Copy, and commit with the other ranks; gives the bytes sent.

        Ranks meet before they wait for their places, so that one that is stopped in line
        stops the others; a place is held until what was begun there has ended.
        """
        async with contextlib.AsyncExitStack() as place:
            try:
                title = f"copy to {self._job.target.path!r}"
                async with self._ranks.session(self._job.key, title, commits=True) as session:
                    if self._ranks.world_size == 1:
                        await self._work(place)
                        await self._meet(session, is_done=True)
                    else:
                        await self._work_and_meet(session, place)
            except BaseException as error:
                if self._attempt is not None:
                    await shielded(self._end(self._attempt, error))
                raise
        if self._attempt is not None and self._ranks.rank != 0:
            await shielded(self._attempt.leave())
        if self._ranks is self._context.ranks:  # but for one that was stopped just now
            self._context.copies.told(self._heard)
        self._context.cache.forget(self._job.target)
        return self._sent_nbytes

    async def _work(self, place: contextlib.AsyncExitStack) -> None:
        """Take a place, and bring this rank's files over."""
        job, context = self._job, self._context

        def on_wait() -> None:
            context.emit(CopyQueued(path=job.source.path, to=job.target.path, save_id=job.save_id))

        if job.ticket is not None:  # so that no more look at a mount that hangs than may copy
            await context.copy_line.turn(job.ticket)
        await job.target.locate()
        if job.target.identity == job.source.identity:
            raise ConfigError(f"then= is {job.target.path!r}, which is the checkpoint itself")
        await place.enter_async_context(
            context.copy_line.place(job.ticket, job.target.identity, on_wait)
        )
        await self._send(await self._read())

    async def _work_and_meet(self, session: Session, place: contextlib.AsyncExitStack) -> None:
        """Bring this rank's files over, and commit when all ranks have.

        What one rank has to send may take hours longer than what another has, and its place
        in line may be taken. So ranks meet often enough to be told from those that do not
        come, and say whether they are done. Those far behind in line do not yet: nobody has
        a place for them.
        """
        if self._job.ticket is not None:
            await self._context.copy_line.approach(self._job.ticket)
        beat_s = self._context.config.meet_timeout_s * _BEAT
        async with Siblings() as group:
            work = group.create_task(self._work(place), name=f"send {self._job.source.path}")
            is_over = False
            while not is_over:
                await asyncio.wait((work,), timeout=beat_s)
                if work.done():
                    work.result()  # it may have failed just now
                is_over = await self._meet(session, is_done=work.done())

    async def _meet(self, session: Session, *, is_done: bool) -> bool:
        """Go into a round; gives whether the copy is committed."""

        async def decide(messages: Sequence[Any]) -> Same:
            _check_alike([message[:-1] for message in messages])
            if is_over := all(message[-1] for message in messages):
                await self._look_again()
                session.decisive(is_on=True)
                await self._commit(session)
            return Same([is_over, copies.untold[:]])

        job, copies = self._job, self._context.copies
        message = [job.save_id, job.target.path, job.overwrite, is_done]
        is_over, self._heard = await session.round("copied", message, decide)
        copies.hear(self._heard)
        return bool(is_over)

    async def _end(self, attempt: Attempt, error: BaseException) -> None:
        """Leave what was sent to whoever goes on with it, if anybody can."""
        self._context.cache.forget(self._job.target)  # it may be committed, though nobody can tell
        is_gone = is_replaced(error) or isinstance(error, _OvertakenError)
        # of a checkpoint that the second tier has, or may soon have, an attempt owns nothing
        owns = attempt.is_alone and not self._was_there
        await (attempt.abort() if is_gone and owns else attempt.leave())

    async def _read(self) -> Manifest:
        """Read what is to be copied."""
        self._manifest = await self._raw_manifest()
        manifest = await run_blocking(self._context.executor, decode_manifest, self._manifest)
        if manifest.save_id != self._job.save_id:
            raise CheckpointChangedError(self._job.source.path)
        require_slabs(manifest, self._context)
        return manifest

    async def _raw_manifest(self) -> bytes:
        try:
            _, data = await self._job.source.read_manifest()
        except CheckpointNotFoundError:
            raise CheckpointChangedError(self._job.source.path) from None
        if not isinstance(data, bytes):  # ours is gone, and another program's is there
            raise CheckpointChangedError(self._job.source.path)
        return data

    async def _look_again(self) -> None:
        """Look whether the first tier still has what was copied, and the second has all of it.

        Another rank may not see the same place; and what an earlier copy had brought, the
        sweep of somebody else may have removed just before this one began.

        Raises:
            CheckpointChangedError: The first has not.
            StorageError: The second has not.
        """
        if await self._raw_manifest() != self._manifest:
            raise CheckpointChangedError(self._job.source.path)
        manifest = await run_blocking(self._context.executor, decode_manifest, self._manifest)
        await require_files(self._job.target, manifest)

    async def _send(self, manifest: Manifest) -> None:
        """Bring this rank's files over."""
        job, context, rank = self._job, self._context, self._ranks.rank
        is_alone = self._ranks.world_size == 1
        files = [i for i, entry in enumerate(manifest.files) if is_alone or entry.rank == rank]
        kept: set[int] = set()
        if rank == 0:
            # this very checkpoint, if nobody had time to say so; of what is none of ours, `begin`
            # says what may be done about it
            there = await read_head(job.target, context)
            self._was_there = there is not None and there.save_id == job.save_id
            # of an earlier run alone: what was saved just now is the newest, whatever clocks say,
            # and what replaced another is newer than that
            is_overtaken = (
                there is not None
                and (job.resumes and there.save_id not in job.replaced)
                and is_newer(there.created, manifest.created)
            )
            may_begin = job.overwrite or self._was_there or is_overtaken
            # it drops all uploads: alone, as those of ranks that are ahead may be among them
            again = is_alone and (job.resumes or self._was_there)
            # of what was overtaken, too, so that what was sent of it goes
            self._attempt = await job.target.begin(job.save_id, overwrite=may_begin, resumes=again)
            if is_overtaken:
                raise _OvertakenError
            if self._was_there or job.resumes:  # now that it counts as alive: what is there stays
                kept = await find_whole(job.target, manifest, files, self._attempt, context)
        else:
            self._attempt = await job.target.join(job.save_id)
        for file in sorted(kept):
            await self._attempt.keep(manifest.files[file].name, manifest.files[file].nbytes)
        missing = [file for file in files if file not in kept]
        self._announce(manifest, missing)
        reading = Reading(job.source, manifest)
        await transfer(reading, missing, self._attempt, context, self._written)
        if rank != 0:
            await self._attempt.seal()

    def _announce(self, manifest: Manifest, missing: Sequence[int]) -> None:
        self._total_nbytes = sum(manifest.files[file].nbytes for file in missing)
        self._context.emit(
            CopyStarted(
                path=self._job.source.path,
                to=self._job.target.path,
                save_id=self._job.save_id,
                nbytes=self._total_nbytes,
                num_files=len(missing),
                is_resumed=self._job.resumes,
            )
        )

    def _written(self, nbytes: int) -> None:
        self._sent_nbytes += nbytes
        self._context.emit(
            CopyProgressed(
                path=self._job.source.path,
                to=self._job.target.path,
                save_id=self._job.save_id,
                sent_nbytes=self._sent_nbytes,
                nbytes=self._total_nbytes,
            )
        )

    async def _commit(self, session: Session) -> None:
        """Publish the manifest, on rank 0."""
        attempt = self._attempt
        assert attempt is not None  # noqa: S101  # it has sent its files
        try:
            await attempt.commit(self._manifest)
        except BaseException:  # a cancellation that came before, too
            if not attempt.is_published:
                session.decisive(is_on=False)
            raise


def _check_alike(messages: Sequence[Any]) -> None:
    """Check that all ranks copy one checkpoint to one place.

    Raises:
        ConfigError: They do not.
    """
    for rank, message in enumerate(messages):
        if message != messages[0]:
            raise ConfigError(
                f"rank {rank} copies to {message[1]!r} and rank 0 to {messages[0][1]!r}; pass"
                " then= and overwrite= alike on all ranks"
            )
