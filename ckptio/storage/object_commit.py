"""The commit of a checkpoint in an object store: its manifest, or what points to that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(slots=True)
class Commit:
    """A commit, and what may still be under way of it.

    Attributes:
        manifest: What is published.
        replaced: The manifest that was there before, if any, and is to be replaced.
        problem: What went wrong with the last request.
        is_sent: The store has acknowledged the last request.
        is_decided: The store judges the condition of the last request in one step with the write.
        in_doubt: Nobody knows what became of one of the requests.
        in_doubt_if_absent: One of these takes effect only where no manifest is.
        num_late: How many such requests may still take effect. Those that the store answered by
            asking for fewer requests are not counted: stores throttle commits every day.
        in_doubt_anyhow: One of these takes effect whatever is there by then.
    """

    manifest: bytes
    replaced: Present | None
    problem: StoreError | None = None
    is_sent: bool = False
    is_decided: bool = False
    in_doubt: bool = False
    in_doubt_if_absent: bool = False
    num_late: int = 0
    in_doubt_anyhow: bool = False

    @property
    def may_come_back(self) -> bool:
        """Whether the manifest may appear once more after it was found to be there.

        If no request was acknowledged, one of those in doubt has brought it, and will not again.
        """
        return self.in_doubt_anyhow or self.num_late > (not self.is_sent)

    def note(self, problem: StoreError | None, conditional: str) -> None:
        """Note how a request ended, and which conditions the store decides (`StoreTraits`)."""
        self.problem = problem
        self.is_sent = problem is None
        absent = self.replaced is None
        self.is_decided = conditional == "atomic" or (conditional == "create" and absent)
        if isinstance(problem, TransientError):
            self.in_doubt = True
            is_if_absent = self.is_decided and absent
            self.in_doubt_if_absent |= is_if_absent
            self.num_late += is_if_absent and not problem.slow_down
            self.in_doubt_anyhow |= not self.is_decided


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
