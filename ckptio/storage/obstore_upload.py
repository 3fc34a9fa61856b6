"""An upload in parts through obstore, which takes them as a stream.

obstore has no word for one part: it is given an iterator, cuts what comes of it into parts,
and tries each of them again on its own. So parts are handed over in order, and what failed
for good is told late: by a later `write`, or by `complete`. It does not try again what is
answered by nonsense, an error in a 200 say: that ends the save.

A part is sent from where it lies. obstore reads the memory on threads of its own, and how
long it does is seen from the memory itself: `write` returns when obstore has let go of it,
never before. What obstore would keep for later (a part that came before the one ahead of it,
or the last one, which it sends at the end) is copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from ckptio._aio import outlive
from ckptio.storage.store import RefusedError, StoreError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self


class GivenUpError(Exception):
    """Tells obstore to drop what it has sent."""


def lend(data: bytes | memoryview) -> tuple[memoryview, asyncio.Future[None]]:
    """Give a view of `data` to be handed to another thread, and a future of its return.

    The future is done once nobody refers to the view any more: the caller must not.
    """
    loop = asyncio.get_running_loop()
    free: asyncio.Future[None] = loop.create_future()
    view = memoryview(data)

    def let_go() -> None:  # on whichever thread was the last
        with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited with it
            loop.call_soon_threadsafe(_settle, free)

    weakref.finalize(view, let_go).atexit = False
    return view, free


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Parts:
    """What obstore iterates over: parts, in order, as they come."""

    def __init__(self) -> None:
        self._waiting: dict[int, bytes | memoryview] = {}
        self._num_taken = 0
        self._problem: StopAsyncIteration | GivenUpError | None = None
        self._news = asyncio.Event()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody takes parts any more."""
        return isinstance(self._problem, GivenUpError)

    def is_next(self, number: int) -> bool:
        """Whether all parts before `number` were put."""
        return all(n in self._waiting for n in range(self._num_taken, number))

    def put(self, number: int, data: bytes | memoryview) -> None:
        """Add a part. One that is there, or was taken, stays as it is."""
        if number >= self._num_taken and self._problem is None:
            self._waiting.setdefault(number, data)
            self._news.set()

    def end(self, problem: StopAsyncIteration | GivenUpError) -> None:
        """Say how it ends when all that waits was taken: `StopAsyncIteration`, or given up.

        Giving up goes first, and lets go of what waits.
        """
        if not self.is_given_up:
            self._problem = problem
        if self.is_given_up:
            self._waiting.clear()
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | memoryview:
        while True:
            if self._num_taken in self._waiting:
                self._num_taken += 1
                return self._waiting.pop(self._num_taken - 1)
            if self._problem is not None:
                raise self._problem
            self._news.clear()
            await self._news.wait()


class ObstoreUpload:
    """An upload on its way; see `store.Upload`.

    As long as no part has gone for good, one that fails is begun again.

    Args:
        start: Has obstore begin to take parts of an iterator; gives a future of the end.
        told: Says what an error of obstore's means.
        part_nbytes: Size of each part but the last.
    """

    def __init__(
        self,
        start: Callable[[Parts], asyncio.Future[Any]],
        told: Callable[[Exception], StoreError],
        part_nbytes: int,
    ) -> None:
        self._start = start
        self._told = told
        self._part_nbytes = part_nbytes
        self._kept: dict[int, bytes] = {}
        self._is_even = True
        self._has_gone = False
        self._is_given_up = False
        self._stopped: asyncio.Future[Any] | None = None  # what was given up from here
        self._begin()

    def _begin(self) -> None:
        parts = self._parts = Parts()
        for number, data in self._kept.items():
            parts.put(number, data)
        self._sending = self._start(parts)
        # it may end by itself, and leaves a step of the iterator waiting then
        self._sending.add_done_callback(lambda _: parts.end(GivenUpError()))

    async def write(self, number: int, data: memoryview) -> None:
        """Hand a part over, and wait until it is sent; see `store.Upload`.

        Raises:
            TransientError: The upload has failed, and nothing is lost.
            RefusedError: It has failed, and what was sent cannot be sent again.
        """
        await self._begin_again()
        # where one part is cut differently, so are all behind it
        self._is_even = self._is_even and len(data) == self._part_nbytes
        if not self._is_even or not self._parts.is_next(number):
            copy = bytes(data)
            self._parts.put(number, copy)
            if not self._has_gone:
                self._kept[number] = copy
            return
        sending, parts = self._sending, self._parts
        # obstore lets go of a part only with all of them
        await outlive(self._hand_over(number, data), on_cancel=lambda: self._stop(sending, parts))
        if parts.is_given_up:
            raise self._failure(sending)
        self._has_gone = True
        self._kept.clear()

    def _stop(self, sending: asyncio.Future[Any], parts: Parts) -> None:
        """Give up what is on its way; what obstore says of it then means nothing.

        It drops the upload at once, and a part that is still under way finds none.
        """
        if not sending.done():
            self._stopped = sending
        parts.end(GivenUpError())

    def _hand_over(self, number: int, data: memoryview) -> asyncio.Future[None]:
        view, free = lend(data)
        self._parts.put(number, view)
        return free

    async def _begin_again(self) -> None:
        """Begin once more if it has failed and everything that was written is at hand."""
        while self._parts.is_given_up:
            await asyncio.wait((self._sending,))
            if not self._parts.is_given_up:
                return  # somebody else was here meanwhile
            failure = self._failure(self._sending)
            if not isinstance(failure, TransientError):
                raise failure
            self._begin()

    def _failure(self, sending: asyncio.Future[Any]) -> StoreError:
        """Say why it has ended, and whether it can be begun again."""
        error = None if not sending.done() or sending.cancelled() else sending.exception()
        failure: StoreError = TransientError("it took too long, or was cancelled")
        is_ours = isinstance(error, GivenUpError) or sending is self._stopped
        if isinstance(error, Exception) and not is_ours:
            failure = self._told(error)
        if self._has_gone or self._is_given_up:
            return RefusedError(f"{failure.problem} (what was sent cannot be sent again)")
        return failure

    async def complete(self) -> None:
        """Make the object; see `store.Upload`. A failure of a part may be told here."""
        if not self._is_made():
            await self._begin_again()
            sending = self._sending
            self._parts.end(StopAsyncIteration())
            await asyncio.wait((sending,))  # never cancelled: it would leave what it sent
            if not self._is_made():
                raise self._failure(sending)

    def _is_made(self) -> bool:
        sending = self._sending
        return sending.done() and not sending.cancelled() and sending.exception() is None

    async def abort(self) -> None:
        """Drop all parts; see `store.Upload`."""
        self._is_given_up = True
        self._parts.end(GivenUpError())
        await asyncio.wait((self._sending,))
        if not self._sending.cancelled():
            self._sending.exception()  # whatever it is, it has ended
