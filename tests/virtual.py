"""Tests that are coroutines of a loop whose pauses take no time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ckptio.testing import run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on such a loop, whose schedule its `seed` draws; see `run_virtual`."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_virtual(test(**fixtures), seed=fixtures.get("seed", 0))

    return run
