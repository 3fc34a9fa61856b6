from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.engine.rounds import meet

if TYPE_CHECKING:
    from collections.abc import Sequence


class Lone:
    """A session of which every round is over at once."""

    async def round(self, phase: str, message: Any, decide: Any) -> Any:
        del phase, decide
        return message

    def absent(self) -> Sequence[int]:
        return ()

    def decisive(self, *, is_on: bool) -> None:
        del is_on


@pytest.mark.usefixtures("no_collections")
async def test_a_round_that_is_over_is_let_go_of() -> None:
    """Without a collection of garbage: it has the engine, and what the session has."""
    context: Any = None  # of no use before somebody is waited for
    decide: Any = None
    session = Lone()
    kept = weakref.ref(session)
    assert await meet(session, "done", 7, decide, path="c", context=context) == 7
    del session
    assert kept() is None
