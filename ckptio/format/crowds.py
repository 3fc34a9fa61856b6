"""Refuse keys that a dict or a set would have to look at one after another.

Hashes of numbers, and of tuples of them, are the same in every process, so a few megabytes of
integers that are multiples of 2^61 - 1 (Python's modulus) keep a dict busy for minutes. Strings
and bytes are hashed with a secret. What shares a hash is counted before it is put anywhere, in
linear time, where there is enough of it to matter; a save refuses what no load would take.

Rejected: to compare keys as sorted texts, without dicts. What a load gives back is a dict.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError, TargetError, UnsupportedLeafError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    Json = Any

#: Keys of one container with one hash, at most. Integers, floats and tuples of a real state
#: have two or three; a class with a poor hash of its own may have more.
MAX_EQUAL_HASHES = 1000
#: Types of keys that have the same hash when they are stored.
_PLAIN = frozenset((str, bytes, int, bool, float, complex, type(None)))


class Crowd:
    """Counts keys of one container by their hashes.

    Args:
        number: How many keys there are; nothing is counted where they are few.
    """

    def __init__(self, number: int) -> None:
        self._counts: Counter[int] | None = Counter() if number > MAX_EQUAL_HASHES else None
        #: A nan is hashed by where it is: while it is there, no other one has its hash.
        self._keys: list[Hashable] = []

    def is_over(self, key: Hashable) -> bool:
        """Count a key, and say whether it is one too many of its hash."""
        if self._counts is None:
            return False
        same = hash(key)
        self._keys.append(key)
        self._counts[same] += 1
        return self._counts[same] > MAX_EQUAL_HASHES


def is_crowded(keys: Sequence[Json]) -> bool:
    """Whether more encoded keys than a save writes have one hash, decoded without classes."""
    if len(keys) <= MAX_EQUAL_HASHES:
        return False
    crowd = Crowd(len(keys))
    return any(map(crowd.is_over, _plain(keys)))


def refuse_crowd(keys: Sequence[Json]) -> None:
    """Refuse encoded keys of one container that no save writes.

    Raises:
        FormatError: Too many of them have one hash; or one is no key.
    """
    if is_crowded(keys):
        raise crowd_error()


def require_spread(fqn: str, keys: Iterable[Hashable], encoded: Sequence[Json]) -> None:
    """Refuse to save a container that no load would take.

    Args:
        fqn: Its name.
        keys: Its keys, as a load makes them if it is given their classes.
        encoded: The same keys as they are stored; without classes, a load makes plain values.

    Raises:
        UnsupportedLeafError: Too many of them have one hash.
    """
    if len(encoded) <= MAX_EQUAL_HASHES:
        return
    keys = list(keys)
    num_equal = len(keys) - len(set(map(hash, keys)))
    is_over = num_equal >= MAX_EQUAL_HASHES and any(map(Crowd(len(keys)).is_over, keys))
    if is_over or (not _PLAIN.issuperset(map(type, keys)) and is_crowded(encoded)):
        raise UnsupportedLeafError(
            fqn, f"more than {MAX_EQUAL_HASHES} keys with one hash", "use strings as keys"
        )


def _plain(keys: Sequence[Json]) -> Iterator[Hashable]:
    """Decode keys without their classes."""
    from ckptio.format.decode import ObjectDecoder  # noqa: PLC0415  # it counts, too
    from ckptio.format.words import decode_word  # noqa: PLC0415  # as above

    decoder = ObjectDecoder(decode_word)
    for key in keys:
        try:
            yield key if type(key) in (str, int) else decoder.decode_key("", key)
        except TargetError:  # equal only without classes; whoever loads hears of it
            continue


def crowd_error(fqn: str = "") -> FormatError:
    """Say that a container of a manifest, perhaps that at `fqn`, has keys that no save writes."""
    where = f" at {fqn!r}" if fqn else ""
    return FormatError(f"more than {MAX_EQUAL_HASHES} keys with one hash{where} in the manifest")
