"""What a caller selects by: names, prefixes of names, globs, predicates. Without torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from ckptio._texts import shown
from ckptio.errors import ConfigError
from ckptio.state.tree import Predicate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Select = str | Predicate | Collection[str]

_GLOB_SIGN = re.compile(r"[*?[]")
#: What may end a part of a glob that stands for itself.
_ENDS = re.compile(r"[*?\[\]]")


class _Glob(NamedTuple):
    """A glob.

    Attributes:
        pattern: It.
        inside: What every name has that matches.
        matches: Whether a name does.
    """

    pattern: str
    inside: str
    matches: Callable[[str], object]


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
    prefix and `.*`; other globs by what they have before their first sign and behind their last,
    and of those that have nothing there only names are tried that have what is between.

    Args:
        patterns: Prefixes and globs.
    """

    def __init__(self, patterns: Collection[str]) -> None:
        self._unmatched = dict.fromkeys(patterns)
        self._prefixes: dict[str, list[str]] = {}
        self._below: dict[str, str] = {}
        #: By the lengths of their heads and tails, and these.
        self._globs: dict[tuple[int, int], dict[tuple[str, str], list[_Glob]]] = {}
        for pattern in self._unmatched:
            head = _GLOB_SIGN.split(pattern, maxsplit=1)[0]
            if head == pattern:
                self._prefixes.setdefault(pattern.removesuffix("."), []).append(pattern)
            elif pattern == f"{head}*" and head.endswith("."):
                self._below[head[:-1]] = pattern
            else:
                tail = _ENDS.split(pattern)[-1]
                ends = self._globs.setdefault((len(head), len(tail)), {})
                ends.setdefault((head, tail), []).append(_make_glob(pattern))
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
        """Whether a name, or one below it, may be accepted; false only if that is ruled out.

        All names are below "".
        """
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
        for (num_first, num_last), ends in self._globs.items():
            for pattern, inside, matches in ends.get(
                (fqn[:num_first], fqn[len(fqn) - num_last :]), ()
            ):
                if inside in fqn and matches(fqn):
                    found.append(pattern)
        return found


def _make_glob(pattern: str) -> _Glob:
    """Compile a glob; what is in brackets is not looked for as it stands."""
    inside = "" if "[" in pattern else max(_ENDS.split(pattern), key=len)
    return _Glob(pattern, inside, re.compile(fnmatch.translate(pattern)).match)


def _outwards(fqn: str) -> Iterator[str]:
    """Give a name, and what it begins with up to each of its dots, the longest first."""
    end = len(fqn)
    while end >= 0:
        yield fqn[:end]
        end = fqn.rfind(".", 0, end)
