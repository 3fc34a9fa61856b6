"""Let an object take the state that it is given, by its own `load_state_dict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckptio._failures import raised
from ckptio.errors import TargetError
from ckptio.format.encode import join_fqn

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How a note ends of what a module has on the meta device yet.
STAYS_META = ": stays on the meta device; the checkpoint has none that fits"


def take_state(fqn: str, target: Any, values: dict[str, Any], *, assigns: bool) -> list[str]:
    """Let a stateful object take its state.

    Args:
        fqn: Its name.
        target: The object.
        values: Its state; tensors of it that were filled are the object's own.
        assigns: Whether it is a module with tensors on the meta device, which others replace.

    Returns:
        Notes for the report.

    Raises:
        TargetError: It does not take it.
    """
    try:
        if not assigns:
            target.load_state_dict(values)
            return []
        names = take_over(target, values)
    except Exception as error:  # of the caller's class, which raises anything
        problem = f"does not take its state: {raised(error)}"
        raise TargetError(f"{fqn or 'the target'!r} {problem}") from error
    return [f"{join_fqn(fqn, name)}{STAYS_META}" for name in names]


def take_over(module: torch.nn.Module, values: dict[str, Any]) -> list[str]:
    """Let a module take new tensors for those it has on the meta device, and for no others.

    What was one parameter under several names stays one: torch's own `assign=True` makes
    a parameter of each name, and an optimizer would step their common memory twice.

    Returns:
        Names of what is on the meta device still.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    stays = {n: held for n, held in _tensors_of(module) if n in values and not held.is_meta}
    module.load_state_dict(values, assign=True)
    made = dict(_tensors_of(module))
    with torch.no_grad():
        for path, held in stays.items():  # an optimizer may have them
            if held.shape != made[path].shape:  # resized by the module
                continue
            parent, _, attribute = path.rpartition(".")
            held.copy_(made[path])
            setattr(module.get_submodule(parent), attribute, held)
    for tied in names.values():
        if len(tied) == 1:
            continue
        taken = [module.get_parameter(name) for name in tied]
        one = next((parameter for parameter in taken if not parameter.is_meta), taken[0])
        for name in tied:
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, one)
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta]


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Give parameters and buffers, those of several names under each."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
