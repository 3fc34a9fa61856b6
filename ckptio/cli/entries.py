"""What a manifest has under which name: the rows of `ckptio show`.

The tree names places, the tensor table what is stored. Two places may have one stored
tensor: the first keeps it, the others are tied to the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptio.format.encode import TAG, join_fqn
from ckptio.layout import nbytes_of
from ckptio.state.tree import children, read_tree, tensor_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptio.format.encode import Json
    from ckptio.format.manifest import Manifest
    from ckptio.state.tree import Predicate

Kind = Literal["container", "tensor", "array", "bytes", "value"]
_KINDS: dict[str, Kind] = {"np": "array", "bytes": "bytes", "bytearray": "bytes"}
_ROOT = "state"  # a state that is no container has no name of its own
_SEQUENCES = ("tuple", "set", "frozenset")
_ABSENT = {TAG: "absent"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A place in the state.

    Attributes:
        name: Its fully qualified name.
        label: The last part of the name, which its container does not have.
        depth: How many containers are around it.
        kind: What is there.
        dtype: Element type; torch's name of it, numpy's for an array.
        shape: Shape.
        nbytes: Bytes of the tensor, whether it is stored here or elsewhere.
        index: Which stored tensor it is, in the manifest's table; `None` for a value.
        tied_to: Name of the place that has the stored tensor, if that is not this one.
        is_view: Whether this is a part of what it is tied to, or another view of it.
        node: What the tree has here.
    """

    name: str
    label: str
    depth: int
    kind: Kind
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    nbytes: int | None = None
    index: int | None = None
    tied_to: str | None = None
    is_view: bool = False
    node: Json = None


def read_entries(manifest: Manifest, keep: Predicate | None) -> Iterator[Entry]:
    """List the places of a state in their order, each after the containers it is in.

    Args:
        manifest: A parsed manifest.
        keep: Accepts names; all if not given. Containers of what is kept are kept.

    Yields:
        Entries; containers without anything in them are values.

    Raises:
        FormatError: The tree is not what a save writes.
    """
    entries = _Walk(manifest).entries()
    return entries if keep is None else _kept(entries, keep)


def _kept(entries: Iterable[Entry], keep: Predicate) -> Iterator[Entry]:
    """Keep what is accepted, and the containers around it."""
    around: list[Entry] = []  # containers not given yet, from the outside in
    for entry in entries:
        while around and around[-1].depth >= entry.depth:
            around.pop()
        if entry.kind == "container":
            around.append(entry)
        elif keep(entry.name) or (
            entry.kind == "value" and any(keep(name) for name in _names_in(entry.name, entry.node))
        ):
            yield from around
            around.clear()
            yield entry


def _names_in(fqn: str, node: Json) -> Iterator[str]:
    """Name the items of a sequence that is shown as one value."""
    if type(node) is dict and node.get(TAG) in _SEQUENCES:
        node = node.get("v")
    if type(node) is list:
        for i, item in enumerate(node):
            name = join_fqn(fqn, i)
            yield name
            yield from _names_in(name, item)


class _Walk:
    """One walk over the tree of one manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = manifest.tensors
        self._tree = read_tree(manifest)
        self._owners: dict[int, str] = {}
        self._given: set[int] = set()

    def entries(self) -> Iterator[Entry]:
        """List all places.

        Raises:
            FormatError: The tree has a key that no save writes.
        """
        self._find_owners("", self._tree)
        yield from self._visit("", None, self._tree, 0)

    def _find_owners(self, fqn: str, node: Json) -> None:
        """Find the first place of each stored tensor that is no view of it."""
        for name, _, item in _items(fqn, node):
            index = tensor_index(item)
            if index is None:
                self._find_owners(name, item)
            elif item[TAG] != "view":
                self._owners.setdefault(index, name)

    def _visit(self, fqn: str, label: str | None, node: Json, depth: int) -> Iterator[Entry]:
        """List a place and what is in it; the state itself only if it is no container."""
        inner = node
        while type(inner) is dict and inner.get(TAG) == "enum":
            inner = inner.get("v")
        index = tensor_index(inner)
        is_root = label is None
        name, label = (_ROOT, _ROOT) if label is None else (fqn, label)
        if index is not None:
            yield self._tensor(name, label, inner, index, depth)
            return
        items = [] if _is_value(node) else list(_items(fqn, node))
        if not items:
            yield Entry(name=name, label=label, depth=depth, kind="value", node=node)
            return
        if not is_root:
            yield Entry(name=name, label=label, depth=depth, kind="container")
        for child, part, item in items:
            yield from self._visit(child, part, item, depth + (not is_root))

    def _tensor(self, name: str, label: str, node: Json, index: int, depth: int) -> Entry:
        """Describe a reference to a stored tensor."""
        stored = self._tensors[index]
        is_view = node[TAG] == "view"
        owner = self._owners.get(index, stored.name)
        tied = is_view or index in self._given
        if not is_view:
            self._given.add(index)
        dtype, shape, nbytes = stored.dtype, stored.shape, stored.nbytes
        if is_view:
            dtype, shape = node["d"], tuple(node["s"])
            nbytes = nbytes_of(shape, dtype)
        elif node[TAG] == "np":
            dtype, shape = node["d"], tuple(node["s"])
        return Entry(
            name=name,
            label=label,
            depth=depth,
            kind=_KINDS.get(node[TAG], "tensor"),
            dtype=dtype,
            shape=shape,
            nbytes=nbytes,
            index=index,
            tied_to=owner if tied else None,
            is_view=is_view,
            node=node,
        )


def _items(fqn: str, node: Json) -> Iterator[tuple[str, str, Json]]:
    """Give name, label and node of what a container holds; nothing for a scalar."""
    start = len(fqn) + 1 if fqn else 0
    if type(node) is list:
        for i, item in enumerate(node):
            yield join_fqn(fqn, i), str(i), item
    elif type(node) is dict and tensor_index(node) is None:
        for name, item in children(fqn, node):
            if item != _ABSENT:  # a rank that had no value here, which is not `None`
                yield name, name[start:], item


def _is_value(node: Json) -> bool:
    """Whether a node is shown on one line: a scalar, or a sequence of nothing but scalars."""
    if type(node) is dict:
        tag = node.get(TAG)
        if tag is None or tensor_index(node) is not None:
            return False
        if tag not in _SEQUENCES:
            return tag == "enum" or next(children("", node), None) is None
        node = node.get("v")
    # by `map`: a generator would be a frame more for each level, and too many for Python
    return type(node) is not list or all(map(_is_value, node))
