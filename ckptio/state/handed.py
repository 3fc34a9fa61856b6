"""Hand a state over to the object that takes it.

What the `state_dict()` of an object gives is its own memory, as a rule, and its
`load_state_dict()` may write to that while it reads what it was given: it resets itself first,
puts rows into another order, swaps two of them, or adds to what it has. Torch's modules and
optimizers copy each tensor to itself, and no more. So theirs are filled where they are, with no
second copy of a model; what has code of others to take its state is given new tensors, as
`torch.load` gives them, and does with its own what it likes. Of a module that is what is below
each module with such code: a hook that runs before, or a `_load_from_state_dict` of its own.

Such code may also give what it has another shape: a buffer of samples is as long as it was when
it was saved, an observer of torch's quantisation learns how many channels there are. So there a
tensor of another shape is no mismatch: the object is given what is stored, and says itself if
that does not fit, when other targets are filled already. Of a module that goes for the buffers of
just the parts with such code, those among them that are `None` as yet. Parameters have to fit:
what differs there is another model, as a rule, and that is said before anything changes. So do
element types, but of what has no elements yet.

An object that is neither module nor optimizer has what it likes: a best model that is `None` as
yet, samples in a list that were an array, a tensor in half the precision. So there, where a
tensor may have another shape, what is of another kind than the object has, or of other floats,
is no mismatch either, and is given as it is stored. Integers for floats stay one, as nothing is
stored in one of these that was computed in the other; so does a name that is not stored. And who
loads what fits (`strict=`) is told of all that differs, as always, and gets no object's refusal.

Some objects change when they are asked for their state: a loader of torchdata's makes the
iterator then that it is asked for next, and forgets where it is told to go on. There is nothing
to fill where no tensors and arrays are stored. So such an object is given what is stored, all of
it and unasked; that is what `torch.load` does, and it says itself what it lacks. It is asked all
the same where only it can say what is meant: of which class a value is, what each rank keeps for
itself, what it has of what is not selected or does not fit (`strict=`), and which keys were
numbers before torch.distributed.checkpoint wrote them. And one that has modules or optimizers
takes tensors, whatever is stored.

An object that has modules and optimizers among its attributes (an `AppState`, as tutorials of
torch.distributed.checkpoint call it) hands on to those what is theirs, as a rule. So their
tensors are filled where they are, too: a second copy of a model may not fit on its device.

Blocks of tensors that are held in parts are filled where they are, whoever has them: nothing but
the object's own says which part of them to load.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ckptio.format.encode import RANKS_TAG, TAG, join_fqn
from ckptio.shards import PerRank
from ckptio.state.fills import Blank
from ckptio.state.records import copied
from ckptio.state.sharded import is_sharded, memory_of
from ckptio.state.versions import Names, above

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Iterator

    from ckptio.format.encode import Json


#: What of torch's gives its buffers the shapes of what it is given.
_RESIZING = frozenset(("torch.ao.quantization.observer", "torch.ao.quantization.fake_quantize"))
#: Longer lists and dicts among an object's attributes hold no modules, but samples or the like.
_MAX_PARTS = 1000


class Handed:
    """What one object is given.

    Args:
        fqn: Its name.
        is_new: Whether a name of its state gets a new tensor.
        kept: Storages that are filled where they are.
        is_resized: Whether what is new under a name may have another shape than it has.
        fixed: Storages whose tensors keep their shape, whatever `is_resized` says.
        is_any: Whether what may have another shape may also be of another kind, and have another
            floating-point type.
    """

    def __init__(
        self,
        fqn: str,
        is_new: Callable[[str], bool],
        kept: Container[int] = frozenset(),
        is_resized: Callable[[str], bool] = lambda _: False,
        fixed: Container[int] = frozenset(),
        *,
        is_any: bool = False,
    ) -> None:
        self._start = len(fqn) + 1 if fqn else 0
        self._is_new = is_new
        self._is_resized = is_resized
        self._fixed = fixed
        self.is_any = is_any
        self._kept = kept
        self._blanks: dict[Hashable, Blank] = {}
        #: The first that was made for a tensor of the object, by its memory.
        self._firsts: dict[Hashable, Blank] = {}

    def is_new(self, fqn: str, target: torch.Tensor | np.ndarray[Any, Any]) -> bool:
        """Whether a tensor or an array of the object, by its whole name, is left for a new one."""
        return self._is_new(fqn[self._start :]) and not self._is_kept(target)

    def is_resized(self, fqn: str, target: Any = None) -> bool:
        """Whether what is new under a whole name may have another shape than it has."""
        is_fixed = isinstance(target, torch.Tensor) and _storage_of(target) in self._fixed
        return self._is_resized(fqn[self._start :]) and not is_fixed

    def is_open(self, fqn: str, target: Any) -> bool:
        """Whether a value of the object, by its whole name, may become one of another kind.

        What is filled where it is has to be filled, and so has what holds some of that.
        """
        if not self.is_any or len(fqn) <= self._start or is_sharded(target):
            return False
        if isinstance(target, (dict, list, tuple)):
            items = target.values() if isinstance(target, dict) else target
            return all(self.is_open(fqn, item) for item in items)
        if isinstance(target, torch.Tensor):
            return self.is_new(fqn, target) and self.is_resized(fqn, target)
        return not isinstance(target, PerRank)

    def _is_kept(self, target: torch.Tensor | np.ndarray[Any, Any]) -> bool:
        return isinstance(target, torch.Tensor) and _storage_of(target) in self._kept

    def blank(
        self, fqn: str, target: torch.Tensor, like: torch.Tensor, stored: int, view: Json
    ) -> Blank:
        """Give the new tensor for one of the object; names that are tied here and there share it.

        Args:
            fqn: Its whole name.
            target: What the object has.
            like: What it is to be like: the same, or one of another shape.
            stored: Index of what it takes.
            view: The part of that, if it is not all.
        """
        memory = memory_of(target)
        key = (memory, stored, msgspec.json.encode(view))
        blank = self._blanks.setdefault(key, Blank(fqn, like, target.device))
        self._firsts.setdefault(memory, blank)
        return blank

    def without_own(self, values: dict[Any, Any], template: dict[Any, Any]) -> dict[Any, Any]:
        """Give a state with copies of what was not loaded, and so is still the object's own memory.

        Args:
            values: A state.
            template: What the object has.
        """
        own: set[int] = set()
        for key, value in template.items():
            if self._is_new(join_fqn("", key)):
                _note_own(value, own)
        return self._apart(values, own)  # type: ignore[no-any-return]  # a dict like it

    def _apart(self, value: Any, own: set[int]) -> Any:
        is_own = id(value) in own
        if isinstance(value, torch.Tensor):
            is_filled = not is_own or is_sharded(value) or self._is_kept(value)
            return value if is_filled else self._tensor_apart(value)
        if isinstance(value, np.ndarray):
            return value.copy() if is_own else value
        if type(value) in (dict, OrderedDict, Counter):
            made = copied("", value) if is_own else value
            for key, item in value.items():
                made[key] = self._apart(item, own)
            return made
        if type(value) in (list, tuple):
            return type(value)([self._apart(item, own) for item in value])
        if isinstance(value, PerRank):
            return PerRank(self._apart(value.value, own))
        return value

    def _tensor_apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give what another name of the same tensor is given, or a copy of it."""
        twin = self._firsts.get(memory_of(tensor))
        if twin is not None:
            return twin.local()
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def handed_to(fqn: str, target: Any, keys: Iterable[Any]) -> Handed | None:
    """Say what an object is given new tensors for; `None` if all it has are filled.

    Args:
        fqn: Its name.
        target: The object.
        keys: Of its state.
    """
    has_own = not is_of_torch(target.load_state_dict)
    if isinstance(target, torch.optim.Optimizer):
        hooks = getattr(target, "_optimizer_load_state_dict_pre_hooks", {})
        is_new = has_own or not all(map(is_of_torch, hooks.values()))
        return Handed(fqn, lambda _: True) if is_new else None
    if not isinstance(target, torch.nn.Module):
        if not has_own:
            return None
        kept, fixed = _kept_by_torch(target), _parameters_of(target)
        return Handed(fqn, lambda _: True, kept, lambda _: True, fixed, is_any=True)
    names = Names(keys)
    rewriting = {
        name: part
        for name, part in target.named_modules(remove_duplicate=False)
        if _rewrites(part) or (has_own and part is target)
    }
    if not rewriting:
        return None
    rewritten = {names.bare(name) for name in rewriting}
    resized = {
        names.bare(join_fqn(name, buffer))
        for name, part in rewriting.items()
        for buffer in part._buffers  # noqa: SLF001  # nothing public names those that are None
        if buffer not in part._non_persistent_buffers_set  # noqa: SLF001  # nor those not stored
    }
    return Handed(
        fqn,
        lambda key: any(bare in rewritten for bare in above(names.bare(key))),
        is_resized=lambda key: names.bare(key) in resized,
    )


