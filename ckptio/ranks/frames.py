"""What goes over a connection between two ranks: a head, and a body that is not looked at.

A frame is the length of its head (4 bytes, little-endian) and of its body (8 bytes), the
head, the body; both are JSON. The head says what it is and is parsed strictly. The body is
encoded once and shared by all frames that carry it, since a plan that is equal for ten
thousand ranks must not be encoded ten thousand times.

JSON and never pickle: a member of the group is trusted with the checkpoint, not with the
process.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from ckptio._gc import without_collection
from ckptio._texts import name_ranks
from ckptio.errors import PeerLostError, RankError, RankFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROTOCOL_VERSION = 2
#: A longer frame is refused before it is read.
MAX_FRAME_NBYTES = 1 << 30
#: The same for a peer that has not said who it is.
MAX_HELLO_NBYTES = 4096

MAX_CAUSES = 64
_MAX_CAUSE_CHARS = 1000
#: Classes of errors that say of damage, as causes name them; see `describe`.
_DAMAGED = {
    *("CorruptionError", "FormatError", "FormatVersionError", "RankFormatError"),
    "UnknownFormatError",
}
_MAX_SHOWN = 16
PREFIX = struct.Struct("<IQ")


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """What a frame is."""


class Hello(Head, frozen=True, kw_only=True):
    """A member says who it is; the first frame of a connection."""

    version: int
    rank: int
    world_size: int
    token: str
    host: str


class Taken(Head, frozen=True):
    """The coordinator takes it, and waits for the others."""


class Refused(Head, frozen=True):
    """The coordinator does not take it."""

    reason: str


class Welcome(Head, frozen=True):
    """All ranks have come. Hosts as runs: name, and how many ranks in a row."""

    nonce: str
    hosts: list[tuple[str, int]]


class Beat(Head, frozen=True):
    """A sign of life."""


class Say(Head, frozen=True):
    """A message of a round, in the body."""

    session: str
    phase: str


class Answer(Head, frozen=True):
    """Its answer, in the body."""

    session: str


class Left(Head, frozen=True):
    """A rank is through with a session, and all went well."""

    session: str


class Failed(Head, frozen=True):
    """A rank's body ended with an error of its own; without a cause if it lost its peers."""

    session: str
    cause: str


class Stopped(Head, frozen=True):
    """A rank's body ended because it was told to, or had not begun."""

    session: str


class Stop(Head, frozen=True):
    """A session has failed: end your body and say so."""

    session: str


class End(Head, frozen=True):
    """Every rank has said how it ended; the `Verdict` is in the body."""

    session: str


class Broken(Head, frozen=True):
    """A rank is lost, so there will be no further sessions; the `Verdict` is in the body."""


class Bye(Head, frozen=True):
    """The sender closes its engine; no frame follows."""


AnyHead: TypeAlias = (
    Hello | Taken | Refused | Welcome | Beat | Say | Answer | Left | Failed | Stopped | Stop
    | End | Broken | Bye
)  # fmt: skip

_heads: msgspec.json.Decoder[AnyHead] = msgspec.json.Decoder(AnyHead)
_encode = msgspec.json.Encoder().encode


