"""Objects in a file of `torch.save` that are more than data: left out, and never run.

torch refuses a whole file for one class that it does not know: the arguments of a script
beside a model, and nobody gets at the model. So for each class that it refuses it is given
another one to make, which takes anything and keeps nothing, and asked again. What was made
of it has no portable form, as little as the object itself would have: whoever wants that is
refused by name, and whoever does not gets the rest. What torch blocks outright (functions of the
operating system) stays refused with the file: nobody means that by an argument.

torch puts items into lists and dicts alone, and makes subclasses of tensors of tensors alone. So
what stands for a class that the pickle (see `scan`) treats so makes a list, a dict or such a
tensor, and what it made is known by its identity. A subclass of list that has attributes, too, has
no such thing: torch takes it from nobody.

torch keeps what it allows for the whole process: while a file is loaded, another thread that
loads an object of such a class gets a stand-in, too, where it would have got an error.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from ckptio.errors import CheckpointChangedError, FormatError
from ckptio.foreign.archive import require_plain
from ckptio.foreign.pickles import UnpicklingError
from ckptio.foreign.scan import DICT, LIST, MIXED, TENSOR
from ckptio.foreign.values import Unending, Unkeyed, allowed, copied, load_file, take_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptio.foreign.scan import Scanned
    from ckptio.state.flatten import FlatState

_REFUSED = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")
#: No file has more kinds of objects by accident, and each costs another look at its pickle.
_MAX_CLASSES = 64


class StandIn:
    """Takes the place of an object of a class that torch refuses.

    Attributes:
        wanted: The class, as the file names it.
        is_module: Whether the object was a module, by what it was to be given.
        of_ckptio: See `rules.allowed`.
    """

    of_ckptio = True
    wanted = ""
    is_module = False

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Take whatever the object was made of."""
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Keep nothing of it."""

    def __setstate__(self, state: Any) -> None:
        """Keep nothing of that either."""
        self.is_module = isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys()


class StandInTensor(torch.Tensor):
    """Takes the place of a tensor of a class that torch refuses.

    Attributes:
        wanted: The class, as the file names it.
        of_ckptio: See `rules.allowed`.
    """

    of_ckptio = True
    wanted = ""

    def __setstate__(self, _: Any) -> None:
        """Keep nothing of what the tensor had besides."""

    @classmethod
    def __torch_dispatch__(cls, *called: Any, **_: Any) -> Any:
        """Make another without memory, whatever is done: a parameter is made of one, say."""
        (tensor,) = (arg for arg in called[2] if isinstance(arg, cls))
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)  # noqa: SLF001  # the only way


class _Makers:
    """What torch is given to make for the classes that it refuses, in one load.

    Args:
        kinds: What has to be made for a class; see `Scanned`.

    Attributes:
        by_name: It, by the name of the class.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.by_name: dict[str, type] = {}
        self._kinds = kinds
        self._stand_ins: dict[str, type[StandIn]] = {}
        self._filled: dict[int, tuple[Any, StandIn]] = {}

    def add(self, name: str) -> None:
        """Make what goes by a name: torch finds it by its module and its own name.

        Raises:
            UnpicklingError: There is nothing that torch would take.
        """
        module, _, own = name.rpartition(".")
        members: dict[str, Any] = {"wanted": name, "__module__": module}
        stand_in = self._stand_ins[name] = type(own, (StandIn,), members)
        kind = self._kinds.get(name, "")
        if kind == MIXED:
            raise UnpicklingError(f"{name} is a container with attributes, or not always one")
        if name == "collections.defaultdict":  # a dict but for what it makes up
            made = type(own, (StandIn,), {**members, "__new__": lambda *_: {}})
        elif kind in (LIST, DICT):
            new = list if kind == LIST else OrderedDict

            def make(*_: Any) -> Any:
                container: Any = new()
                self._filled[id(container)] = container, stand_in()
                return container

            made = type(own, (StandIn,), {**members, "__new__": make})
        elif kind == TENSOR:
            # one that is made of no tensor would have room for as many elements as it is told
            members["__new__"] = lambda *_: stand_in()
            made = type(own, (StandInTensor,), members)
        else:
            made = stand_in
        self.by_name[name] = made

    def instead(self, value: Any) -> Any:
        """Give the stand-in for what was made for torch; any other value as it is."""
        if isinstance(value, StandInTensor):
            return self._stand_ins[value.wanted]()
        found = self._filled.get(id(value))
        return value if found is None else found[1]

    def forget(self) -> None:
        """Let what was made go: it is made anew."""
        self._filled.clear()


