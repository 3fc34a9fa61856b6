"""Optimizers as targets: what they would take and then fail on, or train nothing with.

They give their state as dicts like everything stateful, but what it is good for depends on
their parameters, which are not in it. What does not fit is said before anything changes, as far
as it was selected: groups if all of them are, moments one by one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from ckptio._failures import raised
from ckptio.errors import TargetError
from ckptio.format.encode import TAG, join_fqn
from ckptio.state.fits import stored_as
from ckptio.state.members import identity_of_key, members_of
from ckptio.state.numbered import groups_of
from ckptio.state.sharded import is_sharded
from ckptio.state.tree import children, is_kept, names_kept, tensor_index
from ckptio.state.wrappers import is_wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptio.format.encode import Json
    from ckptio.format.manifest import TensorEntry
    from ckptio.state.tree import Predicate

#: Options that torch's optimizers got one after the other, and set where a state lacks them.
_LATE_OPTIONS = frozenset(
    {"capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
)
#: Options that one class had from early on, and sets as well where a state lacks them.
_EARLY_OPTIONS = {
    **dict.fromkeys(("Adam", "AdamW"), frozenset({"amsgrad"})),
    "SGD": frozenset({"nesterov"}),
    "RMSprop": frozenset({"centered", "momentum"}),
}
#: Options of Adam as others have it without "amsgrad": in apex and DeepSpeed, and in transformers.
_ADAM_OF_OTHERS = frozenset({"bias_correction", "correct_bias"})
#: Options of LAMB in the first two, which has the first of these as well, and is another.
_LAMB = frozenset({"grad_averaging", "max_coeff"})
#: Options that a class of torch's had from the first, or never has: state with one that the
#: target has not, in none of its groups, is another's. What users add to groups is not asked.
_TELLING_OPTIONS = frozenset({"amsgrad", "momentum_decay"})
#: The same of one class, whose options all others of its kind have; elsewhere, trainers add it.
_TELLING_OF_SPARSE = frozenset({"weight_decay"})
#: State that tells two classes apart which have the same options.
_TELLING_MOMENTS = {
    "Adamax": "exp_avg_sq",
    **dict.fromkeys(("Adam", "AdamW", "RAdam"), "exp_inf"),
}
#: State of torch's optimizers that has an element for each of the parameter.
_ELEMENTWISE = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum"),
        *("square_avg", "grad_avg", "acc_delta", "ax", "prev", "step_size"),
    }
)


def require_parameters(fqn: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state would not be that of its parameters.

    Raises:
        TargetError: They are on the meta device.
    """
    if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
        raise TargetError(
            f"cannot load into {fqn!r}: its parameters are on the meta device, and a model takes"
            " others for them; load the model, make the optimizer of what it has then, and load"
            " that"
        )


def optimizer_differs(
    fqn: str,
    optimizer: torch.optim.Optimizer,
    node: Json,
    entries: Sequence[TensorEntry],
    keep: Predicate | None,
) -> str:
    """Say what an optimizer would fail on at its next step; empty if nothing tells.

    Args:
        fqn: Its name.
        optimizer: The target.
        node: What the checkpoint has of it.
        entries: Tensors of the manifest.
        keep: Accepts the names to load; everything if not given.
    """
    members = dict(children(fqn, node))
    groups_fqn, state_fqn = join_fqn(fqn, "param_groups"), join_fqn(fqn, "state")
    groups = members.get(groups_fqn)
    stored = groups_of(groups)
    if stored is None:
        return ""
    ids = [group["params"] for group in stored]
    here, there = [len(g["params"]) for g in optimizer.param_groups], [len(p) for p in ids]
    takes_groups = _takes_groups(groups_fqn, groups, ids, keep)
    if takes_groups and here != there:
        return f"groups of {here} parameters in the target, of {there} in the checkpoint"
    if not has_known_state(optimizer):
        return ""  # nobody knows what it is made of
    kind, state = type(optimizer).__name__, members.get(state_fqn)
    if stored and (takes_groups or names_kept(state_fqn, state, keep)):
        found = _options_differ(optimizer, stored, takes_groups=takes_groups)
        if found:
            return _another(kind, f"whose groups {found}")
    moments = dict(children(state_fqn, state)) if type(state) is dict else {}
    for name, parameter in parameters_by_name(fqn, optimizer, node, keep).items():
        if found := _moments_differ(name, parameter, moments.get(name), entries, keep, kind):
            return found
    return ""


