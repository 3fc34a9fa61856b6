"""Say where the states of ranks differ, and in what, to somebody who has to mend it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from ckptio._texts import name_ranks
from ckptio.errors import FormatError, PlanError
from ckptio.format.decode import ObjectDecoder
from ckptio.format.encode import RANKS_TAG, TAG, join_fqn
from ckptio.format.words import decode_word
from ckptio.plan.marks import is_marked, show_mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptio.format.encode import Json

    #: Where a node is: the place of its container, and its key there; `None` for the root.
    Place = tuple[Any, Json] | None

DICT_TAGS = ("dict", "odict", "counter")
RECORD_TAGS = ("namedtuple", "dataclass")
#: Has, in a reference of a rank that holds nothing of a tensor, the name of the place, where its
#: own memory does not tell which tensor is there.
UNSURE = "unsure"
_MAX_LISTED = 10
_MAX_SHOWN = 60
_MAX_TEXTS = 4
#: What to do where moments of an optimizer differ: each stage of a pipeline numbers its parameters
#: from zero on. `PerRank` would let such a save commit, with the parameters of one stage alone.
_STAGES = (
    "; if the ranks are stages of a pipeline, give their parameters and optimizers names of their"
    " own instead: of parameters with one name, those of one rank are saved for all"
)


class Differences:
    """Collects what ranks disagree on: the first few in words, and how many there are."""

    def __init__(self) -> None:
        self._listed: list[str] = []
        self._number = 0
        self._has_moments = False

    def add(self, text: str) -> None:
        """Note a difference."""
        self._number += 1
        if self._number <= _MAX_LISTED:
            self._listed.append(text)

    def add_values(
        self, place: Place, held: Iterable[tuple[Sequence[int], Json]], what: str
    ) -> None:
        """Note that ranks have different values at a place.

        Args:
            place: Where.
            held: Ranks, and the node they have; tensors are referred to by `[name]`.
            what: What the place does with its value.
        """
        held = list(held)
        self._has_moments |= any(is_marked(node) for _, node in held) and _is_in_optimizer(place)
        if self._number >= _MAX_LISTED:
            self._number += 1
            return
        ranks_of: dict[bytes, list[int]] = {}
        nodes: dict[bytes, Json] = {}
        for ranks, node in held:
            same = msgspec.json.encode(node)
            nodes.setdefault(same, node)
            ranks_of.setdefault(same, []).extend(ranks)
        texts = _shorten([_show(node) for node in nodes.values()])
        parts = [
            f"{text} on {name_ranks(ranks_of[same], max_runs=4)}"
            for text, same in zip(texts, nodes, strict=True)
        ]
        self.add(f"{_fqn(place)!r} {what} {_list(parts)}")

    def check(self) -> None:
        """Raise if there is any.

        Raises:
            PlanError: With the first of them.
        """
        if not self._number:
            return
        more = self._number - len(self._listed)
        raise PlanError(
            f"ranks disagree on {self._number} value{'s' if self._number > 1 else ''}:"
            f" {'; '.join(self._listed)}{f'; and {more} more' if more else ''};"
            " make them equal on all ranks that have them, or wrap what is meant to differ in"
            f" ckptio.PerRank{_STAGES if self._has_moments else ''}"
        )


def decode_key(key: Json) -> Any:
    """Give a key of a mapping as a value."""
    return key if type(key) is str else ObjectDecoder(decode_word).decode_key("", key)


def _keys_of(place: Place) -> list[Any]:
    """Give the keys that lead to a place."""
    keys = []
    while place is not None:
        place, key = place
        keys.append(key if type(key) is int else decode_key(key))
    return keys[::-1]


def _fqn(place: Place) -> str:
    """Name a place as tensors are named."""
    fqn = ""
    for key in _keys_of(place):
        fqn = join_fqn(fqn, key)
    return fqn or "state"


def _is_in_optimizer(place: Place) -> bool:
    """Whether a place is in what an optimizer keeps; a random state, say, is not."""
    keys = _keys_of(place)
    return "param_groups" in keys[:-1] or "state" in keys[:-2]  # of a parameter, under its number


def _show(node: Json) -> str:
    """Write a node for people."""
    if type(node) is list:
        return f"a list of {len(node)}"
    if type(node) is not dict:
        return repr(node)
    tag = node.get(TAG, "dict")
    if type(tag) is list:
        return f"a tensor ({show_mark(node)})" if is_marked(node) else f"tensor {tag[0]!r}"
    if is_marked(node):
        return f"{'an array' if tag == 'np' else tag} ({show_mark(node)})"
    if tag in DICT_TAGS:
        return f"a dict of {len(node['v'] if TAG in node else node)}"
    if tag == "tuple":
        return f"a tuple of {len(node['v'])}"
    if tag == RANKS_TAG:
        return "a PerRank value"
    if tag in RECORD_TAGS:
        return f"a {tag} {node['c']!r}"
    try:
        return repr(ObjectDecoder(decode_word).decode("", node))
    except (FormatError, ValueError):  # numpy has no text for a datetime64 without a unit
        return msgspec.json.encode(node).decode()


def _shorten(texts: Sequence[str]) -> list[str]:
    """Shorten texts that differ so that they still do: what they begin with goes first."""
    common = dict.fromkeys(texts, 0)  # characters with which some other text begins, too
    for one, other in itertools.pairwise(sorted(common)):
        pairs = enumerate(zip(one, other, strict=False))
        common[other] = next((i for i, (a, b) in pairs if a != b), len(one))
        common[one] = max(common[one], common[other])
    shown = [
        f"...{text[common[text] - _MAX_SHOWN // 4 :]}"
        if len(text) > _MAX_SHOWN and common[text] >= _MAX_SHOWN // 2
        else text
        for text in texts
    ]
    return [t if len(t) <= _MAX_SHOWN else f"{t[: _MAX_SHOWN - 3]}..." for t in shown]


def _list(texts: Sequence[str]) -> str:
    """Write a list out: the first few, and how many there are besides."""
    if len(texts) > _MAX_TEXTS:
        texts = [*texts[: _MAX_TEXTS - 1], f"{len(texts) - _MAX_TEXTS + 1} more"]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
