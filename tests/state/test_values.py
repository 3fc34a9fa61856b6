from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given

from ckptio.errors import FormatError
from ckptio.format.manifest import FORMAT_VERSION, Chunk, Manifest, TensorEntry
from ckptio.state.flatten import flatten
from ckptio.state.values import check_values
from tests.strategies import states


def manifest_with(tree: Any, *tensors: TensorEntry) -> Manifest:
    raw = msgspec.Raw(msgspec.json.encode(tree))
    return Manifest(FORMAT_VERSION, "1", "0" * 32, "", 4096, (), tensors, raw)


@given(state=states)
def test_every_value_of_a_state_can_be_made(state: Any) -> None:
    """Whatever is saved; records and enums as plain values, as a load without classes has them."""
    flat = flatten(state)
    tensors = [
        TensorEntry(spec.name, spec.dtype, tuple(source.shape), (Chunk(0, 0),))
        for spec, source in zip(flat.specs, flat.sources, strict=True)
    ]
    check_values(manifest_with(flat.tree, *tensors))


BYTE = base64.b64encode(b"a").decode()
BAD = [
    {"~": "int", "v": "xyz"}, {"~": "float", "v": "7ff8"}, {"~": "complex", "v": "00"},
    {"~": "bytes", "v": "Y"}, {"~": "str", "v": "/w=="}, {"~": "date", "v": "2020-13-01"},
    {"~": "datetime", "v": "2020-01-01T00:00:00", "f": 2}, {"~": "timedelta", "v": [1, 2]},
    {"~": "path", "k": "os", "v": "a"}, {"~": "npscalar", "d": "O", "v": BYTE},
    {"~": "torch.Size", "v": ["a"]}, {"~": "torch.dtype", "v": 5},
    {"~": "dict", "v": [["a", 1], ["a", 2]]}, {"~": "dict", "v": [[[1], 1]]},
    {"~": "dict", "v": [[{"~": 0}, 1]]}, {"~": "set", "v": [{"~": "bytearray", "v": BYTE}]},
    {"~": "odict", "v": {}, "m": {"a": "x"}}, {"~": "enum", "c": 5, "v": 1},
    {"~": 0, "p": [0, 0]}, {"~": 0, "p": [1]}, {"~": 0, "p": [0, 1, 2]},
    {"~": "view", "t": 0, "d": "float32", "o": 0, "s": [7], "r": [1]},
    {"~": "view", "t": 0, "d": "float32", "o": 2, "s": [1], "r": [1]},
    {"~": "np", "t": 0, "d": "<f4", "s": [7]}, {"~": "np", "t": 0, "d": "V4", "s": [6]},
    {"~": "np", "t": 0, "d": "<f4", "s": [1] * 64 + [6]},
]  # fmt: skip
#: Of a machine that knows all zones but this one; in a key, too.
UNKNOWN = {"~": "datetime", "v": "2020-01-01T00:00:00", "f": 0, "z": "No/Where"}
COLORS = [{"~": "enum", "c": "a:Color", "v": 1}, {"~": "enum", "c": "a:Kind", "v": 1}]
AROUND = [
    "%s", "[1, %s]", '{"a": {"~": "tuple", "v": [%s]}}', '{"~": "ranks", "v": [1, %s]}',
    json.dumps([UNKNOWN, UNKNOWN, "here"]), json.dumps({"a": UNKNOWN, "b": "here"}),
    json.dumps({"~": "dict", "v": [[COLORS[0], 1], [COLORS[1], "here"]]}),
    json.dumps({"~": "dict", "v": [[UNKNOWN, {"~": "tuple", "v": ["here"]}]]}),
    json.dumps({"~": "enum", "c": "a:b", "v": {"~": "tuple", "v": [UNKNOWN, "here"]}}),
    json.dumps({"~": "set", "v": [UNKNOWN, "here"]}),
    json.dumps({"~": "dict", "v": [[UNKNOWN, 1], ["here", 1]]}),
    json.dumps({"~": "odict", "v": {"a": UNKNOWN, "b": "here"}}),
    json.dumps([UNKNOWN, {"~": "ranks", "v": [{"~": "absent"}, "here"]}]),
]  # fmt: skip


@pytest.mark.parametrize("around", [text.replace('"here"', "%s") for text in AROUND])
def test_a_value_that_nobody_can_have_saved_is_found(around: str) -> None:
    """Wherever it is, and beside what this machine, or nobody without classes, can make."""
    weight = TensorEntry("w", "float32", (2, 3), (Chunk(0, 0),))
    check_values(manifest_with(json.loads(around % "1"), weight))
    for node in BAD:
        with pytest.raises(FormatError):
            check_values(manifest_with(json.loads(around % json.dumps(node)), weight))


def test_what_a_tensor_may_be_is_a_value() -> None:
    """In any order, an array of any shape of as many bytes, and views of what is in them."""
    weight = TensorEntry("w", "float32", (2, 3), (Chunk(0, 0),))
    array = {"~": "np", "t": 0, "d": "<f4", "s": [1] * 63 + [6]}
    view = {"~": "view", "t": 0, "o": 0, "s": [3], "r": [1]}
    views = [
        {**view, "d": "complex64", "conj": True},
        {**view, "d": "complex64", "conj": True, "neg": True},
        {**view, "d": "float32", "conj": False, "neg": True},
        {**view, "d": "bool", "neg": False},
        {**view, "d": "bool"},
    ]
    check_values(manifest_with([{"~": 0, "p": [1, 0]}, array, *views], weight))


def test_what_depends_on_who_loads_is_not_looked_at() -> None:
    """Classes, zones, and what types and devices some torch knows."""
    words = [{"~": f"torch.{kind}", "v": "of_tomorrow"} for kind in ("dtype", "device")]
    check_values(manifest_with([UNKNOWN, {"~": "set", "v": COLORS}, *words]))


def test_values_are_checked_without_torch() -> None:
    """The command line has none."""
    program = "import sys, ckptio.state.values; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert found.stdout == b"False\n"
