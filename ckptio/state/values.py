"""Make every value of a tree once, to know that it can be made: without torch, and without tensors.

Of what refers to a tensor, it is compared with what the manifest says of that. What depends on who
loads is no matter of the checkpoint: classes, which stay plain values here, zones that this machine
does not know, and what of element types and devices some version of torch knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio._gc import without_collection
from ckptio.errors import FormatError, TargetError
from ckptio.format.decode import ObjectDecoder
from ckptio.format.encode import RANKS_TAG, TAG
from ckptio.format.manifest import MAX_DIMS
from ckptio.format.words import decode_word, numpy_dtype
from ckptio.layout import numel
from ckptio.plan.trees import ABSENT
from ckptio.state.references import check_view
from ckptio.state.tree import read_tree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptio.format.encode import Json
    from ckptio.format.manifest import Manifest, TensorEntry


@without_collection
def check_values(manifest: Manifest) -> None:
    """Check a tree, see `read_tree`, and every value in it.

    Raises:
        FormatError: A value is not what a save writes. The first one is named.
    """
    tensors, pending = manifest.tensors, [("", read_tree(manifest))]

    def leaf(fqn: str, node: Json) -> Any:
        tag = node[TAG]
        if type(tag) is int:
            _check_order(tensors[tag], node)
        elif "t" in node:
            _check_reference(tensors[node["t"]], node)
        elif tag == RANKS_TAG:
            pending.extend((fqn, item) for item in node["v"] if item != ABSENT)
        else:
            return decode_word(fqn, node)
        return None

    while pending:
        fqn, node = pending.pop()
        try:
            ObjectDecoder(leaf).decode(fqn, node)
        except TargetError:  # it depends on who loads, and where; what is in it does not
            pending += [(fqn, item) for item in _items_of(node)]


def _items_of(node: Json) -> Iterable[Json]:
    """Give what is in a node: its members, which are values, too, or lists of such."""
    if type(node) is dict:
        return node.values()
    return node if type(node) is list else ()


def _check_order(entry: TensorEntry, node: Json) -> None:
    order = node.get("p")
    if order is not None and sorted(order) != list(range(len(entry.shape))):
        raise FormatError(f"{entry.name!r} of shape {entry.shape} has an order {order}")


def _check_reference(entry: TensorEntry, node: Json) -> None:
    """Check that a view lies in its tensor, and that an array has the bytes it needs."""
    if node[TAG] == "view":
        check_view(node, entry.nbytes)
    if node[TAG] == "np":
        dtype, shape = numpy_dtype(node["d"]), node["s"]
        if numel(tuple(shape)) * dtype.itemsize != entry.nbytes or len(shape) > MAX_DIMS:
            raise FormatError(f"an array {dtype} {shape} does not have {entry.nbytes} bytes")
