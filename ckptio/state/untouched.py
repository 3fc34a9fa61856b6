"""Whether code of others has written to what was filled, before it is taken.

All bytes land first; then the objects of a target take their states one after another, and torch's
modules and optimizers are given their own memory, see `handed`. So what a `load_state_dict` or a
hook does to another object comes after that was filled: averaged weights that copy themselves to
their model, a hook that brings a second network into line with the first. With `torch.load` what
is stored comes last, for an object that takes its state later. Here it would be lost, and so it is
refused: some bytes of each tensor are kept, and compared before its object takes it.

On the host alone, and only where there is such code. New tensors for all of a module that has it
were rejected: some libraries hang a hook on each layer, to forgive names that are missing.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import torch

from ckptio.errors import TargetError
from ckptio.state.handed import is_of_torch
from ckptio.state.looks import PLAIN_TENSORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptio.state.fills import Fill

_SAMPLE_NBYTES = 64


class Untouched:
    """Some bytes of what was filled where it is."""

    def __init__(self) -> None:
        #: By the start of a tensor's memory: its name, where the bytes are, and they.
        self._samples: dict[int, tuple[str, int, bytes]] = {}

    def sample(self, fills: Iterable[Fill]) -> None:
        """Keep some bytes of each tensor of the host that one memmove fills."""
        for fill in fills:
            if fill.span is not None:
                start, stop = fill.span
                count = min(stop - start, _SAMPLE_NBYTES)
                at = start + (stop - start - count) // 2
                self._samples[start] = fill.name, at, ctypes.string_at(at, count)

    def require(self, taker: str, state: Any) -> None:
        """Look at a state that is about to be taken.

        Args:
            taker: The object that takes it.
            state: Tensors, in dicts, lists and tuples of any nesting; others are left alone.

        Raises:
            TargetError: One is not as it was filled.
        """
        if not self._samples:
            return
        if isinstance(state, (dict, list, tuple)):
            for item in state.values() if isinstance(state, dict) else state:
                self.require(taker, item)
        elif isinstance(state, torch.Tensor) and (name := self._changed(state)):
            raise TargetError(
                f"{name!r} was filled, and then written to, by a load_state_dict() or a hook in the"
                f" target, before {taker or 'the target'!r} took it; give these objects what load()"
                " returns without into=, one after another"
            )

    def _changed(self, tensor: torch.Tensor) -> str:
        """Give the name of a tensor that is not as it was filled; empty for any other."""
        if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu:
            return ""
        try:
            sample = self._samples.get(tensor.data_ptr())
        except RuntimeError:  # one without memory
            return ""
        if sample is None:
            return ""
        name, at, filled = sample
        storage = tensor.untyped_storage()  # it may have been resized
        if at + len(filled) > storage.data_ptr() + storage.nbytes():
            return ""
        return "" if ctypes.string_at(at, len(filled)) == filled else name

    @contextlib.contextmanager
    def guard(self, taker: str, target: Any) -> Iterator[None]:
        """Look at the tensors of each part of a module when it takes them, inside the block.

        Raises:
            TargetError: One is not as it was filled.
        """
        with contextlib.ExitStack() as stack:
            is_watched = self._samples and isinstance(target, torch.nn.Module)
            for part in target.modules() if is_watched else ():

                def look(module: torch.nn.Module, *_: object) -> None:
                    own = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001  # with those that are shared
                    self.require(taker, own)

                if not isinstance(part, torch.jit.ScriptModule):  # which take no hooks
                    stack.callback(part.register_load_state_dict_pre_hook(look).remove)
            yield


def runs_foreign(target: Any) -> bool:
    """Whether an object runs code of others when it takes its state, which may write anywhere."""
    functions: list[Any] = [target.load_state_dict]
    if isinstance(target, torch.optim.Optimizer):
        for when in ("pre", "post"):
            functions += getattr(target, f"_optimizer_load_state_dict_{when}_hooks", {}).values()
    elif isinstance(target, torch.nn.Module):
        for part in target.modules():
            functions += (part._load_from_state_dict, part.set_extra_state)  # noqa: SLF001  # made to be overridden
            for when in ("pre", "post"):
                functions += getattr(part, f"_load_state_dict_{when}_hooks", {}).values()
    return not all(map(is_of_torch, functions))
