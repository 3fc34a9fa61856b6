"""Agree on the step at which all ranks save, when one of them asks for a save.

A signal reaches ranks at different moments, some of them not at all, and clocks differ.
What is asked for, a save or the last save, has to happen on all ranks at one step. A
collective at every step would answer that, and cost every step. Instead:

    always       every rank is in a session in which nothing is said
    a call       a rank that is asked for something leaves its session by an error, which
                 ends the session on every rank: that is the broadcast
    an answer    a round: each rank says how many steps it has asked about, and holds back
                 its answer to the next until the round is over. What is asked for happens
                 at the step after the largest of these numbers

So no rank has passed that step when it is chosen, and none passes it without asking: all ranks
count the same questions, one a step, whatever the numbers of their steps. Until a call comes this
costs nothing. A call holds the trainer where it asks for the length of one round; the round runs on
the engine's loop, and does not wait for any trainer.
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
#: A save due within this time is due now: the clock may be too coarse to show a shorter one.
_SOON_S = 1e-3


class StopCall(Exception):  # noqa: N818  # no error: it ends a session to be heard
    """A rank asks for a save. Its text is the kind, and for the last save the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A step at which all ranks are to save.

    Attributes:
        number: The question to `ask` that it answers, on each rank; counted from 1.
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
        self._held: Outcome[None] | None = None  # what the trainer waits for during a round
        self._pending: list[Stop] = []  # agreed on, and not yet returned by `ask`
        self._wanted = ""  # why this rank asks for the last save; empty if it does not
        self._heard: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def call_last(self, reason: str) -> None:
        """Ask all ranks for a last save. From any thread, and from a signal's handler.

        Takes no lock: the handler may have interrupted who holds it.
        """
        self._wanted = self._wanted or reason
        self.look_again()

    def look_again(self) -> None:
        """Have the listener look anew at what is asked for, and when. From any thread."""
        loop, heard = self._loop, self._heard
        if loop is not None and heard is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                loop.call_soon_threadsafe(heard.set)

    def ask(self) -> Stop | Outcome[None] | None:
        """Ask whether to save at this step. Once a step, but for the third answer.

        Returns:
            A stop: save now; then call `look_again`, as the next save by time is due later. `None`:
            go on. An outcome: ranks are agreeing; wait for it, and ask again for the same step.
            A signal's handler that asks while the call that it interrupts holds the lock gets
            `None`, and is not counted: the answer goes to that call.
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
        """Listen for calls until one asks for the last save, or a rank leaves or is lost."""
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
        """Wait for a call.

        Returns:
            Why, if it is for the last save; empty, if it is for a save by time; `None`, if a rank
            left instead.
        """
        calls: list[str]
        try:
            async with ranks.session(key):
                await self._call_out(is_first=ranks.rank == 0)
        except StopCall as call:  # there is one rank
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

        It asks for no save by time while a stop is pending, which the trainer has not reached yet:
        during one long step, any number of saves may become due.

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
        """Tell ranks that have heard a call meanwhile, and begin to agree, that this one leaves."""
        with contextlib.suppress(RankError, ConnectionError):
            async with ranks.session(key):
                raise ConnectionError("this rank has left its checkpointer")

    async def _agree(self, ranks: Ranks, key: str, reason: str) -> Stop:
        """Agree with all ranks on the step, and let the trainer go on."""

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
        """Have the trainer wait from its next question on, and say how often it has asked."""
        self._held = Outcome()
        return self._num_asked

    def _release(self, stop: Stop | None) -> None:
        """Let the trainer go on.

        Without the lock: as long as the trainer is held back, `ask` changes nothing.
        """
        if stop is not None:
            self._pending.append(stop)
        held, self._held = self._held, None
        if held is not None:
            held.set_result(None)
