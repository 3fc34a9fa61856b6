from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import struct
import sys
import zoneinfo
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import FormatError, TargetError, UnsupportedLeafError
from ckptio.format.decode import ObjectDecoder, named_types
from ckptio.format.encode import MAX_DEPTH, MAX_LEVELS, ObjectEncoder, encode_bytes, join_fqn
from ckptio.format.words import Word, decode_word
from tests.strategies import (
    CLASSES,
    Color,
    Key,
    Level,
    Point,
    Settings,
    assert_same,
    fingerprint,
    plain_keys,
    plain_states,
)


def refuse(fqn: str, value: Any) -> Any:
    raise UnsupportedLeafError(fqn, f"{type(value).__name__} here", "leave it out")


def encode(value: Any) -> bytes:
    inline: dict[type, Any] = {
        bytes: lambda _, v: encode_bytes(v),
        bytearray: lambda _, v: encode_bytes(v),
    }
    return msgspec.json.encode(ObjectEncoder(refuse, inline).encode("", value))


def no_leaf(fqn: str, node: Any) -> Any:
    raise FormatError(f"unknown {node!r} at {fqn!r}")


def decode(document: bytes, types: list[type] | None = None) -> tuple[Any, list[str]]:
    decoder = ObjectDecoder(no_leaf, named_types(types or []))
    return decoder.decode("", msgspec.json.decode(document)), decoder.notes


@given(value=plain_states)
def test_values_come_back_bit_for_bit(value: Any) -> None:
    """Any nesting of any values, types and NaN payloads included, with nothing to note."""
    found, notes = decode(encode(value), CLASSES)
    assert_same(found, value)
    assert notes == []


@pytest.mark.parametrize(
    "value",
    [
        struct.unpack(">d", bytes.fromhex(bits))[0]
        for bits in (
            "7ff8000000000000", "fff8000000000000", "7ff8dead00beef00", "fff8000000000001",
            "7ff0000000000000", "fff0000000000000", "8000000000000000", "0000000000000001",
            "7fefffffffffffff", "3fb999999999999a",
        )
    ]
    + [
        0, -1, 2**53, 2**53 + 1, -(2**63), 2**64, -(10**6000), True, False, None,
        complex(-0.0, math.nan), complex(math.inf, -0.0),
        "", "\0", "é🔥", "\ud800", "a\udfffb", b"", bytes(range(256)), bytearray(b"x"),
        [], (), {}, set(), frozenset(), OrderedDict(), Counter(), Counter("abca"),
        OrderedDict(b=1, a=2), {"~": 1}, {"~": {"~": []}}, {"": {"": 0}}, {1: "int", "1": "str"},
        {True: 1, None: 2, 2.5: 3, b"k": 4, (1, ("a",)): 5, frozenset([1]): 6, -0.0: 7},
        {"\ud800": 1}, {10**5000: 1},
        dt.date.min, dt.datetime.max.replace(tzinfo=dt.UTC), dt.timedelta.min, dt.timedelta.max,
        dt.time(23, 59, 59, 999999, tzinfo=dt.UTC, fold=1),
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        dt.datetime(2024, 10, 27, 2, 30, fold=0, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-23, seconds=-59))),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
        pathlib.Path(), pathlib.Path("/a/b"), pathlib.PurePosixPath("a/../b"),
        pathlib.PureWindowsPath(r"C:\x\y"), pathlib.Path("a\udc80"),
        Color.RED, Level.HIGH, Point(1, Point(2, ())), Settings({1: Settings([])}, None),
        {Key(0, 1): "a", Key(0, 2): "b"}, {Color.RED: 1, Level.LOW: 2, Point(1, 2): 3},
        {frozenset([Point(1, Color.BLUE)])},
    ],
    ids=lambda value: type(value).__name__,  # some have no `repr`
)  # fmt: skip
def test_a_value_of_every_kind_comes_back(value: Any) -> None:
    """The corners of every type: signs, payloads, folds, surrogates, tags as keys."""
    found, _ = decode(encode(value), CLASSES)
    assert_same(found, value)


@pytest.mark.parametrize("key", sorted(zoneinfo.available_timezones())[::29])
def test_zones_come_back_by_name(key: str) -> None:
    """A zone is its rules, not the offset it had."""
    value = dt.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo(key))
    found, _ = decode(encode(value))
    assert found.tzinfo.key == key


@dataclasses.dataclass
class Unset:
    a: int = 1
    b: int = dataclasses.field(init=False)


