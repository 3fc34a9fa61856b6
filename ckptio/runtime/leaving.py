"""How a block of an engine ends, and what becomes of errors that nobody has seen.

An error of a save that nobody waited for is told in time, by the log, when the next save
begins; and once more where the block is left. Leaving it with `sys.exit()` is leaving it in
order: what is in flight is finished first, since that is how a run that is to be continued
ends.

An engine that is left open and that nobody refers to any more is closed all the same, when the
last of what is in flight has ended. Its finalizer does not do that itself: it may run on any
thread, on the loop's own or on one that holds any lock, and must wait for nothing.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from ckptio._failures import described
from ckptio.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptio.moments import SaveMoments

_RETRY_S = 1.0
#: Failures beside the first that the error names where a block is left.
_MAX_NAMED = 8


def not_open(what: str, *, was_open: bool) -> EngineClosedError:
    """Make the error of what is used outside of its block: before it, or behind it."""
    if was_open:
        return EngineClosedError(f"the {what} is closed: it is used inside its block")
    return EngineClosedError(
        f"the {what} is not open: open it with `async with` (or `with`, for ckptio.sync), and use"
        " it inside that block"
    )


def is_breaking_off(error: BaseException | None) -> bool:
    """Whether a block that is left by this does not wait for what is in flight."""
    return error is not None and not isinstance(error, SystemExit)


def leave_behind(close: Callable[[], None]) -> None:
    """Close an engine that nobody has, on a thread, for which the end of the program waits.

    Called on its loop. Where no thread begins, it is tried again, or the end of the program
    closes it.

    Args:
        close: What does that; it keeps the engine.
    """
    try:
        threading.Thread(target=close, name="ckptio-leave", daemon=False).start()
    except RuntimeError:  # the limit of threads is reached, or the interpreter ends
        asyncio.get_running_loop().call_later(_RETRY_S, leave_behind, close)


def unsettled(saves: Iterable[SaveMoments]) -> list[SaveMoments]:
    """Give the saves that are under way, or whose error nobody has seen; the log has it then."""
    found = [save for save in saves if not save.is_settled()]
    for save in found:
        save.tell()
    return found


def end_saves(saves: Iterable[SaveMoments], error: BaseException | None) -> None:
    """See to it that every failure of a save was seen, when all have ended.

    Args:
        saves: The saves.
        error: What the block is left by. With one, the log gets the failures.

    Raises:
        BaseException: Without one: the first failure that nobody has seen, with notes of some
            others, and of how many more there are; the log has those.
    """
    failed = [save for save in saves if save.durable.done() and save.is_unheard()]
    for index, save in enumerate(failed):
        if error is not None or index > _MAX_NAMED:
            save.tell()
        save.seen()
    if error is not None or not failed:
        return
    first = failed[0].error()
    assert first is not None  # noqa: S101  # it has failed
    for other in failed[1 : 1 + _MAX_NAMED]:
        if (failure := other.error()) is not None:
            why = described(failure, with_notes=False)
            first.add_note(f"and {other.what_failed()} failed: {why}")
    if (num_more := len(failed) - 1 - _MAX_NAMED) > 0:
        first.add_note(f"and {num_more} others failed; the log has them all")
    raise first
