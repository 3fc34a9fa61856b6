"""Make of DCP's metadata, and of what ranks say they wrote, what a manifest is made of.

What a rank says travels as the `storage_data` of DCP's write results, in plain values:

    a tensor    {"dtype", "shape", "offset", "file", "start"}
    a value     {"word", "node", "leaves": [{"name", "dtype", "shape", "file", "start"}, ...]}

where `file` counts the files of the rank, and the first result of a rank has all of these
beside it, as `"receipt"`: {"host", "files": [[name, nbytes, packed checksums], ...]}.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptio.adapters.dcp.document import Document, Item, Pieces, build_tree
from ckptio.errors import PlanError
from ckptio.format.checksum import unpack_checksums
from ckptio.format.encode import TAG
from ckptio.format.manifest import DOCUMENT_NAME
from ckptio.layout import numel
from ckptio.shards import distinct_name
from ckptio.state.tree import renumbered
from ckptio.tiling import find_overlap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.storage import WriteResult

    from ckptio.adapters.dcp.document import Path
    from ckptio.format.encode import Json

    Row = tuple[str, str, tuple[int, ...], list[tuple[Any, ...]]]

RECEIPT = "receipt"
_UNKNOWN_HOST = "unknown"


class Table(NamedTuple):
    """What a manifest is made of.

    Attributes:
        files: Name, size, checksums and rank of each data file.
        rows: Tensors, as `encode_rows` takes them.
        tree: The state, encoded.
        document: What DCP has to know besides.
        hosts: Host of each rank; none if there is one rank.
    """

    files: list[tuple[str, int, Sequence[int], int]]
    rows: list[Row]
    tree: bytes
    document: Document
    hosts: tuple[str, ...]


class Names:
    """Gives names that a bucket and a manifest take, each once."""

    def __init__(self) -> None:
        self._taken = {"__metadata__", DOCUMENT_NAME}

    def distinct(self, fqn: str) -> str:
        """Give a name that nobody has yet; `fqn` itself where that is one."""
        plain = fqn.encode("utf-8", "backslashreplace").decode() or "state"
        return distinct_name(plain, self._taken)


class _Part(NamedTuple):
    """A part of a tensor: where it lies, and which part it is."""

    file: int
    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


class _Said:
    """What ranks said, with files counted through."""

    def __init__(self, results: Sequence[Sequence[WriteResult]]) -> None:
        self.files: list[tuple[str, int, Sequence[int], int]] = []
        self.hosts: list[str] = []
        self.parts: dict[str, dict[tuple[int, ...], _Part]] = {}
        self.values: dict[str, Mapping[str, Any]] = {}
        for rank, ours in enumerate(results):
            self._hear(rank, ours)

    def _hear(self, rank: int, results: Sequence[WriteResult]) -> None:
        base = len(self.files)
        host = _UNKNOWN_HOST
        for result in results:
            said, fqn = result.storage_data, result.index.fqn
            if RECEIPT in said:
                host = said[RECEIPT]["host"]
                self.files += [
                    (name, nbytes, unpack_checksums(base64.b64decode(sums)), rank)
                    for name, nbytes, sums in said[RECEIPT]["files"]
                ]
            if "word" in said:
                leaves = [{**leaf, "file": leaf["file"] + base} for leaf in said["leaves"]]
                self.values[fqn] = {**said, "leaves": leaves}
                continue
            offset, shape = tuple(said["offset"]), tuple(said["shape"])
            part = _Part(said["file"] + base, said["start"], offset, shape, said["dtype"])
            self.parts.setdefault(fqn, {})[offset] = part
        self.hosts.append(host)


def make_table(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> Table:
    """Put together what ranks wrote.

    Args:
        metadata: As the planner made it.
        results: What each rank said.

    Raises:
        PlanError: Something that is planned was not written by any rank.
    """
    said = _Said(results)
    names = Names()
    rows: list[Row] = []
    items: list[Item] = []
    nodes: list[tuple[str, Path, Json]] = []
    for fqn, stored in metadata.state_dict_metadata.items():
        path = _path_of(fqn, metadata.planner_data)
        if isinstance(stored, TensorStorageMetadata):
            shape = tuple(stored.size)
            what, node = _take_tensor(fqn, shape, said.parts.get(fqn, {}), rows, names)
            items.append(Item(fqn, what, path, stored.properties.requires_grad))
        else:
            value = said.values.get(fqn)
            if value is None:
                raise PlanError(f"no rank wrote {fqn!r}; save again")
            node = renumbered(value["node"], len(rows).__add__)
            for leaf in value["leaves"]:
                chunk = (leaf["file"], leaf["start"])
                name = names.distinct(leaf["name"])
                rows.append((name, leaf["dtype"], tuple(leaf["shape"]), [chunk]))
            items.append(Item(fqn, value["word"], path))
        nodes.append((fqn, path, node))
    tree, nested = build_tree(nodes)
    meta = metadata.storage_meta
    document = Document(
        tuple(items),
        nested,
        metadata.planner_data,
        {} if meta is None else _meta_of(meta),
    )
    hosts = tuple(said.hosts) if len(said.hosts) > 1 else ()
    return Table(said.files, rows, msgspec.json.encode(tree), document, hosts)


def _meta_of(meta: StorageMeta) -> dict[str, Any]:
    """Keep what DCP says of a checkpoint; older versions of torch know of no modules."""
    return {
        "checkpoint_id": str(meta.checkpoint_id),
        "modules": list(getattr(meta, "modules", ())),
    }


def _path_of(fqn: str, planner_data: Any) -> Path:
    """Say where an item is in the state; DCP's planners note it."""
    path = planner_data.get(fqn) if isinstance(planner_data, dict) else None
    if isinstance(path, tuple) and path and all(type(key) in {str, int} for key in path):
        return path
    return (fqn,)


def _take_tensor(
    fqn: str,
    shape: tuple[int, ...],
    parts: Mapping[tuple[int, ...], _Part],
    rows: list[Row],
    names: Names,
) -> tuple[int | Pieces, Json]:
    """Add a tensor to the rows, or each part of it if they do not fill it.

    Returns:
        What it is in the document, and in the tree.
    """
    if not parts:
        raise PlanError(f"no rank wrote {fqn!r}; save again")
    dtype = next(iter(parts.values())).dtype
    full = [part for part in parts.values() if numel(part.shape)]
    if _fills(shape, full):  # one without elements has no parts
        chunks: list[tuple[Any, ...]] = [
            (part.file, part.start)
            if part.shape == shape
            else (part.file, part.start, part.offset, part.shape)
            for part in full
        ]
        rows.append((names.distinct(fqn), dtype, shape, chunks))
        return len(rows) - 1, {TAG: len(rows) - 1}
    first = len(rows)
    node: dict[str, Json] = {}
    for part in parts.values():
        at = ",".join(map(str, part.offset))
        node[at] = {TAG: len(rows)}
        name = names.distinct(f"{fqn}@{at}")
        rows.append((name, part.dtype, part.shape, [(part.file, part.start)]))
    numbered = tuple((first + i, part.offset) for i, part in enumerate(parts.values()))
    return Pieces(shape, numbered), node


def _fills(shape: tuple[int, ...], parts: Sequence[_Part]) -> bool:
    """Whether parts are a tensor: all of it, and no element twice."""
    if sum(numel(part.shape) for part in parts) != numel(shape):
        return False
    return find_overlap([(part.offset, part.shape) for part in parts]) is None
