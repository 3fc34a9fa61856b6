"""Objects that take states, in the tests of more than one module."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio import PerRank, sync
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio import LoadResult


def loaded_both(tmp_path: Path, saved: Any, target: Any, **options: Any) -> tuple[Any, Any]:
    """Load into a target, and into a copy of it as torch does."""
    other, file = copy.deepcopy(target), io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    sync.save({"x": saved}, tmp_path / "c", config=SMALL, overwrite=True)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL, **options)
    return target, other


class OwnMemory(torch.Tensor):
    """A subclass that may keep its data elsewhere."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as a method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        return func(*args, **(kwargs or {}))


class Mean:
    """A mean that starts anew before it takes another."""

    def __init__(self, *values: float) -> None:
        self.total, self.parts = torch.tensor(values, dtype=torch.float32), np.array(values)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "parts": PerRank(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.zero_()
        self.parts[:] = 0
        self.total += state["total"]
        parts = state["parts"]
        self.parts += parts.value if isinstance(parts, PerRank) else parts


class Turned(torch.nn.Module):
    """A module whose older releases had other names and other dimensions."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2) + start)
        self.twin = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2) - start)


class Overriding(Turned):
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Best:
    """The best model so far, or whatever else it has."""

    def __init__(self, best: Any, **more: Any) -> None:
        self.best, self.more = best, more

    def state_dict(self) -> dict[str, Any]:
        return {"best": {"of": self.best}, "mean": torch.ones(1), **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]["of"]


def net_of(value: float) -> torch.nn.Linear:
    """Make a layer that is told from others by its value."""
    net = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(net.weight, value)
    torch.nn.init.zeros_(net.bias)
    return net


def hook_before(module: torch.nn.Module) -> torch.nn.Module:
    """Have a module run code of others before it takes its state."""
    module.register_load_state_dict_pre_hook(lambda *_: None)
    return module


class App:
    """Hands on to a model, as tutorials do."""

    def __init__(self, width: int, *, has_hook: bool) -> None:
        model = torch.nn.Linear(width, 2)
        self.model = hook_before(model) if has_hook else model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


class Loader:
    """A stateful object, which can have one state."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def loaded(tmp_path: Path, saved: Any, target: Any, **options: Any) -> LoadResult:
    sync.save(saved, tmp_path / "c", config=SMALL, overwrite=True)
    return sync.load_with_report(tmp_path / "c", target, config=SMALL, **options)
