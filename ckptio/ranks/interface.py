"""What a session of ranks is, whoever carries its messages.

A *round* is one collective step: every rank gives a message, the coordinator (rank 0)
decides over all of them, every rank gets its answer. A *session* is a few rounds and what
lies between, under one key. It ends on all ranks alike: a failure of its body on any rank
stops the bodies of all, and all raise the same `RankError` when every rank has said how it
ended, so that nobody still writes when somebody cleans up.

Rejected: collectives of `torch.distributed`, which belong to the trainer's thread, know
no sessions, and hang or take the process down when a peer dies; and a key-value store,
where n ranks poll for n keys and a dead rank is only silence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ckptio.errors import OutOfStepError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

#: None, bool, str, int of 64 bits, finite float, lists, and dicts with str keys. What is
#: given to or by rank 0 may arrive as the same object, so nobody changes it afterwards.
Json: TypeAlias = Any
#: What the cause of a rank begins with that lives and has not said how it ended.
NOT_STOPPED = "has not stopped"


@dataclass(frozen=True, slots=True)
class Same:
    """One answer for every rank; it is encoded once."""

    answer: Json


def require_alike(messages: Sequence[Json], verb: str, call: str) -> None:
    """Check in a `Decide` that all ranks sent the same message.

    Args:
        messages: What they sent, by rank; shown in the error as `str` writes it.
        verb: What a rank does with it, for the error: `"loads"`.
        call: What all ranks have to call alike: `"load"`.

    Raises:
        OutOfStepError: The message of some rank differs from that of rank 0.
    """
    for rank, message in enumerate(messages):
        if message != messages[0]:
            raise OutOfStepError(
                f"rank {rank} {verb} {message} and rank 0 {messages[0]}; call {call} on all ranks"
                " alike and in one order"
            )


#: Makes one answer for each rank of the messages by rank. Runs on the coordinator alone.
Decide: TypeAlias = Callable[[Sequence[Json]], Awaitable[Sequence[Json] | Same]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long is waited for others.

    Attributes:
        peer_s: Seconds without a byte after which a peer is lost. It is noticed at most a
            quarter later.
        meet_s: Seconds for which a rank that is alive is waited for where others are.
    """

    peer_s: float = 30.0
    meet_s: float = 600.0

    @property
    def beat_s(self) -> float:
        """Seconds between signs of life."""
        return self.peer_s / 4


class Session(Protocol):
    """A few rounds of all ranks. Made by `Ranks.session`."""

    def decisive(self, *, is_on: bool) -> None:
        """Say on the coordinator that a decision is about to be made that cannot be undone.

        From then on a failure leaves ranks in doubt whether it was made, and their errors
        say so. To be taken back where it turns out that it was not made.
        """

    def absent(self) -> Sequence[int]:
        """Name on the coordinator the ranks that have not come to the round; nobody elsewhere."""

    async def round(self, phase: str, message: Json, decide: Decide) -> Json:
        """Give a message, get an answer.

        Args:
            phase: Name of the round, the same on every rank.
            message: This rank's.
            decide: Awaited on the coordinator, in the task that called this, when the
                messages of all ranks are there. Not used on other ranks. It is cancelled
                when the session fails meanwhile, and must not hold the loop for as long
                as `Deadlines.peer_s`.

        Returns:
            This rank's answer.

        Raises:
            asyncio.CancelledError: The session failed on another rank; the block around
                it turns this into the `RankError`.
        """


class Ranks(Protocol):
    """The engines of a group, as one of them sees them. Belongs to one loop.

    Closed by `close`; sessions end before.

    Attributes:
        rank: This one, from 0 to `world_size` - 1; 0 is the coordinator.
        world_size: How many there are.
        hosts: The host of each rank, by rank. Equal names are one machine.
        nonce: 32 hex digits, the same on all ranks, of no other group ever.
        address: Where other machines reach this rank; empty if it met rank 0 on rank 0's
            own machine. Ranks of that machine are reached where rank 0 is.
        rank_0_address: Where this rank reaches rank 0; empty on rank 0's machine. Another
            machine may reach it elsewhere.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102  # documented above

    @property
    def world_size(self) -> int: ...  # noqa: D102  # as above

    @property
    def hosts(self) -> tuple[str, ...]: ...  # noqa: D102  # as above

    @property
    def nonce(self) -> str: ...  # noqa: D102  # as above

    @property
    def address(self) -> str: ...  # noqa: D102  # as above

    @property
    def rank_0_address(self) -> str: ...  # noqa: D102  # as above

    def session(
        self, key: str, title: str = "", *, commits: bool = False
    ) -> AbstractAsyncContextManager[Session]:
        """Make a session: `async with ranks.session(key) as session`.

        The block's task is cancelled when the session fails elsewhere. What is left of it
        then is up to the block: it has all the time it needs to clean up.

        Args:
            key: The same on every rank, and used once. Several sessions may be open at a
                time, and be entered in any order.
            title: What its errors on this rank call it: "save to 'run/step-4'", say. The key
                if empty.
            commits: Whether what is decided in it lasts. A rank that never hears of it, because
                the coordinator is lost, is then in doubt; otherwise nothing may have happened.

        Raises:
            RankError: From the block: it failed on some rank, or one that is alive did not come
                to a round. In a world of one, what the block raised passes unchanged.
            PeerLostError: From the block: a rank was lost.
            asyncio.CancelledError: From the block: it was cancelled here. Other ranks get
                a `RankError`; it is the `__cause__` here. Cancelling a second time stops waiting
                for the others, and leaves no cause.
        """

    async def close(self) -> None:
        """Leave the group. Sessions that others begin later fail there."""
