"""What of a target is filled, and with what.

A tensor of the target is filled where it is. One on the meta device has no memory yet: a
new one like it is made when the sizes of files were checked, and takes its place.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ckptio.errors import TargetError
from ckptio.format.encode import join_fqn
from ckptio.format.fields import is_named_tuple
from ckptio.shards import PerRank, Shard
from ckptio.state.leaves import DTYPE_NAMES, SCALAR_TYPES, TORCH_DTYPES, as_integers
from ckptio.state.looks import plain_memory
from ckptio.state.rebuild import UNMADE, unmade, view_of
from ckptio.state.records import fields_of, record_tag
from ckptio.state.sharded import is_dtensor, is_sharded, local_of, memory_of, part_of
from ckptio.state.stateful import is_stateful
from ckptio.state.wrappers import is_wrapper, wrapper_in

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from ckptio.format.encode import Json
    from ckptio.format.manifest import TensorEntry
    from ckptio.state.sharded import Block
    from ckptio.state.taken import Taken
    from ckptio.state.tree import Predicate


@dataclass(slots=True, eq=False)
class Blank:
    """A tensor to make in place of one on the meta device; once, whoever asks.

    Attributes:
        name: Its name, for errors.
        template: The tensor, DTensor or `Shard` on the meta device.
        device: Where to make it, the CPU if not given. A DTensor's mesh says where.
    """

    name: str
    template: Any
    device: torch.device | None
    _value: Any = None

    def value(self) -> Any:
        """Give what takes the template's place.

        Raises:
            TargetError: There is no such device, or not enough memory on it.
        """
        if self._value is None:
            self._value = self._make()
        return self._value

    def local(self) -> torch.Tensor:
        """Give the memory of it that this rank holds."""
        value = self.value()
        if isinstance(value, Shard):
            return value.tensor
        local: torch.Tensor = local_of(value) if is_dtensor(value) else value
        return local

    def _make(self) -> Any:
        template = self.template
        if isinstance(template, Shard):
            return dataclasses.replace(template, tensor=self._empty(template.tensor, self.device))
        if is_dtensor(template):
            return self._empty(template, torch.device(template.device_mesh.device_type))
        return self._empty(template, self.device)

    @torch.no_grad()
    def _empty(self, template: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        device = device or torch.device("cpu")
        try:
            made = torch.empty_like(template, device=device)
        except UNMADE as error:
            raise unmade(self.name, tuple(template.shape), device, error) from error
        if isinstance(template, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=template.requires_grad)
        return made.requires_grad_(template.requires_grad)


class Fill(msgspec.Struct, frozen=True, gc=False):
    """A piece of memory of the target and what goes into it. A struct, as there are thousands.

    Attributes:
        stored: Index of the stored tensor.
        tensor: The target's memory.
        name: What the target calls it.
        view: The node of the view, if the target takes a part of the stored tensor.
        block: The part of the memory that is filled, and the block of the tensor that it
            takes; all and all if not given.
        span: First byte and end of the memory of one that takes what is stored as it is, by
            one memmove, or one copy of `device`; not known of any other.
        dtype: Its element type, where that is another than the stored one.
        device: The CUDA device that has the span; `None` if the host does.
        storage: Keeps the memory of the span: nobody else gets it before it is filled.
    """

    stored: int
    tensor: torch.Tensor | Blank
    name: str
    view: Json | None = None
    block: Block | None = None
    span: tuple[int, int] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    storage: torch.UntypedStorage | None = None

    def __repr__(self) -> str:
        """Say what it is of; the storage's own has every byte of it."""
        return f"<Fill {self.name!r} with tensor {self.stored}>"

    def memory(self) -> torch.Tensor:
        """Give what is filled, of the shape of what it takes. Makes what is blank.

        Raises:
            TargetError: It cannot be made.
        """
        tensor = self.tensor.local() if isinstance(self.tensor, Blank) else self.tensor
        return tensor if self.block is None else self.block.view(tensor)

    def checked(self, entry: TensorEntry) -> Fill:
        """Look again at memory that was matched before a program's `state_dict()` ran.

        Args:
            entry: What it takes.

        Raises:
            TargetError: It has another shape or element type by now.
        """
        tensor = self.tensor
        if self.view is not None or self.block is not None or not isinstance(tensor, torch.Tensor):
            return self
        dtype = self.dtype or TORCH_DTYPES.get(entry.dtype)
        if tensor.dtype is not dtype or tensor.shape != entry.shape:
            raise TargetError(
                f"{self.name!r} was changed to {tuple(tensor.shape)} of {tensor.dtype} while the"
                " target was looked at: a state_dict() in the same target did that"
            )
        if self.span is None:
            return self
        found = plain_memory(tensor, far=True)
        span, storage = (None, None) if found is None else found[2:]
        device = None if span is None or tensor.is_cpu else tensor.device
        return msgspec.structs.replace(self, span=span, device=device, storage=storage)

    @torch.no_grad()
    def copy_from(self, base: torch.Tensor) -> None:
        """Fill it from the whole stored tensor that its view is a part of."""
        view = view_of(base, self.view)
        source = view if self.block is None else part_of(view, self.block.box)
        as_integers(self.memory()).copy_(as_integers(source))


