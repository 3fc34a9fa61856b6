"""Agree on the step at which all ranks do what one of them asks for.

A signal reaches ranks at different moments, some of them not at all, and clocks differ.
What is asked for, a save or the last save, has to happen on all ranks at one step. A
collective at every step would answer that, and cost every step. Instead:

    always       every rank is in a session in which nothing is said
    a call       a rank that is asked for something leaves its session by an error, which
                 ends the session on every rank: that is the broadcast
    an answer    a round: each rank says how many steps it has asked about, and holds back
                 its answer to the next until the round is over. What is asked for happens
                 at the step after the largest of these numbers

So no rank has passed that step when it is chosen, and none passes it unasked: ranks count
the same steps, whatever their numbers. Until a call comes this costs nothing; a call holds
the trainer for one round, which runs on the engine's loop and needs no trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ckptio._outcome import Outcome
from ckptio.errors import RankError
from ckptio.ranks.interface import Same
from ckptio.runtime.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.ranks.interface import Ranks

_CALL = "StopCall: "
_SAVE = "save"
_LAST = "last"
#: A time this near has come: a clock may not move by less.
_SOON_S = 1e-3


class StopCall(Exception):  # noqa: N818  # no error: it ends a session to be heard
    """A rank asks for a stop. Its text is the kind of it, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """What was agreed on.

    Attributes:
        number: The question after which it happens: each rank's, counted from 1.
        reason: Why it is the last save; empty if it is not.
    """

    number: int
    reason: str


class Stops:
    """A rank's part in agreeing on steps to stop at.

    `call_last` and `ask` are thread-safe; `watch` runs on the engine's loop.

    Args:
        key: Names the sessions; the same on all ranks.
        due_in_s: Says in how many seconds a save is due by time; `None` if never. Only
            rank 0's counts.
        on_stop: Called on the engine's loop with each stop that was agreed on.
    """

    def __init__(
        self,
        key: str,
        due_in_s: Callable[[], float | None],
        on_stop: Callable[[Stop], None],
    ) -> None:
        self._key = key
        self._due_in_s = due_in_s
        self._on_stop = on_stop
        self._guard = Guard()
        self._asking: set[int] = set()  # threads that have the lock, or wait for it
        self._num_asked = 0
        self._held: Outcome[None] | None = None
        self._pending: list[Stop] = []
        self._wanted = ""
        self._heard: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def call_last(self, reason: str) -> None:
        """Ask all ranks for a last save. From any thread, and from a signal's handler.

        Takes no lock: the handler may have interrupted who holds it.
        """
        self._wanted = self._wanted or reason
        self.look_again()

    def look_again(self) -> None:
        """Have it found out when a save is due by time, which is later now. From any thread."""
        loop, heard = self._loop, self._heard
        if loop is not None and heard is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                loop.call_soon_threadsafe(heard.set)

    def ask(self) -> Stop | Outcome[None] | None:
        """Ask whether to stop at this step, once a step.

        Returns:
            What to do now; nothing; or what to wait for before asking again. Nothing, and it does
            not count, where a signal's handler asks what it interrupts: that gets the answer. After
            what to do now, time counts anew: see `look_again`.
        """
        thread = threading.get_ident()
        if thread in self._asking:
            return None
        try:
            self._asking.add(thread)
            return self._guard.run(self._next_stop)
        finally:
            self._asking.discard(thread)

    def _next_stop(self) -> Stop | Outcome[None] | None:
        if self._held is not None:
            return self._held
        self._num_asked += 1
        due = [stop for stop in self._pending if stop.number <= self._num_asked]
        self._pending = [stop for stop in self._pending if stop not in due]
        return max(due, key=lambda stop: bool(stop.reason), default=None)

    async def watch(self, ranks: Ranks) -> None:
        """Listen for calls until one asks for the last save, or a rank leaves."""
        self._loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()
        number = 0
        reason: str | None = ""
        try:
            while not reason:
                number += 1
                reason = await self._listen(ranks, f"{self._key} call {number}")
                if reason is None:
                    return
                self._on_stop(await self._agree(ranks, f"{self._key} stop {number}", reason))
        except RankError:  # a rank is lost; whoever saves or loads next is told
            return
        finally:
            self._loop = self._heard = None

    async def _listen(self, ranks: Ranks, key: str) -> str | None:
        """Wait for a call; `None` if a rank leaves instead. Why, if it is for the last save."""
        calls: list[str]
        try:
            async with ranks.session(key):
                await self._call_out(is_first=ranks.rank == 0)
        except StopCall as call:  # a world of one
            calls = [str(call)]
        except RankError as error:
            causes = error.causes.values()
            if not causes or not all(cause.startswith(_CALL) for cause in causes):
                return None
            calls = [cause.removeprefix(_CALL) for cause in causes]
        except asyncio.CancelledError:
            await self._refuse(ranks, key.replace(" call ", " stop "))
            raise
        lasts = [call.partition(" ")[2] for call in calls if call.startswith(_LAST)]
        return lasts[0] if lasts else ""

    async def _call_out(self, *, is_first: bool) -> NoReturn:
        """Wait until this rank has something to ask for, and ask.

        For no save by time while one is agreed on that nobody has asked about yet: a trainer may
        take longer for a step than for all saves that are due meanwhile.

        Raises:
            StopCall: With what it asks for.
        """
        assert self._heard is not None  # noqa: S101  # `watch` made it
        while not self._wanted:
            due_s = self._due_in_s() if is_first and not self._pending else None
            if due_s is not None and due_s <= _SOON_S:
                raise StopCall(_SAVE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await self._heard.wait()
            self._heard.clear()
        raise StopCall(f"{_LAST} {self._wanted}")

    async def _refuse(self, ranks: Ranks, key: str) -> None:
        """Leave: nobody is to wait for this rank where a call was heard meanwhile."""
        with contextlib.suppress(RankError, ConnectionError):
            async with ranks.session(key):
                raise ConnectionError("this rank has left its checkpointer")

    async def _agree(self, ranks: Ranks, key: str, reason: str) -> Stop:
        """Choose the step."""

        async def decide(messages: Sequence[Any]) -> Same:
            return Same({"number": max(messages) + 1, "reason": reason})

        stop: Stop | None = None
        try:
            async with ranks.session(key) as session:
                num_asked = await self._guard.run_aside(self._hold)
                answer = await session.round("stop", num_asked, decide)
            stop = Stop(number=answer["number"], reason=answer["reason"])
        finally:
            self._release(stop)
        return stop

    def _hold(self) -> int:
        """Let the trainer wait, and say how often it has asked."""
        self._held = Outcome()
        return self._num_asked

    def _release(self, stop: Stop | None) -> None:
        """Let the trainer go on. Without the lock: it takes nothing while it is held back."""
        if stop is not None:
            self._pending.append(stop)
        held, self._held = self._held, None
        if held is not None:
            held.set_result(None)
