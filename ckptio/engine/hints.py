"""What would make a target and a checkpoint agree, where their names or types tell.

`hint_for` tries the few mistakes that nearly everybody makes, each with the words that undo it: a
level too many, another key, a wrapper's prefix, dots in a key, numbers for names, another element
type. It goes by names and types alone, and gives one hint about names, the first that fits, since
two would contradict each other. Nothing is loaded by a hint: the caller changes the call.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from ckptio.format.encode import TAG, join_fqn
from ckptio.state.fills import names_of
from ckptio.state.members import members_of
from ckptio.state.tree import children, read_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptio.format.encode import Json
    from ckptio.format.manifest import Manifest
    from ckptio.state.fills import Match

#: What wrappers put before the names of a module: torch.compile, and DistributedDataParallel and
#: its like.
WRAPPERS = ("_orig_mod.", "module.")
#: What has the names without, and what has them with, by what is put before them.
_WRAPPED = {
    WRAPPERS[:1]: ("the module before torch.compile", "a compiled module"),
    WRAPPERS[1:]: ("the .module of the wrapper", "a wrapped module"),
    WRAPPERS: ("the module inside of both wrappers", "a module that is wrapped and compiled so"),
}
_OTHER_FLOAT = re.compile(
    r".*: (torch\.b?float\d+) in the target, torch\.b?float\w+ in the checkpoint"
)


#: Places that are tried for names that end as others do, and parts of their names.
_MAX_TRIED = _MAX_DEPTH = 8

#: A moment by the number of its parameter.
_NUMBERED = re.compile(r"((?:.*\.)?state)\.\d+\.\w+")


def hint_for(match: Match, target: Any, manifest: Manifest, rank: int) -> str:
    """Say what to do, empty if nothing tells.

    Args:
        match: What disagrees.
        target: What was to be filled.
        manifest: The checkpoint's.
        rank: Who loads it.
    """
    given, tree = _names_of(target), read_tree(manifest, rank)
    names = (
        _level(match, given, tree)
        or _empty(target, match.unexpected)
        or _nesting(match.missing, match.unexpected, tree)
        or _prefix(match.missing, match.unexpected)
        or _numbers(match.missing, match.unexpected)
        or _beside(target, _lacking(match, given), match.unexpected, tree)
        or _older(match)
        or _renaming(match, manifest.writer)
    )
    return "; ".join(filter(None, (names, _conversion(match))))


def nothing_fits(match: Match, path: str, target: Any, manifest: Manifest, rank: int) -> str:
    """Say that a checkpoint has nothing for a target, and what to do.

    Args:
        match: What disagrees; not nothing.
        path: The checkpoint.
        target: What was to be filled.
        manifest: The checkpoint's.
        rank: Who loads it.
    """
    if match.mismatched:
        num_more = len(match.mismatched) - 1
        more = f", and {num_more} more" if num_more else ""
        problem = f"nothing in checkpoint {path!r} fits the target: {match.mismatched[0]}{more}"
    elif not match.missing:
        problem = f"nothing that select= takes of checkpoint {path!r} is in the target, neither"
        problem += f" {match.unexpected[0]!r} nor another"
    else:
        problem = f"nothing that the target asks for is in checkpoint {path!r}, neither"
        problem += f" {match.missing[0]!r} nor another"
    hint = hint_for(match, target, manifest, rank)
    return "; ".join(filter(None, (problem, hint, "load_with_report(...) says what is")))


def _names_of(target: Any) -> list[str]:
    """Name what a target has, and what modules in it have; nothing if it does not say.

    No object is asked for its state, not even one that is the target: that moves some data loaders,
    and for some objects all ranks have to do it, of which this one may be alone here.
    """
    try:
        if type(target) is not dict:
            return names_of("", _members_of(target))
        return names_of("", {key: _members_of(part) for key, part in target.items()})
    except Exception:  # of the caller's class, which raises anything
        return []


def _members_of(part: Any) -> Any:
    """Give the names of a module with something; what is none as it is."""
    if not isinstance(part, torch.nn.Module):
        return part
    return {
        name: None
        for members in (part.named_parameters, part.named_buffers)
        for name, _ in members(remove_duplicate=False)
    }


def _lacking(match: Match, given: Sequence[str]) -> list[str]:
    """Give the names of a target that the checkpoint has not, with those that modules have.

    What was not selected is not looked for; so all are given where nothing was taken.
    """
    if not match.missing:
        return [] if match.num_taken or match.mismatched else list(given)
    missing = set(match.missing)
    return [name for name in given if name in missing or not missing.isdisjoint(_above([name]))]


def _level(match: Match, given: Sequence[str], tree: Json) -> str:
    """Say so if the names of a target are those of a checkpoint, a level up or down.

    Where some are in both, both are of one level.
    """
    if match.num_taken or match.mismatched:
        return ""
    above = _added(given, match.unexpected)
    if above:
        places = " or ".join(map(repr, above))
        what = f"the target's names are those below {places}"
        if _leads(tree, above[0]):
            return f"{what}: pass into={_nested(above[0], 'target')}"
        if all(f"{part}." in WRAPPERS for part in above[0].split(".")):
            return ""  # keys with a prefix, of which more is known
        return f"{what}: take them from what load() returns without into="
    below = _added(match.unexpected, given)
    if below:
        return f"the checkpoint's names are those below {below[0]!r} of the target: pass that alone"
    return ""


def _added(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Give what has all names below it among others, the nearest first."""
    if not names:
        return []
    found = {each.removesuffix(f".{names[0]}") for each in others if each.endswith(f".{names[0]}")}
    there = set(others)
    nearest = sorted(found, key=lambda each: (each.count("."), each))[:_MAX_TRIED]
    return [each for each in nearest if all(f"{each}.{n}" in there for n in names)]


