"""Whether code of others has written to what was filled, before it is taken.

All bytes land first; then the objects of a target take their states one after another, and torch's
modules and optimizers are given their own memory, see `handed`. So what a `load_state_dict` or a
hook does to another object comes after that was filled: averaged weights that copy themselves to
their model, a hook that brings a second network into line with the first. With `torch.load` what
is stored comes last, for what takes its state later. Here it would be lost, and so it is refused:
some bytes of each tensor are kept, and compared when it is taken. An object takes its tensors when
it is given them, a part of a module when torch copies each to itself; what is no object's is taken
at its place in the target.

On the host alone, and only where there is such code. New tensors for all of a module that has it
were rejected: some libraries hang a hook on each layer, to forgive names that are missing. So were
hooks of our own that look: a module that copies another one while it is loaded copies those, too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ckptio.errors import TargetError
from ckptio.state.handed import is_of_torch
from ckptio.state.samples import some_of
from ckptio.state.sharded import begin_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.state.fills import Fill


class _Sample(NamedTuple):
    """A tensor that was filled, and some of its bytes; `None` if it is not to be compared."""

    name: str
    tensor: torch.Tensor
    filled: bytes | None

    @property
    def is_changed(self) -> bool:
        if self.filled is None:
            return False
        now = some_of(self.tensor)
        return now is not None and now != self.filled  # its memory may be gone


class Untouched:
    """Some bytes of what was filled where it is."""

    def __init__(self) -> None:
        self._samples: list[_Sample | None] = []  # in the order of the target
        #: By where the tensor begins, or the local one that it is a block of.
        self._by_address: dict[int, list[_Sample]] = {}
        self._num_taken = 0

    def sample(self, fills: Sequence[Fill]) -> None:
        """Keep some bytes of each tensor that was filled, in the order of the target."""
        for fill in fills:
            sample = None
            if isinstance(whole := fill.tensor, torch.Tensor):
                tensor = fill.memory()
                sample = _Sample(fill.name, tensor, some_of(tensor))
                if sample.filled is not None:
                    self._by_address.setdefault(whole.data_ptr(), []).append(sample)
            self._samples.append(sample)

    def check_before(self, start: int, stop: int) -> None:
        """Check tensors that belong to no object, up to an object that is about to take its state.

        The object's own tensors are left out here, and of later calls: see `check_state`.

        Args:
            start: How many tensors of the target are filled before those of the object.
            stop: The same, with those of the object.

        Raises:
            TargetError: One is not as it was filled.
        """
        for sample in self._samples[self._num_taken : start]:
            if sample is not None and sample.is_changed:
                raise _error(sample.name)
        self._num_taken = max(self._num_taken, stop)

    def check_state(self, state: Any) -> None:
        """Check the tensors of a state that an object is about to take.

        Args:
            state: Tensors, in dicts, lists and tuples of any nesting; others are left alone.

        Raises:
            TargetError: One is not as it was filled.
        """
        if not self._by_address:
            return
        if isinstance(state, (dict, list, tuple)):
            for item in state.values() if isinstance(state, dict) else state:
                self.check_state(item)
        elif isinstance(state, torch.Tensor) and (name := self.changed(state)):
            raise _error(name)

    def changed(self, tensor: torch.Tensor) -> str:
        """Give the name of a tensor that is not as it was filled; empty for any other."""
        for sample in self._by_address.get(begin_of(tensor), ()):
            if sample.is_changed:
                return sample.name
        return ""

    @contextlib.contextmanager
    def guard(self, target: Any) -> Iterator[None]:
        """Look at each tensor of a module when torch copies it to itself, inside the block.

        Raises:
            TargetError: One was not as it was filled.
        """
        if not self._by_address or not isinstance(target, torch.nn.Module):
            yield
            return
        looking = _Looking(self)
        try:
            with looking:
                yield
        finally:
            if looking.found:  # torch makes a message of its own of what is raised in between
                raise _error(looking.found)


class _Looking(TorchFunctionMode):
    """Sees tensors that are copied to themselves.

    Attributes:
        found: Name of the first that was not as it was filled.
    """

    def __init__(self, untouched: Untouched) -> None:
        super().__init__()
        self._untouched = untouched
        self.found = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Look, and do what is asked for."""
        del types
        if func is torch.Tensor.copy_ and not torch.compiler.is_compiling() and not self.found:
            into, source = (*args, None)[:2]
            if (begin := begin_of(into)) and begin == begin_of(source):
                self.found = self._untouched.changed(into)
        return func(*args, **(kwargs or {}))


def _error(name: str) -> TargetError:
    return TargetError(
        f"{name!r} was filled, and then written to, by a load_state_dict() or a hook in the target,"
        " before it was taken; give such objects what load() returns without into=, one after"
        " another"
    )


def runs_foreign(target: Any) -> bool:
    """Whether an object runs code of others when it takes its state, which may write anywhere."""
    functions: list[Any] = [target.load_state_dict]
    if isinstance(target, torch.optim.Optimizer):
        for when in ("pre", "post"):
            functions += getattr(target, f"_optimizer_load_state_dict_{when}_hooks", {}).values()
    elif isinstance(target, torch.nn.Module):
        for _, part in target.named_modules():
            functions += (part._load_from_state_dict, part.set_extra_state)  # noqa: SLF001  # made to be overridden
            for when in ("pre", "post"):
                functions += getattr(part, f"_load_state_dict_{when}_hooks", {}).values()
    return not all(map(is_of_torch, functions))
