"""The commit of a checkpoint in an object store: its manifest, or what points to that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ckptio.errors import FormatError
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES
from ckptio.format.pointer import decode_pointer
from ckptio.storage.keys import join_key
from ckptio.storage.store import ObjectMissingError, TransientError

if TYPE_CHECKING:
    from ckptio.storage.object_place import Present
    from ckptio.storage.requests import Requests
    from ckptio.storage.store import ObjectInfo, ObjectStore, StoreError

#: A larger manifest is written first, and the commit points to it.
MAX_COMMIT_NBYTES = 8 << 20
#: How often a manifest is looked for that a commit points to; others may commit meanwhile.
_MAX_FOLLOWING = 3


#: What the store makes sure of in one step with the write of a manifest: that none is there, or the
#: one that is replaced; or nothing, and it takes effect whatever is there by then.
OnlyIf = Literal["absent", "match", "anything"]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that publishes a manifest, and how it ended.

    Attributes:
        only_if: When it takes effect.
        problem: What went wrong; `None` if the store has acknowledged it. After a `TransientError`
            nobody knows whether it has taken effect, or will.
    """

    only_if: OnlyIf
    problem: StoreError | None


@dataclass(slots=True)
class Commit:
    """A manifest to publish, and what was asked of the store so far.

    Attributes:
        save_id: Of the save.
        manifest: What is published.
        replaced: The manifest that was there before, if any, and is to be replaced.
        sent: Requests, in order; none follows one that was acknowledged.
    """

    save_id: str
    manifest: bytes
    replaced: Present | None
    sent: list[Sent] = field(default_factory=list)

    @property
    def problem(self) -> StoreError | None:
        """What went wrong with the last request, if there was one."""
        return self.sent[-1].problem if self.sent else None

    @property
    def is_acknowledged(self) -> bool:
        """Whether the store has said that the manifest is there."""
        return bool(self.sent) and self.problem is None

    @property
    def is_decided(self) -> bool:
        """Whether it has been there for certain, whatever is there by now."""
        return self.is_acknowledged and self.sent[-1].only_if != "anything"

    def doubts(self, *kinds: OnlyIf) -> list[TransientError]:
        """Give what leaves requests in doubt: of some kinds, or of all if none is given."""
        return [
            each.problem
            for each in self.sent
            if isinstance(each.problem, TransientError) and (not kinds or each.only_if in kinds)
        ]

    @property
    def may_come_back(self) -> bool:
        """Whether the manifest may appear once more after it was found to be there.

        If no request was acknowledged, one of those in doubt has brought it, and will not again.
        Those that the store answered by asking for fewer requests are not counted: stores throttle
        commits every day.
        """
        num_late = sum(not doubt.slow_down for doubt in self.doubts("absent"))
        return bool(self.doubts("anything")) or num_late > (not self.is_acknowledged)

    def stands(self, found: Present) -> bool:
        """Whether the manifest is what was found, or was there, and another one has replaced it."""
        if not found.save_id:
            return False
        old = self.replaced
        is_new = old is None or found.save_id != old.save_id
        return found.save_id == self.save_id or (self.is_decided and is_new)

    def may_be(self, found: Present | None) -> bool:
        """Whether what was found is damaged, perhaps on the way, and new."""
        return found is not None and not found.save_id and not found.may_be(self.replaced)

    def note(self, problem: StoreError | None, conditional: str) -> None:
        """Note how a request ended, and which conditions the store decides (`StoreTraits`)."""
        only_if: OnlyIf = "absent" if self.replaced is None else "match"
        if conditional != "atomic" and (conditional, only_if) != ("create", "absent"):
            only_if = "anything"
        self.sent.append(Sent(only_if, problem))


async def read_commit(
    store: ObjectStore, requests: Requests, prefix: str
) -> tuple[ObjectInfo, bytes, list[str]]:
    """Read the manifest of a checkpoint.

    Returns:
        What tells this commit from others, the manifest, and the keys that it is under
        beside that of the commit.

    Raises:
        ObjectMissingError: There is no commit.
        FormatError: It is larger than any manifest, or points to something else than one.
        StorageError: It cannot be read.
    """
    for _ in range(_MAX_FOLLOWING):
        info, commit = await read_whole(store, requests, join_key(prefix, MANIFEST_NAME))
        pointer = decode_pointer(commit)
        if pointer is None:
            return info, commit, []
        key = join_key(prefix, pointer.pointer)
        try:
            _, manifest = await read_whole(store, requests, key)
        except ObjectMissingError:
            continue  # it was replaced just then, or it is not whole
        pointer.check(manifest)
        return info, manifest, [key]
    raise FormatError(f"the manifest points to {key!r}, which is not there")


async def read_whole(store: ObjectStore, requests: Requests, key: str) -> tuple[ObjectInfo, bytes]:
    """Read a manifest, or what stands in its place.

    Raises:
        ObjectMissingError: It is not there.
        FormatError: It is larger than any manifest.
        StorageError: It cannot be read.
    """
    info, data = await requests.run("read", key, lambda: store.get(key, MAX_MANIFEST_NBYTES))
    if info.nbytes > MAX_MANIFEST_NBYTES:
        raise FormatError(
            f"{key!r} has {info.nbytes} bytes and a manifest at most {MAX_MANIFEST_NBYTES}"
        )
    return info, data
