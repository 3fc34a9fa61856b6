"""Several ranks on one loop: the real groups over connections in memory.

What runs is what runs between machines, down to the protocols; only the sockets are not
there. Bytes arrive late and in pieces, by a seed, and in order. A rank can be killed (its
connections end) or frozen (nothing comes from it and nothing reaches it, and nobody is
told), and then its own tasks go on like those of a machine behind a cut cable: what they
end with is nobody's business. A rank that is deafened only does not read for a while, as one
whose training step holds the interpreter.
"""

from __future__ import annotations

import asyncio
import collections
import random
from typing import TYPE_CHECKING, TypeVar, cast

from ckptio.ranks.coordinator import Coordinator
from ckptio.ranks.interface import Deadlines
from ckptio.ranks.member import Member
from ckptio.ranks.solo import SoloRanks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType
    from typing import Self

    from ckptio.ranks.interface import Ranks

T = TypeVar("T")

_TOKEN = "token"  # noqa: S105  # of a group that nobody else can reach
_HIGH_WATER_NBYTES = 64 << 10


class MemoryTransport(asyncio.Transport):
    """One end of a connection in memory.

    Args:
        rng: Draws delays, and where bytes are cut.
        max_delay_s: The longest time in seconds from one piece to the next. Pieces arrive one
            after the other, so that one behind others takes longer.
        joins_pieces: Whether what has piled up arrives as one piece.

    Attributes:
        sent_nbytes: Bytes that were sent from this end.
    """

    def __init__(
        self, rng: random.Random, max_delay_s: float, *, joins_pieces: bool = False
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._rng = rng
        self._max_delay_s = max_delay_s
        self._joins_pieces = joins_pieces
        self._protocol: asyncio.Protocol | None = None
        self._peer: MemoryTransport | None = None
        self._sent: collections.deque[bytes | Exception | None] = collections.deque()
        self._num_sent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._has_ended = False
        self._is_closing = False
        self._is_gone = False
        self._is_held = False
        self.sent_nbytes = 0

    def join(self, peer: MemoryTransport, protocol: asyncio.Protocol) -> None:
        """Connect."""
        self._peer, self._protocol = peer, protocol
        protocol.connection_made(self)

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._is_closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, piece by piece."""
        if self._is_closing or self._has_ended:
            return
        data = bytes(data)
        self.sent_nbytes += len(data)
        cut = self._rng.randint(1, len(data)) if data else 0
        self._push(data[:cut])
        self._push(data[cut:])

    def write_eof(self) -> None:
        """End the sending."""
        if not self._has_ended:
            self._has_ended = True
            self._push(None)

    def close(self) -> None:
        """End, after what was sent."""
        self.write_eof()
        self._go(None)

    def abort(self) -> None:
        """End now. What was sent may or may not arrive."""
        if self._is_gone:
            return
        if self._rng.random() < 0.5:  # noqa: PLR2004  # a coin
            self._sent.clear()
        self._has_ended = True
        self._push(ConnectionResetError("reset by peer"))
        self._go(None)

    def hold(self, *, held: bool) -> None:
        """Let nothing arrive at the other end, or let it arrive again."""
        self._is_held = held
        self._schedule()

    def _go(self, error: Exception | None) -> None:
        self._is_closing = True
        if not self._is_gone and self._protocol is not None:
            self._is_gone = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    def _push(self, piece: bytes | Exception | None) -> None:
        if piece == b"":
            return
        self._sent.append(piece)
        if isinstance(piece, bytes):
            self._num_sent_bytes += len(piece)
            if self._num_sent_bytes > _HIGH_WATER_NBYTES and not self._is_paused:
                self._is_paused = True
                cast("asyncio.Protocol", self._protocol).pause_writing()
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is None and self._sent and not self._is_held:
            delay_s = self._rng.uniform(0, self._max_delay_s)
            self._timer = self._loop.call_later(delay_s, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        if self._is_held or not self._sent:
            return
        piece = self._sent.popleft()
        if isinstance(piece, bytes):
            while self._joins_pieces and self._sent and isinstance(self._sent[0], bytes):
                piece += cast("bytes", self._sent.popleft())
            self._num_sent_bytes -= len(piece)
        if self._peer is not None:
            self._peer.arrive(piece)
        if self._is_paused and not self._num_sent_bytes:
            self._is_paused = False
            if not self._is_gone and self._protocol is not None:
                self._protocol.resume_writing()
        self._schedule()

    def arrive(self, piece: bytes | Exception | None) -> None:
        """Take what the other end sent."""
        if self._is_gone or self._protocol is None:
            return
        if isinstance(piece, bytes):
            self._protocol.data_received(piece)
        elif isinstance(piece, Exception):
            self._go(piece)
        elif not self._protocol.eof_received():
            self.close()


class MemoryRanks:
    """A group of ranks on this loop: `async with MemoryRanks(4) as world`.

    Args:
        world_size: How many.
        hosts: The host of each; one host for all if not given.
        deadlines: How long ranks wait for each other.
        seed: Draws how bytes travel.
        max_delay_s: The longest time in seconds from one piece of them to the next; see
            `MemoryTransport`.
        joins_pieces: Whether bytes that have piled up arrive as one piece, as they do from
            a socket whose reader was busy. Else the loop has turns between any two.

    Attributes:
        ranks: One for each rank, inside the block.
    """

    def __init__(
        self,
        world_size: int,
        *,
        hosts: Sequence[str] | None = None,
        deadlines: Deadlines | None = None,
        seed: int = 0,
        max_delay_s: float = 0.01,
        joins_pieces: bool = False,
    ) -> None:
        self._hosts = tuple(hosts) if hosts is not None else ("host",) * world_size
        self._deadlines = deadlines or Deadlines()
        self._rng = random.Random(seed)  # noqa: S311  # a schedule, nothing secret
        self._max_delay_s = max_delay_s
        self._joins_pieces = joins_pieces
        self._ends: dict[int, tuple[MemoryTransport, MemoryTransport]] = {}
        self.ranks: tuple[Ranks, ...] = ()

    async def __aenter__(self) -> Self:
        world_size = len(self._hosts)
        if world_size == 1:
            self.ranks = (SoloRanks(self._hosts[0]),)
            return self
        leader = Coordinator(world_size, _TOKEN, self._deadlines, self._hosts[0])
        members = [
            Member(rank, world_size, _TOKEN, self._deadlines, self._hosts[rank])
            for rank in range(1, world_size)
        ]
        self.ranks = (leader, *members)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(leader.gather(self._deadlines.meet_s), name="gather 0")
                for member in members:
                    tasks.create_task(self._join(member, leader), name=f"gather {member.rank}")
        except BaseException:
            await self._close()
            raise
        return self

    async def _join(self, member: Member, leader: Coordinator) -> None:
        async def connect(make: Callable[[], asyncio.Protocol]) -> None:
            self._ends[member.rank] = self.connect(make(), leader.guest())

        reason = await member.knock(connect, self._deadlines.peer_s)
        if reason:
            raise AssertionError(f"rank {member.rank} was not taken: {reason}")
        await member.gather(self._deadlines.meet_s)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the ranks have sent each other."""
        return sum(end.sent_nbytes for ends in self._ends.values() for end in ends)

    def connect(
        self, mine: asyncio.Protocol, theirs: asyncio.Protocol
    ) -> tuple[MemoryTransport, MemoryTransport]:
        """Connect two protocols; give the end of each."""
        ends = (self._end(), self._end())
        ends[0].join(ends[1], mine)
        ends[1].join(ends[0], theirs)
        return ends

    def _end(self) -> MemoryTransport:
        return MemoryTransport(self._rng, self._max_delay_s, joins_pieces=self._joins_pieces)

    def kill(self, rank: int) -> None:
        """End a rank's connections, as the end of its process does."""
        for member, (end, leader_end) in self._ends.items():
            if member == rank:
                end.abort()
            elif rank == 0:
                leader_end.abort()

    def freeze(self, rank: int) -> None:
        """Stop what goes to and from a rank, and tell nobody."""
        self._hold(rank, held=True)

    def deafen(self, rank: int) -> None:
        """Let nothing reach a rank, while what it says arrives."""
        for member, (end, leader_end) in self._ends.items():
            if member == rank:
                leader_end.hold(held=True)
            elif rank == 0:
                end.hold(held=True)

    def thaw(self, rank: int) -> None:
        """Let what was held go on."""
        self._hold(rank, held=False)

    def _hold(self, rank: int, *, held: bool) -> None:
        for member, ends in self._ends.items():
            if rank in {0, member}:
                for end in ends:
                    end.hold(held=held)

    async def run(self, body: Callable[[Ranks], Awaitable[T]]) -> list[T | BaseException]:
        """Run a body on every rank, each in a task of its own, to their ends.

        Returns:
            What each returned or raised, by rank.
        """

        async def one(ranks: Ranks) -> T | BaseException:
            try:
                return await body(ranks)
            except BaseException as error:  # the test looks at it
                return error

        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(one(ranks), name=f"rank {ranks.rank}") for ranks in self.ranks
            ]
        return [task.result() for task in running]

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for ranks in self.ranks:
                tasks.create_task(ranks.close(), name=f"close {ranks.rank}")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        await self._close()
