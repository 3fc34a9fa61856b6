"""Look whether anything of what was asked for is there, before a load begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._texts import some_of
from ckptio.engine.hints import nothing_fits
from ckptio.errors import TargetError
from ckptio.state.select import Patterns
from ckptio.state.tree import names_kept_for_ranks

if TYPE_CHECKING:
    from ckptio.engine.request import LoadRequest
    from ckptio.engine.restoration import Restoration
    from ckptio.format.manifest import Manifest


def require_selected(
    request: LoadRequest, restoration: Restoration, manifest: Manifest, path: str
) -> None:
    """Refuse to load nothing where something was asked for: mostly a mistyped name.

    Args:
        request: What was asked for.
        restoration: What there is of it.
        manifest: Of the checkpoint.
        path: Where that is.

    Raises:
        TargetError: There is nothing.
    """
    keep = request.keep
    unmatched = isinstance(keep, Patterns) and keep.unmatched
    if keep is not None and request.strict == "raise" and (unmatched or restoration.is_empty):
        # this rank may have none of what others kept for themselves; asking for it may match
        # patterns that nothing has matched before
        is_of_others = [keep(name) for name in names_kept_for_ranks(manifest)]
        if isinstance(keep, Patterns) and keep.unmatched:
            names = some_of(keep.unmatched)
            whose = f"checkpoint {path!r}" + ("" if request.into is None else " or target")
            raise TargetError(
                f"select= asks for {names}, and no name of {whose} matches;"
                f" `ckptio show {path}` lists the names"
            )
        if restoration.is_empty and not any(is_of_others):
            raise _accepts_none(path)
        return
    if not restoration.is_empty or request.strict == "report":
        return
    match = restoration.match
    # of what was selected a target asks for nothing where it has other names; another rank's may
    is_unknown = match is not None and bool(match.unexpected) and request.num_ranks == 1
    if match is not None and (match.missing or match.mismatched or (keep and is_unknown)):
        raise TargetError(nothing_fits(match, path, request.into, manifest, request.rank))
    if keep is None or match is None or match.unexpected:
        return
    if not any(keep(name) for name in names_kept_for_ranks(manifest)):  # nor has either such a name
        raise _accepts_none(path)


def _accepts_none(path: str) -> TargetError:
    return TargetError(f"select= accepts no name that checkpoint {path!r} and target have")
