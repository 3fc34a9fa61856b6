"""Objects in a file of `torch.save` that are more than data: left out, and never run.

torch refuses a whole file for one class that it does not know: the arguments of a script
beside a model, and nobody gets at the model. So for each class that it refuses it is given
another one to make, which takes anything and keeps nothing, and asked again. What was made
of it has no portable form, as little as the object itself would have: who wants that is
refused by name, and who does not gets the rest. What torch blocks outright (functions of the
operating system) stays refused with the file: nobody means that by an argument.

torch keeps what it allows for the whole process: while a file is loaded, another thread that
loads an object of such a class gets a stand-in, too, where it would have got an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.serialization import safe_globals

from ckptio.foreign.pickles import UnpicklingError
from ckptio.foreign.values import Unending, take_apart

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.state.flatten import FlatState

_REFUSED = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")
#: No file has more kinds of objects by accident, and each costs another look at its pickle.
_MAX_CLASSES = 64


class StandIn:
    """Takes the place of an object of a class that torch refuses.

    Attributes:
        wanted: The class, as the file names it.
    """

    wanted = ""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Take whatever the object was made of."""
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Keep nothing of it."""

    def __setstate__(self, _: Any) -> None:
        """Keep nothing of that either."""


def load_with_stand_ins(load: Callable[[], Any]) -> Any:
    """Load with `weights_only`, with stand-ins for objects that are more than data.

    Args:
        load: Loads; called again for each class that it refuses.

    Raises:
        UnpicklingError: It refuses something else.
    """
    makers: dict[str, Callable[..., Any]] = {}
    while True:
        try:
            with safe_globals(list(makers.values())):
                return load()
        except UnpicklingError as error:
            found = _REFUSED.search(str(error))
            name = "" if found is None else found[1]
            if "." not in name:
                name = f"builtins.{name}"  # of which torch tells the name alone
            if found is None or name in makers or len(makers) >= _MAX_CLASSES:
                raise
            makers[name] = _maker_of(name)


def _maker_of(name: str) -> Callable[..., Any]:
    """Make what goes by a name: torch finds it by its module and its own name."""
    module, _, own = name.rpartition(".")
    if name == "collections.defaultdict":  # a dict but for what it makes up

        def plain_dict(*_: Any) -> dict[Any, Any]:
            return {}

        plain_dict.__module__, plain_dict.__name__, plain_dict.__qualname__ = module, own, own
        return plain_dict
    return type(own, (StandIn,), {"wanted": name, "__module__": module})


@dataclass(frozen=True, slots=True)
class Taken:
    """A state taken apart.

    Attributes:
        flat: It; what is more than data is a byte that nobody gets.
        refused: Name and class of what such a byte stands for, by its number.
    """

    flat: FlatState
    refused: dict[int, str]


def take_apart_data(state: Any) -> Taken:
    """Take a loaded state apart, and hold back what is more than data.

    Raises:
        FormatError: A key has no portable form.
    """
    kept: dict[int, tuple[torch.Tensor, str]] = {}

    def instead(fqn: str, value: Any) -> torch.Tensor:
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        kept[id(byte)] = byte, f"{fqn!r} ({_name_of(value)})"
        return byte

    flat = take_apart(state, instead)
    numbered = enumerate(flat.sources)
    return Taken(flat, {n: kept[id(source)][1] for n, source in numbered if id(source) in kept})


def _name_of(value: object) -> str:
    """Name the class of an object, or the one that a stand-in is for."""
    if isinstance(value, StandIn):
        return value.wanted
    if isinstance(value, Unending):
        return "a container inside itself, or inside too many"
    return f"{type(value).__module__}.{type(value).__qualname__}"
