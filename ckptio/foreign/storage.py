"""A place that may hold a checkpoint of ours, or one that another program wrote.

Ours is looked for first, and costs nothing more; where there is none, what is there is recognised,
see `recognise`. (Only at a URL with a query what another program wrote comes first, see `_look`.)
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptio._aio import run_blocking
from ckptio.errors import CheckpointNotFoundError, StorageError, UnknownFormatError
from ckptio.foreign.bridge import Bridge, WaitsError
from ckptio.foreign.interface import seen_in
from ckptio.foreign.objects import ObjectFolder
from ckptio.foreign.recognise import UrlPlaces, find_reader, may_mean_absent
from ckptio.foreign.rules import byte_order
from ckptio.storage.fsspec_answers import BUCKETED, WEB
from ckptio.storage.keys import split_query
from ckptio.storage.objects import ObjectStorage
from ckptio.storage.streams import AwaitedSource

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.foreign.interface import ForeignReader
    from ckptio.format.manifest import Manifest
    from ckptio.storage.interface import Attempt, Note, Storage
    from ckptio.storage.streams import Open, Source

T = TypeVar("T")

#: Requests of one load that its threads wait for at a time.
_MAX_THREADS = 16


class _Other(NamedTuple):
    """What others wrote."""

    reader: ForeignReader


class AnyStorage:
    """A place, read in whichever format is there, and written in ours.

    Args:
        inner: The place for checkpoints of ours.
        config: The unit in which foreign files are read, and limits.
        executor: Threads for calls that block.
    """

    def __init__(self, inner: Storage, config: CheckpointConfig, executor: Executor) -> None:
        self._inner = inner
        self._config = config
        self._executor = executor
        self._bridge = Bridge(min(config.max_requests, _MAX_THREADS))
        self._byte_order = byte_order()  # as it was said where this is made: by the caller
        self._reader: ForeignReader | None = None
        self._folder: ObjectFolder | None = None
        self._seen: Mapping[str, str] = {}
        self._is_known = False

    @property
    def path(self) -> str:
        """What the user called it."""
        return self._inner.path

    @property
    def identity(self) -> str:
        """The same for two names of the same place."""
        return self._inner.identity

    async def identify(self) -> str:
        """Give `identity` as it is now; see `storage.interface.Storage`."""
        return await self._inner.identify()

    async def identify_now(self) -> str | None:
        """Give `identity` if it answers; see `storage.interface.Storage`."""
        return await self._inner.identify_now()

    async def locate(self, *, gives_up: bool = True) -> bool:
        """Find `identity` out; see `storage.interface.Storage`."""
        return await self._inner.locate(gives_up=gives_up)

    @property
    def is_outlived(self) -> bool:
        """As the place for checkpoints of ours has it."""
        return self._inner.is_outlived

    @property
    def gap_nbytes(self) -> int:
        """As the place for checkpoints of ours has it."""
        return self._inner.gap_nbytes

    async def version(self) -> Hashable:
        """Tell manifests apart; see `storage.interface.Storage`."""
        found = await self._look(self._inner.version)
        if isinstance(found, _Other):
            reader = found.reader
            return await self._run(lambda: reader.version)
        return found

    async def read_manifest(self) -> tuple[Hashable, bytes | Manifest]:
        """Read our manifest, or make one of what is there."""
        found = await self._look(self._inner.read_manifest)
        if isinstance(found, _Other):
            reader = found.reader
            return await self._run(lambda: (reader.version, reader.manifest()))
        return found

    async def peek_manifest(self) -> bytes | Manifest:
        """Read our manifest; see `storage.interface.Storage`."""
        return await self._inner.peek_manifest()

    async def find_below(self) -> str:
        """Look for checkpoints of ours below; see `storage.interface.Storage`."""
        return await self._inner.find_below()

    async def _look(self, ask: Callable[[], Awaitable[T]]) -> T | _Other:
        """Ask for ours, and look for what others wrote where there is none.

        What a server gives for a URL with a query may be one file, whatever name is put before
        that: there, what is at the URL itself comes first, if it is of a known format.

        Raises:
            CheckpointNotFoundError: There is neither.
            UnknownFormatError: There is something else.
            StorageError: Nobody says what there is.
        """
        is_queried = bool(split_query(self._inner.path)[1])
        if is_queried:
            try:
                reader = await self._recognise()
            except (UnknownFormatError, StorageError) as error:
                if isinstance(error, StorageError) and not may_mean_absent(error):
                    raise
                try:  # it may be a directory's
                    found = await ask()
                except StorageError as other:
                    if not may_mean_absent(other):
                        raise
                else:
                    self._take_as_ours()
                    return found
                raise
            if reader is not None:
                return _Other(reader)
        try:
            found = await ask()
        except CheckpointNotFoundError:
            reader = None if is_queried else await self._recognise()
            if reader is None:
                raise
            return _Other(reader)
        self._take_as_ours()
        return found

    def remember(self, manifest: Manifest) -> None:
        """Take over from a manifest that is known whose the checkpoint is, and that of its files.

        So nobody has to look whose it is, if it is ours; and other files than those that the
        manifest was made of are refused, if it is not.
        """
        self._seen = seen_in(manifest)
        if not manifest.is_foreign:
            self._take_as_ours()

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Give the size of each data file; see `storage.interface.Storage`."""
        reader = await self._recognised()
        if reader is None:
            return await self._inner.sizes(names)
        if self._folder is not None:
            self._folder.expect(self._seen)
        return await self._run(lambda: reader.sizes(names))

    async def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Open a data file; see `storage.interface.Storage`."""
        reader = await self._recognised()
        if reader is None:
            return await self._inner.open(name, nbytes)
        if isinstance(self._inner, ObjectStorage):
            # no thread where all that it takes is known, as it is once sizes were looked at
            with contextlib.suppress(WaitsError):
                return reader.open(name, nbytes)
        opened: list[Source | AwaitedSource] = []
        try:
            await self._run(lambda: opened.append(reader.open(name, nbytes)))
        except BaseException:
            for source in opened:  # cancelled while the thread opened it: nobody else has it
                if not isinstance(source, AwaitedSource):  # which holds nothing
                    source.close()
            raise
        return opened[0]

    async def opener(self) -> Open | None:
        """Give what opens a data file on the calling thread; see `storage.interface.Storage`."""
        reader = await self._recognised()
        if reader is None:
            return await self._inner.opener()
        if isinstance(self._inner, ObjectStorage):
            return None

        def open_here(name: str, nbytes: int) -> Source:
            source = reader.open(name, nbytes)
            assert not isinstance(source, AwaitedSource)  # noqa: S101  # of a file
            return source

        return open_here

    async def is_cached(self, ranges: Sequence[tuple[str, int, int]]) -> bool:
        """Whether ours is; what others wrote counts as far away."""
        return await self._recognised() is None and await self._inner.is_cached(ranges)

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> Attempt:
        """Begin a save, of ours; from here on, data files are those of ours."""
        attempt = await self._inner.begin(save_id, overwrite=overwrite, resumes=resumes)
        self._take_as_ours()
        return attempt

    async def join(self, save_id: str) -> Attempt:
        """Take part in a save, of ours; see `begin`."""
        attempt = await self._inner.join(save_id)
        self._take_as_ours()
        return attempt

    def _take_as_ours(self) -> None:
        """From here on, read what is there in our own format."""
        self._reader = None
        self._is_known = True

    async def take_note(self, save_id: str) -> Note | None:
        """Take a note, of ours."""
        return await self._inner.take_note(save_id)

    async def read_note(self, save_id: str) -> bytes | None:
        """Read a note, of ours."""
        return await self._inner.read_note(save_id)

    async def has_note(self, save_id: str | None) -> bool:
        """Look for a note, of ours."""
        return await self._inner.has_note(save_id)

    async def _recognised(self) -> ForeignReader | None:
        """Give the reader of what is there; `None` for ours, or nothing."""
        if not self._is_known:
            with contextlib.suppress(CheckpointNotFoundError):
                await self._look(self._inner.version)
        return self._reader

    async def _recognise(self) -> ForeignReader | None:
        """Look what is there that is not ours."""
        if isinstance(self._inner, ObjectStorage):
            url = await self._places_of(self._inner)
            self._reader, self._folder = await self._run(url.find)
        else:
            find = functools.partial(
                find_reader, self._inner.path, self._config.block_nbytes, self._byte_order
            )
            self._reader = await self._run(find)
        self._is_known = True
        return self._reader

    async def _places_of(self, inner: ObjectStorage) -> UrlPlaces:
        """Say where what a URL names may lie."""
        store, requests, prefix = await inner.reach()
        (key, query), (url, _) = split_query(prefix), split_query(inner.path)
        above, slash, name = key.rpartition("/")
        protocol = url.partition("://")[0]
        is_bucket, is_web = not slash and protocol in BUCKETED, protocol in WEB

        def folder(root: str, start: str, query: str) -> ObjectFolder:
            return ObjectFolder(root, start, store, requests, self._bridge, query)

        beside = None
        if name and not is_bucket:
            beside = folder(above_of(url), above + slash, query)
        below = folder(url, f"{key}/" if key else "", query.lstrip("/"))

        return UrlPlaces(
            below=below,
            beside=beside,
            name=name,
            is_web=is_web,
            block_nbytes=self._config.block_nbytes,
            order=self._byte_order,
        )

    async def _run(self, function: Callable[[], T]) -> T:
        """Call what blocks, on a thread that may wait for the loop if it has to."""
        if isinstance(self._inner, ObjectStorage):
            return await self._bridge.run(function)
        return await run_blocking(self._executor, function)


def above_of(url: str) -> str:
    """Cut the last part of a URL's path off, for messages: it may be the one behind `://`.

    What lies there is found by its key alone: file systems cut hosts off, or nothing.
    """
    above = url.rpartition("/")[0]
    return f"{above}/" if above.endswith("/") else above