def takes_unasked(target: Any, node: Json) -> bool:
    """Whether an object is given all that is stored, and is not asked what it has."""
    if isinstance(target, (torch.nn.Module, torch.optim.Optimizer)):
        return False
    if is_of_torch(target.load_state_dict) or any(True for _ in _parts_of(target)):
        return False
    is_dict = type(node) is dict and node.get(TAG, "dict") in ("dict", "odict", "counter")
    return is_dict and bool(node.get("v", node)) and _is_plain(node)


def _is_plain(node: Json) -> bool:
    """Whether what is stored comes back as it was, whoever asks for it, and has no elements."""
    if type(node) is list:
        return all(map(_is_plain, node))
    if type(node) is not dict:
        return True
    if TAG not in node:
        return not any(map(str.isdecimal, node)) and all(map(_is_plain, node.values()))
    tag = node[TAG]
    if "t" in node or "m" in node:  # versions are of modules
        return tag in ("bytes", "bytearray")
    is_own = tag in ("enum", "namedtuple", "dataclass", RANKS_TAG)
    return type(tag) is str and not is_own and _is_plain(node.get("v"))


def _parts_of(target: Any) -> Iterator[Any]:
    """Give the modules and optimizers that an object has as attributes, or in lists of those."""
    values = list(getattr(target, "__dict__", {}).values())
    for value in values[:]:
        if type(value) in (list, tuple, dict) and len(value) <= _MAX_PARTS:
            values += value.values() if type(value) is dict else value
    for value in values:  # what a proxy says it is may be gone
        if issubclass(type(value), (torch.nn.Module, torch.optim.Optimizer)):
            yield value


