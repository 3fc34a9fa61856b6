"""`Member`: the end of a group of any rank but 0, with one connection, to rank 0.

It says what this rank has to say, hears what was decided, and beats so that silence means that
it is gone. Where the connection ends, or rank 0 is silent for too long, all its sessions end with
`PeerLostError`: nothing here waits for ever, and nothing is decided here.
"""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

from ckptio.ranks import frames
from ckptio.ranks.coordinator import CLOSED
from ckptio.ranks.frames import (
    PROTOCOL_VERSION,
    Beat,
    Bye,
    Hello,
    Refused,
    Taken,
    Welcome,
    decode_verdict,
    encode_body,
    loss,
    lost_cause,
)
from ckptio.ranks.pulse import Pulse
from ckptio.ranks.sessions import RankSession, Sessions
from ckptio.ranks.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ckptio.ranks.frames import AnyHead, Verdict
    from ckptio.ranks.interface import Deadlines, Json, Same

#: What a process may lack to call another.
_TOO_LITTLE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Member:
    """An implementation of `interface.Ranks`, for a rank other than 0.

    Args:
        rank: This one.
        world_size: How many ranks there are.
        token: What the coordinator has to be told.
        deadlines: How long is waited for others.
        host: The host of this rank.

    Attributes:
        was_told: Whether rank 0 has said that others were lost, or did not come.
        shortage: What this rank itself lacked to call rank 0, if that was why it did not; or empty.
    """

    def __init__(
        self, rank: int, world_size: int, token: str, deadlines: Deadlines, host: str
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hosts: tuple[str, ...] = ()
        self.nonce = ""
        self.was_told = False
        self.shortage = ""
        self._deadlines = deadlines
        self._hello = Hello(
            version=PROTOCOL_VERSION, rank=rank, world_size=world_size, token=token, host=host
        )
        self._loop = asyncio.get_running_loop()
        self._wire: Wire | None = None
        self._knock: asyncio.Future[str] = self._loop.create_future()
        self._welcome: asyncio.Future[Verdict | None] = self._loop.create_future()
        self._sessions = Sessions(self, rank)
        self._pulse = Pulse(deadlines.beat_s, self._beat)

    @property
    def address(self) -> str:
        """Where other machines reach this rank; empty if it is on rank 0's machine."""
        return "" if self._wire is None else self._wire.own_address

    @property
    def rank_0_address(self) -> str:
        """Where this rank reaches rank 0; empty if it is on rank 0's machine."""
        return "" if self._wire is None else self._wire.peer_address

    def session(self, key: str, title: str = "", *, commits: bool = False) -> RankSession:
        """Make a session; see `interface.Ranks`."""
        return RankSession(self._sessions, key, title, commits=commits)

    # joining

    async def knock(
        self, connect: Callable[[Callable[[], Wire]], Awaitable[object]], timeout_s: float
    ) -> str:
        """Say hello over a new connection.

        Args:
            connect: Opens a connection with a protocol of the given making.
            timeout_s: For how long to wait for both.

        Returns:
            Why this is not the coordinator, or it did not take this rank; "" if it did.
        """
        wire, reason = Wire(self), "cancelled"
        try:
            async with asyncio.timeout(timeout_s):
                await connect(lambda: wire)
                self._wire = wire  # no sooner: a beat would go before the hello
                wire.send(self._hello)
                reason = await asyncio.shield(self._knock)
        except TimeoutError:
            reason = f"no answer within {timeout_s:.2g} s"
        except UnicodeError as error:  # of a name of more than 63 letters
            reason = str(error)
        except OSError as error:
            reason = str(error)
            if error.errno in _TOO_LITTLE:
                self.shortage = os.strerror(error.errno)
        finally:
            if reason:
                self._wire = None
                wire.cut()
        return reason

    async def has_news(self, timeout_s: float) -> bool:
        """Wait whether `gather` would come to its end, and say if so."""
        done, _ = await asyncio.wait((self._welcome,), timeout=max(0.0, timeout_s))
        return bool(done)

    async def gather(self, timeout_s: float) -> None:
        """Wait until all ranks have come.

        Raises:
            PeerLostError: Some did not come in time, or rank 0 went away.
        """
        try:
            async with asyncio.timeout(timeout_s):
                verdict = await asyncio.shield(self._welcome)
        except TimeoutError:
            cause = f"it did not begin within {timeout_s:g} s"
            verdict = loss("joining the group", [0], {0: cause})
        if verdict is not None:
            raise verdict.error() from None

    # what comes over the wire

    def frame(self, wire: Wire, head: AnyHead, body: bytes) -> None:
        """Take a frame; see `wire.Receiver`."""
        match head:
            case Beat():
                return
            case Taken() | Refused():
                self._answer_knock("" if isinstance(head, Taken) else f"refused: {head.reason}")
            case Welcome(nonce, hosts):
                self.nonce, self.hosts = nonce, frames.unpack_hosts(hosts, self.world_size)
                self._begin(None)
            case Bye():
                self._lose(CLOSED, orderly=True)
                wire.hang_up(Bye())
            case frames.Broken():
                self._break_up(decode_verdict(body))
            case frames.End():
                self._sessions.receive(head, decode_verdict(body))
            case _:
                self._sessions.receive(head, frames.decode(body) if body else None)

    def _answer_knock(self, reason: str) -> None:
        if not self._knock.done():
            self._knock.set_result(reason)

    def _begin(self, verdict: Verdict | None) -> None:
        if not self._welcome.done():
            self._welcome.set_result(verdict)

    def _break_up(self, verdict: Verdict) -> None:
        if self.rank in verdict.lost:  # it is this one that the others have lost
            self._sessions.lose_coordinator(verdict, orderly=False)
        else:
            self._sessions.break_up(verdict)
        self.was_told = True
        self._begin(verdict)

    def wire_lost(self, wire: Wire, reason: str) -> None:
        """Take note of the end of a connection; see `wire.Receiver`."""
        self._answer_knock(reason)
        if wire is self._wire:
            self._lose(reason, orderly=False)

    def _lose(self, reason: str, *, orderly: bool) -> None:
        if self._sessions.is_alone:
            return
        cause = lost_cause(self.hosts[0], reason) if self.hosts else f"lost: {reason}"
        verdict = loss("the group", [0], {0: cause})
        self._sessions.lose_coordinator(verdict, orderly=orderly)
        self._begin(verdict)

    # what this rank says; see `sessions.Voice`

    def _send(self, head: frames.Head, body: bytes = b"") -> None:
        if self._wire is not None:
            self._wire.send(head, body)

    def say(self, key: str, phase: str, message: Json) -> None:
        """Give a message of a round."""
        self._send(frames.Say(key, phase), encode_body(message))

    def answer(self, key: str, answers: Sequence[Json] | Same) -> bool:
        """Answers come from rank 0 alone."""
        raise AssertionError(f"rank {self.rank} decided in {key!r}: {answers!r}")

    def absent(self, key: str) -> Sequence[int]:
        """Only rank 0 knows."""
        del key
        return ()

    def decisive(self, key: str, *, is_on: bool) -> None:
        """Rank 0 alone decides."""
        raise AssertionError(f"rank {self.rank} decides in {key!r}: {is_on}")

    def part(self, why: str) -> None:
        """Rank 0 alone compares calls."""
        raise AssertionError(f"rank {self.rank} compared calls: {why}")

    def left(self, key: str) -> None:
        """Say that a session went well."""
        self._send(frames.Left(key))

    def failed(self, key: str, cause: str) -> None:
        """Say that a session failed here."""
        self._send(frames.Failed(key, cause))

    def stopped(self, key: str) -> None:
        """Say that a session was stopped."""
        self._send(frames.Stopped(key))

    # time

    def _beat(self, late_s: float) -> None:
        wire, deadlines, now_s = self._wire, self._deadlines, self._loop.time()
        if wire is None or self._sessions.is_alone:
            return
        if late_s > deadlines.beat_s:
            wire.last_heard_s += late_s
        if now_s - wire.last_heard_s >= deadlines.peer_s:
            wire.abort(f"nothing was heard of it for {deadlines.peer_s:g} s")
        elif now_s - wire.last_sent_s >= deadlines.beat_s / 2:
            wire.send(Beat())

    async def close(self) -> None:
        """Leave the group; see `interface.Ranks`."""
        wire = self._wire
        if not self._sessions.is_alone:
            verdict = loss(
                "the group", [self.rank], {self.rank: lost_cause(self._hello.host, CLOSED)}
            )
            self._sessions.lose_coordinator(verdict, orderly=False)
        try:
            if wire is not None:
                wire.hang_up(Bye())
                async with asyncio.timeout(self._deadlines.peer_s):
                    await wire.gone()
        except TimeoutError:
            return  # a coordinator that takes nothing: it is cut off
        finally:
            self._pulse.stop()
            if wire is not None:
                wire.cut()
