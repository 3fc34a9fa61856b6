"""A place that may hold a checkpoint of ours, or one that another program wrote.

Ours is looked for first and costs nothing more; where there is none, what is there is
recognised by its names and its first bytes.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.errors import CheckpointNotFoundError
from ckptio.foreign.folder import Folder
from ckptio.foreign.safetensors import STEMS, SafetensorsReader, read_index
from ckptio.storage.blocks import storage_error

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from concurrent.futures import Executor

    from ckptio.foreign.interface import ForeignReader
    from ckptio.format.manifest import Manifest
    from ckptio.storage.interface import Attempt, AwaitedSource, Note, Source, Storage

_ZIP = b"PK\x03\x04"
#: How `torch.save` began before it wrote zip files: a pickled magic number.
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


class AnyStorage:
    """A local place, read in whichever format is there, and written in ours.

    Args:
        inner: The place for checkpoints of ours.
        block_nbytes: The unit in which foreign files are read.
        executor: Threads for calls that block.
    """

    def __init__(self, inner: Storage, block_nbytes: int, executor: Executor) -> None:
        self._inner = inner
        self._block_nbytes = block_nbytes
        self._executor = executor
        self._reader: ForeignReader | None = None
        self._is_known = False

    @property
    def path(self) -> str:
        """What the user called it."""
        return self._inner.path

    @property
    def identity(self) -> str:
        """The same for two names of the same place."""
        return self._inner.identity

    @property
    def gap_nbytes(self) -> int:
        """As the place for checkpoints of ours has it."""
        return self._inner.gap_nbytes

    async def version(self) -> Hashable:
        """Tell manifests apart; see `storage.interface.Storage`."""
        self._is_known = False
        reader = await self._recognised()
        if reader is None:
            return await self._inner.version()
        return await run_blocking(self._executor, lambda: reader.version)

    async def read_manifest(self) -> tuple[Hashable, bytes | Manifest]:
        """Read our manifest, or make one of what is there."""
        self._is_known = False
        reader = await self._recognised()
        if reader is None:
            return await self._inner.read_manifest()
        version = await run_blocking(self._executor, lambda: reader.version)
        return version, await run_blocking(self._executor, reader.manifest)

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Give the size of each data file; see `storage.interface.Storage`."""
        reader = await self._recognised()
        if reader is None:
            return await self._inner.sizes(names)
        return await run_blocking(self._executor, reader.sizes, names)

    async def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Open a data file; see `storage.interface.Storage`."""
        reader = await self._recognised()
        if reader is None:
            return await self._inner.open(name, nbytes)
        opened: list[Source] = []
        try:
            await run_blocking(self._executor, lambda: opened.append(reader.open(name, nbytes)))
        except BaseException:
            for source in opened:  # cancelled while the thread opened it: nobody else has it
                source.close()
            raise
        return opened[0]

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> Attempt:
        """Begin a save, of ours."""
        return await self._inner.begin(save_id, overwrite=overwrite, resumes=resumes)

    async def join(self, save_id: str) -> Attempt:
        """Take part in a save, of ours."""
        return await self._inner.join(save_id)

    async def take_note(self, save_id: str) -> Note | None:
        """Take a note, of ours."""
        return await self._inner.take_note(save_id)

    async def has_note(self, save_id: str) -> bool:
        """Look for a note, of ours."""
        return await self._inner.has_note(save_id)

    async def _recognised(self) -> ForeignReader | None:
        """Give the reader of what is there; `None` for ours, or nothing."""
        if not self._is_known:
            try:
                await self._inner.version()
            except CheckpointNotFoundError:
                self._reader = await run_blocking(
                    self._executor, find_reader, self._inner.path, self._block_nbytes
                )
            else:
                self._reader = None
            self._is_known = True
        return self._reader


def find_reader(path: str, block_nbytes: int) -> ForeignReader | None:
    """Recognise what is at a path. Blocks.

    Returns:
        What reads it; `None` if it is nothing that is known.

    Raises:
        FormatError: It is known, and not what it should be.
        StorageError: It cannot be read.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(error, path, "cannot stat it") from error
    if stat.S_ISDIR(mode):
        return _find_in_folder(Folder(path), block_nbytes)
    if stat.S_ISREG(mode):
        return _find_in_file(path, block_nbytes)
    return None


def _find_in_folder(folder: Folder, block_nbytes: int) -> ForeignReader | None:
    """Recognise a directory."""
    if folder.status(".metadata") is not None:
        from ckptio.foreign.dcp import DcpReader  # noqa: PLC0415  # where there is one

        return DcpReader(folder, block_nbytes)
    for stem in STEMS:
        index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        if folder.status(index) is not None:
            return read_index(folder, index, block_nbytes)
        if folder.status(single) is not None:
            return SafetensorsReader(folder, [single], block_nbytes=block_nbytes)
    return None


def _find_in_file(path: str, block_nbytes: int) -> ForeignReader | None:
    """Recognise a file."""
    folder, name = Folder(os.path.dirname(path)), os.path.basename(path)
    head = folder.read(name, 0, 16)
    if name.endswith(".safetensors.index.json"):
        return read_index(folder, name, block_nbytes)
    if head.startswith((_ZIP, _OLD_TORCH)):
        from ckptio.foreign.torchsave import TorchSaveReader  # noqa: PLC0415  # imports torch

        return TorchSaveReader(folder, name, block_nbytes)
    # a header is an object, and only its length stands before it
    if name.endswith(".safetensors") or head[8:9] == b"{":
        return SafetensorsReader(folder, [name], block_nbytes=block_nbytes)
    return None
