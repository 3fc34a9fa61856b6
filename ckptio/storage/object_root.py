"""Checkpoints side by side in an object store: what is there, and how one of them goes.

    <root>/step-00000100/manifest.json           committed
    <root>/step-00000090/.manifest-<id>-old      being removed, if there is no manifest
    <root>/step-00000080/data-<id>-...           no commit: being written, or its save died

Nothing can be renamed here. So a copy of the manifest is written first, under the name that
a removed one has in a directory; then the manifest goes, which makes the checkpoint none;
then data files, and last the copy, which lists them. Whoever is killed in between leaves a
checkpoint or none, and what the next sweep knows to be the rest of one.

Few stores remove an object on condition. So the manifest is looked at once more right
before it goes, and one that another save put there since it was read stays. A save that
replaces a checkpoint in the very moment of its removal may still be removed with it: let
one process look after a run. And so may one that is committed under that name afterwards, if
a request to remove the manifest was not answered, another one was, and the store carries out
the first one late, after that commit. To refuse a name for an hour was rejected: a run that goes
back saves its steps anew, and a store that does this is rare.

A manifest may come back after it went: by a request that the store carries out when the save
that sent it had sent it anew, and was committed. That save has left its mark, and for an hour
from then a removal leaves the files, so that what comes back is whole; a sweep removes them.

What a dead save left goes when the store has seen nothing of it for an hour at least,
however short a while was asked for: there are no locks that tell a living one. The hour is
the store's: before anything goes, its clock is asked.
"""

from __future__ import annotations

import errno
import secrets
import time
from typing import TYPE_CHECKING, TypeVar

from ckptio._aio import run_blocking, run_some
from ckptio._failures import without_frames
from ckptio.errors import CheckpointNotFoundError, FormatError, StorageError
from ckptio.events import LeftoversRemoved
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.format.pointer import decode_pointer, encode_pointer
from ckptio.format.summary import decode_summary
from ckptio.storage.file_names import ATTEMPT_PREFIX, NOTE_PREFIX, QUIET_S, TOMB
from ckptio.storage.object_commit import read_commit, read_whole
from ckptio.storage.object_place import Listing, ObjectPlace, name_of, owner_of
from ckptio.storage.removal import require_save
from ckptio.storage.requests import Requests
from ckptio.storage.root_interface import Found
from ckptio.storage.store import ObjectMissingError, may_be_same, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.format.summary import Summary
    from ckptio.storage.store import ObjectInfo, ObjectStore
    from ckptio.storage.stores import OpenStore

T = TypeVar("T")

#: Requests that are asked for at once: requests wait in line, and a load that begins meanwhile
#: is not to wait for all steps of a run to be looked at. Whoever waits for nothing here asks for
#: half of those that may be under way: with 32, loads took twice as long.
_MAX_LOOKS = 32