@dataclass(slots=True)
class Match:
    """What came out of matching.

    Attributes:
        fills: Memory to fill; several pieces for one sharded tensor, or none.
        fresh: Stored tensors that have to be made, by index; with `order` as in `allocate`.
        on_host: Those of them that are made in the host's memory, wherever others are.
        taken: Values to make, in the order of the target.
        wrapped: Tensors of the target whose memory is filled behind their back.
        doubles: One line for each place of an object that takes what another place has.
        kept: Values kept for each rank that the checkpoint has for other ranks only; they
            stay as they are.
        missing: Names of the target that the checkpoint does not have.
        unexpected: Names of the checkpoint that the target does not have.
        mismatched: One line for each name that is there in another shape, type or kind.
        unfit: Tensors of the target among those.
        modules: Modules of the target, by their names; they may know names of older versions.
        num_filled: Tensors of the target that are filled, or take nothing since this rank
            holds no element of them.
        num_values: Values taken from the checkpoint that are not filled in place.
        num_before: How many `fills` there were when a program's `state_dict()` ran last, which
            may have moved tensors of them.
    """

    fills: list[Fill] = field(default_factory=list)
    fresh: dict[int, tuple[int, ...]] = field(default_factory=dict)
    on_host: set[int] = field(default_factory=set)
    taken: list[Taken] = field(default_factory=list)
    wrapped: list[torch.Tensor] = field(default_factory=list)
    doubles: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    unfit: list[torch.Tensor] = field(default_factory=list)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    num_filled: int = 0
    num_values: int = 0
    num_before: int = 0

    @property
    def num_left(self) -> int:
        """What stays as it is, though it was asked for; as far as it is counted."""
        return len(self.missing) + len(self.mismatched) + len(self.kept)

    @property
    def num_taken(self) -> int:
        """Values of the target that come from the checkpoint, filled or made."""
        return self.num_filled + self.num_values

    @property
    def agrees(self) -> bool:
        """Whether nothing is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)

    def make(self, orders: Mapping[int, tuple[int, ...]]) -> None:
        """Have stored tensors made, if they are not yet; row-major where their orders differ."""
        for index, order in orders.items():
            self.fresh[index] = order if self.fresh.get(index, order) == order else ()

    def look_again(self, entries: Sequence[TensorEntry]) -> None:
        """Find what was moved meanwhile, once all is matched.

        Args:
            entries: Tensors of the manifest.

        Raises:
            TargetError: One is not what was matched any more.
        """
        before = self.fills[: self.num_before]
        self.fills[: self.num_before] = [fill.checked(entries[fill.stored]) for fill in before]

    def forgive_tied(self, template: Mapping[str, Any], keep: Predicate | None) -> None:
        """Strike what is missing but is the same memory as what is filled, or would be if it fit.

        Other programs (Hugging Face's) store tied parameters under one of their names.

        Args:
            template: Tensors of a module, by their whole names.
            keep: Accepts names to load.
        """
        if not self.missing:
            return
        whole = [fill.tensor for fill in self.fills if fill.block is None]
        held = [each.template if isinstance(each, Blank) else each for each in whole]
        there = template.keys() - self.missing
        parts = [template[name] for name in there if keep is None or keep(name)]
        held += filter(is_dtensor, parts)  # a rank may hold no element of one, and fill nothing
        found = {*map(_memory_of, (*held, *self.unfit))} - {None}
        self.missing = [n for n in self.missing if _memory_of(template.get(n)) not in found]

    def mark_written(self) -> None:
        """Tell autograd that wrapped tensors changed, as any in-place operation does."""
        torch.autograd.graph.increment_version(self.wrapped)


def check_fillable(fqn: str, target: torch.Tensor) -> None:
    """Refuse targets whose memory cannot take every element.

    Raises:
        TargetError: With the reason.
    """
    is_locked = target.is_inference() and not torch.is_inference_mode_enabled()
    if not is_locked and plain_memory(target) is not None and target.dtype in DTYPE_NAMES:
        return  # most blocks of tensors that are held in parts, and there are thousands
    if target.layout is not torch.strided or target.dtype not in DTYPE_NAMES:
        raise TargetError(
            f"cannot fill {fqn!r}: {target.layout} {target.dtype} is not dense memory"
        )
    if not (target.is_cpu or target.is_cuda):
        raise TargetError(f"cannot fill {fqn!r} on {target.device}: use a CPU or CUDA tensor")
    if type(target).__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
        raise TargetError(
            f"cannot fill {fqn!r}: the subclass {type(target).__qualname__!r} may hold its data"
            " elsewhere; pass the plain tensors it is made of"
        )
    if is_locked:
        raise TargetError(
            f"cannot fill {fqn!r}: it is an inference tensor; load under torch.inference_mode(), or"
            " clone() it first"
        )
    if target.numel() and _overlaps_itself(target.shape, target.stride()):
        raise TargetError(f"cannot fill {fqn!r}: its elements share memory; clone() it first")


def check_array(fqn: str, target: np.ndarray[Any, Any]) -> None:
    """Refuse arrays whose memory cannot take every element.

    Raises:
        TargetError: With the reason.
    """
    if not target.flags.writeable:
        raise TargetError(f"cannot fill {fqn!r}: the array is read-only")
    if isinstance(target, np.ma.MaskedArray):
        raise TargetError(f"cannot fill {fqn!r}: its mask would stay; pass its data and its mask")
    if not target.nbytes:
        return
    elements = tuple(stride / target.itemsize for stride in target.strides)
    if _overlaps_itself(target.shape, elements):
        raise TargetError(f"cannot fill {fqn!r}: its elements share memory; copy() it first")


def _overlaps_itself(shape: Sequence[int], strides: Sequence[float]) -> bool:
    """Whether two elements of an array are at one place; strides are in elements.

    As a rule each dimension steps over all that is within; where one does not, places are counted.
    """
    dims = sorted((abs(step), extent) for extent, step in zip(shape, strides, strict=True))
    dims = [(step, extent) for step, extent in dims if extent > 1]
    reach = 0.0
    for step, extent in dims:
        if step < reach + 1:
            break
        reach += step * (extent - 1)
    else:
        return False
    if math.prod(extent for _, extent in dims) > 1 + sum(s * (extent - 1) for s, extent in dims):
        return True  # more elements than places; there may be any number of them
    places = np.zeros(1)
    for step, extent in dims:
        places = np.add.outer(places, step * np.arange(extent)).reshape(-1)
    return bool(np.diff(np.sort(places)).min() < 1)


def classes_in(target: Any) -> Iterator[type]:
    """Give the classes in a value of a target: of dataclasses, named tuples, enums and wrappers."""
    own, parts = _class_and_parts(target)
    if own is not None:
        yield own
    for part in parts:
        if type(part) not in SCALAR_TYPES:
            yield from classes_in(part)


def _class_and_parts(target: Any) -> tuple[type | None, Iterable[Any]]:
    """Give the class that a value is saved with, if it is, and what else is in it."""
    if isinstance(target, (list, tuple, set, frozenset)):
        return type(target) if is_named_tuple(type(target)) else None, target
    if isinstance(target, dict):
        return None, itertools.chain(target, target.values())
    if isinstance(target, enum.Enum):
        return type(target), (target.value,)
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        names = (field.name for field in dataclasses.fields(target))
        return type(target), [getattr(target, name, None) for name in names]
    if is_wrapper(target):
        local = wrapper_in(target)
        wrapper: Any = target if local is None else local
        return type(wrapper), (wrapper.__tensor_flatten__()[1],)
    return None, ()


def names_of(fqn: str, target: Any) -> list[str]:
    """Name everything in a value of a target that is no container."""
    return [name for name, _ in leaves_in(fqn, target)]


def leaves_in(fqn: str, target: Any, takes: Predicate | None = None) -> Iterator[tuple[str, Any]]:
    """Give everything in a value of a target that is no container, and its name.

    An empty dict has no name: torch.distributed.checkpoint keeps none, and there is nothing in
    it to be missing.

    Args:
        fqn: Its name.
        target: The value.
        takes: Accepts names; a dataclass whose own is not among them is given by its fields.
    """
    if isinstance(target, PerRank):
        yield from leaves_in(fqn, target.value, takes)
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(target, dict):
        items = target.items()
    elif isinstance(target, (list, tuple)) and target:
        is_named = record_tag(target) is not None
        items = fields_of(target).items() if is_named else enumerate(target)
    elif takes is not None and not takes(fqn) and record_tag(target) and not is_stateful(target):
        items = fields_of(target).items()
    else:
        yield fqn, target
        return
    for key, value in items:
        yield from leaves_in(join_fqn(fqn, key), value, takes)


def _memory_of(value: Any) -> Hashable:
    if is_dtensor(value):
        return value.shape, memory_of(local_of(value))
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return memory_of(value) if is_dense and not is_sharded(value) else None
