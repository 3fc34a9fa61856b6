"""Write a folder of safetensors files as Hugging Face's libraries read it.

A reader takes `model.safetensors`, or else the files that the index lists. So what is there
stays whole until one step makes the new checkpoint the one that is read: a single file is
renamed over the old one; the files of an index get names that the old index does not list,
and then the new index is renamed over it; where a single file is there, the step is its
removal, once files and index are whole. What nobody reads any more goes last.

Files that are whole have their names, and these are the same when the conversion is run
again: one that was stopped goes on with the files that are missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from typing import TYPE_CHECKING

import msgspec

from ckptio.conversion.own import make_own_dirs, open_file, remove_empty, sync_kept, take_lock
from ckptio.conversion.safetensors import (
    Shard,
    Written,
    is_there,
    replace_file,
    tensors_of,
    write_shard,
)
from ckptio.errors import CheckpointError, CheckpointExistsError
from ckptio.foreign.safetensors import Index
from ckptio.storage.blocks import storage_error
from ckptio.storage.files import PosixFiles, write_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.conversion.source import Leaf, Source

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: What writers of such folders call the files of an index, and we, with a tag.
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}(-[0-9a-f]{8})?\.safetensors")
_PARTIAL = re.compile(rf"\.{_SHARD.pattern}\.partial")


def write_folder(
    source: Source,
    path: str,
    *,
    overwrite: bool,
    drop_values: bool,
    max_shard_nbytes: int,
    config: CheckpointConfig,
    advance: Callable[[int], None],
) -> list[Written]:
    """Write a folder of shards with an index; one file needs none.

    Args:
        source: What is written.
        path: The folder.
        overwrite: Replace files of other conversions that are there.
        drop_values: Leave out what is no tensor.
        max_shard_nbytes: Bytes of tensors in a file; a larger tensor has one of its own.
        config: Who may read files and folder, and what is synced.
        advance: Takes bytes as they are written.

    Raises:
        ConfigError: There is more than tensors, and it may not be left out.
        CheckpointExistsError: A file of another conversion is there.
        CommitConflictError: Another conversion is writing the folder.
        StorageError: It cannot be written; what was there is untouched, unless it was the sync of
            the directory that failed: then the new file has the name, but may lose it.
    """
    shards = [
        Shard(leaves, source.manifest.save_id)
        for leaves in _share_out(tensors_of(source, drop_values=drop_values), max_shard_nbytes)
    ]
    try:
        made = make_own_dirs(path, config)
        with _held(path):
            try:
                return _write(
                    source, path, shards, overwrite=overwrite, config=config, advance=advance
                )
            except BaseException:
                remove_empty(made)  # held still: another conversion finds out, and begins again
                raise
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise storage_error(error, path, "cannot write the folder") from error


def _write(
    source: Source,
    path: str,
    shards: Sequence[Shard],
    *,
    overwrite: bool,
    config: CheckpointConfig,
    advance: Callable[[int], None],
) -> list[Written]:
    names = _names_for(path, shards)
    index = _index_of(shards, names) if len(shards) > 1 else None
    has_index = index is not None and _read(f"{path}/{_INDEX}") == index
    others = _others(path, {*names, _INDEX} if has_index else {*names})
    if not overwrite:
        _require_free(path, shards, names, others)
    written = [
        write_shard(
            source,
            shard,
            f"{path}/{name}",
            name,
            overwrite=overwrite,
            config=config,
            advance=advance,
        )
        for shard, name in zip(shards, names, strict=True)
    ]
    if index is not None:
        if has_index:
            sync_kept(f"{path}/{_INDEX}", config)
        else:
            replace_file(
                f"{path}/{_INDEX}",
                lambda fd: write_at(fd, index, 0),
                overwrite=overwrite,
                config=config,
            )
        written.append(Written(_INDEX, len(index), was_there=has_index))
    if others:  # what an earlier conversion wrote may have no lasting names yet
        sync_kept(path, config)
    for name in others:  # only now: until here the old ones may be all there is
        if index is None or name != _INDEX:
            os.unlink(f"{path}/{name}")
    sync_kept(path, config)  # of one file, its removal is the step; others may be kept
    _sweep(path)
    return written


def _require_free(
    path: str, shards: Sequence[Shard], names: Sequence[str], others: Sequence[str]
) -> None:
    """Refuse to replace what is there, and say whether anybody would read it.

    Raises:
        CheckpointExistsError: There are files of another conversion.
    """
    if any(os.path.lexists(f"{path}/{name}") for name in (_INDEX, _SINGLE)):
        if others:
            raise CheckpointExistsError(f"{path}/{others[0]}")
        return  # each file is looked at before it is written
    for name, shard in zip(names, shards, strict=True):
        if os.path.lexists(f"{path}/{name}") and not is_there(f"{path}/{name}", shard):
            others = [name, *others]
            break
    if others:
        raise CheckpointExistsError(
            f"{path}/{others[0]}",
            "pass overwrite=True to replace them",
            "files of another checkpoint, which was not written to its end, are here",
        )


@contextlib.contextmanager
def _held(path: str) -> Iterator[None]:
    """Keep other conversions out of a folder: each would remove the other's files.

    Raises:
        CommitConflictError: One is at work there.
    """
    real = os.path.realpath(path)
    fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        take_lock(fd, real, path)
        yield
    finally:
        PosixFiles().close(fd)


def _names_for(path: str, shards: Sequence[Shard]) -> list[str]:
    """Name the files, so that none is written over that the index of the folder lists."""
    if len(shards) == 1:
        return [_SINGLE]
    listed = _listed(path)
    what = hashlib.blake2b(digest_size=16)
    for shard in shards:
        what.update(shard.header)
    for number in itertools.count():
        tag = f"-{hashlib.blake2b(what.digest() + bytes([number]), digest_size=4).hexdigest()}"
        names = [
            f"model-{i + 1:05d}-of-{len(shards):05d}{tag if number else ''}.safetensors"
            for i in range(len(shards))
        ]
        if listed.isdisjoint(names) or all(
            is_there(f"{path}/{name}", shard) for name, shard in zip(names, shards, strict=True)
        ):
            break
    return names


def _listed(path: str) -> set[str]:
    """Give the files that the index of a folder lists; none if nobody can read it."""
    data = _read(f"{path}/{_INDEX}")
    try:
        return set(msgspec.json.decode(data or b"", type=Index).weight_map.values())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return set()


def _read(path: str) -> bytes | None:
    try:
        with open(open_file(path), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _index_of(shards: Sequence[Shard], names: Sequence[str]) -> bytes:
    """Make the index of files."""
    homes = list(zip(shards, names, strict=True))
    weight_map = {leaf.name: name for shard, name in homes for leaf in shard.leaves}
    total = sum(leaf.nbytes for shard in shards for leaf in shard.leaves)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def _others(path: str, ours: set[str]) -> list[str]:
    """List files of an earlier checkpoint, first what a reader looks at; no others of the user."""
    listed = _listed(path)
    found = [
        name
        for name in os.listdir(path)
        if name not in ours
        and (
            name in (_INDEX, _SINGLE)
            or _SHARD.fullmatch(name)
            or (name in listed and name.endswith(".safetensors"))
        )
    ]
    return sorted(found, key=lambda name: (name not in (_INDEX, _SINGLE), name))


def _sweep(path: str) -> None:
    """Remove what conversions that were killed had begun and nobody goes on with."""
    for name in os.listdir(path):
        if _PARTIAL.fullmatch(name):
            with contextlib.suppress(OSError):  # it is in nobody's way
                os.unlink(f"{path}/{name}")


def _share_out(leaves: Sequence[Leaf], max_nbytes: int) -> list[list[Leaf]]:
    """Fill files up to a size, in order."""
    shards: list[list[Leaf]] = [[]]
    nbytes = 0
    for leaf in leaves:
        if shards[-1] and nbytes + leaf.nbytes > max_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(leaf)
        nbytes += leaf.nbytes
    return shards
