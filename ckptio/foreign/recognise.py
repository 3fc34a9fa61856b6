"""What another program wrote at a place, recognised by its names and its first bytes."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptio.errors import CheckpointNotFoundError, StorageError, UnknownFormatError
from ckptio.foreign.archive import ZIP
from ckptio.foreign.folder import LocalFolder
from ckptio.foreign.parts import CONSOLIDATE, SHARD
from ckptio.foreign.safetensors import STEMS, SafetensorsReader, read_index
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.blocks import storage_error
from ckptio.storage.store import RefusedError

if TYPE_CHECKING:
    from ckptio.foreign.folder import Folder
    from ckptio.foreign.interface import ForeignReader
    from ckptio.foreign.objects import ObjectFolder

#: What libraries of models called their files before they wrote safetensors.
_INDEX_SUFFIX = ".bin.index.json"
_TORCH_FILES = (
    "pytorch_model.bin",
    f"pytorch_model{_INDEX_SUFFIX}",
    "diffusion_pytorch_model.bin",
    "adapter_model.bin",
)
#: Other files of tensors. `model-00001-of-00002.safetensors` is not looked for: without an index it
#: is of a checkpoint that was not finished, and is none; nor is a data file of ours, for the same.
_WEIGHTS = re.compile(
    r"(?!\.|data-[0-9a-f]+-\d+-\d+\.safetensors|.*-\d+-of-\d+\.safetensors).+\.safetensors"
)
#: How `torch.save` began before it wrote zip files: a pickled magic number, of any protocol that is
#: not text; from the fourth on in a frame, which torch does not read, and says so.
_OLD_TORCH = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL
)
_HEAD_NBYTES = 32


def may_mean_absent(error: StorageError) -> bool:
    """Whether an error means that nothing is there, or may: some servers refuse instead."""
    return isinstance(error, CheckpointNotFoundError) or isinstance(error.__cause__, RefusedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlPlaces:
    """Where what a URL names may lie: it is a file, or a directory.

    Attributes:
        below: What is in the directory.
        beside: What is where the file is; `None` where it can be none.
        name: Of the file.
        is_web: Whether a page may stand for the directory.
        block_nbytes: The unit in which it is read.
        order: What `rules.byte_order` gave to the caller.
    """

    below: ObjectFolder
    beside: ObjectFolder | None
    name: str
    is_web: bool
    block_nbytes: int
    order: Any

    def find(self) -> tuple[ForeignReader | None, ObjectFolder]:
        """Recognise what is there. Blocks.

        Returns:
            What reads it, `None` if nothing is known there; and whichever of `below` and `beside`
            was looked into last, which the reader has.

        Raises:
            FormatError: It is known, and not what it should be; or nobody knows it.
            StorageError: It cannot be read.
        """
        if self.beside is None:
            return self._find_below(), self.below
        try:
            status = self.beside.status(self.name)
        except StorageError as error:  # it refuses the directory, and may give what is in it
            return self._find_below_or_raise(is_likely=may_mean_absent(error)), self.below
        if status is None or not status.nbytes:  # some tools mark a directory by such an object
            reader = self._find_below()
            if reader is not None or status is None:
                return reader, self.below
        try:
            reader = find_in_file(self.beside, self.name, self.block_nbytes, self.order)
        except UnknownFormatError:
            return self._find_below_or_raise(is_likely=self.is_web), self.below
        return reader, self.beside

    def _find_below(self) -> ForeignReader | None:
        return find_in_folder(self.below, self.block_nbytes, self.order)

    def _find_below_or_raise(self, *, is_likely: bool) -> ForeignReader:
        """Look in the directory; if nothing is found, raise the error again.

        Only to be called in an `except` block: it is that block's error.
        """
        if is_likely:
            with contextlib.suppress(StorageError):
                reader = self._find_below()
                if reader is not None:
                    return reader
        raise  # noqa: PLE0704  # as it says


def find_reader(path: str, block_nbytes: int, order: Any) -> ForeignReader | None:
    """Recognise what is at a path. Blocks.

    Args:
        path: It.
        block_nbytes: The unit in which it is read.
        order: What `rules.byte_order` gave to the caller.

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
        return find_in_folder(LocalFolder(path), block_nbytes, order)
    if stat.S_ISREG(mode):
        folder = LocalFolder(os.path.dirname(path))
        return find_in_file(folder, os.path.basename(path), block_nbytes, order)
    return None


