"""A rank's side of its sessions: what it is in, and how it gets out.

The block of a session is stopped as `asyncio.timeout` stops one: its task is cancelled,
and the cancellation is taken back (`uncancel`) and turned into an error where the block
ends. So a block needs no checks, and cleans up as it does after any cancellation; and one
that was cancelled from outside as well stays cancelled.

How a block ends is always said before its verdict is waited for: nobody waits for a rank
that waits. The wait ends with the verdict, with the loss of the coordinator, or with a
cancellation from outside. For a rank that gave a message and has no answer, that is the second
one: once cancelled, be it before or meanwhile, it has to hear whether what was decided is in doubt.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from ckptio.errors import OutOfStepError
from ckptio.ranks.frames import Answer, Broken, End, Stop, describe, failure, loss
from ckptio.ranks.interface import Same

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from ckptio.ranks.frames import Head, Verdict
    from ckptio.ranks.interface import Decide, Json

_MAX_DOOMED = 4096


class Voice(Protocol):
    """What a rank tells the coordinator: frames, or calls where it is the coordinator."""

    def say(self, key: str, phase: str, message: Json) -> None:
        """Give a message of a round."""

    def answer(self, key: str, answers: Sequence[Json] | Same) -> bool:
        """Give the answers of a round, if it still runs; the coordinator alone."""

    def decisive(self, key: str, *, is_on: bool) -> None:
        """Say whether a decision may have been made; the coordinator alone."""

    def absent(self, key: str) -> Sequence[int]:
        """Name the ranks that have not come to a round, where that is known."""

    def part(self, why: str) -> None:
        """Say that ranks were in different calls; the coordinator alone."""

    def left(self, key: str) -> None:
        """Say that a session went well."""

    def failed(self, key: str, cause: str) -> None:
        """Say that a session failed here."""

    def stopped(self, key: str) -> None:
        """Say that a session was stopped."""


class Sessions:
    """The sessions of one rank.

    Args:
        voice: Takes what it says.
        rank: This one.

    Attributes:
        broken: Why there are no more sessions, once there are none.
        is_alone: Whether the coordinator is gone.
    """

    def __init__(self, voice: Voice, rank: int) -> None:
        self.voice = voice
        self.rank = rank
        self.broken: Verdict | None = None
        self.is_alone = False
        self._open: dict[str, RankSession] = {}
        # sessions that failed before this rank came to them, and what is known of them
        self._doomed: dict[str, Verdict | None] = {}

    def enter(self, session: RankSession) -> Verdict | None:
        """Begin a session; give its verdict instead, if there is one already.

        Raises:
            RuntimeError: One of that name is open.
        """
        if session.key in self._open:
            raise RuntimeError(f"session {session.key!r} is open already; a key is used once")
        is_doomed = session.key in self._doomed
        verdict = self._doomed.pop(session.key, None)
        if verdict is None and (self.is_alone or not is_doomed):
            verdict = self.broken
        if verdict is None:
            session.is_doomed = is_doomed
            self._open[session.key] = session
        return verdict

    def leave(self, session: RankSession) -> None:
        """End a session."""
        self._open.pop(session.key, None)

    def receive(self, head: Head, body: Json) -> None:
        """Take a frame of the coordinator.

        Raises:
            ValueError: It is none for a rank.
        """
        match head:
            case Answer(key):
                self.message(key, body)
            case Stop(key):
                self.stop(key)
            case End(key):
                self.end(key, body)
            case Broken():
                self.break_up(body)
            case _:
                raise ValueError(f"{type(head).__name__} from the coordinator")

    def message(self, key: str, body: Json) -> None:
        """Take an answer, or on the coordinator the messages of all."""
        session = self._open.get(key)
        if session is not None:  # one that was left has no use for it
            session.message(body)

    def stop(self, key: str) -> None:
        """Stop a session, entered or not."""
        session = self._open.get(key)
        if session is not None:
            session.stop()
            return
        self._doomed[key] = None
        if len(self._doomed) > _MAX_DOOMED:
            del self._doomed[next(iter(self._doomed))]
        self.voice.stopped(key)

    def end(self, key: str, verdict: Verdict) -> None:
        """Take a session's verdict."""
        session = self._open.get(key)
        if session is not None:
            session.end(verdict)
        elif key in self._doomed:
            self._doomed[key] = verdict

    def break_up(self, verdict: Verdict) -> None:
        """Take note that a rank is lost. Sessions that the coordinator knows of, it ends."""
        self.broken = self.broken or verdict
        for session in list(self._open.values()):
            if not session.has_spoken:
                session.stop()

    def lose_coordinator(self, verdict: Verdict, *, orderly: bool) -> None:
        """Take note that nobody will say anything any more.

        Args:
            verdict: On the group.
            orderly: The coordinator has left every session that it had entered, so bodies
                that do not wait for it may go on to their ends.
        """
        self.broken, self.is_alone = verdict, True
        for session in list(self._open.values()):
            if session.is_waiting or not orderly:
                session.end(self.loss_in(session, in_doubt=session.commits and session.is_owed))

    def loss_in(self, session: RankSession, *, in_doubt: bool) -> Verdict:
        """Make the verdict on a session without a coordinator."""
        assert self.broken is not None  # noqa: S101  # that is why there is none
        what = f"session {session.key!r}"
        return loss(what, self.broken.lost, self.broken.causes, in_doubt=in_doubt)


