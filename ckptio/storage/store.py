"""What an object store has to offer: one method per operation, on keys.

An `ObjectStore` is a bucket (or what a protocol has instead) with the options to reach it.
It does one request and says how that ended; how often a request is tried, how many run at
a time and what a checkpoint is made of is decided above (`storage.requests`,
`storage.objects`). It belongs to the loop on which it was made.

Failures are told in four words, since only a store knows what its answers mean, and only
whoever asked knows what to do about them: `ObjectMissingError`, `ConditionFailedError`,
`TransientError`, and `RefusedError` for whatever will not get better.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


#: How an etag begins that tells only sizes apart.
_UNTOLD = "untold-"


class StoreError(Exception):
    """A request failed. Says what the store said, without anything secret.

    Attributes:
        problem: In words.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class ObjectMissingError(StoreError):
    """There is no such object."""


class ConditionFailedError(StoreError):
    """The object is not as the request wanted it to be: nothing was written by it.

    A client that repeats requests on its own may see this for what it wrote itself, just
    before: whoever is told so looks at what is there.
    """


class TransientError(StoreError):
    """It may work in a while. Whether the request took effect is not known.

    Attributes:
        slow_down: The store asked for fewer requests.
    """

    def __init__(self, problem: str, *, slow_down: bool = False) -> None:
        super().__init__(problem)
        self.slow_down = slow_down


class RefusedError(StoreError):
    """It will not work: no permission, no such bucket, an answer that makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object, as a listing or a look at it shows it.

    Attributes:
        key: Its key; of a listing by level also what stands for all keys below, with `/` at
            its end.
        nbytes: Its size in bytes.
        etag: Tells its contents apart from others; empty where a store has none, or
            `untold_etag()`.
        modified_s: When it was written, in seconds since 1970; 0 where nobody knows.
    """

    key: str
    nbytes: int
    etag: str = ""
    modified_s: float = 0.0


def untold_etag(nbytes: int) -> str:
    """Give an etag for one look at an object of which only the size is known.

    The next look gives another one, so nobody takes what was seen before for what is there.
    """
    return f"{_UNTOLD}{nbytes}-{secrets.token_hex(8)}"


def may_be_same(etag: str, other: str) -> bool:
    """Whether two etags are equal, or of one size where nothing else is known."""
    if not (etag.startswith(_UNTOLD) and other.startswith(_UNTOLD)):
        return etag == other
    return etag.rpartition("-")[0] == other.rpartition("-")[0]


def version_of(info: ObjectInfo) -> tuple[str, int, float]:
    """Give what is equal for two looks at an object only if nobody wrote to it in between."""
    etag = info.etag or ("" if info.modified_s else untold_etag(info.nbytes))
    return etag, info.nbytes, info.modified_s


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """An upload in parts that was begun and not ended.

    Attributes:
        key: The object that it would make.
        upload_id: The store's name of it.
        active_s: When it was begun, or its last part came, in seconds since 1970.
    """

    key: str
    upload_id: str
    active_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTraits:
    """What a store can do, and what it wants.

    Attributes:
        min_part_nbytes: The least size of a part but the last.
        max_parts: Parts of one object, at most.
        in_order: Parts have to come in order, one at a time.
        conditional: Which conditions of `put` the store decides in one step with the write.
            `"atomic"`: `absent` and `match`, so that of any number of writers one succeeds.
            `"create"`: `absent` alone. `"none"`: neither; the client looks first and writes
            then, or writes whatever is there.
        begins_again: What carries out an upload may begin it several times, under names that
            nobody gets: what is left of that has to be looked for.
    """

    min_part_nbytes: int = 1
    max_parts: int = 10_000
    in_order: bool = False
    conditional: str = "none"
    begins_again: bool = False


class Upload(Protocol):
    """An object being written in parts."""

    async def write(self, number: int, data: memoryview) -> None:
        """Write part `number`, from 0. Parts may come at once and out of order; see `StoreTraits`.

        `data` is the caller's again when this returns or raises.

        Raises:
            TransientError: It was not written, or nobody knows: the same part may be sent again.
            StoreError: It was not written.
        """
        ...

    async def complete(self) -> None:
        """Make the object of its parts.

        Raises:
            StoreError: It was not made, or nobody knows: look at it.
        """
        ...

    async def abort(self) -> None:
        """Drop all parts.

        Raises:
            StoreError: They may still be there.
        """
        ...


class ObjectStore(Protocol):
    """A place for objects by key. Used from one loop. Every method may raise `StoreError`."""

    @property
    def traits(self) -> StoreTraits:
        """What it can do."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Look at an object.

        Raises:
            ObjectMissingError: There is none.
            StoreError: It cannot be told.
        """
        ...

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Read an object, or its first `limit` bytes; and give what tells just these bytes apart.

        The info has the size of the whole object.

        Raises:
            ObjectMissingError: There is none.
            StoreError: It cannot be read.
        """
        ...

    async def get_into(self, key: str, start: int, room: memoryview, *, match: str = "") -> None:
        """Read as many bytes as `room` has, from `start` on, into it.

        Args:
            key: The object.
            start: First byte.
            room: Takes them.
            match: The etag it has to have, by the answer that has the bytes; where an answer
                has none, by a look at the object behind it.

        Raises:
            ObjectMissingError: There is no such object.
            ConditionFailedError: It has another etag; what is in `room` is garbage.
            TransientError: Fewer bytes came.
            RefusedError: The object ends before.
        """
        ...

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        """Write an object in one step.

        Args:
            key: Its key.
            data: Its contents; the caller's again when this returns or raises.
            absent: Only if there is none.
            match: Only if there is one with this etag.

        Returns:
            Its etag, as `head` would give it.

        Raises:
            ConditionFailedError: The condition does not hold.
        """
        ...

    async def upload(self, key: str) -> Upload:
        """Begin an object in parts. It is not there before `complete`."""
        ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """List the objects whose keys begin with `prefix`, sorted by key.

        What has a further `/` in its key is one entry for each first part, with the slash.

        Args:
            prefix: Empty, or ends in `/`.
        """
        ...

    async def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        """List uploads that were begun and not ended; none where a store cannot say.

        Args:
            prefix: What their keys begin with: as `list` takes it, or the key of one object.
        """
        ...

    async def drop_upload(self, upload: UploadInfo) -> None:
        """Abort an upload of anybody."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects. What is not there is no error.

        Raises:
            StoreError: Some may still be there.
        """
        ...

    async def close(self) -> None:
        """Give connections back."""
        ...
