"""Blocks that an optimizer over DTensors takes for parameters it has no state of yet.

An optimizer makes the state of a parameter when it first steps it. Before, nothing in its
`state_dict()` says that a moment is held in parts; a whole one beside a parameter of which a
rank has a block fails at the next step. What has an element for each of the parameter is made by
torch's optimizers, and by those of others, with `zeros_like` or `clone` of it: it is cut as the
parameter is. So here it stands on the meta device, and is made of blocks like everything there.
Of what has another shape (Adafactor's rows) nobody knows how it is cut: that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckptio.errors import TargetError
from ckptio.format.encode import join_fqn
from ckptio.state.fits import stored_as
from ckptio.state.members import members_of
from ckptio.state.optimizers import parameters_by_name
from ckptio.state.sharded import is_dtensor
from ckptio.state.tree import children, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.format.encode import Json
    from ckptio.format.manifest import TensorEntry
    from ckptio.state.tree import Predicate


def with_blocks(
    fqn: str,
    optimizer: torch.optim.Optimizer,
    template: dict[str, Any],
    node: dict[str, Json],
    entries: Sequence[TensorEntry],
    keep: Predicate | None,
) -> dict[str, Any]:
    """Add to what an optimizer has the blocks of what it is to get, for each DTensor alone.

    Args:
        fqn: Its name.
        optimizer: The target.
        template: What it has, by its `state_dict()`. Left as it is.
        node: What the checkpoint has of it.
        entries: Tensors of the manifest.
        keep: Accepts the names to load; everything if not given.

    Raises:
        TargetError: Nothing says how something that it has not yet is sharded.
    """
    if not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        return template
    state_fqn = join_fqn(fqn, "state")
    moments, made = dict(children(fqn, node)).get(state_fqn), template.get("state", {})
    if type(moments) is not dict or not isinstance(made, dict):
        return template
    has = {join_fqn(state_fqn, key): (key, item) for key, item in made.items()}
    parameters = parameters_by_name(fqn, optimizer, node, keep)
    state = dict(made)
    for key, name, item in members_of(state_fqn, moments).values():
        parameter = parameters.get(name)
        if parameter is None or not is_dtensor(parameter):
            continue
        own_key, own = has.get(name, (key, {}))
        names = tuple(_tensors_in(name, own))
        added: dict[str, torch.Tensor] = {}
        for part, reference in walk(name, item):
            stored = stored_as(entries, reference)
            if stored is None or not stored[1] or (keep and not keep(part)):
                continue
            if any(part == own_name or part.startswith(f"{own_name}.") for own_name in names):
                continue  # by its name, or as a part of a tensor that is made of others
            _, shape, dtype = stored
            short = part.removeprefix(f"{name}.")
            if shape != tuple(parameter.shape) or "." in short or not isinstance(own, dict):
                raise _unknown(fqn, part)
            added[short] = _block_like(parameter, dtype)
        if added:
            state[own_key] = {**own, **added}
    return {**template, "state": state}


def _tensors_in(name: str, value: Any) -> Iterator[str]:
    """Name the tensors of a parameter's state."""
    if isinstance(value, torch.Tensor):
        yield name
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors_in(join_fqn(name, key), item)


@torch.no_grad()
def _block_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Give what is cut as a parameter is, on the meta device."""
    return torch.empty_like(parameter, dtype=dtype, device="meta")


def _unknown(fqn: str, name: str) -> TargetError:
    return TargetError(
        f"cannot load into {fqn!r}: its parameters are DTensors, and it has no {name!r} yet, which"
        " would say how that is sharded; before the first step of the optimizer, load into what"
        " torch.distributed.checkpoint.state_dict.get_state_dict gives, and pass it on to"
        " set_state_dict"
    )
