"""The coordinator's table: which ranks are where in which session, and what that means.

Plain functions over a table: frames of ranks go in, frames for ranks come out, and the
only clock is an argument. A session passes through these states:

- *open*: ranks give messages. The first message of a round opens it; when the last one is
  there, rank 0 decides, and the answers close it. Ranks that have left are remembered.
- *failing*: from the first failure on. Every rank that has not left is told to stop, and
  what it says last is waited for: that it stopped, or a failure of its own.
- gone: every rank has left, or has said how it ended, or is lost. The ranks that did not
  leave get the verdict, which is one value for all of them.

A rank that was told to stop a session that it has not entered says at once that it has
stopped, and remembers. A lost rank fails every session it has not left, and every later
one; all ranks are told of the first loss, since a rank may be in a session that nobody has
heard of yet. Of later losses they need not hear: n ranks that close their engines would
make n² frames of it.

A round costs 2 (n - 1) frames, a session n - 1 more (`Left`), which nobody waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptio._texts import name_ranks
from ckptio.ranks.frames import (
    MAX_CAUSES,
    Answer,
    Broken,
    End,
    Stop,
    Verdict,
    encode_body,
    failure,
    loss,
    lost_cause,
)
from ckptio.ranks.interface import NOT_STOPPED, Same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.ranks.frames import Head
    from ckptio.ranks.interface import Deadlines, Json

_MAX_SESSIONS = 1024


class Outgoing(NamedTuple):
    """A frame for a rank: its body as a value, and how it is encoded."""

    head: Head
    body: Json
    encoded: Callable[[], bytes]


class _Encoding:
    """A body that is encoded once, and only if somebody needs the bytes."""

    __slots__ = ("_data", "value")

    def __init__(self, value: Json) -> None:
        self.value = value
        self._data: bytes | None = None

    def __call__(self) -> bytes:
        if self._data is None:
            self._data = encode_body(self.value)
        return self._data


class _Session:
    """A session, as the table sees it."""

    __slots__ = (
        "causes", "deciding", "ended", "failing_since_s", "in_doubt", "is_decisive", "key",
        "left", "lost", "messages", "num_causes", "phase", "reason", "since_s",
    )  # fmt: skip

    def __init__(self, key: str) -> None:
        self.key = key
        self.phase = ""
        self.messages: dict[int, Json] = {}
        self.since_s = 0.0
        self.deciding = False
        self.left: set[int] = set()
        self.ended: set[int] = set()  # those that left, too
        self.failing_since_s: float | None = None
        self.reason = ""
        self.in_doubt = False
        self.is_decisive = False
        self.causes: dict[int, str] = {}
        self.num_causes = 0
        self.lost: list[int] = []  # not those that live and did not come

    def blame(self, rank: int, cause: str) -> None:
        """Note a cause, of the first few ranks, and of rank 0: it decides, or fails to."""
        if rank not in self.causes:
            self.num_causes += 1
            if len(self.causes) < MAX_CAUSES or rank == 0:
                self.causes[rank] = cause


class Hub:
    """The table.

    Args:
        hosts: Host of each rank.
        deadlines: How long ranks are waited for.
        clock: Gives the time in seconds.
        send: Takes a frame for a rank. It must not call back.
        ready: Takes the key and the messages of a complete round, for rank 0 to decide.
            It must not call back.

    Attributes:
        num_messages: Messages that came from other ranks, and answers that went to them.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        deadlines: Deadlines,
        clock: Callable[[], float],
        send: Callable[[int, Outgoing], None],
        ready: Callable[[str, list[Json]], None],
    ) -> None:
        self._hosts = tuple(hosts)
        self._world_size = len(hosts)
        self._deadlines = deadlines
        self._clock = clock
        self._send = send
        self._ready = ready
        self._sessions: dict[str, _Session] = {}
        self._lost: dict[int, str] = {}
        self._apart = ""
        self.num_messages = 0

    @property
    def num_sessions(self) -> int:
        """Sessions that some rank has not ended."""
        return len(self._sessions)

    def say(self, rank: int, key: str, phase: str, message: Json) -> None:
        """Take a message of a round."""
        self.num_messages += rank != 0
        session = self._session(key)
        if session.failing_since_s is not None:
            return
        problem = _problem(session, rank, phase)
        if problem:
            self._fail(session, problem, {rank: problem})
            return
        if not session.messages:
            session.phase, session.since_s = phase, self._clock()
        session.messages[rank] = message
        if len(session.messages) == self._world_size:
            messages = [session.messages[r] for r in range(self._world_size)]
            session.messages = dict.fromkeys(session.messages)
            session.deciding = True
            self._ready(key, messages)

    def absent(self, key: str) -> list[int]:
        """Name the ranks that have not come to a round that others have come to."""
        session = self._sessions.get(key)
        came = range(self._world_size) if session is None else session.messages
        return [rank for rank in range(self._world_size) if rank not in came]

    def answer(self, key: str, answers: Sequence[Json] | Same) -> bool:
        """Close a round: send each rank its answer. To rank 0 itself, nothing is sent.

        Args:
            key: The session.
            answers: By rank; one object for several ranks is encoded once.

        Returns:
            Whether they were sent: a session that has failed meanwhile takes none.
        """
        session = self._sessions.get(key)
        if session is None or not session.deciding or session.failing_since_s is not None:
            return False
        head = Answer(key)
        encodings: dict[int, _Encoding] = {}
        outgoing = []
        for rank in range(1, self._world_size):
            value = answers.answer if isinstance(answers, Same) else answers[rank]
            encoding = encodings.setdefault(id(value), _Encoding(value))
            encoding()  # one that cannot be encoded is found before any is sent
            outgoing.append(Outgoing(head, value, encoding))
        session.messages = {}
        session.deciding = False
        self.num_messages += len(outgoing)
        for rank, frame in enumerate(outgoing, 1):
            self._send(rank, frame)
        return True

    def decisive(self, key: str, *, is_on: bool) -> None:
        """Note whether a failure from now on leaves ranks in doubt."""
        # one that is over, because rank 0 did not stop in time, is not begun again
        session = self._session(key) if is_on else self._sessions.get(key)
        if session is None:
            return
        session.is_decisive = is_on
        if session.failing_since_s is not None:
            session.in_doubt = is_on

    def part(self, why: str) -> None:
        """Let no session begin any more: who says that the next calls belong together?

        Sessions are told by how many calls a rank has made. If one has made a call that another
        has not, each meets the other's next one from then on, and they may agree in all but
        what they hold: a checkpoint of two steps.
        """
        self._apart = self._apart or (
            f"{why}, so the calls of the ranks may not belong together any more; close the engine"
            " on all ranks, and open another"
        )

    def left(self, rank: int, key: str) -> None:
        """Take note that a rank is through with a session."""
        session = self._session(key)
        session.left.add(rank)
        if session.messages and session.failing_since_s is None:
            problem = f"{name_ranks([rank])} left before round {session.phase!r}"
            self._fail(session, problem, {rank: "left too early"})
        self._end(session, rank)

    def failed(self, rank: int, key: str, cause: str) -> None:
        """Take note that a rank's body ended with an error; an empty cause is none."""
        session = self._session(key)
        if cause:
            session.blame(rank, cause)
        session.ended.add(rank)
        self._fail(session, "", {})
        self._settle(session)

    def stopped(self, rank: int, key: str) -> None:
        """Take note that a rank's body ended because it was told to."""
        session = self._sessions.get(key)
        if session is not None:
            self._end(session, rank)

    def lose(self, rank: int, reason: str) -> None:
        """Take note that a rank is lost, and fail what it has not left."""
        if rank in self._lost:
            return
        self._lost[rank] = reason
        if len(self._lost) == 1:
            verdict = loss("the group", [rank], {rank: self._cause(rank)}, in_doubt=False)
            frame = Outgoing(Broken(), verdict, _Encoding(verdict))
            for other in range(self._world_size):
                if other != rank:
                    self._send(other, frame)
        for session in list(self._sessions.values()):
            if rank not in session.ended:
                self._miss(session, [rank])
                session.ended.add(rank)
                self._settle(session)

    def tick(self) -> None:
        """Give up on ranks that are waited for too long."""
        now_s, meet_s = self._clock(), self._deadlines.meet_s
        for session in list(self._sessions.values()):
            if session.failing_since_s is not None:
                if now_s - session.failing_since_s > meet_s:
                    self._give_up(session)
            elif session.messages and not session.deciding and now_s - session.since_s > meet_s:
                absent = self.absent(session.key)
                problem = (
                    f"{name_ranks(absent)} did not come to round {session.phase!r} within"
                    f" {meet_s:g} s; every rank of the job has to make the same calls, or wait"
                    " longer with meet_timeout_s; one that saves or loads alone passes ranks='solo'"
                )
                self._fail(session, problem, dict.fromkeys(absent, "did not come"))
                self.part(f"{name_ranks(absent)} did not come to an earlier call")

    def _session(self, key: str) -> _Session:
        """Find a session, or begin it; one that begins in a broken group has failed."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session(key)
            if self._lost:
                self._miss(session, list(self._lost))
                session.ended.update(self._lost)
            elif self._apart:
                self._fail(session, self._apart, {})
            elif len(self._sessions) > _MAX_SESSIONS:
                self._fail(session, f"more than {_MAX_SESSIONS} sessions at a time", {})
        return session

    def _miss(self, session: _Session, lost: list[int]) -> None:
        """Fail a session because ranks are lost."""
        if session.failing_since_s is None or session.lost:
            session.lost.extend(lost)
        for rank in lost:
            session.blame(rank, self._cause(rank))
        self._fail(session, "", {})

    def _fail(self, session: _Session, reason: str, causes: dict[int, str]) -> None:
        """Stop every rank that is in a session or has yet to come to it."""
        if session.failing_since_s is not None:
            return
        session.failing_since_s = self._clock()
        session.in_doubt = session.is_decisive
        session.reason = reason
        for rank, cause in causes.items():
            session.blame(rank, cause)
        session.messages = {}
        frame = Outgoing(Stop(session.key), None, bytes)
        for rank in range(self._world_size):
            if rank not in session.ended and rank not in self._lost:
                self._send(rank, frame)

    def _end(self, session: _Session, rank: int) -> None:
        session.ended.add(rank)
        self._settle(session)

    def _give_up(self, session: _Session) -> None:
        """End a session although ranks have not said that they stopped."""
        for rank in range(self._world_size):
            if rank not in session.ended:
                session.blame(rank, f"{NOT_STOPPED} within {self._deadlines.meet_s:g} s")
        session.ended.update(range(self._world_size))
        self._settle(session)

    def _settle(self, session: _Session) -> None:
        """Give the verdict, when every rank has ended."""
        if len(session.ended) < self._world_size:
            return
        self._sessions.pop(session.key, None)
        if session.failing_since_s is None:
            return
        verdict = _verdict(session)
        frame = Outgoing(End(session.key), verdict, _Encoding(verdict))
        for rank in range(self._world_size):
            if rank not in session.left and rank not in self._lost:
                self._send(rank, frame)

    def _cause(self, rank: int) -> str:
        return lost_cause(self._hosts[rank], self._lost[rank])


def _verdict(session: _Session) -> Verdict:
    what = f"session {session.key!r}"
    causes, in_doubt = dict(sorted(session.causes.items())), session.in_doubt
    if session.lost:
        return loss(what, session.lost, causes, in_doubt=in_doubt)
    return failure(
        what,
        causes,
        reason=session.reason,
        num_more=session.num_causes - len(causes),
        in_doubt=in_doubt,
    )


def _problem(session: _Session, rank: int, phase: str) -> str:
    """Say why a message cannot belong to a session as it is."""
    if rank in session.ended:
        return f"{name_ranks([rank])} used the key twice"
    if session.left:
        left = name_ranks(session.left)
        return f"{left} left before round {phase!r}, which {name_ranks([rank])} came to"
    if rank in session.messages:
        return f"{name_ranks([rank])} came to a round before the last one was over"
    if session.messages and phase != session.phase:
        return (
            f"{name_ranks([rank])} came to round {phase!r} while"
            f" {name_ranks(session.messages.keys())} came to {session.phase!r};"
            " every rank of the job has to make the same calls"
        )
    return ""
