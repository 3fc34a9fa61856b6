"""Whether two stored tensors are alike as they were loaded, wherever that is.

One is filled where it is, another made anew; of one, this rank may have blocks, or views of its
memory. What is here of both is compared, and what is not, tells nothing: so are tensors that have
been written to meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from ckptio.state.leaves import raw_bytes
from ckptio.state.rebuild import view_of
from ckptio.state.records import tag_of
from ckptio.state.sharded import part_of
from ckptio.state.tree import tensor_index
from ckptio.tiling import is_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptio.format.encode import Json
    from ckptio.layout import Box
    from ckptio.state.fills import Fill


class _Piece(NamedTuple):
    """What is here of a tensor, and the memory that it is in."""

    tensor: torch.Tensor
    memory: torch.Tensor


class Landed:
    """Stored tensors, as they were loaded.

    Args:
        fills: What is filled where it is.
        changed: Says whether a tensor that was filled has been written to since.
    """

    def __init__(self, fills: Sequence[Fill], changed: Callable[[torch.Tensor], object]) -> None:
        self._fills = fills
        self._changed = changed
        self._by_node: dict[tuple[int, bytes], list[Fill]] | None = None

    def are_alike(self, one: Json, other: Json, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Whether two stored tensors are alike, as far as both are here.

        Args:
            one: How one is stored.
            other: And another.
            tensors: Stored tensors, by index, that were made anew.
        """
        ones, others = self._pieces(one, tensors), self._pieces(other, tensors)
        for box in ones.keys() | others.keys():
            first, second = _at(box, ones), _at(box, others)
            if first is None or second is None:
                continue
            is_changed = self._changed(first.memory) or self._changed(second.memory)
            if not is_changed and not are_same_bytes(first.tensor, second.tensor):
                return False
        return True

    def _pieces(self, node: Json, tensors: Mapping[int, torch.Tensor]) -> dict[Box | None, _Piece]:
        """Give what is here of a stored tensor: the whole of it, or blocks."""
        index = tensor_index(node)
        view = node if tag_of(node) == "view" else None
        if index is None:
            return {}
        if index in tensors:
            made = tensors[index]
            return {None: _Piece(made if view is None else view_of(made, view), made)}
        if self._by_node is None:
            self._by_node = {}
            for fill in self._fills:
                self._by_node.setdefault((fill.stored, _key_of(fill.view)), []).append(fill)
        found: dict[Box | None, _Piece] = {}
        for fill in self._by_node.get((index, _key_of(view)), ()):
            tensor = fill.memory()
            memory = fill.tensor if isinstance(fill.tensor, torch.Tensor) else tensor
            found[None if fill.block is None else fill.block.box] = _Piece(tensor, memory)
        return found


def are_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, the other one in the precision of the first."""
    if one.shape != other.shape:
        return False
    return torch.equal(raw_bytes(one.cpu()), raw_bytes(other.to(one.dtype).cpu()))


def _at(box: Box | None, pieces: Mapping[Box | None, _Piece]) -> _Piece | None:
    """Give what is in a box; all that there is if it is in no such tensor, `None` for nothing."""
    if box is None or box in pieces:
        return pieces.get(box)
    whole = pieces.get(None)
    if whole is None or not is_inside(box.offset, box.shape, whole.tensor.shape):
        return whole
    return whole._replace(tensor=part_of(whole.tensor, box))


def _key_of(view: Json | None) -> bytes:
    return b"" if view is None else msgspec.json.encode(view)
