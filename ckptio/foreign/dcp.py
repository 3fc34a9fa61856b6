"""Directories that torch.distributed.checkpoint wrote, Megatron-core's among them.

`.metadata` is a pickle and says which bytes of which `.distcp` file are which item; every
item is a file of `torch.save` by itself. The pickle is read into inert records; values are
loaded by torch with `weights_only`; and of a tensor only the bytes that are wanted are read.

What Megatron-core does not shard is in a `common.pt` beside it, a file of `torch.save` to be
loaded by its own path.

A value that `weights_only` refuses is kept as an item that nobody can open: a load that
leaves it out succeeds, and one that wants it fails with its name before it fills anything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptio.errors import CorruptionError, FormatError
from ckptio.foreign.archive import find_tensor
from ckptio.foreign.folder import range_name, require_apart, split_range
from ckptio.foreign.interface import Encoded, at, encode_places, make_manifest, place
from ckptio.foreign.nesting import nest
from ckptio.foreign.pickles import Record, UnpicklingError, first_sentence, read_metadata, short
from ckptio.format.encode import TAG
from ckptio.format.manifest import MAX_EXTENT, Chunk, TensorEntry
from ckptio.layout import DTYPES, numel

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ckptio.foreign.folder import Folder
    from ckptio.format.manifest import Manifest
    from ckptio.storage.streams import AwaitedSource, Source

METADATA = ".metadata"
_MAX_METADATA_NBYTES = 1 << 30
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Item:
    """What is in a range of a file.

    Attributes:
        fqn: Name of the tensor or value.
        dtype: Element type; empty for a value.
        shape: Shape of the chunk.
    """

    fqn: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk."""
        return numel(self.shape) * DTYPES[self.dtype].itemsize


