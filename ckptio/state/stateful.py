"""Objects that give and take their state: modules, optimizers, schedulers, loaders."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from ckptio.state.leaves import PLAIN_TYPES


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its state as a dict: a module, an optimizer, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """Give the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take the state."""
        ...


def is_stateful(value: object) -> bool:
    """Whether a value is saved through its `state_dict` and restored through its twin."""
    if type(value) in PLAIN_TYPES or isinstance(value, (torch.Tensor, type)):
        return False  # most are, and to look for methods takes fifty times as long
    try:
        return isinstance(value, Stateful)
    except Exception:  # a `__getattr__` of the caller's, which raises anything
        return False
