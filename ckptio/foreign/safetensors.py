"""safetensors files, and the folders that Hugging Face's libraries make of them.

Headers alone become a manifest, so that such files load through the same plan, lanes and targets
as checkpoints of ours. Extents are checked against the files; the format has no checksums, so data
is not verified. An index is checked against the files: a tensor that is not where it says, or that
is in two files where it says nothing, is an error and not a guess.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckptio.errors import CorruptionError, FormatError
from ckptio.foreign.folder import range_name, split_range
from ckptio.foreign.interface import Encoded, at, encode_places, make_manifest
from ckptio.foreign.parts import CONSOLIDATE, listed, read_sharding
from ckptio.format.bucket import decode_header, header_nbytes
from ckptio.format.encode import TAG
from ckptio.format.manifest import MAX_DIMS, Chunk, TensorEntry
from ckptio.layout import DTYPES

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ckptio.foreign.folder import Folder, Status
    from ckptio.foreign.parts import Sharding
    from ckptio.format.bucket import StoredTensor
    from ckptio.format.manifest import Manifest
    from ckptio.storage.streams import AwaitedSource, Source

#: Of an index: what a checkpoint of a hundred thousand tensors stays far below.
_MAX_INDEX_NBYTES = 1 << 27
_PREFIX_NBYTES = 8
#: Metadata of ours, and of torch.distributed.checkpoint, begins so.
_OF_WRITERS = ("ckptio.", "DCP_")
#: Names that libraries look for in a folder, the first one found counts.
STEMS = ("model", "diffusion_pytorch_model", "adapter_model")


class Index(msgspec.Struct, frozen=True):
    """An index.

    Attributes:
        weight_map: The file of each tensor.
        metadata: What else it says; anything.
    """

    weight_map: dict[str, str]
    metadata: msgspec.Raw = msgspec.Raw(b"")

    @property
    def total_nbytes(self) -> int | None:
        """Bytes of all tensors, if it counts them."""
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return _count_decoder.decode(self.metadata).total_size
        return None


class _Count(msgspec.Struct, frozen=True):
    total_size: int


_index_decoder = msgspec.json.Decoder(Index)
_count_decoder = msgspec.json.Decoder(_Count)


class _Header(NamedTuple):
    """What is known of a file without its data.

    Attributes:
        status: How it looks from outside.
        start: Where its data begins, in bytes.
        stored: What that is.
        said: What it says of itself, for a message.
        sharding: What it says of ranks' parts.
    """

    status: Status
    start: int
    stored: list[StoredTensor]
    said: str
    sharding: Sharding


class SafetensorsReader:
    """One safetensors file, or several that an index holds together.

    Args:
        folder: The directory.
        names: The files.
        index: Name of the index file; a single file has none.
        weight_map: What the index says of each tensor; `None` without one.
        total_nbytes: How many bytes of tensors the index counts; `None` if it does not.
        is_alone: Whether a file was asked for by its own path: then parts that a rank has of
            tensors are loaded, and a note says so. In a folder nobody expects them, and those
            that are wanted are refused.
        block_nbytes: The unit in which it is read.
    """

    def __init__(
        self,
        folder: Folder,
        names: Sequence[str],
        *,
        index: str | None = None,
        weight_map: dict[str, str] | None = None,
        total_nbytes: int | None = None,
        is_alone: bool = False,
        block_nbytes: int,
    ) -> None:
        self._folder = folder
        self._names = dict.fromkeys(names)
        self._index = index
        self._weight_map = weight_map
        self._total_nbytes = total_nbytes
        self._is_alone = is_alone
        self._block_nbytes = block_nbytes

    @property
    def version(self) -> Hashable:
        """See `interface.ForeignReader`."""
        files = [self._index, *self._names] if self._index is not None else list(self._names)
        return tuple(self._folder.each(self._folder.version, files))

    def manifest(self) -> Manifest:
        """Read the headers of all files."""
        version = self.version
        files: list[tuple[str, int]] = []
        tensors: list[TensorEntry] = []
        homes: dict[str, str] = {}
        state: dict[str, Encoded] = {}
        modified_s = 0.0
        beside: dict[str, str] = {}
        headers = self._headers()
        lost = self._lost(headers)
        for name, header in zip(self._names, headers, strict=True):
            beside |= self._notes(name, header)
            modified_s = max(modified_s, header.status.modified_s)
            files.append((name, header.status.nbytes))
            whole = len(files) - 1
            for tensor in header.stored:
                if self._is_elsewhere(tensor.name, name):
                    continue
                if tensor.name in homes:
                    raise FormatError(
                        f"tensor {tensor.name!r} is in {homes[tensor.name]!r} and in {name!r}"
                    )
                homes[tensor.name] = name
                file, first = whole, header.start + tensor.start
                is_refused = bool(tensor.unknown or self._flaw(header, tensor, lost))
                if not (tensor.nbytes or is_refused):
                    first = 0  # of nothing, so that no range stands for it and for another
                # no rule of the format forbids it
                is_odd = bool(first % DTYPES[tensor.dtype].itemsize)
                if is_odd or is_refused:
                    files.append((range_name(name, first, tensor.nbytes), tensor.nbytes))
                    file, first = len(files) - 1, 0
                node = {TAG: "bytes", "t": len(tensors)} if tensor.unknown else {TAG: len(tensors)}
                state[tensor.name] = Encoded(node)
                tensors.append(
                    TensorEntry(tensor.name, tensor.dtype, tensor.shape, (Chunk(file, first),))
                )
        self._check_map(homes)
        try:
            return make_manifest(
                writer="safetensors",
                version=version,
                modified_s=modified_s,
                block_nbytes=self._block_nbytes,
                files=files,
                tensors=tensors,
                tree=encode_places(state),
                beside=beside,
                seen=self._folder.seen(),
            )
        except FormatError as error:
            raise at(self._folder.join(self._index or next(iter(self._names))), error) from None

    def _is_elsewhere(self, tensor: str, name: str) -> bool:
        """Whether the index has a tensor in another file, so that this one's does not count."""
        return self._weight_map is not None and self._weight_map.get(tensor, name) != name

    def _headers(self) -> list[_Header]:
        return self._folder.each(self._header, list(self._names))

    def _notes(self, name: str, header: _Header) -> dict[str, str]:
        """Say what a file says beside its tensors, and of them; see `make_manifest`."""
        path = self._folder.join(name)
        said = f"{path}: its metadata is no part of this: {header.said}" if header.said else ""
        parts = header.sharding.note(path, name, is_alone=self._is_alone)
        return {key: line for key, line in ((name, said), (f"{name} (parts)", parts)) if line}

    def _lost(self, headers: Sequence[_Header]) -> str:
        """Say how much the files lack of what the index counts, if all are of ranks.

        Of other files it means nothing: programs count tied weights twice, or leave the count as
        it was.
        """
        if self._total_nbytes is None or not all(header.sharding.is_noted for header in headers):
            return ""
        nbytes = sum(header.status.nbytes - header.start for header in headers)
        if nbytes >= self._total_nbytes:
            return ""
        return (
            f"the index counts {self._total_nbytes} bytes of tensors and there are {nbytes}:"
            " ranks wrote over each other's files, or the tensors were converted since (if so, take"
            " total_size out of the index)"
        )

    def _flaw(self, header: _Header, tensor: StoredTensor, lost: str) -> str:
        """Say why a tensor is not loaded, as it is a part, or nobody knows."""
        if self._is_alone:
            return ""
        return header.sharding.parts.get(tensor.name) or (lost if tensor.nbytes else "")

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Stat files, and what ranges of them there are.

        Raises:
            FormatError: One of them is a tensor of an unknown type, or one rank's part of one.
        """
        wanted = {part for part in map(self._part, names) if part is not None}
        files = sorted({name for name, _, _ in wanted})
        # a manifest that was kept, or came from another rank, says nothing of it
        headers = self._folder.each(self._header, files)
        is_counted = self._total_nbytes is not None and any(h.sharding.is_noted for h in headers)
        lost = self._lost(self._headers()) if is_counted else ""
        for name, header in zip(files, headers, strict=True):
            unknown, parts = [], []
            for tensor in header.stored:
                if (name, header.start + tensor.start, tensor.nbytes) not in wanted:
                    continue
                if tensor.unknown:
                    unknown.append(f"{tensor.name!r} ({tensor.unknown})")
                elif flaw := self._flaw(header, tensor, lost):
                    parts.append(
                        f"{tensor.name!r}" if flaw == lost else f"{tensor.name!r} ({flaw})"
                    )
            if unknown:
                raise FormatError(
                    f"{self._folder.join(name)!r} has tensors of types or shapes that are not"
                    f" known: {listed(unknown)}; leave them out with select="
                )
            if parts:
                raise FormatError(
                    f"{self._folder.join(name)!r} {'may have' if lost else 'has'} only one rank's"
                    f" part of tensors{f' ({lost})' if lost else ''}: {listed(parts)};"
                    f" {CONSOLIDATE}, leave them out with select=, or load the file by its own path"
                )
        return self._folder.each(self._size, names)

    def _part(self, name: str) -> tuple[str, int, int] | None:
        """Give file, start and bytes of a range; `None` for a file, whatever it is called."""
        return None if name in self._names else split_range(name)

    def _size(self, name: str) -> int | None:
        part = self._part(name)
        if part is not None:
            return self._folder.part_nbytes(*part)
        status = self._folder.status(name)
        return None if status is None else status.nbytes

    def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Open a file, or a range of one."""
        part = self._part(name)
        if part is None:
            return self._folder.open(name, nbytes)
        return self._folder.open(part[0], part[2], part[1])

    def _header(self, name: str) -> _Header:
        """Look at a file, and read its header."""
        status = self._folder.status(name)
        if status is None:
            raise self._missing(name)
        try:
            prefix = self._folder.read(name, 0, _PREFIX_NBYTES)
            start = header_nbytes(prefix, status.nbytes)
            header = self._folder.read(name, 0, start)
            stored, metadata = decode_header(header, status.nbytes - start)
        except FormatError as error:
            self._folder.require_no_pointer(name)
            raise at(self._folder.join(name), error) from None
        sharding = read_sharding(metadata, stored)
        return _Header(
            status, start, list(map(_within_limits, stored)), _names_said(metadata), sharding
        )

    def _check_map(self, homes: dict[str, str]) -> None:
        """Check that the index and the files say the same."""
        if self._weight_map is None:
            return
        for tensor, name in self._weight_map.items():
            if homes.get(tensor) != name:
                raise FormatError(
                    f"{self._folder.root!r}: the index has tensor {tensor!r} in {name!r}, which"
                    " does not have it"
                )

    def _missing(self, name: str) -> FormatError:
        return CorruptionError(
            "no such regular file, which the index names",
            path=self._folder.root,
            file=name,
            start=0,
            stop=0,
        )


