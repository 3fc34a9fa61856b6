"""A checkpoint under a prefix of an object store: reading it, and where a save of it begins.

    <prefix>/manifest.json                              the commit; written last, in one step
    <prefix>/manifest-<save id>.json                    a large manifest, to which that points
    <prefix>/data-<save id>-<rank>-<index>.safetensors  in parts; there when complete
    <prefix>/.attempt-<save id>                         says that a save is, or was, under way

`storage.object_attempt` has what a save writes, and in which order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._aio import run_all
from ckptio.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.file_names import NOTE_PREFIX, numbered
from ckptio.storage.keys import join_key, split_query
from ckptio.storage.notes import MAX_NOTE_NBYTES
from ckptio.storage.object_attempt import ObjectAttempt, elapsed_s
from ckptio.storage.object_commit import read_commit
from ckptio.storage.object_files import ObjectNote, ObjectSource
from ckptio.storage.object_place import ObjectPlace
from ckptio.storage.requests import Requests
from ckptio.storage.store import ObjectMissingError, version_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.format.manifest import Manifest
    from ckptio.storage.store import ObjectStore
    from ckptio.storage.stores import OpenStore

#: How many names are looked at for one that is a checkpoint, where here is none.
_MAX_LOOKS_BELOW = 4
#: What tells one manifest from another: its etag, size and time.
Version = tuple[str, int, float]


class ObjectStorage:
    """The place of one checkpoint in an object store. Belongs to the loop of the engine.

    Args:
        url: What the user called it.
        store: Opens the store at the first use.
        prefix: Of its keys, without a slash at the end.
        config: Limits of requests, sizes.
        emit: Takes events.
        rng: Draws how long to wait before a request is tried again.
        clock: Gives seconds since some moment; by it a save says now and then that it lives.
    """

    is_outlived = False  # a request can be given up

    def __init__(
        self,
        url: str,
        store: OpenStore,
        prefix: str,
        config: CheckpointConfig,
        emit: Callable[[Event], None],
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = elapsed_s,
    ) -> None:
        self._url = url
        self._open_store = store
        self._prefix = prefix
        self._config = config
        self._emit = emit
        self._rng = rng
        self._clock = clock
        self._requests: Requests | None = None

    @property
    def path(self) -> str:
        """The URL."""
        return self._url

    @property
    def identity(self) -> str:
        """The store and the prefix."""
        return f"{self._open_store.identity}/{self._prefix}"

    async def identify(self) -> str:
        """The same; see `interface.Storage`."""
        return self.identity

    identify_now = identify  # it has always answered

    async def locate(self, *, gives_up: bool = True) -> bool:
        """Nothing: its name says where it is; see `interface.Storage`."""
        del gives_up
        return True

    @property
    def gap_nbytes(self) -> int:
        """Bytes worth reading over rather than sending another request."""
        return self._open_store.gap_nbytes

    async def version(self) -> Version:
        """Look at the manifest; see `interface.Storage`."""
        store, requests = await self._ready()
        info = await requests.look(store, self._join(MANIFEST_NAME))
        if info is None:
            raise CheckpointNotFoundError(self._url)
        return version_of(info)

    async def read_manifest(self) -> tuple[Version, bytes]:
        """Read the manifest, and what tells just these bytes apart."""
        store, requests = await self._ready()
        try:
            info, manifest, _ = await read_commit(store, requests, self._prefix)
        except ObjectMissingError:
            raise CheckpointNotFoundError(self._url) from None
        except FormatError as error:
            raise type(error)(f"{self._url!r}: {error}") from None
        return version_of(info), manifest

    async def peek_manifest(self) -> bytes:
        """Read the manifest: that ends; see `interface.Storage`."""
        return (await self.read_manifest())[1]

    async def find_below(self) -> str:
        """List one level, and look at the last names in it; see `interface.Storage`.

        Steps have numbers: the last name is the highest. All of it ends within ten seconds.
        """
        if split_query(self._url)[1]:
            return ""  # a query asks for one object
        try:
            store, requests = await self._ready()
            requests, prefix = requests.brief(), self._join("")
            listed = await requests.must("list", prefix, lambda: store.list(prefix))
            names = (info.key[len(prefix) :] for info in listed if info.key.endswith("/"))
            below = filter(None, (name.rstrip("/") for name in names))
            last = sorted(below, key=numbered)[-_MAX_LOOKS_BELOW:]
            keys = [join_key(prefix + name, MANIFEST_NAME) for name in last]
            looks = await run_all((requests.look(store, key) for key in keys), "look below")
        except Exception:  # the caller raises what it has in hand
            return ""
        found = [name for name, info in zip(last, looks, strict=True) if info is not None]
        return found[-1] if found else ""

    def remember(self, manifest: Manifest) -> None:
        """Nothing: there is no need to know; see `interface.Storage`."""

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Look at data files, at once; see `interface.Storage`."""
        store, requests = await self._ready()
        looks = (requests.look(store, self._join(name)) for name in names)
        infos = await run_all(looks, "size of an object")
        return [None if info is None else info.nbytes for info in infos]

    async def open(self, name: str, nbytes: int) -> ObjectSource:
        """Give what reads a data file; sends nothing."""
        store, requests = await self._ready()
        return ObjectSource(self._url, store, requests, self._join(name), name, nbytes)

    async def opener(self) -> None:
        """Nothing: reading awaits; see `interface.Storage`."""

    async def is_cached(self, ranges: Sequence[tuple[str, int, int]]) -> bool:
        """Nothing is kept of what was read; see `interface.Storage`."""
        del ranges
        return False

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> ObjectAttempt:
        """Begin a save; see `interface.Storage`."""
        if not overwrite:
            try:
                await self.version()
            except CheckpointNotFoundError:
                pass
            else:
                raise CheckpointExistsError(self._url)
        attempt = await self._attempt(save_id, overwrite=overwrite, leads=True)
        try:
            await attempt.prepare(resumes=resumes)
        except BaseException:  # cancelled, as a rule: nobody else knows of the mark
            await (attempt.leave() if resumes else attempt.abort())
            raise
        return attempt

    async def join(self, save_id: str) -> ObjectAttempt:
        """Take part in a save of many ranks; see `interface.Storage`."""
        return await self._attempt(save_id, overwrite=True, leads=False)

    async def resume(self, save_id: str, *, overwrite: bool) -> ObjectAttempt:
        """Go on with a save that `begin` began, on another loop or in another call.

        What was created before is known by the save's id alone: `commit` and `abort` are right
        for all of it. Sends nothing.
        """
        return await self._attempt(save_id, overwrite=overwrite, leads=True)

    async def take_note(self, save_id: str) -> ObjectNote | None:
        """Take a note; see `interface.Storage`. Nothing keeps others from taking it, too."""
        data = await self.read_note(save_id)
        if data is None:
            return None
        return ObjectNote(*await self._ready(), self._join(NOTE_PREFIX + save_id), data)

    async def read_note(self, save_id: str) -> bytes | None:
        """Read a note; see `interface.Storage`."""
        store, requests = await self._ready()
        key = self._join(NOTE_PREFIX + save_id)
        try:
            _, data = await requests.run("read", key, lambda: store.get(key, MAX_NOTE_NBYTES))
        except ObjectMissingError:
            return None
        return data

    async def has_note(self, save_id: str | None) -> bool:
        """Look for a note; see `interface.Storage`."""
        store, requests = await self._ready()
        if save_id is None:
            prefix = self._join("")
            found = await requests.must("list", prefix, lambda: store.list(prefix))
            return any(info.key[len(prefix) :].startswith(NOTE_PREFIX) for info in found)
        return await requests.look(store, self._join(NOTE_PREFIX + save_id)) is not None

    async def _attempt(self, save_id: str, *, overwrite: bool, leads: bool) -> ObjectAttempt:
        store, requests = await self._ready()
        return ObjectAttempt(
            ObjectPlace(self._url, self._prefix, store, requests, self._emit),
            save_id,
            config=self._config,
            overwrite=overwrite,
            leads=leads,
            clock=self._clock,
        )

    async def reach(self) -> tuple[ObjectStore, Requests, str]:
        """Give the store, what tries requests to it, and the prefix, for files of others.

        Raises:
            ConfigError: The store cannot be opened.
        """
        return *await self._ready(), self._prefix

    async def _ready(self) -> tuple[ObjectStore, Requests]:
        store, limit = await self._open_store.get()
        if self._requests is None:
            self._requests = Requests(self._url, self._config, limit, self._emit, self._rng)
        return store, self._requests

    def _join(self, name: str) -> str:
        return join_key(self._prefix, name)
