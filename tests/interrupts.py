"""Interrupts that come where a test wants them."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

T = TypeVar("T")


@types.coroutine
def interrupted(coroutine: Coroutine[Any, Any, T]) -> Generator[object, object, T]:
    """Await a coroutine, and interrupt it where it first waits."""
    try:
        coroutine.send(None)
        waits = coroutine.throw(KeyboardInterrupt)
        while True:
            try:
                value = yield waits
            except BaseException as error:  # it is the coroutine's
                waits = coroutine.throw(error)
            else:
                waits = coroutine.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result
