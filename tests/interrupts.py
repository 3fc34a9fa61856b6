"""Interrupts that come where a test wants them, and calls that last as long as it wants."""

from __future__ import annotations

import asyncio
import threading
import types
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

T = TypeVar("T")


class Held:
    """A blocking call that goes on until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self.entered.set()
        self.go_on.wait()
        self.ended = True
        return "done"

    async def started(self) -> None:
        while not self.entered.is_set():
            await asyncio.sleep(0)


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
