"""A prefix of an object store: what is there, and how it is removed when nobody needs it.

There are no locks in an object store: a save is alive as long as something of it was written
within the last hour. What time it is, the store says, by the mark that the save that asks
has written just before: clocks of hosts play no part. What a store cannot date is left
alone.

Only what lies directly under the prefix is looked at: what is below belongs to other
checkpoints.
"""

from __future__ import annotations

import errno
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import run_all
from ckptio.errors import FormatError, StorageError
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.format.summary import decode_summary
from ckptio.storage.file_names import ATTEMPT_PREFIX, NOTE_PREFIX, QUIET_S, TOMB
from ckptio.storage.keys import join_key, split_query
from ckptio.storage.object_commit import read_commit
from ckptio.storage.store import ObjectMissingError, RefusedError, StoreError, may_be_same

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence

    from ckptio.events import Event
    from ckptio.storage.requests import Requests
    from ckptio.storage.store import ObjectInfo, ObjectStore, UploadInfo

_OURS = re.compile(r"(?:data-|\.attempt-|\.copy-|\.?manifest-)([0-9a-f]{32})(?:[-.].*)?")


@dataclass(frozen=True, slots=True)
class Present:
    """The manifest that is there.

    Attributes:
        etag: Tells it apart from others.
        save_id: The save that wrote it; empty if it cannot be read.
        names: Of its data files, of what it points to, and of a note.
    """

    etag: str
    save_id: str
    names: tuple[str, ...]

    def may_need(self, name: str) -> bool:
        """Whether a file is named by it, or may be; not its mark, nor what a removal left of it."""
        if name in self.names:
            return True
        is_over = name.startswith(ATTEMPT_PREFIX) or TOMB.fullmatch(name) is not None
        return owner_of(name) == self.save_id and not is_over

    def may_be(self, other: Present | None) -> bool:
        """Whether it may be the one that was there at another time."""
        return other is not None and may_be_same(self.etag, other.etag)


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies directly under a prefix.

    Attributes:
        objects: Objects.
        uploads: Uploads that were begun and not ended.
    """

    objects: tuple[ObjectInfo, ...] = ()
    uploads: tuple[UploadInfo, ...] = ()

    def signs(self) -> Iterator[tuple[str, float]]:
        """Give each key, and when something was last seen of it."""
        yield from ((info.key, info.modified_s) for info in self.objects)
        yield from ((upload.key, upload.active_s) for upload in self.uploads)

    def of(self, owners: Collection[str]) -> Listing:
        """Give what belongs to some saves."""
        return Listing(
            tuple(info for info in self.objects if owner_of(info.key) in owners),
            tuple(upload for upload in self.uploads if owner_of(upload.key) in owners),
        )

    def also_in(self, other: Listing) -> Listing:
        """Give what is in another listing, too."""
        objects = {info.key for info in other.objects}
        return Listing(
            tuple(info for info in self.objects if info.key in objects),
            tuple(upload for upload in self.uploads if upload in other.uploads),
        )

    def has(self, name: str) -> bool:
        """Whether there is an object of a name."""
        return any(name_of(info.key) == name for info in self.objects)

    def time_of(self, save_id: str) -> float:
        """Say when a save marked itself as alive; 0 if it has not, or nobody knows."""
        mark = ATTEMPT_PREFIX + save_id
        return max((when for key, when in self.signs() if name_of(key) == mark), default=0.0)

    def dead_saves(self, now_s: float, quiet_s: float = QUIET_S) -> set[str]:
        """Name the saves of which nothing was heard for long.

        Args:
            now_s: What time it is where the store is; none is dead at 0.
            quiet_s: How long.
        """
        latest: dict[str, float] = {}
        for key, when in self.signs():
            if owner := owner_of(key):
                # what has no time may be of this very moment
                latest[owner] = max(latest.get(owner, 0.0), when or now_s)
        return {owner for owner, when in latest.items() if when + quiet_s < now_s}


class ObjectPlace:
    """A prefix, and who asks there.

    Args:
        url: What the user called it; for messages.
        prefix: Of its keys, without a slash at the end.
        store: Where it is.
        requests: Tries requests.
        emit: Takes events.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        store: ObjectStore,
        requests: Requests,
        emit: Callable[[Event], None],
    ) -> None:
        self.url = url
        self.store = store
        self.requests = requests
        self._prefix = prefix
        self._emit = emit
        self._has_told = False

    def key(self, name: str) -> str:
        """Give the key of a file."""
        return join_key(self._prefix, name)

    def hurry(self) -> None:
        """Do the rest within ten seconds: the caller has given up, and a sweep finds what stays."""
        self.requests = self.requests.brief()

    async def present(self) -> Present | None:
        """Look at the manifest that is there, if there is one.

        One that cannot be read is read once more: it may have been damaged on its way, and
        nobody would remove what it names when it is replaced.

        Raises:
            StorageError: It cannot be told.
        """
        key = self.key(MANIFEST_NAME)
        for is_last in (False, True):
            try:
                info, data, pointed = await read_commit(self.store, self.requests, self._prefix)
                summary = decode_summary(data)
            except ObjectMissingError:
                return None
            except FormatError:  # damaged, or of a newer version: what it needs stays
                if is_last:
                    return await self._unreadable(key)
            else:
                break
        names = (*(f.name for f in summary.files), *map(name_of, pointed))
        names += (NOTE_PREFIX + summary.save_id,)
        return Present(info.etag, summary.save_id, names)

    async def _unreadable(self, key: str) -> Present | None:
        """Look at a manifest that is there and cannot be read."""
        info = await self.requests.look(self.store, key)
        return None if info is None else Present(info.etag, "", ())

    async def listed(self) -> Listing:
        """List what lies here; an event, not an error, and nothing if it cannot be listed."""
        try:
            return await self.list()
        except StorageError as error:
            self.cannot(self.key(""), error)
            return Listing()

    async def list(self) -> Listing:
        """List what lies here; without uploads, and with an event, where those may not be seen.

        What is called as the prefix itself is none of it: SeaweedFS lists that for a few minutes
        where everything was removed, and consoles make one for a directory.

        Raises:
            StorageError: It cannot be listed.
        """
        prefix = self.key("")
        objects = await self.requests.must("list", prefix, lambda: self.store.list(prefix))
        objects = [info for info in objects if info.key != prefix]
        near = [upload for upload in await self._uploads() if "/" not in upload.key[len(prefix) :]]
        return Listing(tuple(objects), tuple(near))

    async def _uploads(self) -> Sequence[UploadInfo]:
        """List uploads; none, and an event, where this user may not.

        It takes a permission of its own. A save that lives has a mark that says so.
        """
        prefix = self.key("")
        try:
            return await self.requests.must(
                "list uploads below", prefix, lambda: self.store.uploads(prefix)
            )
        except StorageError as error:
            if not isinstance(error.__cause__, RefusedError):
                raise
            self.cannot(prefix, error)
            return ()

    async def sweep(self, save_id: str) -> None:
        """Remove what saves that were killed left: nothing of a living one, or a checkpoint.

        It is looked at twice: whoever goes on with a save marks it first, so what was taken up
        meanwhile is not dead the second time.

        Args:
            save_id: The save that asks, and that has just marked itself as alive.
        """
        found = await self._left_by_dead(save_id)
        if found.objects or found.uploads:
            found = found.also_in(await self._left_by_dead(save_id))
        if names := await self.remove(found):
            self._emit(LeftoversRemoved(path=self.url, files=names))

    async def _left_by_dead(self, save_id: str) -> Listing:
        """List what saves left that are dead; nothing if that cannot be told.

        Listed first, so that a save that ends meanwhile has its manifest in place before
        that is read.
        """
        found = await self.listed()
        dead = found.dead_saves(found.time_of(save_id))
        if not dead:
            return Listing()
        key = self.key(MANIFEST_NAME)
        try:
            present = await self.present()
        except StorageError as error:
            self.cannot(key, error)
            return Listing()
        left = found.of(dead)
        if present is None:
            if found.has(MANIFEST_NAME):  # it was there just now: one wrong answer costs nothing
                self.cannot(key, RefusedError("it is listed and cannot be found; all stays"))
                return Listing()
            return left
        if not present.save_id:
            return Listing()  # whatever a manifest that cannot be read may need stays
        return Listing(
            tuple(info for info in left.objects if not present.may_need(name_of(info.key))),
            left.uploads,  # of itself, too: they were given up
        )

    async def is_swept(self, mark: str, names: Sequence[str]) -> bool:
        """Whether the mark of a save is gone, and a file of it; an event, and no, if nobody knows.

        The mark alone goes where another process commits the same copy.
        """
        try:
            if await self.requests.look(self.store, mark) is not None:
                return False
            listed = await self.list()
        except StorageError as error:
            self.cannot(mark, error)
            return False
        return not all(map(listed.has, names))

    async def remove(self, found: Listing) -> tuple[str, ...]:
        """Remove objects and abort uploads; gives the names of the objects that are gone."""
        await self.drop(found.uploads)
        return await self.delete([info.key for info in found.objects])

    async def drop_lost(self, key: str) -> None:
        """Drop all uploads of an object, within ten seconds: none of them is needed.

        Events, not errors, for what stays. Where uploads cannot be listed, it is one event for all
        objects, and nobody asks again.
        """
        if self._has_told:
            return
        requests = self.requests.brief()
        try:
            found = await requests.must("list uploads of", key, lambda: self.store.uploads(key))
        except StorageError as error:
            if not self._has_told:  # meanwhile, by another
                self._has_told = True
                self.cannot(self.key(""), error)
            return
        for upload in found:
            if upload.key == key:
                await self.quietly(key, functools.partial(self.store.drop_upload, upload), requests)

    async def drop(self, uploads: Iterable[UploadInfo]) -> None:
        """Abort uploads, at once; events, not errors, for what stays."""
        await run_all([self._drop(upload) for upload in uploads], "drop")

    async def _drop(self, upload: UploadInfo) -> None:
        await self.quietly(upload.key, lambda: self.store.drop_upload(upload))

    async def delete(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Remove objects, each by a request of its own; events, not errors, for what stays.

        Returns:
            The names of those that are gone.
        """
        gone = await run_all([self._delete(key) for key in keys], "remove")
        return tuple(name_of(key) for key, is_gone in zip(keys, gone, strict=True) if is_gone)

    async def _delete(self, key: str) -> bool:
        return await self.quietly(key, lambda: self.store.delete([key]))

    async def quietly(
        self,
        key: str,
        request: Callable[[], Awaitable[None]],
        requests: Requests | None = None,
    ) -> bool:
        """Send what removes something; give whether it is gone. An event, not an error, if not."""
        try:
            await (requests or self.requests).run("remove", key, request)
        except ObjectMissingError:
            return True
        except StorageError as error:
            self.cannot(key, error)
            return False
        return True

    def cannot(self, key: str, error: StorageError | StoreError) -> None:
        """Emit an event: something stays that may not be needed any more."""
        reason = error if isinstance(error, OSError) else OSError(errno.EIO, error.problem)
        self._emit(CleanupFailed(path=self.url, file=name_of(key), error=reason))


def name_of(key: str) -> str:
    """Give the last part of a key, as it may be shown."""
    return split_query(key)[0].rpartition("/")[2]


def owner_of(key: str) -> str:
    """Give the id of the save that a key belongs to; empty for what is none of ours."""
    match = _OURS.fullmatch(name_of(key))
    return match[1] if match else ""