class Suit(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Odd:
    a: int
    b: int = dataclasses.field(init=False, default=7)
    c: list[int] = dataclasses.field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.a *= 2
        self.b = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: int = dataclasses.field(init=False, default=0)


def test_a_dataclass_comes_back_with_the_fields_it_had() -> None:
    """Whatever its `__post_init__` does, frozen or slotted, arguments or not."""
    odd = Odd(2)
    odd.b = 5
    slotted = Slotted(1)
    object.__setattr__(slotted, "b", 9)
    found, _ = decode(encode([odd, slotted, Suit.A | Suit.B]), [Odd, Slotted, Suit])
    assert found == [odd, slotted, Suit.A | Suit.B]


def test_without_its_class_a_value_comes_back_plain_and_noted() -> None:
    """Tuples for named tuples, dicts for dataclasses, values for enums; one note each."""
    value = {"p": Point(1, 2), "s": [Settings(0.5)], "c": Color.BLUE, "l": Level.LOW}
    found, notes = decode(encode(value))
    assert found == {
        "p": (1, 2),
        "s": [{"rate": 0.5, "name": "adam"}],
        "c": (0, 0, 255),
        "l": 1,
    }
    assert [type(found[key]) for key in "pcl"] == [tuple, tuple, int]
    assert [note.split(":")[0] for note in notes] == ["p", "s.0", "c", "l"]
    assert all("pass the class in types=" in note for note in notes)


def test_without_its_class_a_key_is_still_a_key() -> None:
    """A record as a key comes back as a tuple, since a dict could not be one."""
    found, notes = decode(encode({Key(1, Color.RED): 1, frozenset([Key(2, 3)]): {Key(4, 5)}}))
    assert found == {(1, "red"): 1, frozenset([(2, 3)]): {(4, 5)}}
    assert len(notes) == 4


@pytest.mark.parametrize("value", [{Color.RED: 1, "red": 2}, {Level.LOW, Key(1, 2), (1, 2)}])
def test_keys_that_would_be_lost_are_an_error(value: Any) -> None:
    """If keys are equal without their classes, the message asks for the classes.

    Nothing is damaged, so that no older checkpoint is of any use.
    """
    with pytest.raises(TargetError, match="pass their classes in types="):
        decode(encode(value))
    assert decode(encode(value), CLASSES)[0] == value


@pytest.mark.parametrize(
    "node",
    [
        {"~": "set", "v": [1, 1]},
        {"~": "dict", "v": [[1, "a"], [{"~": "int", "v": "1"}, "b"]]},
        {"~": "dict", "v": [[{"~": "enum", "c": "x.Y", "v": 1}, "a"]] * 2},
    ],
)
def test_keys_that_are_equal_whatever_is_passed_are_damage(node: Any) -> None:
    """No dict or set has two of them."""
    with pytest.raises(FormatError, match="two equal keys"):
        decode(msgspec.json.encode(node))


def test_some_classes_are_enough_for_some_values() -> None:
    """Each class in `types` counts for itself."""
    found, notes = decode(encode([Point(Color.RED, 1)]), [Color])
    assert found == [(Color.RED, 1)]
    assert len(notes) == 1


def test_a_class_that_does_not_fit_is_named() -> None:
    """A member or a field that is gone is an error, not a value that is quietly dropped."""
    document = encode([Color.RED]).replace(b"red", b"green")
    with pytest.raises(TargetError, match=r"does not fit .*Color.* comes back as its value"):
        decode(document, CLASSES)
    document = encode([Settings(1)]).replace(b'"rate"', b'"pace"')
    with pytest.raises(TargetError, match="there is no field 'pace'"):
        decode(document, CLASSES)


def test_sets_of_equal_states_are_written_alike() -> None:
    """The order of a set, which depends on the process, is not in the file."""
    names = [f"name{i}" for i in range(50)]
    other = names[::-1]
    assert encode(set(names)) == encode(set(other))
    assert encode({frozenset(names): 1}) == encode({frozenset(other): 1})


@given(key=plain_keys)
def test_a_name_is_the_same_with_and_without_classes(key: Any) -> None:
    """What a value is called when it is saved is what it is called when it is loaded."""
    node = msgspec.json.decode(encode({key: None}))
    if isinstance(node, dict) and "~" not in node:
        return  # plain names
    encoded = node["v"][0][0]
    plain = ObjectDecoder(no_leaf).decode_key("", encoded)
    whole = ObjectDecoder(no_leaf, named_types(CLASSES)).decode_key("", encoded)
    assert join_fqn("x", plain) == join_fqn("x", whole) == join_fqn("x", key)
    assert fingerprint(whole) == fingerprint(key)


@pytest.mark.parametrize(
    ("parent", "key", "name"),
    [
        ("", "a", "a"), ("a", "b", "a.b"), ("a", 0, "a.0"), ("a", (1, "x"), "a.(1, 'x')"),
        ("a", None, "a.None"), ("a", 2.5, "a.2.5"), ("a", b"k", "a.b'k'"), ("a", "", "a."),
        ("a", Color.RED, "a.red"), ("a", Level.LOW, "a.1"), ("a", Point(1, 2), "a.(1, 2)"),
        ("a", frozenset("ba"), "a.{'a', 'b'}"), ("a", (1,), "a.(1,)"),
    ],
)  # fmt: skip
def test_names_are_joined_with_dots(parent: str, key: object, name: str) -> None:
    """Strings and ints as they are, other keys as Python writes their values."""
    assert join_fqn(parent, key) == name


class Opaque:
    pass


class MyStr(str):
    __slots__ = ()


class Fixed(dt.tzinfo):
    def utcoffset(self, _: object) -> dt.timedelta:
        return dt.timedelta(0)

    def tzname(self, _: object) -> str:
        return "fixed"

    def dst(self, _: object) -> None:
        return None


@pytest.mark.parametrize(
    ("value", "fqn", "problem"),
    [
        ({"a": [0, Opaque()]}, "a.1", "Opaque"),
        ({"a": {"b": (Opaque,)}}, "a.b.0", "type"),
        (Settings(lambda: 0), "rate", "function"),
        ([MyStr("x")], "0", "MyStr"),
        ([defaultdict(list)], "0", "defaultdict"),
        ({Opaque: 1}, f"{Opaque!r}", "a key of type type"),
        ({(1, 1j, MyStr("x")): 1}, "(1, 1j, 'x').2", "a key of type MyStr"),
        ({"a": {MyStr("x")}}, "a.'x'", "a key of type MyStr"),
        ({"t": dt.datetime(1, 1, 1, tzinfo=Fixed())}, "t", "a time zone of type Fixed"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_has_no_portable_form_is_refused_by_name(value: Any, fqn: str, problem: str) -> None:
    """The error says where the value is."""
    with pytest.raises(UnsupportedLeafError, match="cannot save") as caught:
        encode(value)
    assert caught.value.fqn == fqn
    assert problem in str(caught.value)


def cycles() -> dict[str, Any]:
    in_list: list[Any] = []
    in_list.append(in_list)
    in_dict: dict[str, Any] = {}
    in_dict["a"] = [in_dict]
    record = Settings([])
    record.rate.append(record)
    pair: tuple[Any, ...] = ([],)
    pair[0].append(pair)
    return {"list": in_list, "dict": in_dict, "record": record, "tuple": pair}


@pytest.mark.parametrize("kind", ["list", "dict", "record", "tuple"])
def test_a_container_inside_itself_is_refused(kind: str) -> None:
    """A cycle has an end."""
    with pytest.raises(UnsupportedLeafError, match="a container contains itself"):
        encode(cycles()[kind])


def test_the_same_container_in_two_places_is_none_of_this() -> None:
    """Shared is not inside itself; it comes back as two equal values."""
    shared = [1]
    assert decode(encode([shared, shared, {"a": shared}]))[0] == [[1], [1], {"a": [1]}]


NESTINGS: dict[str, Any] = {
    "dict": lambda x: {"a": x},
    "pairs": lambda x: {1: x},
    "odict": lambda x: OrderedDict(a=x),
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "frozenset": lambda x: frozenset([x]),
    "namedtuple": lambda x: Point(x, 0),
    "dataclass": Settings,
}


def nested(kind: str, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = NESTINGS[kind](value)
    return value


@pytest.mark.parametrize("kind", NESTINGS)
def test_what_is_deep_but_not_too_deep_comes_back(kind: str) -> None:
    """What was saved can be loaded, at the limit, too."""
    value = nested(kind, MAX_DEPTH)
    found, _ = decode(encode(value), CLASSES)
    assert_same(found, value)


def test_a_member_of_an_enum_may_lie_in_the_deepest_container() -> None:
    """Though it takes a level of its own in the document."""
    value: Any = [Color.RED]
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    found, _ = decode(encode(value), CLASSES)
    assert_same(found, value)


def test_each_container_may_be_in_an_enum_and_hold_one() -> None:
    """The deepest document that a save writes."""
    make_enum: Any = enum.Enum
    value = make_enum("E", {"A": 1})["A"]
    for number in range(MAX_DEPTH):
        value = make_enum(f"E{number}", {"A": (value,)})["A"]
    found, _ = decode(encode(value), [])  # without their classes: plain values
    for _ in range(MAX_DEPTH):
        (found,) = found
    assert found == 1


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 3])
def test_enums_in_enums_are_as_deep_as_containers_may_be(depth: int) -> None:
    """Each takes a level of the document: what is saved can be loaded, and what cannot is not."""
    make_enum: Any = enum.Enum
    value: Any = []
    for number in range(depth):
        value = make_enum(f"E{number}", {"A": value})["A"]
    if depth > MAX_DEPTH:
        with pytest.raises(UnsupportedLeafError, match="flatten the state"):
            encode(value)
        return
    found, _ = decode(encode(value), [])  # without their classes: plain values
    assert found == []


@pytest.mark.parametrize("kind", NESTINGS)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 3000])
def test_what_is_too_deep_is_refused(kind: str, depth: int) -> None:
    """With its name and a way out, not with a `RecursionError`."""
    if kind in ("namedtuple", "frozenset") and depth > sys.getrecursionlimit():
        depth = 500  # Python itself gives up on hashing and printing more
    with pytest.raises(UnsupportedLeafError, match="flatten the state"):
        encode(nested(kind, depth))


@pytest.mark.parametrize(
    "document",
    [
        {"~": "int", "v": "xyz"}, {"~": "int", "v": 5}, {"~": "int"}, {"~": "float", "v": "00"},
        {"~": "float", "v": "zz"}, {"~": "float", "v": None}, {"~": "complex", "v": ""},
        {"~": "str", "v": "%%%"}, {"~": "str", "v": "/w=="}, {"~": "bytes", "v": "a"},
        {"~": "date", "v": "2024-13-01"}, {"~": "date", "v": 5}, {"~": "date", "v": "x" * 9999},
        {"~": "datetime", "v": "2024-01-01"}, {"~": "datetime", "v": "2024-01-01", "f": 2},
        {"~": "datetime", "v": "2024-01-01", "f": 0, "z": "../../etc/passwd"},
        {"~": "datetime", "v": "2024-01-01", "f": 0, "z": "/etc/passwd"},
        {"~": "datetime", "v": "2024-01-01", "f": 0, "z": 7},
        {"~": "datetime", "v": "2024-01-01", "f": 0, "n": "CET"},
        {"~": "time", "v": "25:00", "f": 0}, {"~": "timedelta", "v": [1, 2]},
        {"~": "timedelta", "v": [10**12, 0, 0]}, {"~": "timedelta", "v": [None, 0, 0]},
        {"~": "path", "k": "WindowsPath", "v": "x"}, {"~": "path", "k": "Path", "v": 3},
        {"~": "path", "k": "os.system", "v": "x"}, {"~": "path", "k": [], "v": "x"},
        {"~": "tuple", "v": {}}, {"~": "tuple"}, {"~": "set", "v": [[1]]},
        {"~": "set", "v": [1, 1]}, {"~": "dict", "v": [[1, 2], [1, 3]]}, {"~": "dict", "v": [1]},
        {"~": "dict", "v": [[[], 1]]}, {"~": "dict", "v": 4}, {"~": "odict", "v": None},
        {"~": "counter", "v": [1, 2, 3]}, {"~": "enum", "c": 5, "v": 1}, {"~": "enum", "v": 1},
        {"~": "dataclass", "c": "os:system", "v": [["a"]]}, {"~": "namedtuple", "c": "a:b"},
        {"~": "os.system"}, {"~": None}, {"~": []}, {"~": -1},
    ],
    ids=lambda document: str(document)[:60],
)  # fmt: skip
def test_a_bad_document_is_a_format_error(document: Any) -> None:
    """Whatever stands where a value should: one kind of error, no other."""
    with pytest.raises(FormatError):
        decode(msgspec.json.encode(document))


@pytest.mark.parametrize("zone", ["No/Such", "America"])
def test_a_zone_that_this_machine_lacks_is_no_damage(zone: str) -> None:
    """Another machine knows it, or this one with a package; what is stored is well."""
    for node in ({"v": "2024-01-01"}, {"v": "12:30"}):
        tag = "time" if ":" in node["v"] else "datetime"
        document = {"at": [{"~": tag, "f": 0, "z": zone} | node]}
        problem = rf"'at\.0' is in the time zone '{zone}', which .* install tzdata, or leave it out"
        with pytest.raises(TargetError, match=problem):
            decode(msgspec.json.encode(document))


def test_a_document_that_is_too_deep_is_a_format_error() -> None:
    """Depth is bounded when it is read, too."""
    for opening, closing in ((b"[", b"]"), (b'{"~":"tuple","v":[', b"]}"), (b'{"a":', b"}")):
        for depth in (MAX_LEVELS + 1, 450):
            with pytest.raises(FormatError):
                decode(opening * depth + b"1" + closing * depth)


def test_a_class_in_a_document_is_never_imported() -> None:
    """A name of a class is compared with those the caller passed, and that is all."""
    before = set(sys.modules)
    for tag in ("namedtuple", "dataclass", "enum"):
        node = {"~": tag, "c": "antigravity:fly", "v": 1 if tag == "enum" else [["a", 1]]}
        _, notes = decode(msgspec.json.encode(node))
        assert len(notes) == 1
    assert set(sys.modules) == before


tags = st.sampled_from(
    [
        "dict", "odict", "counter", "tuple", "set", "frozenset", "namedtuple", "dataclass", "enum",
        "int", "float", "complex", "str", "bytes", "bytearray", "date", "datetime", "time",
        "timedelta", "path", "npscalar", "torch.Size", "torch.dtype", "torch.device",
    ]
)  # fmt: skip
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.sampled_from(["2024-01-01", "00" * 8, "AAAA", "Europe/Berlin", "Path", "12:30", "<f2"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.tuples(inner, inner).map(list), max_size=3),
        st.dictionaries(st.sampled_from("~vfzcnkabd"), inner, max_size=3),
        st.fixed_dictionaries({"~": tags}, optional=dict.fromkeys("vfzcnkd", inner)),
    ),
    max_leaves=10,
)


