"""`Made`: a value that one task of a group makes, and that other tasks of it wait for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from ckptio.errors import SaveAbortedError

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")


class Made(Generic[T]):
    """A value that is being made.

    It refers to no task: a task refers to the error that ended it, whose frames have this. Such a
    reference cycle would keep a state in memory until Python collects garbage. If making it
    fails, the group raises the error.
    """

    def __init__(self) -> None:
        self._is_over = asyncio.Event()
        self._things: list[T] = []

    @property
    def is_there(self) -> bool:
        """Whether it is made."""
        return bool(self._things)

    @property
    def is_over(self) -> bool:
        """Whether it is made, or will not be."""
        return self._is_over.is_set()

    async def make(self, making: Awaitable[T]) -> None:
        """Make it; once, in a task of its own."""
        try:
            self._things.append(await making)
        finally:
            self._is_over.set()

    async def get(self) -> T:
        """Wait until it is made.

        Raises:
            SaveAbortedError: It will not be: the task that made it has failed, which is said
                first, or was cancelled.
        """
        await self._is_over.wait()
        if not self._things:
            raise SaveAbortedError("the task that made what was to be written to was cancelled")
        return self._things[0]
