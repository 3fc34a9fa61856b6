"""Match tensors and arrays of a target with what a checkpoint has: they are filled in place."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio.errors import TargetError
from ckptio.format.encode import TAG
from ckptio.format.words import numpy_dtype
from ckptio.state.fills import Blank, Fill, check_array, check_fillable, classes_in
from ckptio.state.fits import (
    array_differs,
    find_plain,
    find_tensor,
    is_like,
    kinds_differ,
    resized_like,
    shape_of,
    stored_as,
)
from ckptio.state.leaves import DTYPE_NAMES, as_tensor
from ckptio.state.match import NotingMatcher
from ckptio.state.sharded import Describer, is_dtensor, memory_of
from ckptio.state.tree import is_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable

    from ckptio.format.encode import Json
    from ckptio.format.manifest import TensorEntry
    from ckptio.state.handed import Handed
    from ckptio.state.rebuild import Rebuilder
    from ckptio.state.tree import Predicate

    Assemble = Callable[[Rebuilder], Any]


class TensorMatcher(NotingMatcher):
    """Matches tensors and arrays. Classes that extend it match the containers these are in.

    Args:
        tensors: The manifest's tensors.
        dtype: Floating-point element type that targets may have instead of the stored one.
        keep: Accepts the names to load; everything if not given.
        device: Where tensors are made for those on the meta device; the CPU if not given.
            DTensors are made where their mesh is.
        resizes: Whether objects that may resize what they have are given what is stored, in any
            shape; what they refuse is an error then. Otherwise another shape is a mismatch.
        types: Classes that may be made beside those of the target.
        is_exact: Whether what is stored has all keys that there were, of the types that they had.
        is_alone: Whether no other rank has a target of its own.
    """

    def __init__(
        self,
        tensors: tuple[TensorEntry, ...],
        *,
        dtype: torch.dtype | None = None,
        keep: Predicate | None = None,
        device: torch.device | None = None,
        resizes: bool = True,
        types: Collection[type] = (),
        is_exact: bool = True,
        is_alone: bool = True,
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._resizes = resizes
        self._hands_over = resizes and is_exact
        self._is_exact, self._is_alone = is_exact, is_alone
        self._find = functools.partial(find_tensor, tensors, converted=dtype)
        super().__init__(keep, types, device)
        self._blanks: dict[Hashable, Blank] = {}
        self._num_blanks = 0
        self._describer = Describer()
        self._handed: Handed | None = None

    def _tensor(self, fqn: str, target: torch.Tensor, node: Json) -> Assemble:
        if self._keep is not None and self._is_left(fqn, node, self._keep):
            return lambda _: target
        is_new = self._handed is not None and self._handed.is_new(fqn, target)
        if not is_new and (fill := find_plain(self._tensors, fqn, node, target)) is not None:
            self.match.num_filled += 1
            self.match.fills.append(fill)
            return lambda _: target
        found, like = self._find(node, shape_of(fqn, target), target.dtype), target
        if isinstance(found, str) and is_new and self._is_resized(fqn, target):
            is_any = self._handed is not None and self._handed.is_any
            resized = resized_like(
                self._tensors, node, target, is_any=is_any, converted=self._dtype
            )
            if resized is not None:
                found, like = self._find(node, resized.shape, resized.dtype), resized
        if isinstance(found, str):
            return self._other(fqn, target, node, found)
        view = node if node[TAG] == "view" else None
        self.match.num_filled += 1
        if target.is_meta:
            blank = self._blank(fqn, like, memory_of(target))
            self.match.fills.append(Fill(found, blank, fqn, view))
            return lambda _: blank.value()
        check_fillable(fqn, target)
        if self._handed is not None and is_new:
            blank = self._handed.blank(fqn, target, like, found, view)
            self.match.fills.append(Fill(found, blank, fqn, view))
            return lambda _: blank.value()
        stored = DTYPE_NAMES[target.dtype] == (view["d"] if view else self._tensors[found].dtype)
        dtype = None if stored else target.dtype
        self.match.fills.append(Fill(found, target, fqn, view, dtype=dtype))
        return lambda _: target

    def _is_resized(self, fqn: str, target: Any = None) -> bool:
        """Whether the object that has a name may give it another shape, when it takes its state."""
        return self._resizes and self._handed is not None and self._handed.is_resized(fqn, target)

    def _other(self, fqn: str, target: Any, node: Json, found: str) -> Assemble:
        """Take a value of another kind, if the object that it is for takes any; else a mismatch.

        Args:
            fqn: Its name.
            target: What is there.
            node: What is stored.
            found: How they differ.
        """
        is_open = self._resizes and self._handed is not None and self._handed.is_open(fqn, target)
        is_tensor = isinstance(target, torch.Tensor) and stored_as(self._tensors, node) is not None
        if is_open and not is_tensor and is_kept(fqn, node, self._keep):
            return self._take(fqn, node, tuple(classes_in(target)))
        return self._mismatch(fqn, target, node, found)

    def _sharded(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Match a tensor of which this rank holds blocks."""
        if self._keep is not None and self._is_left(fqn, node, self._keep):
            return lambda _: target
        sharded = self._describer.describe(
            target,
            lambda problem, way_out: TargetError(f"cannot fill {fqn!r}: {problem}; {way_out}"),
        )
        found = self._find(node, sharded.global_shape, sharded.dtype)
        if isinstance(found, str):
            return self._mismatch(fqn, target, node, found)
        blank = None
        if len(sharded.local) == 1 and sharded.local[0].is_meta:
            blank = self._blank(fqn, target, sharded.identity)
        for local in sharded.local if blank is None else ():
            check_fillable(fqn, local)
        view = node if node[TAG] == "view" else None
        self.match.num_filled += 1
        self.match.fills += [
            Fill(found, blank or block.local, fqn, view, block) for block in sharded.blocks
        ]
        if blank is not None:
            return lambda _: blank.value()
        if is_dtensor(target):
            self.match.wrapped.append(target)
        return lambda _: target

    def _blank(self, fqn: str, target: Any, identity: Hashable) -> Blank:
        """Give what takes the place of a tensor on the meta device; tied ones get one."""
        self._num_blanks += 1
        return self._blanks.setdefault(identity, Blank(fqn, target, self._device))

    def _array(self, fqn: str, target: np.ndarray[Any, Any], node: Json) -> Assemble:
        if self._keep is not None and self._is_left(fqn, node, self._keep):
            return lambda _: target
        if type(node) is not dict or node.get(TAG) != "np":
            return self._other(fqn, target, node, kinds_differ("an array", node))
        is_new = self._handed is not None and self._handed.is_new(fqn, target)
        has_type = not target.size or target.dtype.str == node["d"]
        if is_new and self._handed is not None and self._handed.is_any:
            has_type = has_type or target.dtype.kind == numpy_dtype(node["d"]).kind == "f"
        is_resized = is_new and has_type and self._is_resized(fqn)
        if (found := array_differs(target, node)) and not is_resized:
            return self._mismatch(fqn, target, node, found)
        if is_new:
            return self._take(fqn, node)
        check_array(fqn, target)
        tensor = as_tensor(target)
        if tensor is not None and is_like(self._tensors[node["t"]], tensor):
            self.match.num_filled += 1
            self.match.fills.append(Fill(node["t"], tensor, fqn))
            return lambda _: target
        if self._is_taken(fqn, target, node):
            return lambda _: target
        assemble = self._take(fqn, node)  # strings, dates, other byte orders: made, copied

        def fill(rebuilder: Rebuilder) -> Any:
            np.copyto(target, assemble(rebuilder), casting="no")
            return target

        return fill