@given(document=json_values)
def test_any_document_is_a_value_or_a_format_error(document: Any) -> None:
    """No JSON at all raises anything else, but for what a class or this machine does not know."""
    for types in ([], CLASSES):
        for leaf in (no_leaf, decode_word):
            with contextlib.suppress(FormatError, TargetError):
                ObjectDecoder(leaf, named_types(types)).decode("", document)


@pytest.mark.parametrize("key", [[1], {}, {"~": "bytearray", "v": ""}, {"~": "set", "v": []},
                                 {"~": "tuple", "v": [[1]]}])  # fmt: skip
def test_what_is_not_hashable_is_no_key(key: Any) -> None:
    """Whoever decodes a key puts it into a dict."""
    with pytest.raises(FormatError):
        ObjectDecoder(no_leaf).decode_key("", key)


def test_words_are_what_they_stand_for() -> None:
    """Without torch they are told apart by their texts, and are no strings."""
    assert Word("torch.int8") == Word("torch.int8")
    assert len({Word("torch.int8"), Word("torch.int16"), "torch.int8"}) == 3
    for node in (
        {"~": "npscalar", "d": "<U2", "v": ""}, {"~": "npscalar", "d": "|S3", "v": "AAA="},
        {"~": "torch.Size", "v": [1.5]}, {"~": "torch.Size", "v": [True]},
        {"~": "torch.Size", "v": 5}, {"~": "torch.dtype", "v": 5}, {"~": "torch.device", "v": None},
        {"~": 0},
    ):  # fmt: skip
        with pytest.raises(FormatError):
            ObjectDecoder(decode_word).decode("", node)


def test_a_class_as_a_key_is_refused_by_name() -> None:
    """A dataclass is one of which its instances have fields."""
    with pytest.raises(UnsupportedLeafError, match="a key of type type"):
        encode({Key: 1})


def test_a_field_that_was_never_set_is_left_out() -> None:
    """As dataclasses allow it of `init=False`."""
    value = Unset()
    found, _ = decode(encode(value), [Unset])
    assert type(found) is Unset
    assert vars(found) == {"a": 1}


@pytest.mark.parametrize(
    "key", [{"~": 0}, {"~": "np", "t": 0, "d": "<f4", "s": [1]}, {"~": "bytes", "t": 0},
            {"~": "tuple", "v": [1, {"~": 0}]}],
)  # fmt: skip
def test_a_tensor_is_no_key(key: Any) -> None:
    """Whatever decodes leaves is not asked: it would give one."""
    for node in ({"~": "dict", "v": [[key, 1]]}, {"~": "set", "v": [key]}):
        with pytest.raises(FormatError, match="a tensor as a key"):
            ObjectDecoder(lambda *_: torch.zeros(1)).decode("", node)
