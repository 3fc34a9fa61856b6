"""What a SavePlanner gives: tensors when their turn comes, and values as portable ones.

The planner is asked for a tensor when the first slab needs it, on the thread that fills
that slab, and the answer is let go behind the last one: a planner that makes what it
gives (a cast, a gather) has a few of them in memory, not the state.

DCP's planners hand values that are no tensors over as pickles. Nothing of these is stored.
The stock planner is asked for the object itself; one that overrides `resolve_data` or
`transform_object` gives bytes, which are one of three things:

    what the stock planner would have made of the object      the object
    an archive of torch.save that loads with weights_only     what it holds
    anything else                                             bytes, for a planner that
                                                              knows what they are
"""

from __future__ import annotations

import contextlib
import io
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptio._failures import raised
from ckptio.engine.context import wait_for_all
from ckptio.errors import PlanError, UnsupportedLeafError
from ckptio.foreign.archive import ZIP
from ckptio.foreign.pickles import UnpicklingError
from ckptio.format.encode import TAG
from ckptio.runtime.currents import CallerCurrents
from ckptio.staging.copy import SourceState
from ckptio.staging.cuda import CallerStreams
from ckptio.state.flatten import flatten
from ckptio.state.leaves import TORCH_DTYPES, plain_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from ckptio.adapters.dcp.document import Word
    from ckptio.format.encode import Json
    from ckptio.plan.save import SavePlan, Segment
    from ckptio.runtime.core import EngineCore
    from ckptio.shards import LeafSpec
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab


class Value(NamedTuple):
    """A value that is no tensor, taken apart.

    Attributes:
        word: What it is.
        node: Its encoded form; tensors in it by index into `leaves`.
        leaves: Arrays, tensors and long bytes that it holds.
        sources: What holds them.
    """

    word: Word
    node: Json
    leaves: tuple[LeafSpec, ...]
    sources: tuple[torch.Tensor, ...]


def take_value(planner: SavePlanner, item: WriteItem) -> Value:
    """Ask a planner for a value that is no tensor.

    Raises:
        UnsupportedLeafError: It has no portable form.
    """
    fqn = item.index.fqn
    word, value = _value_of(planner, item)
    flat = flatten({fqn: value}, takes_objects=False)
    if any(spec.global_shape is not None for spec in flat.specs):
        raise UnsupportedLeafError(
            fqn, "a sharded tensor inside a value", "let the planner flatten the state"
        )
    tree = flat.tree
    node = tree["v"][0][1] if TAG in tree else tree[fqn]
    return Value(word, node, flat.specs, flat.sources)


def _value_of(planner: SavePlanner, item: WriteItem) -> tuple[Word, Any]:
    """Get at the value behind what a planner hands over."""
    known = planner if isinstance(planner, DefaultSavePlanner) else None
    if known is not None and _is_stock(known):
        return _object(known.lookup_object(item.index))
    given = planner.resolve_data(item)
    if not isinstance(given, io.BytesIO):
        raise UnsupportedLeafError(
            item.index.fqn,
            f"the planner gave a {type(given).__name__} for an item of bytes",
            "give an io.BytesIO from resolve_data",
        )
    data = given.getvalue()
    if known is not None:
        with contextlib.suppress(Exception):  # whatever it says: the bytes are looked at instead
            value = known.lookup_object(item.index)
            stock = DefaultSavePlanner.transform_object(known, item, value)
            if stock.getvalue() == data:
                return _object(value)
    if not data.startswith(ZIP):
        return "opaque", data
    try:
        return _object(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except UnpicklingError as error:
        raise UnsupportedLeafError(
            item.index.fqn,
            f"the planner gave a pickle that is not only of plain values: {error}",
            "give plain values, or bytes that are no pickle",
        ) from None


def _is_stock(planner: SavePlanner) -> bool:
    """Whether a planner turns objects into bytes as the stock one does."""
    return all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name)
        and name not in vars(planner)
        for name in ("resolve_data", "transform_object")
    )


def _object(value: Any) -> tuple[Word, Any]:
    if type(value) is io.BytesIO:
        return "bytesio", value.getvalue()
    return "object", value