def find_in_folder(folder: Folder, block_nbytes: int, order: Any) -> ForeignReader | None:
    """Recognise a directory."""
    if folder.status(".metadata") is not None:
        from ckptio.foreign.dcp import DcpReader  # noqa: PLC0415  # where there is one

        return DcpReader(folder, block_nbytes, order)
    for stem in STEMS:
        index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        if folder.status(single) is not None:  # first, as in Hugging Face's libraries
            return SafetensorsReader(folder, [single], block_nbytes=block_nbytes)
        if folder.status(index) is not None:
            return read_index(folder, index, block_nbytes)
    _require_nothing_known(folder)
    return None


def _require_nothing_known(folder: Folder) -> None:
    """Refuse a directory with files that are read one by one, or not at all.

    It is not "not there", after which a run would begin anew. That also stops a run whose own
    directory has such a file from the first; at its beginning, where it is told what to do.
    Rejected: an error that is a `CheckpointNotFoundError`, too, by which a run that was to go on
    from weights of an unknown name would begin anew and say nothing.

    Raises:
        UnknownFormatError: There is one. It says what to give.
    """
    for name, status in zip(_TORCH_FILES, folder.each(folder.status, _TORCH_FILES), strict=True):
        if status is not None:
            raise UnknownFormatError(_of_torch(folder, name))
    if shards := folder.matching(SHARD):
        raise UnknownFormatError(
            f"{folder.root!r} has parts of tensors as ranks of torch.distributed.checkpoint wrote"
            f" them ({shards[0]!r}), and no index; {CONSOLIDATE}, or load each by its own path"
        )
    if files := folder.matching(_WEIGHTS):
        raise UnknownFormatError(
            f"{folder.root!r} has {files[0]!r}, which is not what a checkpoint's only file, or its"
            " index, is called; give the file's own path, or keep it elsewhere if a"
            " checkpoint is yet to be saved here"
        )


def _of_torch(folder: Folder, name: str) -> str:
    """Say what to do with what libraries of models wrote with torch.save."""
    if name.endswith(_INDEX_SUFFIX):
        return (
            f"{folder.join(name)!r} is an index of files that torch.save wrote; load each of them"
            " by its own path, or write safetensors files (safe_serialization=True)"
        )
    return f"{folder.root!r} has {name!r}, which torch.save wrote; give its own path"


def find_in_file(folder: Folder, name: str, block_nbytes: int, order: Any) -> ForeignReader:
    """Recognise a file.

    Raises:
        UnknownFormatError: It is of no known format: it is not "not there", after which a run would
            begin anew.
    """
    head = folder.read(name, 0, _HEAD_NBYTES)
    if not head:
        raise UnknownFormatError(f"{folder.join(name)!r} is empty: nothing was written to it")
    if name.endswith(".safetensors.index.json"):
        return read_index(folder, name, block_nbytes)
    if head.startswith(ZIP) or _OLD_TORCH.match(head):
        from ckptio.foreign.torchsave import TorchSaveReader  # noqa: PLC0415  # imports torch

        return TorchSaveReader(folder, name, block_nbytes, order)
    # a header is an object, and only its length stands before it
    if name.endswith(".safetensors") or head[8:9] == b"{":
        return SafetensorsReader(folder, [name], is_alone=True, block_nbytes=block_nbytes)
    if name.endswith(_INDEX_SUFFIX):
        raise UnknownFormatError(_of_torch(folder, name))
    folder.require_no_pointer(name)
    if name == MANIFEST_NAME:
        raise UnknownFormatError(
            f"{name!r} is a checkpoint's manifest: give the directory that it is in"
        )
    raise UnknownFormatError(
        f"{name!r} is a file of no known format: it begins with {head[:8]!r}, and neither files of"
        " torch.save nor safetensors files do"
    )