class ObjectRoot:
    """A prefix with checkpoints below it; see `root_interface.Root`. Used on one loop.

    Args:
        url: What the user called it.
        store: Opens the store at the first use.
        base: What the keys below begin with: empty, or with a slash at its end.
        config: Limits of requests.
        executor: Threads that take manifests apart.
        emit: Takes events: what could not be removed, and what was swept.
    """

    def __init__(
        self,
        url: str,
        store: OpenStore,
        base: str,
        config: CheckpointConfig,
        executor: Executor,
        emit: Callable[[Event], None],
    ) -> None:
        self._url = url
        self._open_store = store
        self._base = base
        self._config = config
        self._executor = executor
        self._emit = emit

    @property
    def path(self) -> str:
        """The URL."""
        return self._url

    def join(self, name: str) -> str:
        """Give the URL of a checkpoint."""
        return f"{self._url}/{name}"

    async def find(
        self,
        accepts: Callable[[str], bool] | None = None,
        unseen: Callable[[str, StorageError], None] | None = None,
        *,
        aside: bool = False,
    ) -> list[Found]:
        """Find what is there: a listing, a look at each manifest; see `root_interface.Root`."""
        names = await self.names(accepts)
        return await self._look(names, unseen, self._at_once(aside=aside))

    async def names(self, accepts: Callable[[str], bool] | None = None) -> list[str]:
        """List names: one listing; see `root_interface.Root`."""
        store, requests = await self._ready(self._url)
        listed = await requests.must("list", self._base, lambda: store.list(self._base))
        names = [
            info.key.removeprefix(self._base).rstrip("/")
            for info in listed
            if info.key.endswith("/")
        ]
        return [name for name in names if name and (accepts is None or accepts(name))]

    async def look(
        self, names: Sequence[str], accepts: Callable[[str], bool] | None = None
    ) -> list[Found]:
        """Look at manifests, a request each; see `root_interface.Root`."""
        del accepts  # there are no links
        return await self._look(names, None, _MAX_LOOKS)

    async def _look(
        self,
        names: Sequence[str],
        unseen: Callable[[str, StorageError], None] | None,
        at_once: int,
    ) -> list[Found]:
        store, requests = await self._ready(self._url)

        async def look(name: str) -> Found | None:
            key = self._key(name, MANIFEST_NAME)
            try:
                info = await requests.look(store, key)
            except StorageError as error:
                if unseen is None:
                    raise
                unseen(name, error)
                return None
            return Found(name=name, version=None if info is None else version_of(info))

        found = await run_some(look, names, at_once, "look at a manifest")
        return [each for each in found if each is not None]

    async def read_manifest(self, name: str) -> bytes:
        """Read a manifest; see `root_interface.Root`."""
        return (await _Removal(self, name, *await self._ready(self.join(name))).read())[1]

    async def read_manifests(
        self, names: Sequence[str], decode: Callable[[str, bytes], T], *, aside: bool = False
    ) -> list[T | FormatError | StorageError]:
        """Read manifests, a request or two each; see `root_interface.Root`."""

        async def read(name: str) -> T | FormatError | StorageError:
            try:
                data = await self.read_manifest(name)
                return await run_blocking(self._executor, decode, name, data)
            except (FormatError, StorageError) as error:
                return without_frames(error)  # its traceback has this: no reference cycle

        return await run_some(read, names, self._at_once(aside=aside), "read a manifest")

    @property
    def max_aside(self) -> int:
        """Requests at a time of who is to leave as many to others."""
        return max(1, self._config.max_requests // 2)

    def _at_once(self, *, aside: bool) -> int:
        return self.max_aside if aside else _MAX_LOOKS

    async def remove(self, name: str, save_id: str | None = None) -> int:
        """Remove a checkpoint; see `root_interface.Root`."""
        return await _Removal(self, name, *await self._ready(self.join(name))).remove(save_id)

    async def sweep(self, name: str, quiet_s: float) -> None:
        """Remove what a dead save left; see `root_interface.Root`."""
        removal = _Removal(self, name, *await self._ready(self.join(name)))
        await removal.sweep(max(quiet_s, QUIET_S))

    async def _ready(self, url: str) -> tuple[ObjectStore, Requests]:
        """Open the store; requests of one call have one deadline."""
        store, limit = await self._open_store.get()
        return store, Requests(url, self._config, limit, self._emit)

    def _key(self, name: str, file: str = "") -> str:
        return f"{self._base}{name}/{file}"


class _Removal:
    """What is removed under one name."""

    def __init__(self, root: ObjectRoot, name: str, store: ObjectStore, requests: Requests) -> None:
        self._url = root.join(name)
        self._prefix = root._key(name)  # noqa: SLF001  # two halves of one thing
        self._executor = root._executor  # noqa: SLF001  # as above
        self._emit = root._emit  # noqa: SLF001  # as above
        self._store = store
        self._requests = requests
        self._place = ObjectPlace(self._url, self._prefix.rstrip("/"), store, requests, self._emit)

    async def read(self) -> tuple[ObjectInfo, bytes, list[str]]:
        """Read the manifest; gives the keys it is under beside that of the commit, too."""
        try:
            return await read_commit(self._store, self._requests, self._prefix.rstrip("/"))
        except ObjectMissingError:
            raise CheckpointNotFoundError(self._url) from None

    async def remove(self, save_id: str | None) -> int:
        """Remove a checkpoint, manifest first; gives the bytes of its data files."""
        info, data, pointed = await self.read()
        summary = await run_blocking(self._executor, decode_summary, data)
        require_save(self._url, summary, save_id)
        tomb = f"{self._prefix}.manifest-{summary.save_id}-old"
        commit = encode_pointer(summary.save_id, data) if pointed else data
        await self._requests.must("write", tomb, lambda: self._store.put(tomb, commit))
        try:
            is_mine = await self._take_back(info)
        except StorageError:
            if await self._is_there():  # else its files go with the tomb, now or in a sweep
                await self._place.delete([tomb])
            raise
        if not is_mine and (await self._place.list()).has(MANIFEST_NAME):
            raise CheckpointNotFoundError(self._url)  # a wrong answer, or another save's by now
        await self._bury(tomb, summary, pointed)
        if not is_mine:
            raise CheckpointNotFoundError(self._url)
        return summary.nbytes

    async def _take_back(self, read: ObjectInfo) -> bool:
        """Remove the manifest that was read; `False` if somebody else has.

        It is looked at before each try: between two of them, a save may have put its own there.

        Raises:
            StorageError: It could not be removed, or is another one by now.
        """
        key, is_sent = self._prefix + MANIFEST_NAME, False

        async def take() -> bool:
            nonlocal is_sent
            try:
                now = await self._store.head(key)
            except ObjectMissingError:
                return is_sent
            if now.nbytes != read.nbytes or not may_be_same(now.etag, read.etag):
                raise StorageError(
                    "another save was committed there just now; it stays",
                    path=self._url,
                    code=errno.ESTALE,
                )
            is_sent = True
            await self._store.delete([key])
            return True

        return await self._requests.run("remove", key, take)

    async def _is_there(self, file: str = MANIFEST_NAME) -> bool:
        """Whether there is a manifest, or another file; yes if nobody can tell."""
        try:
            return await self._requests.look(self._store, self._prefix + file) is not None
        except StorageError:
            return True

    async def _bury(self, tomb: str, summary: Summary, pointed: Sequence[str]) -> None:
        """Remove the files of a checkpoint that was taken back, and what lists them.

        Unless its manifest may come back: then all of it is left to a sweep.
        """
        marks = await self._quiet_marks(tomb, summary.save_id)
        if marks is None:
            return
        keys = [self._prefix + f.name for f in summary.files if summary.save_id in f.name]
        keys += marks
        if await self._is_there(NOTE_PREFIX + summary.save_id):
            keys.append(f"{self._prefix}{NOTE_PREFIX}{summary.save_id}")
        if len(await self._place.delete(keys)) == len(keys):
            for key in (*pointed, tomb):  # last: what they list is not forgotten
                await self._place.delete([key])

    async def _quiet_marks(self, tomb: str, save_id: str) -> list[str] | None:
        """Give the mark of a committed save, if it has one; `None` if that has not been quiet yet.

        It stands where a request that was never answered may bring the manifest back. By the time
        of the store, as the tomb has it that was written just now.
        """
        mark = f"{self._prefix}{ATTEMPT_PREFIX}{save_id}"
        try:
            made = await self._requests.look(self._store, mark)
            now = None if made is None else await self._requests.look(self._store, tomb)
        except StorageError as error:
            self._place.cannot(mark, error)
            return None
        if made is None or now is None:
            return []
        is_quiet = made.modified_s == 0.0 or made.modified_s + QUIET_S < now.modified_s
        return [mark] if is_quiet else None

    async def sweep(self, quiet_s: float) -> None:
        """Remove what removals that were cut short left, and then what dead saves did.

        Of a removal whose manifest may come back, its mark says so: it goes as a dead save does.
        What dead saves left is looked at twice: whoever goes on with one marks it first.
        """
        found = await self._found()
        if not any(owner_of(key) for key, _ in found.signs()):
            return
        tombs = [info.key for info in found.objects if TOMB.fullmatch(name_of(info.key))]
        tombs = [tomb for tomb in tombs if not found.time_of(owner_of(tomb))]
        for tomb in tombs:
            await self._bury_found(tomb)
        buried = {owner_of(tomb) for tomb in tombs}
        dead = found.dead_saves(time.time(), quiet_s) - buried
        if dead:
            now_s = await self._store_now_s()
            again = await self._found()
            dead &= found.dead_saves(now_s, quiet_s) & again.dead_saves(now_s, quiet_s)
            found = found.also_in(again)
        if names := await self._place.remove(found.of(dead)):
            self._emit(LeftoversRemoved(path=self._url, files=names))

    async def _found(self) -> Listing:
        """List what is there; nothing where there is a checkpoint.

        Listed first: a save that ends meanwhile has its manifest in place by the time that
        is looked for. One that is listed is there, whatever else the store says.
        """
        found = await self._place.list()
        return Listing() if found.has(MANIFEST_NAME) or await self._is_there() else found

    async def _bury_found(self, tomb: str) -> None:
        """Bury what a removal that was cut short left."""
        pointed: list[str] = []
        try:
            _, data = await read_whole(self._store, self._requests, tomb)
            if (pointer := decode_pointer(data)) is not None:
                pointed.append(self._prefix + pointer.pointer)
                _, data = await read_whole(self._store, self._requests, pointed[0])
            summary = await run_blocking(self._executor, decode_summary, data)
        except ObjectMissingError:
            if pointed:  # it went just before the tomb would have
                await self._place.delete([tomb])
            return  # or somebody else was faster
        except FormatError as error:
            failure = StorageError(str(error), path=self._url, code=errno.EBADMSG)
            self._place.cannot(tomb, failure)
            return
        if summary.save_id == owner_of(tomb):
            await self._bury(tomb, summary, pointed)

    async def _store_now_s(self) -> float:
        """Ask what time it is where the store is, by an object that is made and removed."""
        key = f"{self._prefix}{ATTEMPT_PREFIX}{secrets.token_hex(16)}"
        await self._requests.must("write", key, lambda: self._store.put(key, b""))
        try:
            info = await self._requests.look(self._store, key)
        finally:
            await self._place.delete([key])
        # without one, somebody tidies up here, too
        return 0.0 if info is None else info.modified_s or time.time()
