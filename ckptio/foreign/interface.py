"""What a reader of a foreign format gives: a manifest, and the bytes that it speaks of.

A foreign checkpoint becomes a manifest in memory, so that everything behind it (selection,
targets, slices, sharded loads, conversion) is the same code that loads our own. Its files
have no checksums: nothing is verified that was never summed, and nothing claims to be.

A file of such a manifest is a file of the checkpoint under its own name, or a range of one,
named `file@start+nbytes`, or whatever else the reader can open by name alone.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from ckptio.errors import CheckpointError, FormatError, UnsupportedLeafError
from ckptio.format.encode import TAG, ObjectEncoder
from ckptio.format.manifest import FOREIGN_VERSION, FileEntry, Manifest, check_tensors

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from ckptio.format.manifest import TensorEntry
    from ckptio.storage.streams import AwaitedSource, Source


#: Members of a manifest's metadata: what lies beside a checkpoint, by name, and a line on each;
#: and what tells its files from others, by name, where that is the same on all hosts.
_BESIDE, _SEEN = "beside", "seen"


class ForeignReader(Protocol):
    """A foreign checkpoint at a path. Everything here blocks."""

    @property
    def version(self) -> Hashable:
        """Equal for two readers of a checkpoint that nobody wrote to in between."""
        ...

    def manifest(self) -> Manifest:
        """Say what it is made of.

        Raises:
            FormatError: It contradicts itself, or is more than data.
        """
        ...

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Give the bytes of each file, `None` for what is not there.

        Raises:
            FormatError: What is there is no data that can be loaded.
        """
        ...

    def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Open a file of the manifest."""
        ...


class Encoded:
    """Stands in a nested state for what is in its tree already.

    Args:
        node: The part of the tree.
    """

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


def place(index: int) -> Encoded:
    """Stand for the tensor of an index in the manifest."""
    return Encoded({TAG: index})


def encode_places(state: Any) -> Any:
    """Write a nesting of containers, plain values and `Encoded` ones as a tree.

    Raises:
        FormatError: A value has no portable form.
    """
    try:
        return ObjectEncoder(_encoded_leaf).encode("", state)
    except UnsupportedLeafError as error:
        raise FormatError(f"the checkpoint holds what cannot be loaded: {error}") from None


def _encoded_leaf(fqn: str, value: Any) -> Any:
    if isinstance(value, Encoded):
        return value.node
    raise UnsupportedLeafError(
        fqn, f"a value of type {type(value).__qualname__}", "leave it out with select="
    )


def make_manifest(
    *,
    writer: str,
    version: Hashable,
    modified_s: float,
    block_nbytes: int,
    files: Sequence[tuple[str, int]],
    tensors: Sequence[TensorEntry],
    tree: Any,
    seen: Mapping[str, str],
    beside: Mapping[str, str] | None = None,
) -> Manifest:
    """Put a manifest without checksums together, and check it as strictly as our own.

    Args:
        writer: What wrote the checkpoint.
        version: Of its files; another version is another save, and so are other names of files.
        modified_s: When it was written, in seconds since 1970.
        block_nbytes: The unit in which it is read.
        files: Name and size of each file.
        tensors: The tensors; chunks refer to `files`.
        tree: The state, JSON-ready.
        beside: What lies beside it and is no part of the state, by name, and a line on each.
        seen: What `Folder.seen` gave.

    Raises:
        FormatError: Chunks overlap, do not fill their tensors or lie outside of their files.
    """
    identity = hashlib.blake2b(repr((writer, version)).encode(), digest_size=16)
    for name, _ in files:
        identity.update(repr(name).encode())
    manifest = Manifest(
        ckptio=FOREIGN_VERSION,
        writer=writer,
        save_id=identity.hexdigest(),
        created=_moment(modified_s).isoformat(timespec="milliseconds"),
        block_nbytes=block_nbytes,
        files=tuple(FileEntry(name, nbytes, b"") for name, nbytes in files),
        tensors=tuple(tensors),
        tree=msgspec.Raw(msgspec.json.encode(tree)),
        metadata={name: dict(found) for name, found in ((_BESIDE, beside), (_SEEN, seen)) if found},
    )
    check_tensors(manifest)
    return manifest


def _moment(since_1970_s: float) -> dt.datetime:
    """Give a time; 1970 for one that no calendar has, as a broken clock gives files."""
    try:
        return dt.datetime.fromtimestamp(since_1970_s, dt.UTC)
    except (ValueError, OverflowError, OSError):  # the last of years that no integer of C takes
        return dt.datetime.fromtimestamp(0, dt.UTC)


def with_files(tensors: Sequence[TensorEntry], order: Sequence[int]) -> list[TensorEntry]:
    """Have chunks refer to files in another order: that in which they are looked at and read.

    As they lie. Small ones are read by blocks of what they lie in, of which some are kept: in
    another order a block is read anew for each.

    Args:
        tensors: The tensors.
        order: The numbers that files had, as they come now.
    """
    numbers = {old: new for new, old in enumerate(order)}
    if all(old == new for old, new in numbers.items()):
        return list(tensors)
    return [
        replace(
            tensor,
            chunks=tuple(replace(chunk, file=numbers[chunk.file]) for chunk in tensor.chunks),
        )
        for tensor in tensors
    ]


def notes_of(manifest: Manifest) -> tuple[str, ...]:
    """Say what lies beside a foreign checkpoint and is no part of its state, a line each."""
    beside = manifest.metadata.get(_BESIDE) if manifest.is_foreign else None
    return tuple(map(str, beside.values())) if isinstance(beside, dict) else ()


def seen_in(manifest: Manifest) -> Mapping[str, str]:
    """Give what tells the files of a foreign checkpoint from others, of those that are known."""
    seen = manifest.metadata.get(_SEEN) if manifest.is_foreign else None
    return {str(n): str(told) for n, told in seen.items()} if isinstance(seen, dict) else {}


def at(path: str, error: CheckpointError) -> FormatError:
    """Give the error again, with the file that it is about before it."""
    return FormatError(f"{path!r}: {error}")
