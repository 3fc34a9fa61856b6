from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from ckptio.errors import FormatError, UnsupportedLeafError
from ckptio.format.crowds import MAX_EQUAL_HASHES, Crowd, is_crowded
from ckptio.format.decode import ObjectDecoder
from ckptio.format.encode import ObjectEncoder, encode_plain_key
from ckptio.format.words import decode_word
from ckptio.state.members import members_of
from ckptio.state.tree import read_tree
from tests.state.test_tree import manifest_with

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULUS = (1 << 61) - 1  # of hashes of numbers


def alike(number: int) -> list[int]:
    """Integers of one hash."""
    return [_MODULUS * i for i in range(number)]


class Poor:
    """A key that counts how often it is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Poor.num_compared += 1
        return self is other

    def __hash__(self) -> int:
        return 7


class Pair(NamedTuple):
    first: int
    second: str


@dataclasses.dataclass(frozen=True)
class Dull:
    number: int

    def __hash__(self) -> int:
        return 7


def encode(value: Any) -> Any:
    def refuse(fqn: str, value: Any) -> Any:
        raise UnsupportedLeafError(fqn, str(value), "")

    return ObjectEncoder(refuse).encode("here", value)


def decode(node: Any) -> Any:
    return ObjectDecoder(decode_word).decode("here", node)


MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "set": set,
    "frozenset": frozenset,
    "dict": lambda keys: dict.fromkeys(keys, 1),
    "key": lambda keys: {frozenset(keys): 1},
    "inside": lambda keys: [{"a": ({(1, frozenset(keys))},)}],
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_a_save_takes_a_load_takes_to_the_last_key(make: Callable[[list[Any]], Any]) -> None:
    """One more is refused by both, with a way out."""
    value = make(alike(MAX_EQUAL_HASHES))
    node = encode(value)
    assert decode(node) == value
    read_tree(manifest_with(msgspec.json.encode(node)))
    with pytest.raises(UnsupportedLeafError, match="use strings as keys"):
        encode(make(alike(MAX_EQUAL_HASHES + 1)))


def _hostile(tag: str, number: int) -> Any:
    keys = [{"~": "int", "v": f"{key:x}"} for key in alike(number)]
    return {"~": tag, "v": keys if "set" in tag else [[key, 1] for key in keys]}


@pytest.mark.parametrize("tag", ["set", "frozenset", "dict", "odict", "counter"])
def test_a_crowd_in_a_manifest_is_refused(tag: str) -> None:
    """Where the tree is read, and wherever a container is made of it."""
    node = _hostile(tag, MAX_EQUAL_HASHES + 1)
    for tree in (node, [node], {"a": {"~": "tuple", "v": [node]}}):
        with pytest.raises(FormatError, match="one hash"):
            read_tree(manifest_with(msgspec.json.encode(tree)))
        with pytest.raises(FormatError, match="one hash"):
            decode(tree)
    if "set" not in tag:
        with pytest.raises(FormatError, match="one hash"):
            members_of("here", node)


def test_equal_items_of_a_tuple_are_no_crowd() -> None:
    """Nobody looks for them."""
    tree = {"~": "tuple", "v": [0] * (MAX_EQUAL_HASHES + 1)}
    assert read_tree(manifest_with(msgspec.json.encode(tree))) == tree


def test_a_crowd_in_a_key_is_refused() -> None:
    """Also where the keys around it are many, and are looked at first."""
    inner = _hostile("frozenset", MAX_EQUAL_HASHES + 1)
    node = {"~": "set", "v": [inner, *range(2 * MAX_EQUAL_HASHES)]}
    with pytest.raises(FormatError, match="one hash"):
        read_tree(manifest_with(msgspec.json.encode(node)))


@pytest.mark.parametrize("make", [lambda value: value, lambda value: (value, 1)], ids=["", "()"])
def test_keys_that_are_alike_without_their_classes_are_refused(make: Callable[[int], Any]) -> None:
    """Whoever loads may not have the classes."""
    values = [make(value) for value in alike(MAX_EQUAL_HASHES + 1)]
    kind = enum.Enum("kind", {f"k{i}": value for i, value in enumerate(values)})  # type: ignore[misc]  # made
    assert not is_crowded([f"k{i}" for i in range(len(values))])
    with pytest.raises(UnsupportedLeafError, match="one hash"):
        encode(set(kind))


def test_keys_that_are_alike_with_their_classes_are_refused() -> None:
    """Whoever loads may have them."""
    with pytest.raises(UnsupportedLeafError, match="one hash"):
        encode({Dull(i) for i in range(MAX_EQUAL_HASHES + 1)})


def test_a_crowd_is_found_without_comparing_keys() -> None:
    """That is what takes as long as the square of them."""
    crowd = Crowd(100 * MAX_EQUAL_HASHES)
    Poor.num_compared = 0
    found = [crowd.is_over(Poor()) for _ in range(MAX_EQUAL_HASHES + 1)]
    assert found == [False] * MAX_EQUAL_HASHES + [True]
    assert Poor.num_compared == 0


@pytest.mark.parametrize(
    "keys",
    [
        range(5000),
        [(i, j) for i in range(70) for j in range(70)],
        [complex(i, j) for i in range(70) for j in range(70)],
        [i / 8 for i in range(-2500, 2500)],
        [1 << i for i in range(5000)],
        [Pair(i, str(i)) for i in range(5000)],
        [frozenset((i, i + 1)) for i in range(5000)],
        [f"layer.{i}" for i in range(5000)],
    ],
    ids=["ints", "tuples", "complex", "floats", "powers", "records", "sets", "words"],
)
def test_keys_of_real_states_are_no_crowd(keys: Any) -> None:
    """However many they are."""
    node = encode(dict.fromkeys(keys, 1))
    assert not is_crowded(list(node) if "~" not in node else [key for key, _ in node["v"]])


@pytest.mark.parametrize("as_key", [lambda nan: nan, lambda nan: (nan, 1)])
def test_nans_are_no_crowd(as_key: Callable[[float], Any]) -> None:
    """Each is hashed by where it is, and one that is gone leaves its place to the next."""
    keys = {as_key(float("nan")): None for _ in range(MAX_EQUAL_HASHES + 5)}
    tree = ObjectEncoder(encode_plain_key).encode("", keys)
    assert len(ObjectDecoder(decode_word).decode("", tree)) == len(keys)
    assert not is_crowded([key for key, _ in tree["v"]])
    read_tree(manifest_with(msgspec.json.encode(tree)))