def _options_differ(
    optimizer: torch.optim.Optimizer, stored: Sequence[dict[str, Json]], *, takes_groups: bool
) -> str:
    """Say what options groups have or lack that are not of the class of one of torch's optimizers.

    Adamax and RAdam have all options of Adam's but "amsgrad" and "fused", and RAdam its moments.
    So Adam may lack the first where something else is known to be its own: "fused", or an option
    of Adam as others have it. A state with neither is that of RAdam in torch 1.10 and 1.11, far
    oftener than that of Adam before 0.4, which had no "amsgrad" yet: it is refused.

    Before torch 2.7 nothing tells Adam and AdamW apart. From there on an option does, which AdamW
    has switched on, and Adam off unless it is asked for; it matters where it is taken.
    """
    there = set[str]().union(*stored)
    set_by_torch = _LATE_OPTIONS
    is_of_others = bool(there & _ADAM_OF_OTHERS) and not there & _LAMB
    if "fused" in there or is_of_others or not _is_adam(optimizer):
        set_by_torch |= _EARLY_OPTIONS.get(type(optimizer).__name__, frozenset())
    if lacking := sorted(optimizer.defaults.keys() - set_by_torch - there):
        return f"have no {lacking[0]!r}"
    here = optimizer.defaults.keys() | set[str]().union(*optimizer.param_groups)
    telling = _TELLING_OPTIONS
    if type(optimizer) is torch.optim.SparseAdam:
        telling |= _TELLING_OF_SPARSE
    if added := sorted((there & telling) - here):
        return f"have {added[0]!r}"
    if takes_groups and _is_adam(optimizer):
        name, is_apart = "decoupled_weight_decay", type(optimizer) is torch.optim.AdamW
        saved = {group[name] for group in stored if type(group.get(name)) is bool}
        if saved and saved.isdisjoint(g.get(name, is_apart) for g in optimizer.param_groups):
            return f"have {name}={saved.pop()}"
    return ""


def _another(kind: str, told_by: str) -> str:
    """Say that the target is of one class, and what was saved of another."""
    return f"the target is {kind}, and the checkpoint holds another optimizer, {told_by}"


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def parameters_by_name(
    fqn: str, optimizer: torch.optim.Optimizer, node: Json, keep: Predicate | None
) -> dict[str, torch.Tensor]:
    """Give the parameters by the names of the state that they get.

    Without the groups, the state goes to the parameters that have the numbers here.
    """
    groups_fqn, state_fqn = join_fqn(fqn, "param_groups"), join_fqn(fqn, "state")
    groups = dict(children(fqn, node)).get(groups_fqn)
    ids = [group["params"] for group in groups_of(groups) or ()]
    keys: Iterable[Any] = itertools.count()
    if ids and _takes_groups(groups_fqn, groups, ids, keep):
        keys = itertools.chain.from_iterable(ids)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        join_fqn(state_fqn, key): parameter
        for key, parameter in zip(keys, parameters, strict=False)
    }


def _takes_groups(
    fqn: str, groups: Json, ids: Sequence[Sequence[Json]], keep: Predicate | None
) -> bool:
    """Whether numbers of parameters are taken from the checkpoint."""
    return is_kept(fqn, groups, keep) or any(
        names_kept(f"{fqn}.{number}.params", params, keep) for number, params in enumerate(ids)
    )


