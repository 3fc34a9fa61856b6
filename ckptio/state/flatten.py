"""Take a state apart: tensors on one side, everything else as a tree on the other.

Runs on the caller's thread, at the call: what is refused is refused before anything is
written, and what a stateful object answers is its state now. Nothing is copied here;
the flat state refers to the caller's tensors until they are staged.

A tensor of which this rank holds a part is taken apart into blocks. Every rank names it,
also one that holds none of it, so that the trees of all ranks have the same references.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio._gc import without_collection
from ckptio.errors import UnsupportedLeafError
from ckptio.format.encode import RANKS_TAG, TAG, ObjectEncoder, class_name, encode_bytes, join_fqn
from ckptio.format.manifest import MAX_DIMS
from ckptio.layout import numel
from ckptio.plan.differences import UNSURE
from ckptio.shards import LeafSpec, PerRank, Shard, distinct_name
from ckptio.state.alike import Alike
from ckptio.state.held import Held
from ckptio.state.leaves import (
    DTYPE_NAMES,
    NUMPY_KINDS,
    TORCH_DTYPES,
    WORDS,
    as_bytes,
    as_tensor,
    encode_key_leaf,
    encode_scalar,
    failed_within,
    name_of,
    plain_dtype,
    refused_within,
    require_extents,
    way_out_of,
)
from ckptio.state.looks import Occurrence, look_at, order_of
from ckptio.state.sharded import Describer, dtensor_class, is_sharded, refuse_partial
from ckptio.state.stateful import is_stateful
from ckptio.state.ties import WITHOUT_MEMORY, resolve_ties, spans_of
from ckptio.state.wrappers import class_of, is_wrapper, take_apart, wrapper_in

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ckptio.format.encode import Json
    from ckptio.state.looks import Look

#: Longer `bytes` go to a bucket, like a tensor; shorter ones stay in the manifest.
MAX_INLINE_NBYTES = 1024
_RESERVED_NAME = "__metadata__"  # safetensors' own


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart.

    Attributes:
        specs: What the plan needs of each block that this rank holds. A plain tensor is
            one block. A tensor of which this rank holds nothing has one spec without
            elements (its shape is zeros), so that every rank knows name, type and shape.
        sources: What holds the blocks (uint8 views of arrays and bytes among them), same
            order. They are the caller's memory, not copies.
        names: Names of the tensors, distinct, in the order in which the tree refers to
            them. Specs are in the same order: without sharded tensors, one for each.
        tree: Everything else, JSON-ready, with tensors by index into `names`.
        untied: Names of tensors that may share memory but are saved apart.
        looks: What is known already of each of `sources`, `None` for nothing; as many as these.
    """

    specs: tuple[LeafSpec, ...]
    sources: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    tree: Json
    untied: tuple[str, ...]
    looks: tuple[Look | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def devices(self) -> set[torch.device]:
        """CUDA devices that have some of `sources`."""
        pairs = zip(self.sources, self.looks, strict=True)
        devices = {s.device if look is None else look.device for s, look in pairs}
        return {each for each in devices if each is not None and each.type == "cuda"}

    def without_sources(self) -> FlatState:
        """Give the same without what refers to the caller's memory."""
        return dataclasses.replace(self, sources=(), looks=())


@without_collection
def flatten(
    state: Any,
    rank: int | None = None,
    instead: Callable[[str, Any], torch.Tensor] | None = None,
    *,
    takes_objects: bool = True,
) -> FlatState:
    """Take a state apart.

    Args:
        state: Any nesting of dicts, lists, tuples and sets with tensors, arrays, numbers,
            strings, bytes and the like; `Stateful` objects stand for their state. Of a
            DTensor, a ShardedTensor or a `Shard` this rank's blocks are taken.
        rank: This rank, if others save the same checkpoint. Tensors inside a `PerRank`
            value are named `fqn~rank<rank>` then, since each rank has its own.
        instead: Gives bytes to store for a value that has no portable form, by name and
            value; without it such a value is refused.
        takes_objects: Whether `Stateful` objects are taken: DCP gives back those at its top alone.

    Returns:
        A flat state that refers to the caller's memory.

    Raises:
        UnsupportedLeafError: A value has no portable form, or a sharded tensor is partial or
            contradicts itself.
    """
    return _Flattener(rank, instead, takes_objects=takes_objects).flatten(state)


class _Flattener:
    """One walk over one state."""

    def __init__(
        self,
        rank: int | None,
        instead: Callable[[str, Any], torch.Tensor] | None,
        *,
        takes_objects: bool,
    ) -> None:
        self._instead = instead
        self._takes_objects = takes_objects
        self._suffix = "" if rank is None else f"~rank{rank}"
        self._in_ranks = False
        self._alike = None if rank is None else Alike()
        self._shared: list[Occurrence] = []
        self._per_rank: list[Occurrence] = []
        self._held: dict[Hashable, Held] = {}
        self._describer = Describer()
        #: Objects that were asked, and their states, by id: one that stands at two places has one
        #: state, of one moment, and what it makes for it is stored once.
        self._states: dict[int, tuple[Any, Any]] = {}
        self._names: set[str] = {_RESERVED_NAME}
        #: How many of `_shared` and `_per_rank` there were when a program's code last ran.
        self._num_before = 0, 0

    def flatten(self, state: Any) -> FlatState:
        """Walk over the state. Once."""
        cls = dtensor_class()
        self._encoder = ObjectEncoder(
            self._leaf,
            {
                **({} if cls is None else {cls: self._sharded}),
                Shard: self._sharded,
                PerRank: self._ranks,
                torch.Tensor: self._tensor,
                torch.nn.Parameter: self._tensor,
                **WORDS,
                np.ndarray: self._array,
                bytes: self._bytes,
                bytearray: self._bytes,
            },
            encode_key_leaf,
        )
        try:
            return self._finish(self._encoder.encode("", state))
        finally:
            # it refers to the encoder, which refers to it: the tensors of a state that is
            # saved and gone would stay in memory until Python collects garbage
            del self._encoder

    def _finish(self, tree: Json) -> FlatState:
        """Settle which tensors share memory, and number those to be stored.

        What is kept for each rank is tied with its like alone: the name that a tensor is
        stored under has to be the same on all ranks.
        """
        # a `state_dict()` may have written to, or moved, what was looked at before
        shared, per_rank = self._num_before
        for occurrence in (*self._shared[:shared], *self._per_rank[:per_rank]):
            occurrence.look_again()
        stored, untied = resolve_ties(self._shared, self._distinct)
        more, more_untied = resolve_ties(self._per_rank, self._distinct, first=len(stored))
        if self._alike is not None:
            self._alike.finish(tree, self._shared, self._held.values())
        stored += more
        specs = [
            LeafSpec(o.name, o.dtype, tuple(o.tensor.shape) if o.look is None else o.look.shape)
            for o in stored
        ]
        sources = [o.tensor for o in stored]
        looks = [o.look for o in stored]
        names = [o.name for o in stored]
        for held in self._held.values():
            for node in held.nodes:
                node[TAG] = len(names)
            names.append(held.name)
            for spec, source in held.pieces():
                specs.append(spec)
                sources.append(source)
                looks.append(None)
        return FlatState(
            tuple(specs), tuple(sources), tuple(names), tree, untied + more_untied, tuple(looks)
        )

    def _distinct(self, fqn: str) -> str:
        """Give a name no other tensor has; the first comer has the plain one."""
        name = fqn or "state"
        if not name.isascii():
            name = name.encode("utf-8", "backslashreplace").decode()
        if self._in_ranks:
            name += self._suffix
        return distinct_name(name, self._names)

    def _leaf(self, fqn: str, value: Any) -> Json:
        """Handle what the encoder has no exact type for."""
        if is_sharded(value):
            return self._sharded(fqn, value)
        if is_wrapper(value):
            return self._wrapper(fqn, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(fqn, value)
        if isinstance(value, np.generic):
            return encode_scalar(fqn, value)
        if is_stateful(value):
            if not self._takes_objects:
                raise UnsupportedLeafError(
                    fqn,
                    f"an object of type {type(value).__qualname__} that is not at the top of the"
                    " state",
                    "put its state_dict() there, or the object at the top",
                )
            state = self._state_of(fqn, value)
            try:
                return self._of_object(fqn, value, state)
            except UnsupportedLeafError as error:
                raise refused_within(fqn, value, error) from error.__cause__
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return self._refuse(
            fqn, value, f"a value of type {name} has no portable form", way_out_of(value)
        )

    def _state_of(self, fqn: str, value: Any) -> Any:
        """Ask an object for its state, once."""
        if id(value) not in self._states:
            try:
                self._states[id(value)] = value, value.state_dict()
            except Exception as error:  # of the caller's class, which raises anything
                raise failed_within(fqn, error) from error
            self._num_before = len(self._shared), len(self._per_rank)
        return self._states[id(value)][1]

    def _of_object(self, fqn: str, value: Any, state: Any) -> Json:
        """Take the state of an object apart, and note whose it is."""
        alike = self._alike
        if alike is None or self._in_ranks:
            return self._encoder.encode(fqn, state)
        before, alike.owner = alike.owner, value
        node = self._encoder.encode(fqn, state)
        alike.owner = before
        if isinstance(value, torch.optim.Optimizer):
            alike.note_optimizer(node, value)
        return node

    def _refuse(self, fqn: str, value: Any, problem: str, way_out: str) -> Json:
        """Raise, or store something instead."""
        if self._instead is None:
            raise UnsupportedLeafError(fqn, problem, way_out)
        return self._store(fqn, self._instead(fqn, value), "uint8", {TAG: None})

    def _tensor(self, fqn: str, tensor: torch.Tensor) -> Json:
        look = look_at(tensor)
        if look is not None:  # by far the most
            if 0 in look.shape or look.shape[MAX_DIMS:]:
                require_extents(fqn, look.shape)
            return self._store(fqn, tensor, look.dtype, {TAG: None}, look)
        try:
            dtype = plain_dtype(fqn, tensor)
        except UnsupportedLeafError:
            if self._instead is None:
                raise
            return self._store(fqn, self._instead(fqn, tensor), "uint8", {TAG: None})
        require_extents(fqn, tensor.shape, tensor.stride())
        order = order_of(tensor)
        return self._store(fqn, tensor, dtype, {TAG: None, "p": order} if order else {TAG: None})

    def _wrapper(self, fqn: str, value: torch.Tensor) -> Json:
        """Save a tensor that is made of others by its parts, as a dataclass by its fields."""
        parts, known = take_apart(fqn, value)
        fields = [[n, self._encoder.encode(join_fqn(fqn, n), part)] for n, part in parts.items()]
        fields += [[name, node] for name, node in known.items()]
        return {TAG: "dataclass", "c": class_name(class_of(value)), "v": fields}

    def _sharded(self, fqn: str, value: Any) -> Json:
        """Take the blocks of a tensor that is held in parts."""
        if wrapper_in(value) is not None:
            return self._for_ranks(functools.partial(self._wrapper, fqn, value))
        refuse = functools.partial(UnsupportedLeafError, fqn)
        if self._in_ranks:
            raise refuse(
                "a sharded tensor inside a PerRank value, where each rank has a whole of its own",
                "put it outside, where its blocks are saved as parts of one tensor",
            )
        refuse_partial(value, refuse)
        sharded = self._describer.describe(value, refuse)
        for local in sharded.local:
            plain_dtype(fqn, local)
            if isinstance(spans_of([local], [local.nbytes]), int):
                raise refuse(WITHOUT_MEMORY, "save it where it has")
        dtype = DTYPE_NAMES.get(sharded.dtype)
        if dtype is None:
            raise refuse(f"elements of type {sharded.dtype}", "save it as a type that is stored")
        node: dict[str, Any] = {TAG: None}
        # without elements anywhere, tensors need not be tied, and no rank can tell which are
        identity = sharded.identity if numel(sharded.global_shape) else id(value)
        held = self._held.get(identity)
        if held is None:
            held = Held(self._distinct(fqn), dtype, sharded, value, [])
            self._held[identity] = held
        elif not sharded.blocks and held.owner is not value:
            node[UNSURE] = fqn or "state"  # the memory may be that of neighbours in a buffer
        held.nodes.append(node)
        return node

    def _ranks(self, fqn: str, value: PerRank) -> Json:
        """Take apart what is kept for each rank."""
        if self._in_ranks:
            raise UnsupportedLeafError(
                fqn, "a PerRank value inside another one", "mark the outer one alone"
            )
        return self._for_ranks(functools.partial(self._encoder.encode, fqn, value.value))

    def _for_ranks(self, encode: Callable[[], Json]) -> Json:
        """Keep a value for this rank alone."""
        before, self._in_ranks = self._in_ranks, True
        try:
            value = encode()
        finally:
            self._in_ranks = before
        return value if before else {TAG: RANKS_TAG, "v": [value]}

    def _array(self, fqn: str, array: np.ndarray[Any, Any]) -> Json:
        if array.dtype.kind not in NUMPY_KINDS:
            problem = f"a numpy array of dtype {array.dtype} has no portable form"
            way_out = "save its fields, or convert it to numbers, strings or dates"
            return self._refuse(fqn, array, problem, way_out)
        require_extents(fqn, array.shape)
        node = {TAG: "np", "t": None, "d": array.dtype.str, "s": list(array.shape)}
        name = name_of(array.dtype)
        tensor = as_tensor(array)  # copied with the others, in pieces, whatever its strides
        if tensor is not None:
            return self._store(fqn, tensor, name, node)
        raw = as_bytes(np.ascontiguousarray(array))
        if name in TORCH_DTYPES and array.dtype.isnative:
            return self._store(fqn, raw.view(TORCH_DTYPES[name]).view(array.shape), name, node)
        return self._store(fqn, raw, "uint8", node)

    def _bytes(self, fqn: str, value: bytes | bytearray) -> Json:
        if len(value) <= MAX_INLINE_NBYTES:
            return encode_bytes(value)
        raw = as_bytes(np.frombuffer(value, dtype=np.uint8))
        return self._store(fqn, raw, "uint8", {TAG: type(value).__name__, "t": None})

    def _store(
        self,
        fqn: str,
        tensor: torch.Tensor,
        dtype: str,
        node: dict[str, Any],
        look: Look | None = None,
    ) -> Json:
        occurrences = self._per_rank if self._in_ranks else self._shared
        found = Occurrence(self._distinct(fqn), tensor, dtype, node, look)
        occurrences.append(found)
        if self._alike is not None and not self._in_ranks:
            self._alike.note(found, is_value="t" in node)
        return node