@without_collection
def decode(body: bytes) -> Any:
    """Read the body of a frame.

    Of the lists of a million blocks that ranks hold, collections took 6 s of 6.4.

    Raises:
        msgspec.DecodeError: It is no JSON.
    """
    return msgspec.json.decode(body)


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a session ended, the same for every rank of it.

    Attributes:
        kind: Whether a rank failed or was lost.
        what: What failed, as the ranks call it among them; empty where `text` says it all.
        text: What to tell people of it: a sentence without its subject.
        causes: What went wrong, by rank.
        lost: Ranks that were lost or did not come.
        in_doubt: See `RankError`.
    """

    kind: Literal["failed", "lost"]
    what: str
    text: str
    causes: dict[int, str] = {}
    lost: list[int] = []
    in_doubt: bool = False

    def error(self, title: str = "") -> RankError:
        """Make the error that says so.

        Args:
            title: What people call what failed.
        """
        text = f"{title or self.what} {self.text}" if self.what else self.text
        if self.kind == "lost":
            return PeerLostError(text, ranks=self.lost, causes=self.causes, in_doubt=self.in_doubt)
        kinds = {cause.partition(":")[0] for cause in self.causes.values()}
        kind = RankFormatError if kinds and kinds <= _DAMAGED else RankError
        return kind(text, causes=self.causes, in_doubt=self.in_doubt)


decode_verdict = msgspec.json.Decoder(Verdict).decode


def encode_body(value: Any) -> bytes:
    """Encode a body.

    Raises:
        TypeError: It is not JSON.
        ValueError: It is longer than any peer takes.
    """
    body = _encode(value)
    if len(body) > MAX_FRAME_NBYTES - MAX_HELLO_NBYTES:
        raise ValueError(
            f"a message of {len(body)} bytes; ranks send each other {MAX_FRAME_NBYTES} at most"
        )
    return body


def pack_head(head: Head, body: bytes) -> bytes:
    """Encode everything of a frame that comes before its body."""
    data = _encode(head)
    return PREFIX.pack(len(data), len(body)) + data


def parse_head(data: bytes) -> AnyHead:
    """Parse a head.

    Raises:
        msgspec.MsgspecError: It is none.
    """
    return _heads.decode(data)


def pack_hosts(hosts: Iterable[str]) -> list[tuple[str, int]]:
    """Write hosts as runs: a table per rank of all ranks would be quadratic."""
    runs: list[tuple[str, int]] = []
    for host in hosts:
        if runs and runs[-1][0] == host:
            runs[-1] = (host, runs[-1][1] + 1)
        else:
            runs.append((host, 1))
    return runs


def unpack_hosts(runs: Sequence[tuple[str, int]], world_size: int) -> tuple[str, ...]:
    """Read what `pack_hosts` wrote.

    Raises:
        ValueError: There are not as many hosts as ranks.
    """
    if any(n < 1 for _, n in runs) or sum(n for _, n in runs) != world_size:
        raise ValueError(f"hosts of {world_size} ranks were expected")
    return tuple(host for host, num in runs for _ in range(num))


def describe(error: BaseException) -> str:
    """Say what an error is, in one text of bounded length."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError):
        return "it was cancelled there"
    try:
        message = str(error)
    except Exception:  # the others wait until they are told of an error
        message = ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    text = text.encode(errors="backslashreplace").decode()  # JSON takes no lone surrogates
    return text if len(text) <= _MAX_CAUSE_CHARS else text[: _MAX_CAUSE_CHARS - 3] + "..."


def name_causes(causes: dict[int, str]) -> str:
    """Name what went wrong: ranks with the same trouble are named together."""
    ranks_of: dict[str, list[int]] = {}
    for rank, cause in sorted(causes.items()):
        ranks_of.setdefault(cause, []).append(rank)
    shown = [f"{name_ranks(ranks)}: {cause}" for cause, ranks in ranks_of.items()]
    more = "" if len(shown) <= _MAX_SHOWN else f"; and {len(shown) - _MAX_SHOWN} more"
    return "; ".join(shown[:_MAX_SHOWN]) + more


def lost_cause(host: str, reason: str) -> str:
    """Say of a rank that it is lost."""
    return f"lost, {reason} (host {host!r})"


def loss(
    what: str, ranks: Sequence[int], causes: dict[int, str], *, in_doubt: bool = False
) -> Verdict:
    """Make the verdict on what ended because ranks were lost."""
    return Verdict(
        kind="lost",
        what=what,
        text=(
            f"failed on {name_causes(causes)}{doubt(in_doubt=in_doubt)}; close the engine,"
            " and open another when all ranks are there"
        ),
        causes=causes,
        lost=sorted(ranks),
        in_doubt=in_doubt,
    )


def absence(ranks: Sequence[int], waited_s: float) -> Verdict:
    """Make the verdict on a group that never came to be."""
    cause = f"did not come within {waited_s:g} s"
    return Verdict(
        kind="lost",
        what="",
        text=(
            f"{name_ranks(ranks)} {cause}; every rank of the job has to open an engine, or call"
            " save or load, or pass ranks='solo' where one rank is to work alone"
        ),
        causes=dict.fromkeys(ranks[:MAX_CAUSES], cause),
        lost=list(ranks),
    )


def failure(
    what: str,
    causes: dict[int, str],
    *,
    reason: str = "",
    num_more: int = 0,
    in_doubt: bool = False,
) -> Verdict:
    """Make the verdict on what failed on ranks that are there.

    Args:
        what: What failed, as the ranks call it.
        causes: What went wrong, by rank.
        reason: Said instead of the causes.
        num_more: How many causes there are beside these.
        in_doubt: See `RankError`.
    """
    why = f": {reason}" if reason else f" on {name_causes(causes)}"
    more = f"; and on {num_more} more" if num_more else ""
    text = f"failed{why}{more}{doubt(in_doubt=in_doubt)}"
    return Verdict(kind="failed", what=what, text=text, causes=causes, in_doubt=in_doubt)


def doubt(*, in_doubt: bool) -> str:
    """Say what a decision that nobody heard means."""
    return "; it may have been decided: look whether the checkpoint is there" if in_doubt else ""