class RankSession:
    """An implementation of `interface.Session`, for one rank; see there.

    Args:
        sessions: Where it belongs.
        key: Its key.
        title: What its errors call it; the key if empty.
        commits: Whether what is decided in it lasts.

    Attributes:
        key, commits: As given.
        is_doomed: It failed before it was entered, and the verdict is to come.
        has_spoken: The coordinator has heard of it from here.
        is_owed: It gave a message and never had the answer, which may have been decided: also
            where a stop ended its round, and it waits for the verdict.
    """

    def __init__(self, sessions: Sessions, key: str, title: str, *, commits: bool) -> None:
        self.key = key
        self.commits = commits
        self._title = title
        self.is_doomed = False
        self.has_spoken = False
        self.is_owed = False
        self._sessions = sessions
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._is_inside = False  # the block runs
        self._stopping = asyncio.Event()
        self._is_stopped = False  # its task was cancelled from here
        self._round: asyncio.Future[Json] | None = None
        self._spoilt: BaseException | None = None  # what a round ended with
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for the coordinator: for an answer or for the verdict."""
        return self._round is not None or not self._is_inside

    async def __aenter__(self) -> Self:
        verdict = self._sessions.enter(self)
        if verdict is None and self.is_doomed:
            try:
                verdict = await self._verdict
            finally:
                self._sessions.leave(self)
        if verdict is not None:
            raise verdict.error(self._title)
        self._task = asyncio.current_task()
        assert self._task is not None  # noqa: S101  # a coroutine runs in a task
        self._num_cancels = self._task.cancelling()
        self._is_inside = True
        return self

    def message(self, body: Json) -> None:
        """Take the answer of the round, or on the coordinator its messages."""
        if self._round is not None and not self._round.done():
            self._round.set_result(body)

    def stop(self) -> None:
        """Stop the block, if it has not ended."""
        if self._is_inside and not self._is_stopped and self._task is not None:
            self._is_stopped = True
            self._stopping.set()
            self._task.cancel()

    def end(self, verdict: Verdict) -> None:
        """Take the verdict, and stop the block, if it has not ended."""
        if not self._verdict.done():
            self._verdict.set_result(verdict)
        self.stop()

    def decisive(self, *, is_on: bool) -> None:
        """Say whether a decision may have been made; see `interface.Session`."""
        self._sessions.voice.decisive(self.key, is_on=is_on)

    def absent(self) -> Sequence[int]:
        """Name those who have not come; see `interface.Session`."""
        return self._sessions.voice.absent(self.key)

    async def round(self, phase: str, message: Json, decide: Decide) -> Json:
        """Give a message, get an answer; see `interface.Session`."""
        if self._round is not None or not self._is_inside:
            raise RuntimeError(f"round {phase!r} of {self.key!r}: in another one, or too late")
        sessions = self._sessions
        self._round = asyncio.get_running_loop().create_future()
        try:
            self._check()
            sessions.voice.say(self.key, phase, message)
            self.has_spoken = self.is_owed = True
            body = await self._round
            self.is_owed = False
            return body if sessions.rank else await self._decide(decide, body)
        except BaseException as error:
            self._spoilt = error  # even if the block goes on: the others wait for its message
            raise
        finally:
            self._round = None

    def _check(self) -> None:
        """Go into no round that will not be answered."""
        if self._is_stopped:  # the block has taken the cancellation for something else
            raise asyncio.CancelledError
        if self._sessions.is_alone:
            verdict = self._sessions.loss_in(self, in_doubt=False)
            if not self._verdict.done():
                self._verdict.set_result(verdict)
            raise verdict.error(self._title)

    async def _decide(self, decide: Decide, messages: Sequence[Json]) -> Json:
        """Decide for all, on the coordinator."""
        answers = await decide(messages)
        if not isinstance(answers, Same) and len(answers) != len(messages):
            raise ValueError(f"{len(answers)} answers for {len(messages)} ranks")
        if not self._sessions.voice.answer(self.key, answers):
            # the session has failed a moment ago: nobody hears the answer, so rank 0 must not
            # act on it either. The cancellation is on its way, or `decide` has swallowed it
            await self._stopping.wait()
            await asyncio.sleep(0)
            raise asyncio.CancelledError
        return answers.answer if isinstance(answers, Same) else answers[0]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, trace
        assert self._task is not None  # noqa: S101  # it was entered
        self._is_inside = False
        own, self._spoilt = error or self._spoilt, None
        is_outside = not self._is_stopped or self._task.uncancel() > self._num_cancels
        try:
            if own is None and not self._is_stopped:
                self._sessions.voice.left(self.key)
                return
            is_cancel = isinstance(own, asyncio.CancelledError)
            self._tell(None if is_cancel and not is_outside else own)
            if not (own is None or is_cancel or isinstance(own, Exception)):
                return  # the process is about to end: no time for a verdict
            is_late = await self._wait(waits_on=self.is_owed and not (is_cancel and is_outside))
            verdict = self._verdict.result()
        finally:
            self._sessions.leave(self)
        # of a cancellation, the cause: a commit may be in doubt all the same
        if is_outside and isinstance(error, asyncio.CancelledError):
            error.__cause__ = verdict.error(self._title)
            return
        if is_late:
            raise asyncio.CancelledError from verdict.error(self._title)
        raise verdict.error(self._title) from (own if isinstance(own, Exception) else None)

    async def _wait(self, *, waits_on: bool) -> bool:
        """Wait for the verdict; gives whether a cancellation came meanwhile.

        Args:
            waits_on: When cancelled, for the first time: only a further one ends the wait.
        """
        try:
            await (asyncio.shield(self._verdict) if waits_on else self._verdict)
        except asyncio.CancelledError:
            if not waits_on:
                raise
            await self._verdict
            return True
        return False

    def _tell(self, own: BaseException | None) -> None:
        """Tell the coordinator how the block ended, unless there is a verdict already."""
        sessions = self._sessions
        if self._verdict.done():
            return
        if sessions.is_alone:  # it had left, so what happens here concerns this rank alone
            causes = {} if own is None else {sessions.rank: describe(own)}
            in_doubt = self.commits and self.is_owed
            self._verdict.set_result(failure(f"session {self.key!r}", causes, in_doubt=in_doubt))
        elif own is not None:
            if isinstance(own, OutOfStepError):
                sessions.voice.part("ranks made different calls earlier")
            sessions.voice.failed(self.key, describe(own))
        elif self.has_spoken:
            sessions.voice.stopped(self.key)
        else:  # the group has broken up, and the coordinator may not know of this session
            sessions.voice.failed(self.key, "")
