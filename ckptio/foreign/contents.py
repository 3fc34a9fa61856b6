"""What `.metadata` of torch.distributed.checkpoint says, checked.

It is a pickle, read by `pickles` into records: nothing that it names is imported or made. What
is in it is checked before it is used, so that a broken or crafted one is a `FormatError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError
from ckptio.foreign.folder import OverlapError, place_of, range_name, require_apart
from ckptio.foreign.interface import with_files
from ckptio.foreign.pickles import Record, short
from ckptio.format.manifest import Chunk, TensorEntry
from ckptio.layout import DTYPES, nbytes_of, numel
from ckptio.state.references import is_naturals

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Item:
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
        return nbytes_of(self.shape, self.dtype)


class Contents:
    """What `.metadata` says.

    Attributes:
        names: Names of everything, in its order.
        paths: Where each belongs in the nested state, of those that say so.
        tensors: Tensors; their chunks refer to `chunks` by number.
        chunks: Chunks by the range that holds them.
        values: Values by the range that holds them.
        unknown: Why nobody can open a value that is a tensor, by its range.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        described, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        if type(described) is not dict or type(places) is not dict:
            raise FormatError("the metadata has no table of tensors, or none of places")
        self.names = list(described)
        self.paths = _paths(metadata.get("planner_data"))
        self.tensors: list[TensorEntry] = []
        self.chunks: dict[str, Item] = {}
        self.values: dict[str, Item] = {}
        self.unknown: dict[str, str] = {}
        ranges = _ranges(places)
        require_apart(ranges.values())
        for fqn, record in described.items():
            kind = record.kind if isinstance(record, Record) else ""
            if type(fqn) is str and kind == "BytesStorageMetadata":
                self._put(self.values, ranges.get((fqn, None)), Item(fqn))
            elif type(fqn) is str and kind == "TensorStorageMetadata":
                self._take(fqn, record, ranges)
            else:
                raise FormatError(f"{short(fqn)} is neither a tensor nor a value")
        self._sort()

    def _sort(self) -> None:
        """Number chunks as they lie in the files.

        Metadata has them by tensor: of hundreds of ranks, one from each file in turn.
        """
        before = list(self.chunks)
        order = sorted(range(len(before)), key=lambda number: place_of(before[number]))
        self.chunks = {before[number]: self.chunks[before[number]] for number in order}
        self.tensors = with_files(self.tensors, order)

    def _take(self, fqn: str, record: Record, ranges: dict[tuple[str, Any], str]) -> None:
        """Read what is said of a tensor, and take its chunks."""
        dtype, shape = _dtype(record.get("properties")), _extents(fqn, record.get("size"))
        every = _parts(fqn, record.get("chunks"))
        parts = [(offset, local) for offset, local in every if numel(local)]
        if type(dtype) is str and dtype in DTYPES:
            self.tensors.append(self._tensor(fqn, dtype, shape, parts, ranges))
            return
        if type(dtype) is not str or not every:
            raise FormatError(f"tensor {fqn!r} has element type {short(dtype)}, which is not known")
        name = ranges.get((fqn, (parts or every)[0][0]))  # one for all of them: nobody opens it
        self._put(self.values, name, Item(fqn))
        self.unknown[str(name)] = f"elements of type {dtype} have no portable form"

    def _tensor(
        self,
        fqn: str,
        dtype: str,
        shape: tuple[int, ...],
        parts: list[tuple[tuple[int, ...], tuple[int, ...]]],
        ranges: dict[tuple[str, Any], str],
    ) -> TensorEntry:
        chunks = []
        for offset, local in parts:
            number = len(self.chunks)
            self._put(self.chunks, ranges.get((fqn, offset)), Item(fqn, dtype, local))
            is_whole = local == shape and not any(offset)
            chunks.append(Chunk(number, 0, *(() if is_whole else (offset, local))))
        return TensorEntry(fqn, dtype, shape, tuple(chunks))

    def _put(self, items: dict[str, Item], name: str | None, item: Item) -> None:
        if name is None:
            raise FormatError(f"{item.fqn!r} has no place")
        if name in self.chunks or name in self.values:
            file, start, _ = place_of(name)
            raise OverlapError(f"{item.fqn!r} has the place of something else", file, start)
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
        if not is_named or not is_naturals([start, nbytes]):
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


def _parts(fqn: str, chunks: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Read where the parts of a tensor lie, and what shapes they have; some have no elements."""
    found = []
    for part in chunks if type(chunks) is list else [None]:
        if not isinstance(part, Record) or part.kind != "ChunkStorageMetadata":
            raise FormatError(f"tensor {fqn!r} has a chunk that is none")
        offset, local = _extents(fqn, part.get("offsets")), _extents(fqn, part.get("sizes"))
        found.append((offset, local))
    return found


def _dtype(properties: Any) -> Any:
    """Give the name of an element type, whatever is in its place."""
    state = properties.state if isinstance(properties, Record) else None
    if type(state) is tuple and state:
        return state[0]
    return state.get("dtype") if type(state) is dict else None


def _extents(fqn: str, value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list) or not is_naturals([*value]):
        raise FormatError(f"tensor {fqn!r} has an impossible shape or offset {short(value)}")
    return tuple(value)
