"""Write safetensors: one file, or a folder as Hugging Face's libraries read it.

A file is written under another name, synced and renamed when it is whole, so what has its
final name is whole: a conversion that was stopped goes on with the files that are missing.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from ckptio.conversion.own import rename_new, take_lock
from ckptio.conversion.source import Leaf, batches, parts_of
from ckptio.errors import (
    CheckpointExistsError,
    CommitConflictError,
    ConfigError,
    FormatError,
    StorageError,
)
from ckptio.format.bucket import StoredTensor, encode_header
from ckptio.format.encode import TAG
from ckptio.format.manifest import DOCUMENT_NAME
from ckptio.layout import DTYPES
from ckptio.state.tree import leaves as all_leaves
from ckptio.state.tree import tensor_index
from ckptio.storage.blocks import storage_error
from ckptio.storage.files import PosixFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.conversion.source import Source

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Written:
    """A file of a conversion.

    Attributes:
        name: Its name in the destination, or its path.
        nbytes: Its size.
        was_there: Whether it was whole already and was not written again.
    """

    name: str
    nbytes: int
    was_there: bool


class _Shard:
    """A file on its way.

    Args:
        leaves: What goes there, in this order.
        source_id: Which checkpoint it comes from.
    """

    def __init__(self, leaves: Sequence[Leaf], source_id: str) -> None:
        self.leaves = leaves
        self.places: list[StoredTensor] = []
        start = 0
        for leaf in leaves:
            self.places.append(StoredTensor(leaf.name, leaf.dtype, leaf.shape, start))
            start += leaf.nbytes
        notes = {"format": "pt", "ckptio.source": _identity(leaves, source_id)}
        self.header = encode_header(self.places, notes)
        self.nbytes = len(self.header) + start


def _identity(leaves: Sequence[Leaf], source_id: str) -> str:
    """Say what a file is made of: of two that have the same, one may stand for the other.

    Names, types and shapes are in its header; which bytes of the source go there is not.
    """
    digest = hashlib.blake2b(source_id.encode(), digest_size=16)
    for leaf in leaves:
        digest.update(msgspec.json.encode([leaf.name, leaf.entry, leaf.node]))
    return digest.hexdigest()


def write_file(
    source: Source, path: str, *, overwrite: bool, drop_values: bool, advance: Callable[[int], None]
) -> list[Written]:
    """Write one safetensors file.

    Args:
        source: What is written.
        path: The file.
        overwrite: Replace one that is there.
        drop_values: Leave out what is no tensor.
        advance: Takes bytes as they are written.

    Raises:
        FormatError: There is more than tensors, and it may not be left out.
        CheckpointExistsError: Another file is there.
    """
    shard = _Shard(_tensors_of(source, drop_values=drop_values), source.manifest.save_id)
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    return [_write(source, shard, path, path, overwrite=overwrite, advance=advance)]


def write_folder(
    source: Source,
    path: str,
    *,
    overwrite: bool,
    drop_values: bool,
    max_shard_nbytes: int,
    advance: Callable[[int], None],
) -> list[Written]:
    """Write a folder of shards with an index; one file needs none.

    Args:
        source: What is written.
        path: The folder.
        overwrite: Replace files of other conversions that are there.
        drop_values: Leave out what is no tensor.
        max_shard_nbytes: Bytes of tensors in a file; a larger tensor has one of its own.
        advance: Takes bytes as they are written.

    Raises:
        FormatError: There is more than tensors, and it may not be left out.
        CheckpointExistsError: A file of another conversion is there.
    """
    shards = [
        _Shard(leaves, source.manifest.save_id)
        for leaves in _share_out(_tensors_of(source, drop_values=drop_values), max_shard_nbytes)
    ]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [_SINGLE]
    os.makedirs(path, exist_ok=True)
    others = _others(path, names)
    if others and not overwrite:
        raise CheckpointExistsError(f"{path}/{others[0]}")
    written = [
        _write(source, shard, f"{path}/{name}", name, overwrite=overwrite, advance=advance)
        for shard, name in zip(shards, names, strict=True)
    ]
    if len(shards) > 1:
        weight_map = {
            leaf.name: name
            for shard, name in zip(shards, names, strict=True)
            for leaf in shard.leaves
        }
        total = sum(leaf.nbytes for shard in shards for leaf in shard.leaves)
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        index = msgspec.json.format(msgspec.json.encode(document), indent=2)
        _replace(f"{path}/{INDEX}", lambda fd: _write_all(fd, index), overwrite=True)
        written.append(Written(INDEX, len(index), was_there=False))
    for name in others:  # only now: until here the old ones may be all there is
        os.unlink(f"{path}/{name}")
    return written


def _others(path: str, names: Sequence[str]) -> list[str]:
    """List files that a reader would take for a part of what is written."""
    ours = {*names, INDEX} if len(names) > 1 else set(names)
    return sorted(
        name
        for name in os.listdir(path)
        if name not in ours
        and (
            name in (INDEX, _SINGLE)
            or (name.startswith("model-") and name.endswith(".safetensors"))
        )
    )


def _tensors_of(source: Source, *, drop_values: bool) -> list[Leaf]:
    """List what a safetensors file can hold, in the order of its bytes.

    Raises:
        FormatError: There is something else.
    """
    taken: list[Leaf] = []
    lost = [name for name, node in all_leaves("", source.tree) if tensor_index(node) is None]
    for leaf in source.leaves():
        if leaf.name == DOCUMENT_NAME:  # of a data file that a StorageWriter wrote
            continue
        tag = leaf.node[TAG]
        if leaf.is_plain or tag == "view":
            taken.append(leaf)
        else:
            lost.append(leaf.name)
    if lost and not drop_values:
        shown = ", ".join(map(repr, lost[:_MAX_SHOWN]))
        more = f" and {len(lost) - _MAX_SHOWN} more" if len(lost) > _MAX_SHOWN else ""
        raise FormatError(
            f"safetensors files hold tensors alone, and {source.path!r} has other values: {shown}"
            f"{more}; select tensors, or drop the values"
        )
    if not taken:
        raise FormatError(f"there is no tensor to write in {source.path!r}")
    names = [leaf.name for leaf in taken]
    if len(set(names)) < len(names) or "__metadata__" in names:
        raise FormatError(
            f"two tensors in {source.path!r} have one name, or one has a reserved one"
        )
    # wide elements first, so that all lie on multiples of their size; then as they lie there
    taken.sort(key=lambda leaf: (-DTYPES[leaf.dtype].itemsize, _position(leaf)))
    return taken


def _position(leaf: Leaf) -> tuple[int, int]:
    chunks = leaf.entry.chunks
    return (chunks[0].file, chunks[0].start) if chunks else (0, 0)


def _share_out(leaves: Sequence[Leaf], max_nbytes: int) -> list[list[Leaf]]:
    """Fill files up to a size, in order."""
    if max_nbytes <= 0:
        raise ConfigError(f"max_shard_nbytes must be positive, not {max_nbytes}")
    shards: list[list[Leaf]] = [[]]
    nbytes = 0
    for leaf in leaves:
        if shards[-1] and nbytes + leaf.nbytes > max_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(leaf)
        nbytes += leaf.nbytes
    return shards


def _write(
    source: Source,
    shard: _Shard,
    path: str,
    name: str,
    *,
    overwrite: bool,
    advance: Callable[[int], None],
) -> Written:
    """Write a file, unless it is there."""
    if _is_there(path, shard):
        advance(sum(leaf.nbytes for leaf in shard.leaves))
        return Written(name, shard.nbytes, was_there=True)
    if os.path.lexists(path) and not overwrite:
        raise CheckpointExistsError(path)
    _replace(path, lambda fd: _fill(fd, source, shard, advance), overwrite=overwrite)
    return Written(name, shard.nbytes, was_there=False)


def _is_there(path: str, shard: _Shard) -> bool:
    """Whether a file is the very one: its header says what it was made of."""
    try:
        with open(path, "rb") as file:
            return (
                os.fstat(file.fileno()).st_size == shard.nbytes
                and file.read(len(shard.header)) == shard.header
            )
    except OSError:
        return False


def _fill(fd: int, source: Source, shard: _Shard, advance: Callable[[int], None]) -> None:
    """Write header and tensors."""
    _write_all(fd, shard.header, 0)
    base = len(shard.header)
    starts = {place.name: base + place.start for place in shard.places}
    plain = (leaf for leaf in shard.leaves if leaf.is_plain)
    for batch in batches(part for leaf in plain for part in parts_of(leaf.entry, name=leaf.name)):
        for part, tensor in zip(batch, source.read(batch), strict=True):
            _write_all(fd, _bytes_of(tensor), starts[part.name] + part.start)
        advance(sum(part.nbytes for part in batch))
    for leaf in shard.leaves:
        if not leaf.is_plain:
            _write_all(fd, _bytes_of(source.view(leaf)), starts[leaf.name])
            advance(leaf.nbytes)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _write_all(fd: int, data: bytes | memoryview, offset: int = 0) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        offset += count
        view = view[count:]


def _cut(fd: int, path: str) -> None:
    """Empty a file that an earlier conversion may have left.

    Raises:
        CommitConflictError: It has another name, too: what is there, of one that was killed
            just then. It loses this one, so that the next try goes well.
    """
    if os.fstat(fd).st_nlink != 1:
        raise CommitConflictError(path)
    os.ftruncate(fd, 0)


def _replace(path: str, fill: Callable[[int], None], *, overwrite: bool) -> None:
    """Write a file aside, and give it its name when it is whole and synced.

    Raises:
        CheckpointExistsError: Somebody else gave it to a file meanwhile, which may not go.
        CommitConflictError: Another conversion is writing it.
        StorageError: It cannot be written; what was there is untouched.
    """
    folder, name = os.path.split(os.path.abspath(path))
    aside = f"{folder}/.{name}.partial"
    fd = -1
    try:
        # not cut before it is locked: another conversion may be writing it
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        take_lock(fd, aside, path)
        try:
            _cut(fd, path)
            fill(fd)
            os.fsync(fd)
            if overwrite:
                os.rename(aside, path)
            else:
                rename_new(aside, path)
        except BaseException:
            if os.path.lexists(aside):
                os.unlink(aside)
            raise
        PosixFiles().fsync_dir(folder)
    except FileExistsError:
        raise CheckpointExistsError(path) from None
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, path, "cannot write the file") from error
    finally:
        if fd >= 0:
            os.close(fd)