@dataclass(slots=True)
class _Slot:
    """A tensor that segments need.

    Attributes:
        lock: Held while it is made.
        tensor: It, from the first segment on.
        num_left: Segments that still need it.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    tensor: torch.Tensor | None = None
    num_left: int = 0


class PlannerSource(SourceState):
    """Tensors of a state, as a planner gives them. Made on the caller's thread.

    Args:
        items: Items whose leaves come first, in order.
        specs: The leaves of all.
        more: What holds the leaves behind those of `items`.
        planner: Who gives them.
        plan: Which segment needs which.
        at_once: Whether the planner may be asked on several threads at once.
    """

    def __init__(
        self,
        items: Sequence[WriteItem],
        specs: Sequence[LeafSpec],
        more: Sequence[torch.Tensor],
        planner: SavePlanner,
        plan: SavePlan,
        *,
        at_once: bool,
    ) -> None:
        super().__init__((), None)
        self._items = items
        self._specs = specs
        self._more = more
        self._planner = planner
        self._one_by_one: AbstractContextManager[Any] = (
            contextlib.nullcontext() if at_once else threading.Lock()
        )
        self._core: EngineCore | None = None
        self._currents = CallerCurrents()
        self._segments = [segment for bucket in plan.buckets for segment in bucket.segments]
        self._slots = [_Slot() for _ in specs]
        for segment in self._segments:
            for leaf in _leaves_of(segment):
                self._slots[leaf].num_left += 1

    def begin(self, core: EngineCore) -> None:
        """Get the tensor that is written first, which tells whether slabs are to be pinned.

        No other is asked for: a planner may make each. If that one is on the CPU, slabs are pinned
        from the first one on that is not.

        Args:
            core: The engine that copies.
        """
        self._core = core
        first = next((leaf for segment in self._segments for leaf in _leaves_of(segment)), None)
        if first is not None and (tensor := self._take(first)).is_cuda:
            core.side_streams(tensor.device, saving=True)

    @property
    def uses_devices(self) -> bool:
        """Whether devices may copy to the slabs: what a planner gives may be on any."""
        return self._currents.use_cuda

    def gather(self, segment: Segment, slab: Slab, pending: list[PendingCopies]) -> None:
        """Copy a segment into a slab, and wait for devices; see `SourceState`."""
        del pending
        leaves = _leaves_of(segment)
        numbers = {leaf: i for i, leaf in enumerate(leaves)}
        pieces = tuple((at, numbers[leaf], start, n) for at, leaf, start, n in segment.pieces)
        try:
            tensors = [self._take(leaf) for leaf in leaves]
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # an exit ends the engine's loop, and no future takes a StopIteration: nobody would
            # wake who waits for the save
            problem = f"the planner raised {raised(error)} on a thread of the engine"
            raise PlanError(problem) from error
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        copies: list[PendingCopies] = []
        try:
            source = SourceState(tensors, self._ordered(devices))
            source.gather(replace(segment, pieces=pieces), slab, copies)
        finally:  # the tensors are let go of here, so that nobody else can wait
            wait_for_all(copies)
        for leaf in leaves:
            self._let_go(leaf)

    def _take(self, leaf: int) -> torch.Tensor:
        slot = self._slots[leaf]
        with slot.lock:
            if slot.tensor is None:
                slot.tensor = self._make(leaf)
            return slot.tensor

    def _let_go(self, leaf: int) -> None:
        slot = self._slots[leaf]
        with slot.lock:
            slot.num_left -= 1
            if not slot.num_left:
                slot.tensor = None

    def _make(self, leaf: int) -> torch.Tensor:
        """Get a tensor as it was planned, on the CPU or a CUDA device."""
        if leaf >= len(self._items):
            return self._more[leaf - len(self._items)]
        item, spec = self._items[leaf], self._specs[leaf]
        with self._currents.entered():
            with self._one_by_one:
                tensor = self._planner.resolve_data(item)
            fqn = item.index.fqn
            if not isinstance(tensor, torch.Tensor):
                raise PlanError(f"the planner gave {type(tensor).__name__} for tensor {fqn!r}")
            tensor = tensor.detach()
            if not (tensor.is_cpu or tensor.is_cuda or tensor.is_meta):
                tensor = tensor.cpu()
            plain_dtype(fqn, tensor)
            if tuple(tensor.shape) != spec.shape:
                raise PlanError(
                    f"the planner gave a tensor of shape {tuple(tensor.shape)} for {fqn!r}, which"
                    f" it had planned with shape {spec.shape}; change the plan alike"
                )
            return tensor.to(TORCH_DTYPES[spec.dtype])

    def _ordered(self, devices: Collection[torch.device]) -> CallerStreams | None:
        """Order copies from devices behind what their streams have to do by now."""
        if not devices:
            return None
        assert self._core is not None  # noqa: S101  # it was begun
        side = self._core.side_streams(min(devices, key=str), saving=True)
        with self._currents.entered():
            return CallerStreams(devices, side)


def _leaves_of(segment: Segment) -> list[int]:
    return sorted({leaf for _, leaf, _, _ in segment.pieces})
