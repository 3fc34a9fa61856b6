"""What a caller selects by: names, prefixes of names, globs, predicates. Without torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ckptio.errors import ConfigError
from ckptio.state.tree import Predicate

if TYPE_CHECKING:
    from collections.abc import Iterator

Select = str | Predicate | Sequence[str]


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
        or not patterns
        or not all(isinstance(p, str) and p for p in patterns)
    ):
        raise ConfigError(
            f"select takes a prefix, a glob, several of these or a predicate, not {select!r}"
        )
    return Patterns(patterns)


class Patterns:
    """Accepts the names that one of several patterns matches.

    Args:
        patterns: Prefixes and globs.
    """

    def __init__(self, patterns: Collection[str]) -> None:
        self._globs = [p for p in patterns if any(c in p for c in "*?[")]
        self._prefixes = {p.removesuffix("."): p for p in patterns if p not in self._globs}
        self._unmatched = dict.fromkeys(patterns)

    @property
    def unmatched(self) -> list[str]:
        """Those that have matched none of the names so far."""
        return list(self._unmatched)

    def __call__(self, fqn: str) -> bool:
        """Whether a name is accepted."""
        is_accepted = False
        for pattern in self._matching(fqn):
            is_accepted = True
            self._unmatched.pop(pattern, None)
        return is_accepted

    def _matching(self, fqn: str) -> Iterator[str]:
        """Give the patterns that match a name; of prefixes, there may be thousands."""
        for pattern in self._globs:
            if fnmatch.fnmatchcase(fqn, pattern):
                yield pattern
        end = len(fqn)
        while end >= 0:
            prefix = self._prefixes.get(fqn[:end])
            if prefix is not None:
                yield prefix
            end = fqn.rfind(".", 0, end)