def _leads(tree: Json, fqn: str) -> bool:
    """Whether each part of a name is a key of a dict: as text, and not of a list or a module."""
    node = tree
    for part in fqn.split("."):
        if type(node) is not dict or node.get(TAG) not in (None, "dict", "odict"):
            return False
        found = members_of("", node).values()
        node = next((item for key, _, item in found if key == part), None)
    return node is not None


def _beside(target: Any, lacking: Sequence[str], unexpected: Sequence[str], tree: Json) -> str:
    """Say so if the names below a key of a target are those below another in a checkpoint.

    Only where none else has these names: an actor and a critic may be made alike.
    """
    if type(target) is not dict:
        return ""
    places = _by_names({k: v for k, v in _grouped(lacking, 1).items() if k in target})
    for depth in range(1, _MAX_DEPTH):
        for below, theres in _by_names(_grouped(unexpected, depth)).items():
            heres = places.get(below, [])
            if len(heres) == len(theres) == 1 and _leads(tree, theres[0]):
                beside = ", and beside it what else is to be loaded" if len(target) > 1 else ""
                return (
                    f"the target has below {heres[0]!r} what the checkpoint has below"
                    f" {theres[0]!r}: pass into={_nested(theres[0], f'target[{heres[0]!r}]')}"
                    f"{beside}"
                )
    return ""


def _grouped(names: Sequence[str], depth: int) -> dict[str, set[str]]:
    """Give the names below each of what so many parts of them name."""
    groups: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".", depth)
        if len(parts) > depth:
            groups.setdefault(".".join(parts[:depth]), set()).add(parts[depth])
    return groups


def _by_names(groups: Mapping[str, set[str]]) -> dict[frozenset[str], list[str]]:
    """Give what has the same names below it, by those."""
    found: dict[frozenset[str], list[str]] = {}
    for place, names in groups.items():
        found.setdefault(frozenset(names), []).append(place)
    return found


def _nested(fqn: str, value: str) -> str:
    """Write a dict that has something under a name."""
    for part in reversed(fqn.split(".")):
        value = f"{{{part!r}: {value}}}"
    return value


def _above(names: Iterable[str]) -> set[str]:
    """Give all that names are below."""
    found: set[str] = set()
    for name in names:
        above = name.rpartition(".")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition(".")[0]
    return found


def _empty(target: Any, unexpected: Sequence[str]) -> str:
    """Say so if a target has a dict without anything in the place of what is stored."""
    above = _above(unexpected)
    ahead = [("", target)]
    while ahead:
        fqn, value = ahead.pop()
        if not isinstance(value, dict):
            continue
        if not value and fqn in above:
            return f"{fqn!r} of the target is empty: None in its place takes what is stored"
        ahead += [(join_fqn(fqn, key), item) for key, item in value.items()]
    return ""


def _nesting(missing: Sequence[str], unexpected: Sequence[str], tree: Json) -> str:
    """Say so if the same name stands for other keys: dots may be between them, or in one."""
    both = sorted(set(missing) & set(unexpected))
    if not both:
        above = _above(unexpected)
        for name in missing:
            if name not in above:
                continue
            below = next((n for n in unexpected if n.startswith(f"{name}.")), None)
            if below is not None:
                held = _holder(tree, below) or ""
                key = below.removeprefix(f"{held}.") if held else below
                place = repr(held) if held else "the target"
                return (
                    f"what the checkpoint has below {name!r} are keys with dots, as in a"
                    f" state_dict: have such keys in {place}, {{{key!r}: tensor}}"
                )
        return ""
    if "." not in both[0]:
        return (
            f"{both[0]!r} is in both, but is not the same key: of 1, '1', True and an enum that is"
            " 1, each is a key of its own"
        )
    return (
        f"{both[0]!r} is in both, but nested otherwise (a name with dots in a state_dict is one"
        " key, {'model': {'layer.weight': tensor}}), or of keys of other types (1, '1' and an enum"
        " that is 1 are three)"
    )


