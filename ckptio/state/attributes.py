"""Attributes that an object has itself, and what of their values may be or hold an object.

They are read and written in the `__dict__` and in the slots themselves: a property of the same name
may raise, or do anything.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_METHODS = ("state_dict", "load_state_dict")
DICTS = (dict, OrderedDict)
CONTAINERS = (list, tuple, deque, *DICTS)
#: What says itself what it takes.
SELF_SAYING = (torch.nn.Module, torch.optim.Optimizer)


class Attribute(NamedTuple):
    """An attribute that an object has itself; `slot` is `None` for one in its `__dict__`."""

    owner: Any
    name: str
    slot: MemberDescriptorType | None

    def read(self) -> Any:
        """Give what it has; `None` for nothing."""
        if self.slot is None:
            return vars(self.owner).get(self.name)
        try:
            return self.slot.__get__(self.owner)
        except AttributeError:
            return None

    def write(self, value: Any) -> None:
        """Set it, also where the class does not allow that."""
        if self.slot is None:
            vars(self.owner)[self.name] = value
        else:
            self.slot.__set__(self.owner, value)


def attributes_of(owner: Any) -> Iterator[Attribute]:
    """Give what an object has as attributes, those in slots among them."""
    for name in list(getattr(owner, "__dict__", ())):
        yield Attribute(owner, name, None)
    for kind in type(owner).__mro__:
        for name, slot in list(vars(kind).items()):
            if type(slot) is MemberDescriptorType:
                yield Attribute(owner, name, slot)


def is_part(value: Any) -> bool:
    """Whether its class takes states: what a proxy stands for may be gone."""
    return all(hasattr(type(value), method) for method in _METHODS)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Give keys and values of what may hold parts; nothing of anything else."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple, deque)) else []