def load_with_stand_ins(load: Callable[[], Any], scanned: Scanned) -> Any:
    """Load with `weights_only`, with stand-ins for objects that are more than data.

    Args:
        load: Loads; called again for each class that it refuses.
        scanned: What its pickles are.

    Returns:
        What it loaded, as `copied` gives it.

    Raises:
        UnpicklingError: It refuses something else.
        FormatError: Written out, it is far more than its pickles.
    """
    makers = _Makers(scanned.kinds)
    while True:
        try:
            makers.forget()
            with allowed(makers.by_name.values()):
                state = load()
            return copied(state, scanned.nbytes, makers.instead if makers.by_name else None)
        except UnpicklingError as error:
            found = _REFUSED.search(str(error))
            name = "" if found is None else found[1]
            if "." not in name:
                name = f"builtins.{name}"  # of which torch tells the name alone
            if found is None or name in makers.by_name or len(makers.by_name) >= _MAX_CLASSES:
                raise
            makers.add(name)


def load_whole(path: str) -> Any:
    """Load a local file into memory, with stand-ins for objects that are more than data.

    A map would be less, but it ends the process if the file is written over in place, as
    `torch.save` itself does.

    Raises:
        UnpicklingError: It holds more than data.
        FormatError: It cannot be loaded.
        CheckpointChangedError: It is not there any more.
    """
    try:
        with open(path, "rb") as file:
            scanned = require_plain(file)
        return load_with_stand_ins(lambda: load_file(path), scanned)
    except (FormatError, UnpicklingError):
        raise
    except FileNotFoundError:
        raise CheckpointChangedError(path) from None
    except Exception as error:  # a damaged file raises anything
        raise FormatError(f"torch.load cannot read it: {error}") from None


@dataclass(frozen=True, slots=True)
class Taken:
    """A state taken apart.

    Attributes:
        flat: It; what is more than data is a byte that nobody gets.
        refused: Name and class of what such a byte stands for, by its number.
        whole: The class, if it is one such object.
        has_modules: Whether modules are among them.
    """

    flat: FlatState
    refused: dict[int, str]
    whole: str = ""
    has_modules: bool = False


def take_apart_data(state: Any) -> Taken:
    """Take a loaded state apart, and hold back what is more than data.

    Raises:
        FormatError: A key has no portable form.
    """
    kept: dict[int, tuple[torch.Tensor, str]] = {}
    modules: list[str] = []

    def instead(fqn: str, value: Any) -> torch.Tensor:
        if isinstance(value, StandIn) and value.is_module:
            modules.append(fqn)
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        kept[id(byte)] = byte, f"{fqn!r} ({_name_of(value)})"
        return byte

    flat = take_apart(state, instead)
    numbered = enumerate(flat.sources)
    return Taken(
        flat,
        {n: kept[id(source)][1] for n, source in numbered if id(source) in kept},
        whole=_name_of(state) if isinstance(state, StandIn) else "",
        has_modules=bool(modules),
    )


def _name_of(value: object) -> str:
    """Name the class of an object, or the one that a stand-in is for."""
    cls = value if isinstance(value, type) else type(value)
    if issubclass(cls, (StandIn, StandInTensor)):
        return cls.wanted
    if isinstance(value, Unkeyed):
        return f"a key of type {value.kind}"
    if isinstance(value, Unending):
        return "a container inside itself, or inside too many"
    if isinstance(value, torch.Tensor) and cls is torch.Tensor:
        kind = "quantised" if value.is_quantized else "meta" if value.is_meta else value.layout
        return f"a {str(kind).removeprefix('torch.')} tensor"
    return f"{type(value).__module__}.{type(value).__qualname__}"
