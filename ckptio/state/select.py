"""What a caller selects by: names, prefixes of names, globs, predicates. Without torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from ckptio.errors import ConfigError, shown
from ckptio.state.tree import Predicate

if TYPE_CHECKING:
    from collections.abc import Iterator

Select = str | Predicate | Collection[str]

_GLOB_SIGN = re.compile(r"[*?[]")


def make_predicate(select: Select) -> Predicate:
    """Turn what the user selects by into a predicate on names.

    Args:
        select: A name or the dotted prefix of names (`"model.layers"`); a glob, if it has
            one of `*?[` (`"*.weight"`; a star matches dots too); several of these; or a
            predicate on the name.

    Raises:
        ConfigError: None of these.
    """
    if callable(select):
        return select
    patterns = [select] if isinstance(select, str) else select
    if (
        not isinstance(patterns, Collection)
        or hasattr(patterns, "__array__")  # of numpy, torch, pandas: no truth value
        or not patterns
        or not all(isinstance(p, str) and p for p in patterns)
    ):
        raise ConfigError(
            f"select takes a prefix, a glob, several of these or a predicate, not {shown(select)}"
        )
    return Patterns(patterns)


class Patterns:
    """Accepts the names that one of several patterns matches.

    There may be thousands of either, so no name is compared with every pattern: prefixes are
    looked up by what a name begins with, up to each of its dots, and so are globs that are a
    prefix and `.*`; other globs by what they have before their first sign.

    Args:
        patterns: Prefixes and globs.
    """

    def __init__(self, patterns: Collection[str]) -> None:
        self._unmatched = dict.fromkeys(patterns)
        self._prefixes: dict[str, list[str]] = {}
        self._below: dict[str, str] = {}
        #: By the length of their heads, and these.
        self._globs: dict[int, dict[str, list[tuple[str, Predicate]]]] = {}
        for pattern in self._unmatched:
            head = _GLOB_SIGN.split(pattern, maxsplit=1)[0]
            if head == pattern:
                self._prefixes.setdefault(pattern.removesuffix("."), []).append(pattern)
            elif pattern == f"{head}*" and head.endswith("."):
                self._below[head[:-1]] = pattern
            else:
                matches = re.compile(fnmatch.translate(pattern)).match
                heads = self._globs.setdefault(len(head), {})
                heads.setdefault(head, []).append((pattern, matches))
        self._names = {*self._prefixes, *self._below}
        self._above = {up for name in self._names for up in _outwards(name)}

    @property
    def unmatched(self) -> list[str]:
        """Those that have matched none of the names so far."""
        return list(self._unmatched)

    def __call__(self, fqn: str) -> bool:
        """Whether a name is accepted."""
        matching = self._matching(fqn)
        for pattern in matching:
            self._unmatched.pop(pattern, None)
        return bool(matching)

    def reaches(self, fqn: str) -> bool:
        """Whether a name could be accepted, or one that begins with it and a dot; any with ""."""
        if not fqn or self._globs or fqn in self._above:
            return True
        return any(up in self._names for up in _outwards(fqn))

    def _matching(self, fqn: str) -> list[str]:
        """Give the patterns that match a name.

        Without a generator, and with one look-up for each dot: this is asked of every name of a
        checkpoint, and mostly there is none.
        """
        found: list[str] = []
        names, up = self._names, fqn
        while True:
            if up in names:
                found += self._prefixes.get(up, ())
                if up != fqn and (below := self._below.get(up)) is not None:
                    found.append(below)
            end = up.rfind(".")
            if end < 0:
                break
            up = up[:end]
        for length, heads in self._globs.items():
            for pattern, matches in heads.get(fqn[:length], ()):
                if matches(fqn):
                    found.append(pattern)
        return found


def _outwards(fqn: str) -> Iterator[str]:
    """Give a name, and what it begins with up to each of its dots, the longest first."""
    end = len(fqn)
    while end >= 0:
        yield fqn[:end]
        end = fqn.rfind(".", 0, end)
