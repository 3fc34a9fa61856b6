"""What DCP knows of a checkpoint and its manifest does not, as JSON.

    {"version": 1, "nested": true, "items": [[fqn, what, path?], ...],
     "grad": [numbers of items], "planner_data": ..., "storage_meta": {...}}

`what` is the index of a tensor in the manifest; `[shape, [[index, offset], ...]]` for a
tensor of which only parts were saved; or a word for what is no tensor, whose value is in the
manifest's tree at `path`. A path that is not given is the name cut at its dots.

The document lies in a bucket like a tensor does, under `DOCUMENT_NAME`, with checksums. The
tree does not refer to it, so it is no part of the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from ckptio.errors import FormatError, FormatVersionError, UnsupportedLeafError
from ckptio.format.decode import ObjectDecoder
from ckptio.format.encode import TAG, ObjectEncoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptio.format.encode import Json
    from ckptio.format.manifest import Manifest

#: Version that is written, and the only one that is read.
DOCUMENT_VERSION = 1
#: A larger document is refused unread.
MAX_DOCUMENT_NBYTES = 1 << 30
Path = tuple[str | int, ...]
#: What an item can be that is no tensor: a value; a `BytesIO`; what a planner made.
Word = Literal["object", "bytesio", "opaque"]
WORDS = frozenset(("object", "bytesio", "opaque"))


class Pieces(NamedTuple):
    """A tensor of which only parts were saved.

    Attributes:
        shape: Its shape.
        parts: Index of each part in the manifest, and its offset.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, tuple[int, ...]], ...]


class Item(NamedTuple):
    """What DCP calls an item.

    Attributes:
        fqn: Its name.
        what: Index of its tensor in the manifest; or parts of a tensor; or a word.
        path: Where it is in the state.
        requires_grad: Whether its tensor required gradients.
    """

    fqn: str
    what: int | Pieces | Word
    path: Path
    requires_grad: bool = False


class Document(NamedTuple):
    """What DCP knows of a checkpoint.

    Attributes:
        items: In the order of DCP's metadata.
        nested: Whether the tree is nested as the paths say; if not, it has the names as keys.
        planner_data: As the planner gave it.
        storage_meta: Id of the checkpoint and of the save, as DCP had them; modules.
    """

    items: tuple[Item, ...]
    nested: bool
    planner_data: Any
    storage_meta: Mapping[str, Any]

    def place(self, item: Item) -> Path:
        """Say where an item is in the tree."""
        return item.path if self.nested else (item.fqn,)


def encode_document(document: Document) -> bytes:
    """Write a document.

    Raises:
        UnsupportedLeafError: What the planner gave has no portable form.
        FormatError: It is larger than readers take.
    """
    codec = ObjectEncoder(_refuse_leaf)
    paths = {item.fqn: item.path for item in document.items}
    planner_data: Json = "paths"
    if not _are_paths(document.planner_data, paths):
        planner_data = [codec.encode("planner_data", document.planner_data)]
    rows: list[list[Json]] = []
    for item in document.items:
        row: list[Json] = [codec.encode("fqn", item.fqn), item.what]
        if item.path != tuple(item.fqn.split(".")):
            row.append([codec.encode("path", key) for key in item.path])
        rows.append(row)
    data = msgspec.json.encode(
        {
            "version": DOCUMENT_VERSION,
            "nested": document.nested,
            "items": rows,
            "grad": [i for i, item in enumerate(document.items) if item.requires_grad],
            "planner_data": planner_data,
            "storage_meta": codec.encode("storage_meta", dict(document.storage_meta)),
        }
    )
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise FormatError(
            f"what DCP has to know of the checkpoint takes {len(data)} bytes, and readers take"
            f" {MAX_DOCUMENT_NBYTES}; have the planner note less"
        )
    return data


def _are_paths(given: Any, paths: Mapping[str, Path]) -> bool:
    """Whether a planner gave just these; values with an equality of their own are not asked."""
    if type(given) is not dict or len(given) != len(paths):
        return False
    return all(
        type(name) is str
        and type(path) is tuple
        and all(type(key) in {str, int} for key in path)
        and path == paths.get(name)
        for name, path in given.items()
    )


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    nested: bool
    items: list[list[Any]]
    grad: list[int]
    planner_data: Any
    storage_meta: Any


def decode_document(data: bytes, manifest: Manifest) -> Document:
    """Read a document strictly.

    Raises:
        FormatError: It is none, or does not belong to the manifest.
    """
    codec = ObjectDecoder(_no_leaf)
    try:
        raw = msgspec.json.decode(data, type=_Document)
        if raw.version != DOCUMENT_VERSION:
            raise FormatVersionError(  # noqa: TRY301  # what follows depends on it
                f"the checkpoint has a DCP document of version {raw.version} and this version of"
                f" ckptio reads {DOCUMENT_VERSION}; upgrade ckptio"
            )
        grads = set(raw.grad)
        items = tuple(_item(row, i in grads, manifest, codec) for i, row in enumerate(raw.items))
        planner_data: Any = {item.fqn: item.path for item in items}
        if raw.planner_data != "paths":
            (node,) = raw.planner_data[:]  # of a list
            planner_data = codec.decode("planner_data", node)
        meta = codec.decode("storage_meta", raw.storage_meta)
    except FormatError:
        raise
    except Exception as error:  # what is read as other than it is raises anything
        raise FormatError(f"the DCP document of the checkpoint is damaged: {error!r}") from None
    if len({item.fqn for item in items}) != len(items) or type(meta) is not dict:
        raise FormatError("the DCP document of the checkpoint names an item twice, or is cut")
    return Document(items, raw.nested, planner_data, meta)


