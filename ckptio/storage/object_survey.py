"""Many checkpoints side by side in an object store, looked at by one listing.

A look at each manifest is a request for each step of a run, and a listing of all that is below
tells the same of hundreds of steps in one. That is so where steps have few files: those of a job
of many ranks have hundreds each, and pages of a listing come one after the other. And only where
a listing shows what is there at that moment: a policy that counts what is gone lets the wrong
steps go.

To trust what was seen of a manifest as long as its name is listed was rejected: the name outlives
the manifest, by an hour or for good, where a removal was cut short or other files lie beside it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptio.errors import StorageError
from ckptio.format.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.storage.requests import Requests
    from ckptio.storage.store import ObjectInfo, ObjectStore

#: So many are looked at one by one, all at once.
_MAX_LOOKS = 32
#: With more files to each, listing them takes longer than looking at the manifests, and costs more.
_MAX_FILES_EACH = 16
#: In all. The pages of a listing have to come within the time of one request.
_MAX_FILES = 20_000


class Survey:
    """Lists manifests below one prefix, and remembers how many files there are to each.

    Args:
        base: What all keys begin with: empty, or with a slash at its end.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._num_files_each = 0.0  # not known yet

    async def manifests(
        self, store: ObjectStore, requests: Requests, names: Sequence[str]
    ) -> dict[str, ObjectInfo] | None:
        """Give the manifests that are there, by name; `None` where looks are the better way.

        Args:
            store: The store.
            requests: Tries requests.
            names: All that there is below the prefix, but for single objects.
        """

        async def listed(prefix: str) -> list[ObjectInfo]:
            return await requests.must("list", prefix, lambda: store.list(prefix))

        if not store.traits.lists_all or len(names) <= _MAX_LOOKS:
            return None
        try:
            if not self._num_files_each:
                self._num_files_each = len(await listed(f"{self._base}{names[0]}/"))
            num_files = self._num_files_each * len(names)
            if self._num_files_each > _MAX_FILES_EACH or num_files > _MAX_FILES:
                return None
            found = {info.key: info for info in await listed(self._base)}
        except StorageError:  # there is more than could be known, or the looks say what is wrong
            self._num_files_each = math.inf
            return None
        self._num_files_each = len(found) / len(names)
        keys = {name: f"{self._base}{name}/{MANIFEST_NAME}" for name in names}
        return {name: found[key] for name, key in keys.items() if key in found}