class DcpReader:
    """A directory of torch.distributed.checkpoint.

    Args:
        folder: The directory.
        block_nbytes: The unit in which it is read.
    """

    def __init__(self, folder: Folder, block_nbytes: int) -> None:
        self._folder = folder
        self._block_nbytes = block_nbytes
        self._starts: dict[str, int | None] = {}
        self._values: dict[str, Any] = {}
        self._refused: dict[str, str] | None = None

    @property
    def version(self) -> Hashable:
        """See `interface.ForeignReader`."""
        return self._folder.version(METADATA)

    @functools.cached_property
    def _contents(self) -> _Contents:
        data = self._folder.read_small(METADATA, _MAX_METADATA_NBYTES, "no metadata of DCP")
        try:
            return _Contents(read_metadata(data))
        except FormatError as error:
            raise at(self._folder.join(METADATA), error) from None

    def manifest(self) -> Manifest:
        """Read the metadata, and the values that are no tensors."""
        version = self.version
        status = self._folder.status(METADATA)
        contents = self._contents
        try:
            files = [(name, item.nbytes) for name, item in contents.chunks.items()]
            tensors = list(contents.tensors)
            state: dict[str, Encoded] = {t.name: place(i) for i, t in enumerate(tensors)}
            for name, item in contents.values.items():
                state[item.fqn] = self._value(name, item, files, tensors)
            return make_manifest(
                writer="torch.distributed.checkpoint",
                version=version,
                modified_s=status.modified_s if status is not None else 0.0,
                block_nbytes=self._block_nbytes,
                files=files,
                tensors=tensors,
                tree=encode_places(
                    nest({fqn: state[fqn] for fqn in contents.names}, contents.paths)
                ),
            )
        except CorruptionError:
            raise
        except FormatError as error:
            raise at(self._folder.root, error) from None

    def _value(
        self, name: str, item: _Item, files: list[tuple[str, int]], tensors: list[TensorEntry]
    ) -> Encoded:
        """Load a value, or make one that cannot be opened of it."""
        from ckptio.foreign import values  # noqa: PLC0415  # imports torch

        reason = self._refusals().get(name)
        if reason is not None:
            nbytes = _split(name)[2]
            files.append((name, nbytes))
            chunk = Chunk(len(files) - 1, 0)
            tensors.append(TensorEntry(item.fqn, "uint8", (nbytes,), (chunk,)))
            return Encoded({TAG: "bytes", "t": len(tensors) - 1})
        flat = values.take_apart(self._loaded(name))
        return values.add_flat(
            flat,
            lambda inner: f"{item.fqn}.{inner}",
            lambda number: f"{name}#{number}",
            files,
            tensors,
        )

    def _loaded(self, name: str) -> Any:
        """Load a value, once."""
        if name not in self._values:
            self._values[name] = self._load(name)
        return self._values[name]

    def _load(self, name: str) -> Any:
        """Load an item whole.

        Raises:
            UnpicklingError: It is more than data.
            FormatError: It is not whole.
        """
        from ckptio.foreign.values import load_bytes  # noqa: PLC0415  # imports torch

        file, start, nbytes = self._checked(name)
        try:
            return load_bytes(self._folder.read(file, start, start + nbytes))
        except FormatError as error:
            raise FormatError(f"bytes [{start}, {start + nbytes}) of {file!r}: {error}") from None

    def _refusals(self) -> dict[str, str]:
        """Say which values cannot be loaded, and why."""
        if self._refused is None:
            names = list(self._contents.values)
            reasons = self._folder.each(self._reason, names)
            self._refused = {
                name: reason
                for name, reason in zip(names, reasons, strict=True)
                if reason is not None
            }
        return self._refused

    def _reason(self, name: str) -> str | None:
        """Say why a value cannot be loaded; `None` if it can."""
        try:
            self._loaded(name)
        except UnpicklingError as error:
            return first_sentence(error)
        return None

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Look whether items are there, whole, and what the metadata says they are."""
        refused = self._refusals()
        wanted = [name for name in names if name in refused]
        if wanted:
            raise self._refusal(wanted)
        return list(self._folder.each(self._size, names))

    def _size(self, name: str) -> int:
        item = self._contents.chunks.get(name)
        if item is None:
            return int(self._inner(name).nbytes)
        if self._start_of(name, item) is None:
            self._whole(name, item).close()  # tried now, before any target changes
        return item.nbytes

    def _refusal(self, wanted: Sequence[str]) -> FormatError:
        """Say what is not loaded, and what to do."""
        fqns = [self._contents.values[name].fqn for name in wanted]
        shown = ", ".join(map(repr, fqns[:_MAX_SHOWN]))
        if len(fqns) > _MAX_SHOWN:
            shown += f" and {len(fqns) - _MAX_SHOWN} more"
        return FormatError(
            f"{self._folder.root!r} holds objects that are more than data, and loading them may run"
            f" anything: {shown}; leave them out with select=, or, if you trust the file, allow"
            " their classes with torch.serialization.safe_globals"
        )

    def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Open a chunk of a tensor, or a tensor inside a value."""
        from ckptio.foreign.values import source_of  # noqa: PLC0415  # imports torch

        item = self._contents.chunks.get(name)
        if item is None:
            return source_of(self._inner(name))
        start = self._start_of(name, item)
        file, first, _ = self._checked(name)
        if start is None:
            return self._whole(name, item)
        return self._folder.open(file, nbytes, first + start)

    def _whole(self, name: str, item: _Item) -> Source:
        """Load a chunk that does not lie in one piece, as torch does."""
        from ckptio.foreign.values import bytes_of  # noqa: PLC0415  # imports torch

        if item.nbytes > _split(name)[2]:  # one element that stands for many, say
            raise self._bad(item, f"{item.nbytes} bytes of it lie in {_split(name)[2]}")
        try:
            return bytes_of(self._load(name), item.dtype, item.shape)
        except UnpicklingError as error:
            raise self._bad(item, f"it is more than data: {first_sentence(error)}") from None
        except FormatError as error:
            raise self._bad(item, error) from None

    def _inner(self, name: str) -> Any:
        """Give a tensor inside a value."""
        from ckptio.foreign.values import take_apart  # noqa: PLC0415  # imports torch

        item, _, number = name.rpartition("#")
        return take_apart(self._loaded(item)).sources[int(number)]

    def _start_of(self, name: str, item: _Item) -> int | None:
        """Find the bytes of a chunk in its item; `None` if torch has to load it whole."""
        if name not in self._starts:
            file, first, nbytes = self._checked(name)

            def read(start: int, stop: int) -> bytes:
                return self._folder.read(file, first + start, first + stop)

            try:
                self._starts[name] = find_tensor(read, nbytes, item.dtype, item.shape)
            except FormatError as error:
                raise self._bad(item, error) from None
        return self._starts[name]

    def _bad(self, item: _Item, error: object) -> FormatError:
        return FormatError(f"{self._folder.root!r}: {item.fqn!r}: {error}")

    def _checked(self, name: str) -> tuple[str, int, int]:
        """Give file, start and bytes of an item that is there.

        Raises:
            CorruptionError: It is not.
        """
        file, start, nbytes = _split(name)
        found = self._folder.part_nbytes(file, start, nbytes)
        if found == nbytes:
            return file, start, nbytes
        item = self._contents.chunks.get(name) or self._contents.values[name]
        problem = "no such regular file" if found is None else f"only {found} bytes of {nbytes}"
        raise CorruptionError(
            problem,
            path=self._folder.root,
            file=file,
            start=start,
            stop=start + nbytes,
            fqns=[item.fqn],
        )


