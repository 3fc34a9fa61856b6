"""Notes of copies that are owed, held from before the commit until the copy is made.

A note (`storage.notes`) is there when the checkpoint is, and from that moment on whoever finishes
the copies of a directory may take it. So a save holds its own before: what its engine is about
to copy, nobody else has in hand meanwhile. Both would send every byte, and on a store the one
would drop the uploads of the other. (Waiting for somebody else's copy was rejected: that process
may be slow, or stopped, and all later copies of the engine stood behind it.)

Where there are no locks, others may take a note that is held; see there.

A note also says what its save replaced. The second tier may have that one still when somebody takes
the copy up, perhaps after the clock was set back: by its time alone it would be the newer one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckptio._aio import shielded
from ckptio.engine.heads import read_head
from ckptio.errors import CheckpointError
from ckptio.format.note import decode_note, encode_note, note_replacing

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.storage.interface import Attempt, Note


class HeldNotes:
    """Those of an engine. Used from its loop."""

    def __init__(self) -> None:
        self._held: dict[str, Note] = {}  # by the ids of their saves

    async def leave(self, job: SaveJob, attempt: Attempt, context: EngineContext) -> None:
        """Leave the note of a save that is to be copied, and hold it; nothing for any other.

        When earlier saves to the place have ended, as the note says what this one replaces.

        Raises:
            StorageError: It could not be written.
        """
        if job.note:
            data = await _with_replaced(job, context) if job.overwrite else job.note
            context.copies.begin(job.storage.identity, job.save_id)
            self._held[job.save_id] = await attempt.note(data)

    def take(self, save_id: str) -> Note | None:
        """Take the note of a copy that begins; whoever takes it drops or releases it."""
        return self._held.pop(save_id, None)

    async def let_go(self, save_id: str) -> None:
        """Release the note of a copy that does not begin, if it is held."""
        note = self.take(save_id)
        if note is not None:
            await shielded(note.release())

    async def close(self) -> None:
        """Release all of them: the engine ends, and no copy begins any more."""
        for save_id in list(self._held):
            await self.let_go(save_id)


async def _with_replaced(job: SaveJob, context: EngineContext) -> bytes:
    """Add to a note what is at the place just now, as far as that can be read."""
    head = owed = None
    with contextlib.suppress(CheckpointError):  # the commit is about to say what is wrong, if so
        head = await read_head(job.storage, context, gives_up=True)
    if head is None:
        return job.note
    with contextlib.suppress(CheckpointError):
        note = await job.storage.read_note(head.save_id)
        owed = None if note is None else decode_note(note)
    return encode_note(note_replacing(decode_note(job.note), head.save_id, owed))