def _parameters_of(target: Any) -> set[int]:
    """Give the storages of the parameters of modules that an object has."""
    modules = (part for part in _parts_of(target) if issubclass(type(part), torch.nn.Module))
    return {_storage_of(held) for module in modules for held in module.parameters()} - {0}


def _kept_by_torch(target: Any) -> set[int]:
    """Give the storages of modules and optimizers that an object has and torch's code fills."""
    kept: set[int] = set()
    for value in _parts_of(target):
        if not is_of_torch(value.load_state_dict):
            continue
        tensors: Iterable[Any]
        if issubclass(type(value), torch.nn.Module):
            tensors = _filled_in(value)
        elif handed_to("", value, ()) is not None:
            continue
        else:
            states = list(value.state.values())
            dicts = [state for state in states if isinstance(state, dict)]
            tensors = [*states, *(item for state in dicts for item in state.values())]
        kept.update(
            _storage_of(tensor)
            for tensor in tensors
            if isinstance(tensor, torch.Tensor) and not is_sharded(tensor)
        )
    return kept - {0}


def _filled_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """Give the tensors of a module that are not below a part with code of others."""
    parts = [part for _, part in module.named_modules() if _rewrites(part)]
    new = {id(tensor) for part in parts for tensor in (*part.parameters(), *part.buffers())}
    return [t for t in (*module.parameters(), *module.buffers()) if id(t) not in new]


def _storage_of(tensor: torch.Tensor) -> int:
    """Tell storages apart; 0 for a tensor that shows none."""
    try:
        storage: int = tensor.untyped_storage()._cdata  # noqa: SLF001  # nothing public tells them apart
    except (NotImplementedError, RuntimeError, ValueError):  # a lazy module's has none yet
        return 0
    return storage


def _rewrites(module: torch.nn.Module) -> bool:
    """Whether a module runs code of others on a state before it takes it, or resizes itself."""
    hooks = getattr(module, "_load_state_dict_pre_hooks", {})
    own = module._load_from_state_dict  # noqa: SLF001  # made to be overridden
    if getattr(own, "__module__", None) in _RESIZING:
        return True
    return not all(map(is_of_torch, (own, *hooks.values())))


def is_of_torch(function: Any) -> bool:
    """Whether torch itself has a function, or a hook that it has wrapped."""
    function = getattr(function, "hook", function)
    name = getattr(function, "__module__", None) or type(function).__module__
    return name == "torch" or name.startswith("torch.")


def _note_own(value: Any, own: set[int]) -> None:
    """Note what can be written to, by its id."""
    if isinstance(value, (torch.Tensor, np.ndarray, dict, list, tuple)):
        own.add(id(value))
        items = value.values() if isinstance(value, dict) else value
        for item in () if isinstance(value, (torch.Tensor, np.ndarray)) else items:
            _note_own(item, own)
    elif isinstance(value, PerRank):
        _note_own(value.value, own)
