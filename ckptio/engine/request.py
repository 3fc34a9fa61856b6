"""A load as it was asked for, with every option checked."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio._texts import shown
from ckptio.errors import ConfigError, TargetError
from ckptio.format.encode import class_name, join_fqn
from ckptio.format.fields import is_named_tuple
from ckptio.shards import PerRank, Shard
from ckptio.state.fills import classes_in
from ckptio.state.leaves import SCALAR_TYPES, require_convertible
from ckptio.state.optimizers import has_known_state
from ckptio.state.rebuild import device_of
from ckptio.state.records import fields_of, record_tag
from ckptio.state.select import make_predicate
from ckptio.state.stateful import is_stateful

if TYPE_CHECKING:
    from ckptio.engine.asked import Asked
    from ckptio.state.tree import Predicate

#: What `save` refuses, and nobody means in a target.
_NO_VALUES = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A load as it was asked for.

    Attributes:
        into: The target; `None` to make everything new.
        device: Where new tensors go, those for tensors of `into` on the meta device too;
            the CPU if not given.
        dtype: Element type for floating-point tensors; their own if not given.
        keep: Accepts the names to load; everything if not given.
        strict: What to do when target and checkpoint disagree.
        types: Classes that may be built.
        rank: Whose values to take of those that were kept for each rank.
        num_ranks: Ranks that load together, each into a target of its own.
    """

    into: Any = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    keep: Predicate | None = None
    strict: str = "raise"
    types: Collection[type] = ()
    rank: int = 0
    num_ranks: int = 1


def make_request(asked: Asked) -> LoadRequest:
    """Check the options of a load.

    Raises:
        ConfigError: One is wrong, or would have no effect.
        TargetError: There is something in `into` that nothing can be filled into.
    """
    into, dtype, strict = asked.into, asked.dtype, asked.strict
    if not isinstance(strict, str) or strict not in ("raise", "report", "ignore"):
        raise ConfigError(f"strict is 'raise', 'report' or 'ignore', not {shown(strict)}")
    keep = None if asked.select is None else make_predicate(asked.select)
    try:
        require_values("", into, keep)
    except RecursionError:
        raise TargetError("cannot fill the target: it is inside itself, or too deep") from None
    if into is not None and not is_target(into):
        way_out = "device= says where new tensors go, " if _is_device(into) else ""
        raise ConfigError(
            f"into= takes what can be filled, not {shown(into)}; {way_out}without into= all is"
            " made new"
        )
    if into is None and strict == "ignore":
        raise ConfigError("strict='ignore' has no effect without into=")
    if strict == "report" and not asked.reports:
        raise ConfigError("load returns no report; use load_with_report with strict='report'")
    if into is not None and asked.device is not None and not may_be_meta(into):
        raise ConfigError(
            "device= has no effect with into=: targets are filled where they are, and none"
            " is on the meta device"
        )
    if dtype is not None:
        require_convertible(dtype)
    check_types(asked.types)
    return LoadRequest(
        into=into,
        device=device_of(asked.device),
        dtype=dtype,
        keep=keep,
        strict=strict,
        types=tuple(asked.types),
    )


def require_values(name: str, target: object, keep: Predicate | None) -> None:
    """Refuse functions, methods and classes in a target, among what is selected of it.

    A placeholder is replaced without a word, and `model.state_dict` is nearly right.

    Raises:
        TargetError: There is one.
    """
    if isinstance(target, dict):
        for key, value in target.items():
            # nearly all are so, and there are thousands
            if type(value) not in SCALAR_TYPES and not isinstance(value, torch.Tensor):
                require_values(join_fqn(name, key), value, keep)
    elif isinstance(target, (list, tuple)):
        for number, value in enumerate(target):
            if type(value) not in SCALAR_TYPES:
                require_values(join_fqn(name, number), value, keep)
    elif record_tag(target) is not None and not is_stateful(target):
        for key, value in fields_of(target).items():
            require_values(join_fqn(name, key), value, keep)
    elif isinstance(target, _NO_VALUES) and (keep is None or keep(name)):
        what = "a class" if isinstance(target, type) else "a function"
        is_getter = getattr(target, "__name__", "") == "state_dict"
        way_out = "call it" if is_getter else "pass what is to be filled"
        where = name or "the target"
        raise TargetError(f"cannot fill {where!r}: it is {what}, {shown(target)}; {way_out}")


def is_target(value: object) -> bool:
    """Whether anything of a value could be filled, or says as what it comes back."""
    if isinstance(value, torch.Size):
        return False
    kinds = (torch.Tensor, np.ndarray, Shard, PerRank, dict, list, tuple)
    return isinstance(value, kinds) or is_stateful(value) or any(classes_in(value))


def _is_device(value: Any) -> bool:
    """Whether somebody means `torch.load(path, "cpu")`."""
    try:
        torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):  # the last two: of numbers
        return False
    return True


def check_types(types: Collection[type]) -> None:
    """Refuse what is no class, or none that a value could come back as.

    Raises:
        ConfigError: One is so, or two have one name.
    """
    # an iterator would have none left for the load; arrays of numpy and torch say they are some
    if (
        not isinstance(types, Collection)
        or hasattr(types, "__array__")
        or not all(isinstance(cls, type) for cls in types)
    ):
        raise ConfigError(f"types= takes classes, not {shown(types)}")
    by_name: dict[str, type] = {}
    for cls in types:
        is_record = dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum)
        is_record = is_record or hasattr(cls, "__tensor_unflatten__")
        if not is_record and not is_named_tuple(cls):
            raise ConfigError(
                "types= takes dataclasses, enums, named tuples and tensors that are made of others,"
                f" and {cls.__name__!r} is none:"
                " other values come back without it, or not at all"
            )
        name = class_name(cls)
        if by_name.setdefault(name, cls) is not cls:
            raise ConfigError(f"types= has two classes of the name {name!r}")


def may_be_meta(target: Any) -> bool:
    """Whether a target has tensors without memory, or objects that nobody knows."""
    if isinstance(target, torch.Tensor):
        return target.is_meta
    if isinstance(target, dict):
        return any(map(may_be_meta, target.values()))
    if isinstance(target, (list, tuple)):
        return any(map(may_be_meta, target))
    if isinstance(target, torch.nn.Module):
        return any(map(may_be_meta, target.state_dict(keep_vars=True).values()))
    if isinstance(target, torch.optim.Optimizer) and has_known_state(target):
        # it puts what it is given where its parameters are; for those on meta others have words
        return any(p.is_meta for group in target.param_groups for p in group["params"])
    # of a place that has nothing yet, everything is new
    return target is None or is_stateful(target) or isinstance(target, (Shard, PerRank))
