"""What a job's store says of where its rank 0 waits, of this attempt and of earlier ones.

A store may outlive ranks: torchrun's is its agent's, and stays when workers are started again.
Nothing in it, nor in the variables that torchrun sets, names the attempt for all ranks alike
(`TORCHELASTIC_RESTART_COUNT` is each agent's own: the failures of its own workers). So nothing
depends on what a rank counted before it died. Rank 0 alone numbers the meetings, by a counter
that only rises; the others look for the newest, and knock where somebody seems to wait. What
an earlier attempt left there does not answer, and is passed over as soon as something newer is
there, whoever was started first, has opened more engines than others, or died meanwhile.

A meeting ends in one of four ways, which the others can tell: all came (rank 0 notes that nobody
waits any more), rank 0 gave up (it notes why), it was killed (its port is closed, or somebody
else's, who does not know the token), or it lives on, of an earlier attempt (there is a newer
one of another process, and who waits with the old one goes over to that).

Ages are measured by the clocks of the machines, and nothing but patience depends on them: how
long a rank waits where rank 0 has gone, or does not answer, is short only if that was said after
the rank itself had begun, and is news then.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ckptio.errors import RankError

#: With the number of the process, a name that no other process has, forked ones neither.
_NAME = secrets.token_hex(8)
#: How far back is looked past numbers under which nothing is said.
_MAX_LOOKS = 16


class Store(Protocol):
    """A key-value store as c10d has them; `torch.distributed.Store` is one. Blocks."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Get a key that is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and give its value."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rank 0 waits, or that it does not any more.

    Attributes:
        process: Name of the process that is rank 0.
        at_s: When this was said, by its wall clock.
        host: Its host.
        addresses: Where it may be reached.
        port: On which port; 0 if it waits no longer.
        token: What it wants to be told.
        gone: Why it waits no longer; empty if it waits, or all have come.
    """

    process: str
    at_s: float
    host: str = ""
    addresses: list[str] = []
    port: int = 0
    token: str = ""
    gone: str = ""


NOTHING_SAID = Meeting(process="", at_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What there is to see.

    Attributes:
        number: Of the newest meeting of which something is said; 0 if there was none.
        meeting: What is said of it.
    """

    number: int = 0
    meeting: Meeting = NOTHING_SAID


def this_process() -> str:
    """Name this process."""
    return f"{_NAME}-{os.getpid()}"


def process_began_s() -> float:
    """Say when this process began, by the wall clock; 0.0 where the system does not say."""
    try:
        with open("/proc/self/stat", "rb") as file:  # see proc(5); names may have blanks
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - (up_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (AttributeError, OSError, ValueError, IndexError):
        return 0.0


def store_host(store: object) -> str:
    """Name the machine that has a store, where the store knows."""
    while not isinstance(getattr(store, "host", None), str):
        store = getattr(store, "underlying_store", None)
        if store is None:
            return ""
    return str(store.host)  # type: ignore[attr-defined]  # it was there just now


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The part of a store that a group meets through. All of it blocks.

    Attributes:
        store: The store.
        group: What all keys of the group begin with.
        rank: This one.
        process: Name of this process.
        host: This host.
        number: Of the meeting, for rank 0; 0 for the others.
    """

    store: Store
    group: str
    rank: int
    process: str
    host: str
    number: int = 0

    def opened(self) -> Board:
        """Take the next number, as rank 0."""
        return dataclasses.replace(self, number=self.store.add(f"{self.group}/opened", 1))

    def invite(self, addresses: list[str], port: int, token: str) -> None:
        """Say where rank 0 waits."""
        self._say(host=self.host, addresses=addresses, port=port, token=token)

    def end(self, gone: str = "") -> None:
        """Say that rank 0 waits no longer, and why, if not because all have come."""
        self._say(gone=gone)

    def _say(self, **what: object) -> None:
        meeting = Meeting(process=self.process, at_s=time.time(), **what)  # type: ignore[arg-type]  # of the two above
        self.store.set(self._key(self.number), msgspec.json.encode(meeting).decode())

    def look(self) -> Sight:
        """Look for the newest meeting, skipping numbers that were taken and never announced.

        Older ones need no look: a process waits at one meeting at a time (`turns`).

        Raises:
            RankError: What is said of it is not what this version says.
        """
        newest = self.store.add(f"{self.group}/opened", 0)
        for number in range(newest, max(0, newest - _MAX_LOOKS), -1):
            if self.store.check([self._key(number)]):  # else it is about to be said, or never is
                text = self.store.get(self._key(number))
                try:
                    meeting = msgspec.json.decode(text, type=Meeting)
                except msgspec.MsgspecError as error:
                    raise RankError(
                        f"the job's store does not say where rank 0 waits, under"
                        f" {self._key(number)!r}: {error}; run one version of ckptio on all ranks"
                    ) from error
                return Sight(number=number, meeting=meeting)
        return Sight()

    def heard(self) -> int:
        """Give the last meeting whose failure this rank was told of, in whatever process."""
        key = f"{self.group}/heard/{self.rank}"
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def hear(self, number: int) -> None:
        """Note that this rank was told of a failure: it is no news to the next engine."""
        self.store.set(f"{self.group}/heard/{self.rank}", str(number))

    def _key(self, number: int) -> str:
        return f"{self.group}/meeting/{number}"
