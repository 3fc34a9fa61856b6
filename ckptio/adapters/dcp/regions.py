"""From DCP's read items to what is asked for of a checkpoint, and the files that hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.checkpoint.planner import LoadItemType

from ckptio.adapters.dcp.document import Document, Item, Pieces, node_at
from ckptio.engine.regions import Need
from ckptio.errors import TargetError
from ckptio.format.manifest import Chunk, TensorEntry
from ckptio.layout import Box, nbytes_of
from ckptio.state.tree import indices_in, read_tree
from ckptio.tiling import is_inside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.planner import ReadItem

    from ckptio.format.encode import Json
    from ckptio.format.manifest import Manifest


class Opened(NamedTuple):
    """A checkpoint whose manifest was read.

    Attributes:
        manifest: What it is made of.
        document: What DCP has to know besides.
        items: Its items, by name.
        parts: Stored parts of tensors as tensors of their own, by name and offset; of those
            that were asked for.
    """

    manifest: Manifest
    document: Document
    items: dict[str, Item]
    parts: dict[str, dict[tuple[int, ...], TensorEntry]]


class Region(NamedTuple):
    """What a read item asks for: a part of a stored tensor."""

    item: ReadItem
    entry: TensorEntry
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of it in the files."""
        return nbytes_of(self.box.shape, self.entry.dtype)


def files_of(opened: Opened, items: Sequence[ReadItem]) -> list[int]:
    """Say which files hold what is asked for.

    Raises:
        TargetError: Something is asked for that is not there.
    """
    needs = [
        Need(region.entry, 0, region=region.box)
        for region in (region_of(opened, item) for item in items if is_tensor(item))
    ]
    used = {chunk.file for need in needs for chunk in need.chunks()}
    tree = tree_of(opened, items)
    for item in items:
        if not is_tensor(item):
            for index in indices_in(node_of(opened, tree, item)):
                used.update(chunk.file for chunk in opened.manifest.tensors[index].chunks)
    return sorted(used)


def is_tensor(item: ReadItem) -> bool:
    """Whether a read item asks for a tensor."""
    return item.type != LoadItemType.BYTE_IO


def region_of(opened: Opened, item: ReadItem) -> Region:
    """Find what a read item asks for.

    Raises:
        TargetError: It is not there.
    """
    index = item.storage_index
    found = opened.items.get(index.fqn)
    if found is None or isinstance(found.what, str):
        raise TargetError(f"the checkpoint has no tensor {index.fqn!r}")
    shape = tuple(item.lengths)
    first = tuple(item.storage_offsets)
    offset = tuple(index.offset) if index.offset is not None else (0,) * len(shape)
    if index.fqn not in opened.parts:
        opened.parts[index.fqn] = _parts_of(opened.manifest, found.what)
    part = opened.parts[index.fqn].get(offset)
    if part is not None and (is_inside(first, shape, part.shape) or isinstance(found.what, Pieces)):
        return _inside(item, part, first, shape)
    if isinstance(found.what, Pieces) or len(offset) != len(first):
        raise TargetError(f"the checkpoint has no part of {index.fqn!r} at {offset}")
    start = tuple(a + b for a, b in zip(offset, first, strict=True))
    return _inside(item, opened.manifest.tensors[found.what], start, shape)


def _parts_of(manifest: Manifest, what: int | Pieces) -> dict[tuple[int, ...], TensorEntry]:
    """Give each stored part of a tensor as a tensor of its own, by its offset.

    DCP names the part it wants something of: looking through all of them for each of its
    items would take minutes for a large job.
    """
    if isinstance(what, Pieces):
        return {first: manifest.tensors[number] for number, first in what.parts}
    entry = manifest.tensors[what]
    if len(entry.chunks) == 1:
        return {entry.box.offset: entry}
    boxes = [(entry.box_of(chunk), chunk) for chunk in entry.chunks]
    return {
        box.offset: TensorEntry(
            entry.name, entry.dtype, box.shape, (Chunk(chunk.file, chunk.start),)
        )
        for box, chunk in boxes
    }


def _inside(
    item: ReadItem, entry: TensorEntry, start: tuple[int, ...], shape: tuple[int, ...]
) -> Region:
    """Check that a part lies in its tensor."""
    if not is_inside(start, shape, entry.shape):
        raise TargetError(f"{entry.name!r} of shape {entry.shape} has no {shape} at {start}")
    return Region(item, entry, Box(start, shape))


def tree_of(opened: Opened, items: Sequence[ReadItem]) -> Json:
    """Parse the tree, if anything in it is asked for."""
    if all(map(is_tensor, items)):
        return None
    return read_tree(opened.manifest, 0)


def node_of(opened: Opened, tree: Json, item: ReadItem) -> Json:
    """Find the encoded value that is asked for.

    Raises:
        TargetError: It is not there.
    """
    found = opened.items.get(item.storage_index.fqn)
    if found is None or not isinstance(found.what, str):
        raise TargetError(f"the checkpoint has no value {item.storage_index.fqn!r}")
    return node_at(tree, opened.document.place(found))
