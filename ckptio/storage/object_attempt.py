"""How a save becomes visible in an object store, or leaves no trace.

Data objects come first, each complete and of the size it should have; then the manifest,
as one small object in one request: `If-None-Match: *` without `overwrite`, and with it a
match of the etag that was there when the commit began. So of any number of writers one
wins, where the store decides such requests atomically. Where it does not, the manifest is
still one object that names data of one save, so that bytes are never mixed.

An answer that says no, or that never came, does not tell who won: the request may have
been repeated by a proxy or a client, and the first one may have been carried out. So what
is there is read back, and the save id in it decides. As long as a request of ours may still
make the manifest appear, nothing that it names is removed: not by this save; nor by one that
replaces it, or by a removal of the checkpoint, since both see the mark, which stays.

    under way   nothing was sent that makes the manifest appear: an abort removes everything
    published   it is there, or may be: an abort removes nothing. So it stays if the commit raises
                an error that is `in_doubt`; with another one, the save is under way again
    left        somebody else goes on with the save, or may: an abort removes nothing

There are no locks here. A save that was killed leaves data, uploads and a mark; the next
save to the path removes them once all of it has been quiet for an hour. So a save that
has itself been silent for long gives up: others may have taken it for dead.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ckptio._aio import GRACE_S, outlive, run_all, shielded, take_back_cancel
from ckptio.errors import CommitConflictError, ConfigError, StorageError
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.format.pointer import encode_pointer, pointed_name
from ckptio.storage.file_names import ATTEMPT_PREFIX, NOTE_PREFIX, QUIET_S
from ckptio.storage.object_commit import MAX_COMMIT_NBYTES, Commit
from ckptio.storage.object_files import ObjectNote, ObjectSink
from ckptio.storage.requests import settling_wait_s
from ckptio.storage.store import ObjectMissingError, RefusedError, StoreError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.storage.object_place import ObjectPlace, Present

#: The mark of a save is written again this often, so that it counts as alive.
REFRESH_S = 300.0
#: How often a commit is sent again while nobody knows whether it was carried out.
_MAX_SETTLING = 8


def elapsed_s() -> float:
    """Give seconds since some moment; those of a suspended machine count."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ObjectAttempt:
    """One save on its way; see `interface.Attempt`. Made by `ObjectStorage.begin`.

    Args:
        place: Where to.
        save_id: Its id.
        config: Sizes.
        overwrite: Whether a checkpoint that is there may be replaced.
        leads: Whether it is this rank that marks, sweeps and commits.
        clock: Gives seconds since some moment.
    """

    is_alone = False  # there are no locks

    def __init__(
        self,
        place: ObjectPlace,
        save_id: str,
        *,
        config: CheckpointConfig,
        overwrite: bool,
        leads: bool,
        clock: Callable[[], float] = elapsed_s,
    ) -> None:
        self._place = place
        self._store = place.store
        self._requests = place.requests
        self._url = place.url
        self._save_id = save_id
        self._config = config
        self._overwrite = overwrite
        self._leads = leads
        self._clock = clock
        self._mark = place.key(ATTEMPT_PREFIX + save_id)
        self._marked_s: float | None = None  # by `clock`, when the mark was written last
        self._sinks: list[ObjectSink] = []
        self._published = False
        self._left = False

    async def prepare(self, *, resumes: bool = False) -> None:
        """Leave a mark, and clear what killed saves left; who resumes drops its own uploads, too.

        Raises:
            StorageError: The place cannot be written. Whoever called aborts.
        """
        await self.stay()
        await self._place.sweep(self._save_id)
        if resumes:
            await self._place.drop((await self._place.listed()).of({self._save_id}).uploads)

    async def stay(self) -> None:
        """Say that this save is alive; see `interface.Attempt`."""
        now, before = self._clock(), self._marked_s
        if before is not None and now - before < REFRESH_S:
            return
        self._marked_s = now
        try:
            if before is not None and now - before > QUIET_S / 2:
                await self._check_alive(now - before)
            await self._write_mark()
        except BaseException:
            self._marked_s = before
            raise

    async def _check_alive(self, silent_s: float) -> None:
        """Make sure that another rank has spoken for this save meanwhile.

        By the store's clock: the time of the mark against that of a new one.
        """
        try:
            before = await self._requests.run("look at", self._mark, self._look_at_mark)
            await self._write_mark()
            now = await self._requests.run("look at", self._mark, self._look_at_mark)
        except ObjectMissingError:
            before, now = 0.0, QUIET_S
        if now - before > QUIET_S / 2:
            raise StorageError(
                f"this save was silent for {silent_s:.0f} s, so that others may have removed its"
                " files; save again",
                path=self._url,
            )

    async def _write_mark(self) -> None:
        await self._requests.must(
            "write", self._mark, lambda: self._store.put(self._mark, b""), outlive=True
        )

    async def _look_at_mark(self) -> float:
        return (await self._store.head(self._mark)).modified_s

    @property
    def is_published(self) -> bool:
        """Whether the manifest is out, or may be; see `interface.Attempt`."""
        return self._published

    async def create(self, name: str, nbytes: int) -> ObjectSink:
        """Begin a data file; see `interface.Attempt`."""
        traits, part = self._store.traits, self._config.slab_nbytes
        if nbytes > part and part < traits.min_part_nbytes:
            raise ConfigError(
                f"{self._url!r} takes parts of at least {traits.min_part_nbytes} bytes;"
                f" raise slab_nbytes ({part})"
            )
        if nbytes > part * traits.max_parts:
            raise ConfigError(
                f"{self._url!r} takes {traits.max_parts} parts an object, and {name!r} of {nbytes}"
                f" bytes has more; raise slab_nbytes ({part})"
            )
        key = self._place.key(name)
        drop_lost = self._place.drop_lost
        sink = ObjectSink(
            self._url, self._store, self._requests, key, nbytes, part, self.stay, drop_lost
        )
        self._sinks.append(sink)
        return sink

    async def keep(self, name: str, nbytes: int) -> None:
        """Take over a data file: an object is there, whole, or not at all.

        Nothing is asked here: a sweep that was under way when this save marked itself as alive
        may be removing it yet. Whoever resumes looks at all files before the commit.
        """

    async def note(self, data: bytes) -> ObjectNote:
        """Leave a note; see `interface.Attempt`."""
        key = self._place.key(NOTE_PREFIX + self._save_id)
        await self._requests.must("write", key, lambda: self._store.put(key, data), outlive=True)
        return ObjectNote(self._store, self._requests, key, data)

    async def seal(self) -> None:
        """Nothing is left to do: a data file is there, whole, when its `close` returns."""

    async def commit(self, manifest: bytes) -> None:
        """Publish `manifest`; see `interface.Attempt`."""
        await self.stay()
        replaced = await self._place.present()
        if replaced is not None and not self._overwrite:
            raise CommitConflictError(self._url)
        if len(manifest) > MAX_COMMIT_NBYTES:
            manifest = await self._write_apart(manifest)
        commit = Commit(self._save_id, manifest, replaced)
        publishing = asyncio.ensure_future(self._publish(commit))
        failure: BaseException | None = None
        try:
            await outlive(publishing)
        except asyncio.CancelledError:
            if not self._published:
                raise
            failure = publishing.exception()
            if failure is not None:
                raise failure from None  # a save that ends as cancelled has changed nothing
            take_back_cancel()
            self._place.hurry()
        finally:
            del publishing, failure  # as in `outlive`
        try:
            await shielded(self._clean_up(commit), grace_s=GRACE_S)
        except asyncio.CancelledError:  # what is left goes with a sweep
            take_back_cancel()

    async def _publish(self, commit: Commit) -> None:
        """Publish a manifest, and find out what became of that; see above for the states."""
        self._published = True
        try:
            await self._settle(commit)
        except StorageError as error:
            self._published = error.in_doubt
            raise

    async def _settle(self, commit: Commit) -> None:
        """Send a manifest, and look, until it is there or another's is for good.

        Raises:
            CommitConflictError: Another's is.
            StorageError: It cannot be sent, or nobody knows: then it is `in_doubt`.
        """
        for tries in range(1, _MAX_SETTLING + 1):
            if not commit.is_acknowledged:
                await self._send(commit)
            found = await self._read_back()
            if found is not None and commit.stands(found):
                await self._require_files(found)
                return
            if not commit.may_be(found):
                if isinstance(commit.problem, RefusedError) and not commit.doubts():
                    break
                self._go_on(found, commit)
            await asyncio.sleep(settling_wait_s(tries))
        if commit.is_acknowledged or commit.doubts() or commit.may_be(found):
            raise self._in_doubt(commit.problem)
        raise StorageError(f"cannot commit: {commit.problem}", path=self._url)

    async def _write_apart(self, manifest: bytes) -> bytes:
        """Write a large manifest as data is written; gives what points to it."""
        sink = await self.create(pointed_name(self._save_id), len(manifest))
        step, view = self._config.slab_nbytes, memoryview(manifest)
        for start in range(0, len(view), step):
            await sink.write(start, view[start : start + step])
        await sink.close()
        return encode_pointer(self._save_id, manifest)

    async def _require_files(self, found: Present) -> None:
        """Make sure that nobody has swept this save before its manifest was there.

        A machine that was suspended for an hour goes on as if nothing had been; its own clock
        may not say so either. Whoever sweeps takes the mark with the files.

        Raises:
            StorageError: Somebody has.
        """
        names = [name for name in found.names if not name.startswith(NOTE_PREFIX)]
        if found.save_id == self._save_id and await self._place.is_swept(self._mark, names):
            problem = "others have removed its files, as of a dead save: save again"
            raise StorageError(problem, path=self._url, in_doubt=True)

    async def _send(self, commit: Commit) -> None:
        """Send the manifest once, and note what became of it."""
        key, old = self._place.key(MANIFEST_NAME), commit.replaced
        absent, match = old is None, "" if old is None else old.etag
        problem: StoreError | None = None
        try:
            await self._requests.once(
                lambda: self._store.put(key, commit.manifest, absent=absent, match=match)
            )
        except StoreError as error:
            problem = error
        commit.note(problem, self._store.traits.conditional)

    async def _read_back(self) -> Present | None:
        """Look which manifest is there.

        Raises:
            StorageError: It cannot be told: nobody knows, whatever was said of what was sent.
        """
        try:
            return await self._place.present()
        except StorageError as error:
            raise self._in_doubt(error) from error

    def _go_on(self, found: Present | None, commit: Commit) -> None:
        """Judge what is there instead of ours: try again, or give up.

        A request that takes effect only where nothing is loses as long as the other's
        manifest stays. Should that be removed, it finds its files: they are left to a later
        sweep. One that is not held back at all may still win.

        Raises:
            CommitConflictError: The other save's checkpoint stands.
        """
        if isinstance(commit.problem, TransientError):
            return
        old = commit.replaced
        if found is None or (old is not None and found.save_id == old.save_id):
            if not commit.is_acknowledged and self._overwrite:
                commit.replaced = found  # the condition was out of date
        elif not commit.doubts("anything"):
            raise CommitConflictError(self._url, in_doubt=bool(commit.doubts("absent")))

    def _in_doubt(self, problem: Exception | None) -> StorageError:
        """Say that nobody knows."""
        what = "nobody knows whether the checkpoint was committed"
        said = f"{what}{f': {problem}' if problem else ''}; its files were left there"
        return StorageError(said, path=self._url, in_doubt=True)

    async def _clean_up(self, commit: Commit) -> None:
        """Remove what the commit made needless; an event, not an error, if it stays.

        Where a late request may bring a manifest back, the mark says so by staying, and what
        that manifest names is not removed but left to the sweep.
        """
        keys: list[str] = []
        old = commit.replaced
        if old is not None and old.save_id != self._save_id and not await self._may_come_back(old):
            keys += [self._place.key(name) for name in old.names if old.save_id in name]
        if not commit.may_come_back:
            keys.append(self._mark)
        await self._place.delete(keys)

    async def _may_come_back(self, replaced: Present) -> bool:
        # nothing comes back beside what is here now; that this is removed before it comes, too, is
        # passed over: the mark of a save that is not through yet would leave files in every race
        if self._store.traits.conditional == "atomic" or not replaced.save_id:
            return False
        mark = self._place.key(ATTEMPT_PREFIX + replaced.save_id)
        try:
            return await self._place.requests.look(self._store, mark) is not None
        except StorageError as error:
            self._place.cannot(mark, error)
        return True

    async def abort(self) -> None:
        """Remove everything this attempt made; see `interface.Attempt`."""
        if self._published or self._left:
            return
        await shielded(self._abort())

    async def _abort(self) -> None:
        self._place.hurry()
        await self._discard(self._sinks)
        keys = [sink.key for sink in self._sinks]
        if self._leads:  # files of ranks that died go with it
            ours = (await self._place.listed()).of({self._save_id})
            keys += [info.key for info in ours.objects]
            await self._place.drop(ours.uploads)
        else:
            await run_all([sink.drop_lost() for sink in self._sinks], "drop lost")
        if keys and await self._may_be_named():
            keys.clear()
        if self._leads:
            keys.append(self._mark)
        await self._place.delete(sorted(set(keys)))

    async def _discard(self, sinks: Sequence[ObjectSink]) -> None:
        """Drop what was sent of uploads, at once: a store that is away is waited for once."""
        await run_all([self._place.quietly(s.key, s.discard) for s in sinks], "discard")

    async def _may_be_named(self) -> bool:
        """Whether a manifest names files of this save, or nobody can tell: then they stay.

        An earlier attempt may have been committed, or another process that copies the same.
        """
        try:
            present = await self._place.present()
        except StorageError as error:
            self._place.cannot(self._place.key(MANIFEST_NAME), error)
            return True
        if present is None or present.save_id:
            return present is not None and present.save_id == self._save_id
        problem = RefusedError("it cannot be read, and may name files of a save that was aborted")
        self._place.cannot(self._place.key(MANIFEST_NAME), problem)
        return True

    async def leave(self) -> None:
        """Let go, and remove nothing; see `interface.Attempt`."""
        self._left = True
        sinks, self._sinks = self._sinks, []
        self._place.hurry()
        # of files that were ended nothing is left; uploads whose names never came stay for who goes
        # on: they may be those of somebody else who makes the same copy
        await self._discard(sinks)
