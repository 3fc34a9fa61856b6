"""Optimizers as targets: what they would take and then fail on, or train nothing with.

They give their state as dicts like everything stateful, but what it is good for depends on
their parameters, which are not in it. What does not fit is said before anything changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio.errors import TargetError
from ckptio.state.sharded import is_dtensor
from ckptio.state.tree import children, leaves

if TYPE_CHECKING:
    import torch

    Json = Any


def require_parameters(fqn: str, optimizer: torch.optim.Optimizer, node: Json) -> None:
    """Refuse an optimizer whose state would not be that of its parameters.

    Raises:
        TargetError: They are on the meta device, or its state would have to be sharded like
            them and nothing says so yet.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(parameter.is_meta for parameter in parameters):
        raise TargetError(
            f"cannot load into {fqn!r}: its parameters are on the meta device, and a model takes"
            " others for them; load the model, make the optimizer of what it has then, and load"
            " that"
        )
    if optimizer.state or not any(map(is_dtensor, parameters)):
        return
    if any(name.startswith(f"{fqn}.state.") for name, _ in leaves(fqn, node)):
        raise TargetError(
            f"cannot load into {fqn!r}: its parameters are DTensors, and an optimizer that has not"
            " stepped has nothing that says how its state is sharded; load into what"
            " torch.distributed.checkpoint.state_dict.get_state_dict gives, and pass it on to"
            " set_state_dict"
        )


def groups_differ(fqn: str, optimizer: torch.optim.Optimizer, node: Json) -> str:
    """Say how the parameter groups differ in number or size; empty if they do not."""
    here = [len(group["params"]) for group in optimizer.param_groups]
    members = dict(children(fqn, node))
    groups = members.get(f"{fqn}.param_groups" if fqn else "param_groups")
    if type(groups) is not list:
        return ""
    there = []
    for group in groups:
        params = dict(children("", group)).get("params") if type(group) is dict else None
        if type(params) is not list:
            return ""
        there.append(len(params))
    if here == there:
        return ""
    return f"groups of {here} parameters in the target, of {there} in the checkpoint"
