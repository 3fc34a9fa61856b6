"""What would make a target and a checkpoint agree, where their names or types tell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.state.fills import Match

#: What wrappers put before the names of a module, and what has the names without.
_PREFIXES = {
    "_orig_mod.": ("the module before torch.compile", "a compiled module"),
    "module.": ("the .module of the wrapper", "a wrapped module"),
}
_OTHER_FLOAT = re.compile(
    r".*: (torch\.b?float\d+) in the target, torch\.b?float\w+ in the checkpoint"
)


def hint_for(match: Match, given: Sequence[str]) -> str:
    """Say what to do, empty if nothing tells.

    Args:
        match: What disagrees.
        given: Names of the target.
    """
    return (
        _level(given, match.unexpected)
        or _nesting(match.missing, match.unexpected)
        or _prefix(match.missing, match.unexpected)
        or _conversion(match)
    )


def _level(given: Sequence[str], unexpected: Sequence[str]) -> str:
    """Say so if the names of a target are those of a checkpoint, a level up or down."""
    if not given or not unexpected:
        return ""
    above = unexpected[0].removesuffix(f".{given[0]}")
    if above != unexpected[0] and {f"{above}.{name}" for name in given} <= set(unexpected):
        nested = "target"
        for part in reversed(above.split(".")):
            nested = f"{{{part!r}: {nested}}}"
        return f"the target's names are those below {above!r}: pass into={nested}"
    below = given[0].removesuffix(f".{unexpected[0]}")
    if below != given[0] and {f"{below}.{name}" for name in unexpected} <= set(given):
        return f"the checkpoint's names are those below {below!r} of the target: pass that alone"
    return ""


def _nesting(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Say so if the same name stands for other keys: dots may be between them, or in one."""
    both = sorted(set(missing) & set(unexpected))
    if not both:
        return ""
    return (
        f"{both[0]!r} is in both, but nested otherwise: a name with dots in a state_dict is one"
        " key, {'model': {'layer.weight': tensor}}"
    )


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Say so if names differ by what a wrapper put before them."""
    for prefix, (plain, wrapped) in _PREFIXES.items():
        here, there = ({n.replace(prefix, "") for n in names} for names in (missing, unexpected))
        if here & there:
            if any(prefix in name for name in unexpected):
                return (
                    f"the checkpoint's names have {prefix!r}: load into {wrapped}, or into a dict"
                    f" of the target's tensors by these names; and save {plain} from now on"
                )
            return f"the target's names have {prefix!r}: load into {plain}"
    return ""


def _conversion(match: Match) -> str:
    """Say so if nothing but floating-point types differ, and all in one way."""
    found = [_OTHER_FLOAT.fullmatch(line) for line in match.mismatched]
    dtypes = {m[1] if m is not None else "" for m in found}
    if match.missing or match.unexpected or len(dtypes) != 1 or "" in dtypes:
        return ""
    return f"dtype={dtypes.pop()} converts"