def _item(row: list[Json], requires_grad: bool, manifest: Manifest, codec: ObjectDecoder) -> Item:  # noqa: FBT001  # private
    """Read an item."""
    fqn = codec.decode("fqn", row[0])
    path: Json = tuple(fqn.split(".")) if len(row) == 2 else None  # noqa: PLR2004  # no path
    if path is None:
        _, _, keys = row
        path = tuple(codec.decode("path", key) for key in keys)
    if type(fqn) is not str or not path or not all(type(key) in {str, int} for key in path):
        raise FormatError(f"a bad name {row[0]!r} in the DCP document of the checkpoint")
    what = row[1]
    if type(what) is list:
        shape, parts = what
        what = Pieces(_sizes(shape), tuple((index, _sizes(first)) for index, first in parts))
        for index, first in what.parts:
            _check_part(what.shape, first, manifest, index)
    elif type(what) is int:
        _check_index(what, manifest)
    elif what not in WORDS:
        raise FormatError(f"{fqn!r} is {what!r} in the DCP document; upgrade ckptio")
    return Item(fqn, what, path, requires_grad)


def _sizes(value: Json) -> tuple[int, ...]:
    """Read a shape or an offset."""
    if not all(type(extent) is int and 0 <= extent < 1 << 56 for extent in value):
        raise FormatError(f"a bad shape {value!r} in the DCP document of the checkpoint")
    return tuple(value)


def _check_index(index: Json, manifest: Manifest) -> None:
    if type(index) is not int or not 0 <= index < len(manifest.tensors):
        raise FormatError(f"the DCP document refers to tensor {index!r}, which is not there")


def _check_part(
    shape: tuple[int, ...], first: tuple[int, ...], manifest: Manifest, index: Json
) -> None:
    """Check that a part lies in its tensor."""
    _check_index(index, manifest)
    local = manifest.tensors[index].shape
    if any(a + n > extent for a, n, extent in zip(first, local, shape, strict=True)):
        raise FormatError(f"the DCP document has {local} at {first} of a tensor {shape}")


def _refuse_leaf(fqn: str, value: Any) -> Json:
    raise UnsupportedLeafError(
        fqn,
        f"a planner's value of type {type(value).__name__} has no portable form",
        "put plain values there, or tensors into the state",
    )


def _no_leaf(fqn: str, node: Json) -> Any:
    raise FormatError(f"{node!r} at {fqn!r} in the DCP document of the checkpoint")


def build_tree(nodes: Sequence[tuple[str, Path, Json]]) -> tuple[Json, bool]:
    """Nest nodes by their paths.

    Args:
        nodes: Name, path and encoded value of each item.

    Returns:
        The tree, and whether it is nested. Where two items want one place it is not: then it is
        one flat dict, with the names as keys.
    """
    root: dict[str | int, Any] = {}
    codec = ObjectEncoder(lambda _, placed: placed.node)
    nested = all(_put(root, path, _Placed(node)) for _, path, node in nodes)
    value = _lists(root) if nested else {fqn: _Placed(node) for fqn, _, node in nodes}
    return codec.encode("", value), nested


class _Placed:
    """An encoded value at its place."""

    def __init__(self, node: Json) -> None:
        self.node = node


def _put(root: dict[str | int, Any], path: Path, placed: _Placed) -> bool:
    """Put a value at a path; false if there, or on the way, another value is."""
    here: Any = root
    for key in path[:-1]:
        here = here.setdefault(key, {})
        if type(here) is not dict:
            return False
    return here.setdefault(path[-1], placed) is placed


def _lists(value: Any) -> Any:
    """Turn each dict whose keys are the ints 0 to n - 1 into a list, at every depth."""
    if type(value) is not dict:
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if inner and set(inner) == set(range(len(inner))):
        return [inner[i] for i in range(len(inner))]
    return inner


def node_at(tree: Json, path: Path) -> Json:
    """Find the encoded value at a path of a tree that `build_tree` made.

    Raises:
        FormatError: There is none.
    """
    codec = ObjectDecoder(_no_leaf)
    node = tree
    for key in path:
        found: list[Json] = []
        if type(node) is list and type(key) is int:
            found = node[key : key + 1] if key >= 0 else []
        elif type(node) is dict and TAG not in node:
            found = [node[key]] if key in node else []
        elif type(node) is dict and node[TAG] == "dict" and type(node["v"]) is list:
            found = [v for k, v in node["v"] if codec.decode_key("key", k) == key]
        if len(found) != 1:
            raise FormatError(f"there is nothing at {path!r} in the tree of the checkpoint")
        node = found[0]
    return node