class _Contents:
    """What `.metadata` says, checked.

    Attributes:
        names: Names of everything, in its order.
        paths: Where each belongs in the nested state, of those that say so.
        tensors: Tensors; their chunks refer to `chunks` by number.
        chunks: Chunks by the range that holds them.
        values: Values by the range that holds them.
    """

    def __init__(self, metadata: Any) -> None:
        described, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        if type(described) is not dict or type(places) is not dict:
            raise FormatError("the metadata has no table of tensors, or none of places")
        self.names = list(described)
        self.paths = _paths(metadata.get("planner_data"))
        self.tensors: list[TensorEntry] = []
        self.chunks: dict[str, _Item] = {}
        self.values: dict[str, _Item] = {}
        ranges = _ranges(places)
        require_apart(ranges.values())
        for fqn, record in described.items():
            kind = record.kind if isinstance(record, Record) else ""
            if type(fqn) is str and kind == "BytesStorageMetadata":
                self._put(self.values, ranges.get((fqn, None)), _Item(fqn))
            elif type(fqn) is str and kind == "TensorStorageMetadata":
                self.tensors.append(self._tensor(fqn, record, ranges))
            else:
                raise FormatError(f"{short(fqn)} is neither a tensor nor a value")

    def _tensor(self, fqn: str, record: Record, ranges: dict[tuple[str, Any], str]) -> TensorEntry:
        """Read what is said of a tensor, and take its chunks."""
        dtype, shape = _dtype(fqn, record.get("properties")), _extents(fqn, record.get("size"))
        chunks = []
        listed = record.get("chunks")
        for part in listed if type(listed) is list else [None]:
            if not isinstance(part, Record) or part.kind != "ChunkStorageMetadata":
                raise FormatError(f"tensor {fqn!r} has a chunk that is none")
            offset, local = _extents(fqn, part.get("offsets")), _extents(fqn, part.get("sizes"))
            if not numel(local):
                continue
            number = len(self.chunks)
            self._put(self.chunks, ranges.get((fqn, offset)), _Item(fqn, dtype, local))
            is_whole = local == shape and not any(offset)
            chunks.append(Chunk(number, 0, *(() if is_whole else (offset, local))))
        return TensorEntry(fqn, dtype, shape, tuple(chunks))

    def _put(self, items: dict[str, _Item], name: str | None, item: _Item) -> None:
        if name is None:
            raise FormatError(f"{item.fqn!r} has no place")
        if name in self.chunks or name in self.values:
            raise FormatError(f"{item.fqn!r} has the place of something else")
        items[name] = item


def _ranges(places: dict[Any, Any]) -> dict[tuple[str, Any], str]:
    """Read the table of places: from name and offset to a range of a file."""
    ranges = {}
    for index, info in places.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise FormatError("the table of places is none of torch.distributed.checkpoint")
        fqn, offset = index.get("fqn"), index.get("offset")
        file, start, nbytes = (info.get(key) for key in ("relative_path", "offset", "length"))
        is_named = type(fqn) is str and type(file) is str and file
        if not is_named or not _is_extent(start, nbytes):
            raise FormatError(f"a bad place of {short(fqn)}: {short((file, start, nbytes))}")
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{fqn!r} was transformed by {short(info.get('transform_descriptors'))} when it"
                " was saved; save it without extensions"
            )
        key = None if offset is None else _extents(fqn, offset)
        ranges[fqn, key] = range_name(file, start, nbytes)
    return ranges


def _paths(planner_data: Any) -> dict[str, tuple[Any, ...]]:
    """Read where names belong in the nested state; nothing of what other planners keep."""
    if type(planner_data) is not dict:
        return {}
    return {
        fqn: path
        for fqn, path in planner_data.items()
        if type(path) is tuple and path and all(type(key) in (str, int) for key in path)
    }


def _dtype(fqn: str, properties: Any) -> str:
    state = properties.state if isinstance(properties, Record) else None
    if type(state) is tuple and state:
        dtype = state[0]
    else:
        dtype = state.get("dtype") if type(state) is dict else None
    if type(dtype) is not str or dtype not in DTYPES:
        raise FormatError(f"tensor {fqn!r} has element type {short(dtype)}, which is not known")
    return dtype


def _extents(fqn: str, value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list) or not _is_extent(*value):
        raise FormatError(f"tensor {fqn!r} has an impossible shape or offset {short(value)}")
    return tuple(value)


def _is_extent(*values: Any) -> bool:
    return all(type(value) is int and 0 <= value < MAX_EXTENT for value in values)


def _split(name: str) -> tuple[str, int, int]:
    found = split_range(name)
    assert found is not None  # noqa: S101  # made by `range_name`
    return found