def _within_limits(tensor: StoredTensor) -> StoredTensor:
    """Give a tensor; one that is known and that no manifest takes as one that is not known."""
    if len(tensor.shape) <= MAX_DIMS:
        return tensor
    unknown = f"{tensor.dtype} of {len(tensor.shape)} dimensions"
    return tensor._replace(dtype="uint8", shape=(tensor.nbytes,), unknown=unknown)


def _names_said(metadata: dict[str, str]) -> str:
    """Name what a file says of itself, but for what its writers say of how it is written."""
    return listed(
        repr(name) for name in metadata if name != "format" and not name.startswith(_OF_WRITERS)
    )


def read_index(folder: Folder, index: str, block_nbytes: int) -> SafetensorsReader:
    """Read the index of a folder.

    Raises:
        FormatError: It is none, or names a file that is not inside the folder.
    """
    data = folder.read_small(index, _MAX_INDEX_NBYTES, "no index of a model")
    try:
        found = _index_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        folder.require_no_pointer(index)
        raise FormatError(f"{folder.join(index)!r} is no index of safetensors: {error}") from None
    names = sorted(set(found.weight_map.values()))
    for name in names:
        folder.join(name)
        if not name.endswith(".safetensors"):  # and so no range's name either
            raise FormatError(
                f"{folder.join(index)!r} names {name!r}, which is no safetensors file"
            )
    return SafetensorsReader(
        folder,
        names,
        index=index,
        weight_map=found.weight_map,
        total_nbytes=found.total_nbytes,
        block_nbytes=block_nbytes,
    )
