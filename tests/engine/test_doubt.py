"""What is told of a save of many ranks that did not end well: all that is known, case by case."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ckptio.engine.doubt import doubt_of
from ckptio.errors import RankError, StorageError
from ckptio.ranks.interface import NOT_STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable


def told(causes: dict[int, str], *, in_doubt: bool = False) -> RankError:
    return RankError("it may stand" if in_doubt else "failed", causes=causes, in_doubt=in_doubt)


def own(*, in_doubt: bool = False) -> StorageError:
    text = "it may stand" if in_doubt else "no space"
    return StorageError(text, path="c", code=28, in_doubt=in_doubt)


COMMIT_FAILED = {0: "StorageError: 'c': no space"}
PART_FAILED = {1: "StorageError: 'c': no space"}


@pytest.mark.parametrize("leads", [True, False], ids=["rank 0", "rank 1"])
@pytest.mark.parametrize("is_found", [True, False], ids=["found", "not found"])
@pytest.mark.parametrize(
    ("make_error", "failure", "problem", "in_doubt"),
    [
        # what the ranks were told: in doubt by (rank 0, it found the manifest), and so on
        (partial(told, {1: "gone"}), None, None, ()),
        (partial(told, {1: "gone"}, in_doubt=True), None, None, ("rank 0, not", "rank 1, not")),
        (partial(told, COMMIT_FAILED), None, None, ("rank 1, found",)),
        (partial(told, COMMIT_FAILED), own(), None, ("rank 0, found", "rank 1, found")),
        (partial(told, COMMIT_FAILED), own(in_doubt=True), None, "all"),
        (partial(told, {0: f"{NOT_STOPPED} within 5 s"}), None, None, ("rank 1, found",)),
        (partial(told, PART_FAILED), None, None, ()),
        (partial(told, PART_FAILED), None, own(), ("rank 0, found", "rank 1, found")),
        # nothing was told
        (own, None, None, ()),
        (asyncio.CancelledError, None, None, ("rank 1, found", "rank 1, not")),
    ],
)
def test_what_nobody_can_tell_is_in_doubt(
    make_error: Callable[[], BaseException],
    failure: StorageError | None,
    problem: StorageError | None,
    in_doubt: tuple[str, ...] | str,
    *,
    leads: bool,
    is_found: bool,
) -> None:
    """And says so, in words and by `in_doubt`."""
    problem = problem if is_found else None
    doubt = doubt_of(make_error(), failure, problem, leads=leads, is_found=is_found, path="c")
    case = f"rank {0 if leads else 1}, {'found' if is_found else 'not'}"
    if in_doubt == "all" or case in in_doubt:
        assert doubt is not None
        assert doubt.in_doubt
        assert "may" in str(doubt)
    else:
        assert doubt is None