def _holder(node: Json, fqn: str, held: str = "") -> str | None:
    """Name what holds a tensor or a value as one of its keys, however many dots the key has."""
    items: Iterable[tuple[str, Json]] = ()
    if type(node) is list:
        items = ((join_fqn(held, i), item) for i, item in enumerate(node))
    elif type(node) is dict:
        items = children(held, node)
    for name, item in items:
        if name == fqn:
            return held
        if fqn.startswith(f"{name}."):  # another one may begin like that, too
            found = _holder(item, fqn, name)
            if found is not None:
                return found
    return None


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Say so if names differ by what wrappers put before them."""
    for prefixes, (plain, wrapped) in _WRAPPED.items():
        if not {_bare(n, prefixes) for n in missing} & {_bare(n, prefixes) for n in unexpected}:
            continue
        here, there = (_those_in(names, prefixes) for names in (missing, unexpected))
        if not there:
            return f"the target's names have {here}: load into {plain}"
        if here:
            return (
                f"the checkpoint's names have {there} and the target's {here}: load into a module"
                " wrapped like the one that was saved"
            )
        return (
            f"the checkpoint's names have {there}: load into {wrapped}, or into a dict"
            f" of the target's tensors by these names; and save {plain} from now on"
        )
    return ""


def _bare(name: str, prefixes: Sequence[str]) -> str:
    """Leave out what wrappers put before names; the last part is a name of its own."""
    *above, last = name.split(".")
    return ".".join([*(part for part in above if f"{part}." not in prefixes), last])


def _those_in(names: Sequence[str], prefixes: Sequence[str]) -> str:
    """Say which prefixes names have."""
    found = [prefix for prefix in prefixes if any(f".{prefix}" in f".{name}" for name in names)]
    return " and ".join(map(repr, found))


def _numbers(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Say so if an optimizer was saved by numbers, and the target has the names of parameters."""
    above = _above(missing)
    for name in unexpected:
        found = _NUMBERED.fullmatch(name)
        if found is not None and found[1] in above:
            return (
                f"the checkpoint has what is below {found[1]!r} by numbers of parameters, and the"
                " target by names: load it into the optimizer itself"
            )
    return ""


def _older(match: Match) -> str:
    """Say so if a module lacks names of which it may know older ones."""
    both = _above(match.missing) & _above(match.unexpected)
    if match.missing and match.unexpected:
        both.add("")
    for fqn, module in match.modules.items():
        if fqn in both and any(_reads_older(part) for _, part in module.named_modules()):
            return (
                f"{fqn or 'the target'!r} has code that may know these names as older ones: give"
                " what load() returns for it without into= to its load_state_dict()"
            )
    return ""


def _reads_older(module: torch.nn.Module) -> bool:
    """Whether a module changes what it is given: by a hook, or by a method that is not torch's."""
    reads = type(module)._load_from_state_dict  # noqa: SLF001  # made to be overridden
    hooks = getattr(module, "_load_state_dict_pre_hooks", {})
    return bool(hooks) or not getattr(reads, "__module__", "").startswith("torch.")


def _conversion(match: Match) -> str:
    """Say so if what is in both differs by floating-point types alone, and all in one way."""
    found = [_OTHER_FLOAT.fullmatch(line) for line in match.mismatched]
    dtypes = {m[1] if m is not None else "" for m in found}
    if len(dtypes) != 1 or "" in dtypes:
        return ""
    rest = " what is of another type" if match.missing or match.unexpected else ""
    return f"dtype={dtypes.pop()} converts{rest}"


def _renaming(match: Match, writer: str) -> str:
    """Say what to do about other names, also where others give a module's to what is in a file."""
    if not (match.missing and match.unexpected):
        return ""
    if writer != "safetensors":
        gives = ", and give that to load_state_dict()" if match.modules else ""
        return (
            "if these are the same under other names: rename the keys of what load() returns"
            f" without into={gives}"
        )
    return (
        "names are taken as they are in the file; where from_pretrained() gives a module others,"
        " load with that, and save what it made"
    )
