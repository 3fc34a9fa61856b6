"""Whether the bucket is there in which something was not found.

Google's and Azure's file systems say of an object, of a listing and of a write alike that
nothing was found. Without a look at the bucket, a misspelt one is a run without steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ckptio.storage.fsspec_answers import BUCKETED
from ckptio.storage.store import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class BucketLook:
    """Looks for the bucket of keys, until it was seen. All of it blocks.

    Args:
        fs: The file system.
        protocol: What it is.
    """

    def __init__(self, fs: Any, protocol: str) -> None:
        self._fs = fs
        self._has_buckets = protocol in BUCKETED
        self._was_seen = False

    def call(self, key: str, function: Callable[[], T]) -> T:
        """Call; what is not found for want of a bucket is told so.

        Raises:
            RefusedError: There is no bucket.
        """
        try:
            return function()
        except FileNotFoundError:
            self.check(key)
            raise

    def check(self, key: str, *, again: bool = False) -> None:
        """Look for the bucket of a key.

        Args:
            key: In which nothing was found.
            again: Also if it was seen before.

        Raises:
            RefusedError: There is none.
        """
        if not self._has_buckets or (self._was_seen and not again):
            return
        bucket = key.partition("/")[0]
        if not self._is_there(bucket):
            raise RefusedError(f"there is no bucket {bucket!r}") from None
        self._was_seen = True

    def _is_there(self, bucket: str) -> bool:
        """Whether there is a bucket; yes if nobody can tell.

        Whoever may not look at one may be allowed to list it: then an empty one is told apart.
        """
        for look in (self._fs.info, self._fs.ls):
            try:
                look(bucket)
            except FileNotFoundError:
                continue
            except Exception:  # whoever asked has an answer of its own
                return True
            return True
        return False
