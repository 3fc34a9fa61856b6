"""Who wants to know when something happens."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Watchers:
    """Functions that are called whenever something happens, for as long as somebody wants that."""

    def __init__(self) -> None:
        self._functions: dict[object, Callable[[], object]] = {}

    @contextlib.contextmanager
    def having(self, function: Callable[[], object]) -> Iterator[None]:
        """Have a function among them for the length of the block."""
        token = object()
        self._functions[token] = function
        try:
            yield
        finally:
            del self._functions[token]

    def call(self) -> None:
        """Call all of them."""
        for function in tuple(self._functions.values()):
            function()
