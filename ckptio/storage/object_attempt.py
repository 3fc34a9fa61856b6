"""How a save becomes visible in an object store, or leaves no trace.

Data objects come first, each complete and of the size it should have; then the manifest,
as one small object in one request: `If-None-Match: *` without `overwrite`, and with it a
match of the etag that was there when the commit began. A large manifest comes before that,
as data does, and the small object points to it. So of any number of writers one wins, where
the store decides such requests atomically. Where it does not, the manifest is still one
object that names data of one save, so that bytes are never mixed.

An answer that says no, or that never came, does not tell who won: the request may have
been repeated by a proxy or a client, and the first one may have been carried out. So what
is there is read back, and the save id in it decides. Only what is settled is acted on: as
long as the manifest may still appear, nothing it names is removed.

There are no locks here. A save that was killed leaves data, uploads and a mark; the next
save to the path removes them once all of it has been quiet for an hour.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import shielded
from ckptio.errors import (
    CommitConflictError,
    ConfigError,
    FormatError,
    StorageError,
)
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.format.pointer import decode_pointer, encode_pointer, pointed_name
from ckptio.format.summary import decode_summary
from ckptio.storage.leftovers import ATTEMPT_PREFIX
from ckptio.storage.object_commit import MAX_COMMIT_NBYTES, join_key, read_commit, read_whole
from ckptio.storage.object_files import ObjectSink
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectMissingError,
    RefusedError,
    StoreError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.requests import Requests
    from ckptio.storage.store import ObjectInfo, ObjectStore, UploadInfo

_OURS = re.compile(r"(?:data-|\.attempt-|manifest-)([0-9a-f]{32})(?:[-.].*)?")
#: A save under way sends something every few seconds; an hour without is its end.
QUIET_S = 3600.0
#: The mark of a save is written again this often, so that it counts as alive.
_REFRESH_S = 300.0
#: How often a commit is sent again while nobody knows whether it was carried out.
_MAX_SETTLING = 8
#: Objects that are removed within the time that one request may take.
_MAX_DELETED = 32


@dataclass(frozen=True, slots=True)
class _Present:
    """The manifest that is there: its etag, and the keys of the data of its save."""

    etag: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Listing:
    """What is under a prefix."""

    objects: tuple[ObjectInfo, ...]
    uploads: tuple[UploadInfo, ...]

    def signs(self) -> Iterator[tuple[str, float]]:
        """Give each key, and when something was last seen of it."""
        yield from ((info.key, info.modified_s) for info in self.objects)
        yield from ((upload.key, upload.active_s) for upload in self.uploads)


class ObjectAttempt:
    """One save on its way; see `interface.Attempt`. Made by `ObjectStorage.begin`."""

    def __init__(
        self,
        url: str,
        prefix: str,
        save_id: str,
        *,
        store: ObjectStore,
        requests: Requests,
        config: CheckpointConfig,
        emit: Callable[[Event], None],
        overwrite: bool,
        leads: bool,
    ) -> None:
        self._url = url
        self._prefix = prefix
        self._save_id = save_id
        self._store = store
        self._requests = requests
        self._config = config
        self._emit = emit
        self._overwrite = overwrite
        self._leads = leads
        self._sinks: list[ObjectSink] = []
        self._published = False
        self._left = False
        self._marked_s = 0.0

    async def prepare(self) -> None:
        """Leave a mark, and clear what killed saves left."""
        await self.mark()
        await self._sweep()

    async def mark(self) -> None:
        """Say that this save is alive, if that was not said just now."""
        now = time.time()
        if now - self._marked_s < _REFRESH_S:
            return
        self._marked_s = now
        key = self._key(ATTEMPT_PREFIX + self._save_id)
        await self._requests.run("write", key, lambda: self._store.put(key, b""), outlive=True)

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
        sink = ObjectSink(
            self._url, self._store, self._requests, self._key(name), nbytes, part, self.mark
        )
        self._sinks.append(sink)
        return sink

    async def seal(self) -> None:
        """Nothing is left to do: a data file is there, whole, when its `close` returns."""

    async def commit(self, manifest: bytes) -> None:
        """Publish `manifest`; see `interface.Attempt`."""
        try:
            await shielded(self._commit(manifest))
        except asyncio.CancelledError:
            if not self._published:
                raise
            # the commit came first: a save that ends as cancelled must have changed nothing
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()

    async def _commit(self, manifest: bytes) -> None:
        replaced = await self._present()
        if replaced is not None and not self._overwrite:
            raise CommitConflictError(self._url)
        key = self._key(MANIFEST_NAME)
        if len(manifest) > MAX_COMMIT_NBYTES:
            manifest = await self._write_apart(manifest)
        # from here on it may be there, whatever the answers are
        self._published = True
        in_doubt = False
        for tries in range(1, _MAX_SETTLING + 1):
            problem = await self._send(key, manifest, replaced)
            if isinstance(problem, RefusedError) and not in_doubt:
                self._published = False
                raise StorageError(f"cannot commit: {problem.problem}", path=self._url)
            in_doubt = in_doubt or isinstance(problem, TransientError)
            found = await self._found_surely(key)
            if found == self._save_id:
                await self._clean_up(replaced)
                return
            if self._is_settled(problem, found, in_doubt=in_doubt):
                self._published = False
                raise CommitConflictError(self._url)
            if problem is None:  # it was there, and somebody took it away or replaced it
                break
            if found is None and isinstance(problem, ConditionFailedError):
                replaced = None  # somebody took that away
            await asyncio.sleep(min(2.0**tries / 10, 5.0))
        raise StorageError(
            "nobody knows whether the checkpoint was committed"
            f"{': ' + problem.problem if problem else ''}; its files were left there",
            path=self._url,
        )

    async def _write_apart(self, manifest: bytes) -> bytes:
        """Write a large manifest as data is written; gives what points to it."""
        sink = await self.create(pointed_name(self._save_id), len(manifest))
        step = self._config.slab_nbytes
        with memoryview(manifest) as view:
            for start in range(0, len(view), step):
                with view[start : start + step] as part:
                    await sink.write(start, part)
        await sink.close()
        return encode_pointer(self._save_id, manifest)

    async def _send(
        self, key: str, manifest: bytes, replaced: _Present | None
    ) -> StoreError | None:
        """Send the manifest once; gives what went wrong."""
        absent, match = replaced is None, "" if replaced is None else replaced.etag
        try:
            await self._requests.once(
                lambda: self._store.put(key, manifest, absent=absent, match=match)
            )
        except StoreError as error:
            return error
        return None

    def _is_settled(self, problem: StoreError | None, found: str | None, *, in_doubt: bool) -> bool:
        """Whether it is certain that another save is there, and this one will not be."""
        if not found:
            return False  # the store decides just now, or it was removed, or nobody can read it
        if in_doubt and self._store.traits.conditional != "atomic":
            return False  # a late one of ours is not held back by any condition
        return problem is None or isinstance(problem, ConditionFailedError)

    async def _present(self, *, has_tried: bool = False) -> _Present | None:
        """Look at the manifest that is there, if there is one."""
        try:
            info, data, keys = await read_commit(self._store, self._requests, self._prefix)
            summary = decode_summary(data)
        except ObjectMissingError:
            return None
        except FormatError:  # damaged, perhaps on the way, or of a newer version
            if not has_tried:
                return await self._present(has_tried=True)
            return await self._unreadable()  # what it needs stays
        names = [file.name for file in summary.files if summary.save_id in file.name]
        return _Present(info.etag, (*map(self._key, names), *keys))

    async def _unreadable(self) -> _Present | None:
        """Look at a manifest that is there and cannot be read."""
        key = self._key(MANIFEST_NAME)
        try:
            info = await self._requests.run("look at", key, lambda: self._store.head(key))
        except ObjectMissingError:
            return None
        return _Present(info.etag)

    async def _found_surely(self, key: str) -> str | None:
        """Give the id of the save whose manifest is there, as `_found` does.

        Unless it is this one's, twice the same: what was changed on the way must not cost data.
        """
        found = await self._found(key)
        for _ in range(_MAX_SETTLING):
            before = found
            if found == self._save_id or (found := await self._found(key)) == before:
                break
        return found

    async def _found(self, key: str) -> str | None:
        """Give the id of the save whose manifest is there; `None` without one.

        Empty for one that nobody can read: damaged, or of a newer version.
        """
        try:
            _, data = await read_whole(self._store, self._requests, key)
            pointer = decode_pointer(data)
            return pointer.save_id if pointer else decode_summary(data).save_id
        except ObjectMissingError:
            return None
        except FormatError:
            return ""

    async def _clean_up(self, replaced: _Present | None) -> None:
        """Remove what the commit made needless; an event, not an error, if it stays."""
        keys = () if replaced is None else replaced.keys
        await self._delete([*keys, self._key(ATTEMPT_PREFIX + self._save_id)])

    async def abort(self) -> None:
        """Remove everything this attempt made; see `interface.Attempt`."""
        if self._published or self._left:
            return
        await shielded(self._abort())

    async def _abort(self) -> None:
        for sink in self._sinks:
            await self._quietly(sink.key, sink.discard)
        keys = [sink.key for sink in self._sinks]
        if self._leads:  # files of ranks that died go with it
            found = await self._ours()
            keys += [info.key for info in found.objects if _owner(info.key) == self._save_id]
            for upload in found.uploads:
                if _owner(upload.key) == self._save_id:
                    await self._drop(upload)
            keys.append(self._key(ATTEMPT_PREFIX + self._save_id))
        await self._delete(sorted(set(keys)))

    async def leave(self) -> None:
        """Let go, and remove nothing; see `interface.Attempt`."""
        self._left = True
        self._sinks.clear()

    async def _sweep(self) -> None:
        """Remove what saves that were killed left: nothing of a living one, or a checkpoint.

        Listed first, so that a save that ends meanwhile has its manifest in place before
        that is read.
        """
        found = await self._ours()
        active: dict[str, float] = {}
        for key, when in found.signs():
            owner = _owner(key)
            if owner and owner != self._save_id:
                active[owner] = max(active.get(owner, 0.0), when)
        dead = {owner for owner, when in active.items() if when + QUIET_S < time.time()}
        if not dead:
            return
        committed = await self._found_surely(self._key(MANIFEST_NAME))
        if committed == "":
            return  # what it needs is not known
        dead.discard(committed or "")
        for upload in found.uploads:
            if _owner(upload.key) in dead:
                await self._drop(upload)
        keys = [info.key for info in found.objects if _owner(info.key) in dead]
        if keys and await self._delete(keys):
            names = tuple(_name(key) for key in keys)
            self._emit(LeftoversRemoved(path=self._url, files=names))

    async def _ours(self) -> _Listing:
        """List what saves left under the prefix; nothing if it cannot be listed."""
        prefix = self._key("")
        try:
            objects = await self._requests.run("list", prefix, lambda: self._store.list(prefix))
            uploads = await self._requests.run("list", prefix, lambda: self._store.uploads(prefix))
        except (StorageError, StoreError) as error:
            self._cannot(prefix, error)
            return _Listing((), ())
        return _Listing(tuple(objects), tuple(uploads))

    async def _drop(self, upload: UploadInfo) -> None:
        await self._quietly(upload.key, lambda: self._store.drop_upload(upload))

    async def _delete(self, keys: Sequence[str]) -> bool:
        """Remove objects, some with each request, so that none takes for ever."""
        batches = [keys[i : i + _MAX_DELETED] for i in range(0, len(keys), _MAX_DELETED)]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._quietly(batch[0], functools.partial(self._store.delete, batch)),
                    name=f"delete {batch[0]}",
                )
                for batch in batches
            ]
        return all(task.result() for task in tasks)

    async def _quietly(self, key: str, request: Callable[[], Awaitable[None]]) -> bool:
        """Remove something; an event, not an error, if it stays."""
        try:
            await self._requests.run("remove", key, request)
        except ObjectMissingError:
            return True
        except (StorageError, StoreError) as error:
            self._cannot(key, error)
            return False
        return True

    def _cannot(self, key: str, error: StorageError | StoreError) -> None:
        """Say that something stays that is no longer needed."""
        reason = error if isinstance(error, OSError) else OSError(errno.EIO, error.problem)
        self._emit(CleanupFailed(path=self._url, file=_name(key), error=reason))

    def _key(self, name: str) -> str:
        return join_key(self._prefix, name)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _owner(key: str) -> str:
    """Give the id of the save that a key belongs to; empty for what is none of ours."""
    match = _OURS.fullmatch(_name(key))
    return match[1] if match else ""
