"""`Coordinator`: rank 0's end of a group, with a connection to every other rank.

A star: a round is two hops, whatever the world size; what rank 0 has to do for one grows
with it. There is no task here: connections are protocols, the clock is a timer, and a
decision runs in the task that waits for it. So a group is opened in one task and closed
in another, as an engine needs it.

Liveness is judged by bytes: each end sends a `Beat` when it had nothing else to send, and
gives the other up after `Deadlines.peer_s` of silence. An end whose own loop stood still
(a debugger, a suspended machine) gives the others that time on top: their bytes are
there, nobody has read them yet.

Nobody is let in who does not know the token, which only those learn who can read the
group's store; it keeps strangers and other jobs apart, it does not encrypt.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import secrets
import weakref
from typing import TYPE_CHECKING

from ckptio.ranks import frames
from ckptio.ranks.frames import (
    MAX_FRAME_NBYTES,
    MAX_HELLO_NBYTES,
    PROTOCOL_VERSION,
    Beat,
    Broken,
    Bye,
    Hello,
    Refused,
    Taken,
    Welcome,
    encode_body,
    loss,
    lost_cause,
)
from ckptio.ranks.hub import Hub
from ckptio.ranks.pulse import Pulse
from ckptio.ranks.sessions import RankSession, Sessions
from ckptio.ranks.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.ranks.frames import AnyHead
    from ckptio.ranks.hub import Outgoing
    from ckptio.ranks.interface import Deadlines, Json, Same

CLOSED = "it closed its engine, and every rank has to make the same calls"


class Coordinator:
    """An implementation of `interface.Ranks`, for rank 0 of several.

    Args:
        world_size: How many ranks there are, more than one.
        token: What members have to know.
        deadlines: How long is waited for others.
        host: The host of this rank.

    Attributes:
        shortage: What this rank lacks to answer others that call; empty if nothing.
    """

    rank = 0
    address = rank_0_address = ""

    def __init__(self, world_size: int, token: str, deadlines: Deadlines, host: str) -> None:
        self.world_size = world_size
        self.nonce = secrets.token_hex(16)
        self.hosts: tuple[str, ...] = ()
        self.shortage = ""
        self._token = token
        self._deadlines = deadlines
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._guests: dict[Wire, float] = {}  # since when they are here without a hello
        self._rank_of: dict[Wire, int] = {}
        self._members: dict[int, tuple[Wire, str]] = {}  # and the host of each
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()  # to be cut at the end, latest
        self._silent: weakref.WeakSet[Wire] = weakref.WeakSet()  # of ranks given up; no end comes
        self._all_here: asyncio.Future[None] = self._loop.create_future()
        self._quiet: asyncio.Future[None] | None = None
        self._hub: Hub | None = None
        self._sessions = Sessions(self, 0)
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._pulse = Pulse(deadlines.beat_s, self._beat)

    def session(self, key: str, title: str = "", *, commits: bool = False) -> RankSession:
        """Make a session; see `interface.Ranks`."""
        return RankSession(self._sessions, key, title, commits=commits)

    # joining

    def guest(self) -> Wire:
        """Make the protocol for a connection that somebody has opened."""
        wire = Wire(self, MAX_HELLO_NBYTES)
        self._wires.add(wire)
        self._guests[wire] = self._loop.time()
        return wire

    async def gather(self, timeout_s: float, waited_s: float | None = None) -> None:
        """Wait until all ranks have come, and let them begin.

        Args:
            timeout_s: For how long.
            waited_s: How long they will have been waited for then, if not since now.

        Raises:
            PeerLostError: Some did not come in time. Those that are here raise the same.
            RankError: The same, where this rank could not answer some.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._all_here)
        except TimeoutError:
            absent = [r for r in range(1, self.world_size) if r not in self._members]
            verdict = frames.absence(absent, timeout_s if waited_s is None else waited_s)
            error = verdict.error()
            if self.shortage:
                cause = f"it could not answer ranks that called: {self.shortage}"
                verdict = loss("joining the group", [0], {0: cause})
                error = frames.failure("joining the group", {0: cause}).error()
            body = encode_body(verdict)
            for wire, _ in self._members.values():
                wire.hang_up(Broken(), body)
            raise error from None

    def _greet(self, wire: Wire, head: AnyHead) -> None:
        """Take the first frame of a connection."""
        del self._guests[wire]
        reason = self._refusal(head)
        if reason or not isinstance(head, Hello):
            wire.hang_up(Refused(reason))
            return
        wire.max_nbytes = MAX_FRAME_NBYTES
        self._rank_of[wire] = head.rank
        self._members[head.rank] = (wire, head.host)
        wire.send(Taken())
        if len(self._members) == self.world_size - 1:
            self._begin()

    def _refusal(self, head: AnyHead) -> str:
        """Say why somebody is not let in; only those with the token learn more than that."""
        if not isinstance(head, Hello) or not hmac.compare_digest(
            head.token.encode(), self._token.encode()
        ):
            return "not a member of this group"
        if head.version != PROTOCOL_VERSION:
            return (
                f"protocol {head.version} instead of {PROTOCOL_VERSION}; run one version of ckptio"
            )
        if head.world_size != self.world_size or not 0 < head.rank < self.world_size:
            return f"rank {head.rank} of {head.world_size} in a world of {self.world_size}"
        if head.rank in self._members:
            return f"rank {head.rank} is here already"
        return ""

    def _begin(self) -> None:
        self.hosts = (self._host, *(self._members[r][1] for r in range(1, self.world_size)))
        self._hub = Hub(self.hosts, self._deadlines, self._loop.time, self._send, self._ready)
        welcome = Welcome(self.nonce, frames.pack_hosts(self.hosts))
        for wire, _ in self._members.values():
            wire.send(welcome)
        if not self._all_here.done():
            self._all_here.set_result(None)

    # what comes over wires

    def frame(self, wire: Wire, head: AnyHead, body: bytes) -> None:
        """Take a frame; see `wire.Receiver`."""
        rank = self._rank_of.get(wire)
        if rank is None:
            self._greet(wire, head)
        elif isinstance(head, Bye):
            self._lose(wire, CLOSED)
        elif not isinstance(head, Beat):
            self._hear(rank, head, body)
        self._look()

    def _hear(self, rank: int, head: AnyHead, body: bytes) -> None:
        hub = self._hub
        if hub is None:
            raise ValueError(f"{type(head).__name__} before all ranks are there")
        match head:
            case frames.Say(session, phase):
                hub.say(rank, session, phase, frames.decode(body))
            case frames.Left(session):
                hub.left(rank, session)
            case frames.Failed(session, cause):
                hub.failed(rank, session, cause)
            case frames.Stopped(session):
                hub.stopped(rank, session)
            case _:
                raise ValueError(f"{type(head).__name__} from a member")

    def wire_lost(self, wire: Wire, reason: str) -> None:
        """Take note of the end of a connection; see `wire.Receiver`."""
        self._lose(wire, reason)
        self._look()

    def _lose(self, wire: Wire, reason: str) -> None:
        """Part with a guest, with a member that may come again, or with one for good."""
        self._guests.pop(wire, None)
        rank = self._rank_of.pop(wire, None)
        if rank is None:
            return
        if self._hub is None:
            del self._members[rank]  # it may come again
            wire.cut()
            return
        verdict = loss("the group", [rank], {rank: lost_cause(self.hosts[rank], reason)})
        wire.hang_up(Broken(), encode_body(verdict))
        self._hub.lose(rank, reason)

    # what goes to ranks

    def _send(self, rank: int, frame: Outgoing) -> None:
        if rank:
            self._members[rank][0].send(frame.head, frame.encoded())
        else:
            self._post(lambda: self._sessions.receive(frame.head, frame.body))

    def _ready(self, key: str, messages: list[Json]) -> None:
        self._post(lambda: self._sessions.message(key, messages))

    def _post(self, call: Callable[[], None]) -> None:
        """Call later, in order: what rank 0 is told must not run inside what it says."""
        self._posted.append(call)
        if len(self._posted) == 1:
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        for _ in range(len(self._posted)):
            self._posted.popleft()()
        if self._posted:
            self._loop.call_soon(self._deliver)

    # rank 0 as one of the ranks; see `sessions.Voice`

    @property
    def _table(self) -> Hub:
        assert self._hub is not None  # noqa: S101  # `gather` has returned
        return self._hub

    def say(self, key: str, phase: str, message: Json) -> None:
        """Give a message of a round."""
        self._table.say(0, key, phase, message)

    def answer(self, key: str, answers: Sequence[Json] | Same) -> bool:
        """Give the answers of a round, if it still runs."""
        return self._table.answer(key, answers)

    def absent(self, key: str) -> Sequence[int]:
        """Name the ranks that have not come to a round."""
        return self._table.absent(key)

    def decisive(self, key: str, *, is_on: bool) -> None:
        """Say whether a decision may have been made."""
        self._table.decisive(key, is_on=is_on)

    def part(self, why: str) -> None:
        """Say that ranks were in different calls."""
        self._table.part(why)

    def left(self, key: str) -> None:
        """Say that a session went well."""
        self._table.left(0, key)

    def failed(self, key: str, cause: str) -> None:
        """Say that a session failed here."""
        self._table.failed(0, key, cause)

    def stopped(self, key: str) -> None:
        """Say that a session was stopped."""
        self._table.stopped(0, key)

    # time

    def _beat(self, late_s: float) -> None:
        now_s, deadlines = self._loop.time(), self._deadlines
        grace_s = late_s if late_s > deadlines.beat_s else 0.0
        for wire, since_s in list(self._guests.items()):
            if now_s - since_s > deadlines.peer_s:
                wire.abort("it did not say who it is")
        for wire in list(self._rank_of):
            wire.last_heard_s += grace_s
            if now_s - wire.last_heard_s >= deadlines.peer_s:
                self._silent.add(wire)
                self._lose(wire, f"nothing was heard of it for {deadlines.peer_s:g} s")
            elif now_s - wire.last_sent_s >= deadlines.beat_s / 2:
                wire.send(Beat())
        if self._hub is not None:
            self._hub.tick()
        self._look()

    def _look(self) -> None:
        """Tell who waits for it that no session is left."""
        if self._quiet is not None and not self._quiet.done() and not self._table.num_sessions:
            self._quiet.set_result(None)

    async def close(self) -> None:
        """Leave the group, last of all: sessions that rank 0 has left come to their ends."""
        for wire in self._guests:  # of whom nobody knows whether they ever say who they are
            wire.cut()
        try:
            if self._hub is not None:
                verdict = loss("the group", [0], {0: lost_cause(self._host, CLOSED)})
                self._sessions.break_up(verdict)
                self._hub.lose(0, CLOSED)
                self._quiet = self._loop.create_future()
                self._look()
                await asyncio.wait((self._quiet,), timeout=self._deadlines.peer_s)
            for wire in list(self._rank_of):
                wire.hang_up(Bye())
            async with asyncio.timeout(self._deadlines.peer_s):
                for wire in list(self._wires):
                    if wire not in self._silent:  # it was waited for, and told what it can hear
                        await wire.gone()
        except TimeoutError:
            return  # a peer that takes nothing: it is cut off
        finally:
            self._pulse.stop()
            for wire in list(self._wires):
                wire.cut()