def template_of(
    fqn: str, target: Any, node: Json, entries: Sequence[TensorEntry], keep: Predicate | None
) -> dict[str, Any]:
    """Ask a stateful object what it has, to fill it in place.

    Args:
        fqn: Its name.
        target: The object. An optimizer takes its state from the checkpoint: what it has made
            since, for parameters of which the checkpoint has none, is left out, and what is
            another kind of value there.
        node: What the checkpoint has of it.
        entries: Tensors of the manifest.
        keep: Accepts the names to load; everything if not given.

    Raises:
        TargetError: It does not say.
    """
    try:
        template: dict[str, Any] = target.state_dict()
    except Exception as error:  # of the caller's class, which raises anything
        raise TargetError(
            f"the state_dict() of {fqn or 'the target'!r}, which says what to fill, fails:"
            f" {raised(error)}; give what load() returns without into= to its load_state_dict()"
        ) from error
    if not isinstance(target, torch.optim.Optimizer):
        return template
    moments = node.get("state") if type(node) is dict else None
    made = template.get("state") if isinstance(template, dict) else None
    is_whole = is_kept(join_fqn(fqn, "state"), moments, keep)
    if is_whole and type(moments) is dict and isinstance(made, dict):
        stored = members_of("", moments)
        parameters = parameters_by_name(fqn, target, node, keep)
        kept = {}
        for key, item in made.items():
            found = stored.get(key) or stored.get(join_fqn("", key))
            parameter = parameters.get(join_fqn(join_fqn(fqn, "state"), key))
            shape = None if parameter is None or has_known_state(target) else tuple(parameter.shape)
            if found is not None:
                kept[key] = _like(item, found[2], entries, shape)
        template = {**template, "state": kept}
    return template


def _like(
    item: Any, node: Json, entries: Sequence[TensorEntry], shape: tuple[int, ...] | None
) -> Any:
    """Leave out of a parameter's state what the checkpoint has not, or has otherwise; and lists.

    It has less of a state where an option was switched on since, or a copy of the weights is made
    only every few steps: as in torch, that is gone. L-BFGS has a number in the first step what is
    a tensor in later ones, and lists that grow. Optimizers of others have tensors that grow.

    Args:
        item: The state, or a dict in it.
        node: What the checkpoint has of it.
        entries: Tensors of the manifest.
        shape: That of the parameter, if what has another one may be stored in a third.
    """
    if not isinstance(item, dict) or type(node) is not dict:
        return item
    stored = members_of("", node)
    kept: dict[Any, Any] = {}
    for key, value in item.items():
        found = stored.get(identity_of_key("", key)) or stored.get(join_fqn("", key))
        if found is None or isinstance(value, list) or _differs(value, found[2], entries, shape):
            continue
        kept[key] = _like(value, found[2], entries, shape)
    return kept


def _differs(
    value: Any, node: Json, entries: Sequence[TensorEntry], shape: tuple[int, ...] | None
) -> bool:
    """Whether a part of a state is of another kind than it was; or as long as it happens to be."""
    if isinstance(value, dict):
        return type(node) is not dict or node.get(TAG, "dict") not in ("dict", "odict", "counter")
    if not isinstance(value, torch.Tensor) or is_sharded(value) or is_wrapper(value):
        return False  # of those that are told from others, a mismatch says so
    stored = stored_as(entries, node)
    if stored is None:
        return True
    return shape is not None and value.shape != stored[1] and shape not in (value.shape, stored[1])


def has_known_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known what an optimizer's state is made of."""
    return type(optimizer).__module__.startswith("torch.optim")


def _moments_differ(
    name: str,
    parameter: torch.Tensor,
    node: Json,
    entries: Sequence[TensorEntry],
    keep: Predicate | None,
    kind: str,
) -> str:
    """Say which part of a parameter's state has another shape than it, or is another class's."""
    for part, item in children(name, node) if type(node) is dict else ():
        index, short = tensor_index(item), part.removeprefix(f"{name}.")
        if index is None or short not in _ELEMENTWISE or (keep is not None and not keep(part)):
            continue
        if short == _TELLING_MOMENTS.get(kind):
            return _another(kind, f"whose state has {short!r}")
        shape = entries[index].shape
        if item[TAG] != "view" and shape != tuple(parameter.shape):
            return (
                f"{part!r} is of a parameter of shape {tuple(parameter.shape)} in the target, and"
                f" of shape {shape} in the checkpoint"
            )
    return ""
