"""Write a safetensors file.

It is written under another name, synced and renamed when it is whole, so what has its
final name is whole. (Not synced with `durability="none"`, as in a save.)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckptio._texts import some_of
from ckptio.conversion.own import (
    make_own_dirs,
    open_file,
    remove_empty,
    rename_new,
    sync_dir,
    sync_file,
    sync_kept,
    take_lock,
)
from ckptio.conversion.source import PART_NBYTES, Leaf, parts_of, read_views, require_text
from ckptio.conversion.stream import StreamWriter
from ckptio.conversion.unfit import UnfitError
from ckptio.errors import (
    CheckpointExistsError,
    CommitConflictError,
    ConfigError,
    StorageError,
)
from ckptio.format.bucket import StoredTensor, encode_header
from ckptio.format.manifest import DOCUMENT_NAME
from ckptio.layout import DTYPES, batches
from ckptio.state.leaves import raw_bytes
from ckptio.state.tree import leaves as all_leaves
from ckptio.state.tree import tensor_index
from ckptio.storage.blocks import storage_error
from ckptio.storage.files import PosixFiles, absolute, set_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.conversion.source import Source


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


class Shard:
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
            require_text(leaf.name)
            self.places.append(StoredTensor(leaf.name, leaf.dtype, leaf.shape, start))
            start += leaf.nbytes
        notes = {"format": "pt", "ckptio.source": _identity(leaves, source_id)}
        self.header = encode_header(self.places, notes, for_others=True)
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
    source: Source,
    path: str,
    *,
    overwrite: bool,
    drop_values: bool,
    config: CheckpointConfig,
    advance: Callable[[int], None],
) -> list[Written]:
    """Write one safetensors file.

    Args:
        source: What is written.
        path: The file.
        overwrite: Replace one that is there.
        drop_values: Leave out what is no tensor.
        config: Who may read it, and what is synced.
        advance: Takes bytes as they are written.

    Raises:
        ConfigError: There is more than tensors, and it may not be left out.
        CheckpointExistsError: Another file is there.
        CommitConflictError: Another conversion is writing it.
        StorageError: It cannot be written; what was there is untouched, unless it was the sync of
            the directory that failed: then the new file has the name, but may lose it.
    """
    shard = Shard(tensors_of(source, drop_values=drop_values), source.manifest.save_id)
    try:
        made = make_own_dirs(os.path.dirname(absolute(path)), config)
    except OSError as error:
        raise storage_error(error, path, "cannot make its directory") from error
    try:
        written = write_shard(
            source, shard, path, path, overwrite=overwrite, config=config, advance=advance
        )
    except BaseException:
        remove_empty(made)
        raise
    if written.was_there:
        sync_kept(os.path.dirname(absolute(path)), config)
        _drop_aside(path)
    return [written]


def is_written(leaf: Leaf) -> bool:
    """Whether a file has it: each tensor but what a StorageWriter keeps beside a state."""
    return leaf.is_tensor and leaf.name != DOCUMENT_NAME


def tensors_of(source: Source, *, drop_values: bool) -> list[Leaf]:
    """List what a safetensors file can hold, in the order of its bytes.

    Raises:
        ConfigError: There is something else, or no tensor.
        UnfitError: Names clash.
    """
    taken: list[Leaf] = []
    lost = [name for name, node in all_leaves("", source.tree) if tensor_index(node) is None]
    for leaf in source.leaves():
        if is_written(leaf):
            taken.append(leaf)
        elif not leaf.is_tensor:
            lost.append(leaf.name)
    if lost and not drop_values:
        raise ConfigError(
            f"safetensors files hold tensors alone, and {source.path!r} has other values:"
            f" {some_of(lost)}; strip= takes what is below one name, as 'model', select= what has"
            " some names, and drop_values= the tensors of all of it"
        )
    if not taken:
        raise ConfigError(f"there is no tensor to write in {source.path!r}")
    names = [leaf.name for leaf in taken]
    if len(set(names)) < len(names) or "__metadata__" in names:
        raise UnfitError(f"two tensors in {source.path!r} have one name, or one has a reserved one")
    # wide elements first, so that all lie on multiples of their size; then as they lie there
    taken.sort(key=lambda leaf: (-DTYPES[leaf.dtype].itemsize, _position(leaf)))
    return taken


def _position(leaf: Leaf) -> tuple[int, int]:
    chunks = leaf.entry.chunks
    return (chunks[0].file, chunks[0].start) if chunks else (0, 0)


def write_shard(
    source: Source,
    shard: Shard,
    path: str,
    name: str,
    *,
    overwrite: bool,
    config: CheckpointConfig,
    advance: Callable[[int], None],
) -> Written:
    """Write a file, unless it is there."""
    if is_there(path, shard):
        sync_kept(path, config)
        advance(sum(leaf.nbytes for leaf in shard.leaves))
        return Written(name, shard.nbytes, was_there=True)
    _require_file(path)
    if os.path.lexists(path) and not overwrite:
        raise CheckpointExistsError(path)

    def fill(fd: int) -> None:
        file = StreamWriter(fd, config)
        _fill(file, source, shard, advance)
        file.end()

    replace_file(path, fill, overwrite=overwrite, config=config)
    return Written(name, shard.nbytes, was_there=False)


def _require_file(path: str) -> None:
    """Refuse to replace what is no file.

    Raises:
        StorageError: It is a directory, a FIFO, a device, a socket.
    """
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except OSError:  # nothing is there, or whoever writes says why not
        return
    if stat.S_ISDIR(mode):
        problem = "a file is to be written, and a directory is here; give the path of a file"
        raise StorageError(problem, path=path, code=errno.EISDIR)
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise StorageError("there is something that is no file; it stays", path=path)


def is_there(path: str, shard: Shard) -> bool:
    """Whether a file is the very one: its header says what it was made of."""
    try:
        with open(open_file(path), "rb") as file:
            return (
                os.fstat(file.fileno()).st_size == shard.nbytes
                and file.read(len(shard.header)) == shard.header
            )
    except OSError:
        return False


def _fill(file: StreamWriter, source: Source, shard: Shard, advance: Callable[[int], None]) -> None:
    """Write header and tensors."""
    file.write(shard.header, 0)
    base = len(shard.header)
    starts = {place.name: base + place.start for place in shard.places}
    plain = {leaf.name: leaf for leaf in shard.leaves if leaf.is_plain}
    parts = (part for name, leaf in plain.items() for part in parts_of(leaf.entry, name=name))
    for batch in batches(parts, PART_NBYTES):
        nbytes = 0
        for part, tensor in zip(batch, source.read(batch), strict=True):
            data = raw_bytes(plain[part.name].as_wanted(tensor)).numpy().data
            # it begins with the same element, which may have another size
            start = part.start * len(data) // part.nbytes
            file.write(data, starts[part.name] + start)
            nbytes += len(data)
        advance(nbytes)
    # one after the other of each that they are views of, whatever their types
    others = sorted((leaf for leaf in shard.leaves if not leaf.is_plain), key=_position)
    for leaf, tensor in zip(others, read_views(source, others), strict=True):
        file.write(raw_bytes(leaf.as_wanted(tensor)).numpy().data, starts[leaf.name])
        advance(leaf.nbytes)


def _cut(fd: int, path: str) -> None:
    """Empty a file that an earlier conversion may have left.

    Raises:
        CommitConflictError: It has a second name. A conversion that was killed between giving it
            its final name and removing this one (`rename_new`) leaves that: emptied, the whole
            file would be lost. The caller removes this name, so that the next try succeeds.
    """
    if os.fstat(fd).st_nlink != 1:
        raise CommitConflictError(path)
    os.ftruncate(fd, 0)


def _aside(path: str) -> str:
    """Name what a file is written as until it is whole."""
    folder, name = os.path.split(absolute(path))
    return f"{folder}/.{name}.partial"


def _drop_aside(path: str) -> None:
    """Remove what a conversion that was killed had begun, of another source: nobody goes on.

    Not where there are no locks: somebody may be writing it.
    """
    aside = _aside(path)
    fd = -1
    with contextlib.suppress(OSError):  # it is not there, as a rule; and in nobody's way
        fd = os.open(aside, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if PosixFiles().lock(fd) and os.path.samestat(os.lstat(aside), os.fstat(fd)):
            os.unlink(aside)
    if fd >= 0:
        PosixFiles().close(fd)


def replace_file(
    path: str, fill: Callable[[int], None], *, overwrite: bool, config: CheckpointConfig
) -> None:
    """Write a file aside, and give it its name when it is whole and synced.

    It is new, and has the mode of `config` whatever the one had that it replaces.

    Raises:
        CheckpointExistsError: Somebody else gave it to a file meanwhile, which may not go.
        CommitConflictError: Another conversion is writing it.
        StorageError: It cannot be written; what was there is untouched, unless it was the sync of
            the directory that failed: then the new file has the name, but may lose it.
    """
    folder, _ = os.path.split(absolute(path))
    aside = _aside(path)
    fd = -1
    try:
        # not cut before it is locked: another conversion may be writing it
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(aside, flags, config.file_mode)
        take_lock(fd, aside, path)
        try:
            _cut(fd, path)
            set_mode(fd, config.file_mode)
            fill(fd)
            sync_file(fd, config)
            if overwrite:
                os.rename(aside, path)
            else:
                rename_new(aside, path)
        except BaseException:
            if os.path.lexists(aside):
                os.unlink(aside)
            raise
        sync_dir(folder, config)
    except FileExistsError:
        raise CheckpointExistsError(path) from None
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, path, "cannot write the file") from error
    finally:
        if fd >= 0:
            PosixFiles().close(fd)
