from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import PAGE_NBYTES, MiB
from ckptio.errors import CheckpointError, FormatError
from ckptio.format.bucket import (
    MAX_HEADER_NBYTES,
    StoredTensor,
    decode_header,
    encode_header,
    header_nbytes,
    sharding_note,
)
from ckptio.layout import DTYPES
from tests.strategies import shapes


@st.composite
def buckets(draw: st.DrawFn) -> list[StoredTensor]:
    """Draw the tensors of a bucket, back to back."""
    names = draw(st.lists(st.text(max_size=6), unique=True, max_size=5))
    tensors = []
    start = 0
    for name in names:
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        tensor = StoredTensor(name, dtype, draw(shapes), start)
        start += tensor.nbytes
        tensors.append(tensor)
    return tensors


def size_of(tensors: list[StoredTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@given(tensors=buckets(), note=st.text(max_size=5))
def test_a_header_is_read_back(tensors: list[StoredTensor], note: str) -> None:
    """Names, types, shapes and places come back, complex and fp8 kinds as themselves."""
    header = encode_header(tensors, {"note": note})
    found, metadata = decode_header(header, size_of(tensors))
    # of tensors without bytes none is before another
    assert sorted(found, key=_key) == sorted(tensors, key=_key)
    assert [t for t in found if t.nbytes] == [t for t in tensors if t.nbytes]
    assert metadata["note"] == note


@given(tensors=buckets())
def test_the_data_starts_on_a_page(tensors: list[StoredTensor]) -> None:
    """A header is whole pages, its length in front of it, padded with spaces."""
    header = encode_header(tensors, {})
    assert len(header) % PAGE_NBYTES == 0
    assert header_nbytes(header[:8], len(header)) == len(header)
    text = header[8:].rstrip(b" ")
    assert len(header) - len(text) < PAGE_NBYTES + 8
    assert text.endswith(b"}")


def test_kinds_that_older_readers_refuse_are_noted_in_the_metadata() -> None:
    """A file with an fp8 or complex tensor is still read by every safetensors reader."""
    tensors = [
        StoredTensor("a", "complex64", (2, 3), 0),
        StoredTensor("b", "float8_e5m2fnuz", (4,), 48),
    ]
    document = json.loads(encode_header(tensors, {})[8:])
    assert document["a"] == {"dtype": "F32", "shape": [2, 3, 2], "data_offsets": [0, 48]}
    assert document["b"] == {"dtype": "U8", "shape": [4], "data_offsets": [48, 52]}
    assert document["__metadata__"] == {
        "ckptio.dtype.a": "complex64",
        "ckptio.dtype.b": "float8_e5m2fnuz",
    }


def test_shards_are_noted_as_dcp_notes_them() -> None:
    """Offsets by name, with as many dimensions as the stored kind has."""
    note = sharding_note(
        [("a", "float32", (4, 0), (8, 2)), ("b", "complex64", (3,), (5,)), ("c", "int8", (), None)]
    )
    assert json.loads(note.pop("DCP_SHARDING_INFO")) == {
        "a": {"saved_offsets": [4, 0], "global_shape": [8, 2]},
        "b": {"saved_offsets": [3, 0], "global_shape": [5, 2]},
        "c": {"saved_offsets": []},
    }
    assert not note


def test_a_header_above_the_limit_is_refused() -> None:
    """What no safetensors reader takes is not written."""
    long = "x" * (MAX_HEADER_NBYTES + MiB)
    with pytest.raises(FormatError, match=r"lower bucket_nbytes"):
        encode_header([StoredTensor(long, "uint8", (), 0)], {})


@pytest.mark.parametrize(
    ("prefix", "file_nbytes"),
    [
        (b"", 0),
        (b"\x01\0\0", 3),
        ((100).to_bytes(8, "little"), 107),
        (b"\xff" * 8, 1 << 62),
        ((MAX_HEADER_NBYTES + 1).to_bytes(8, "little"), 1 << 40),
    ],
)
def test_a_length_that_cannot_be_is_refused(prefix: bytes, file_nbytes: int) -> None:
    """A header longer than its file, or than any reader takes, is no header."""
    with pytest.raises(FormatError, match="no safetensors header"):
        header_nbytes(prefix, file_nbytes)


def make(document: Any) -> bytes:
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"a": []},
        {"a": entry(dtype=4)},
        {"a": entry(shape=(5,))},
        {"a": entry(shape=(-4,))},
        {"a": entry(shape=(-2, -2))},
        {"a": entry(shape=(2.5,))},
        {"a": entry(shape=(1 << 70,))},
        {"a": entry(offsets=(-4, 0))},
        {"a": entry(offsets=(0, 4, 8))},
        {"a": entry(offsets=(4, 8))},
        {"a": entry(), "b": entry()},
        {"__metadata__": {"x": 1}, "a": entry()},
        {"__metadata__": [], "a": entry()},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_refused(document: Any) -> None:
    """Every byte of the data belongs to one tensor, or it is no header."""
    with pytest.raises(FormatError):
        decode_header(make(document), 4)


def test_half_bytes_are_not_known() -> None:
    """Two elements of F4 are one of torch's; an odd number of them is bytes that nobody reads."""
    (tensor,), _ = decode_header(make({"a": entry("F4", (9,), (0, 4))}), 4)
    assert (tensor.dtype, tensor.shape, tensor.unknown) == ("uint8", (4,), "F4")


def test_a_tensor_of_an_unknown_type_may_be_empty() -> None:
    """It takes no byte from the one behind it."""
    document = {"a": entry("Q8", (0,), (0, 0)), "b": entry()}
    tensors, _ = decode_header(make(document), 4)
    assert tensors == [
        StoredTensor("a", "uint8", (0,), 0, "Q8"),
        StoredTensor("b", "uint8", (4,), 0),
    ]


@pytest.mark.parametrize(
    "document",
    [
        {"a": entry(), "__metadata__": None},
        {"a": {**entry(), "more": 1}},
        {"a": entry(), "__metadata__": {"ckptio.dtype.a": "bool"}},
        {"a": entry(), "__metadata__": {"ckptio.dtype.a": "nothing that is known"}},
    ],
)
def test_what_only_others_write_is_read_over(document: Any) -> None:
    """As safetensors itself does."""
    (tensor,), _ = decode_header(make(document), 4)
    assert tensor == StoredTensor("a", "uint8", (4,), 0)


def test_data_behind_the_last_tensor_is_refused() -> None:
    """Nothing can hide in a file."""
    with pytest.raises(FormatError, match=r"tensors end at 4 and the data at 3: it was cut off$"):
        decode_header(make({"a": entry()}), 3)
    with pytest.raises(FormatError, match=r"tensors end at 4 and the data at 5$"):
        decode_header(make({"a": entry()}), 5)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_format_error(data: bytes) -> None:
    """Random bytes raise nothing but `FormatError`."""
    with contextlib.suppress(FormatError):
        decode_header(data, 0)
    with contextlib.suppress(FormatError):
        header_nbytes(data[:8], len(data))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(data=st.data(), tensors=buckets())
def test_any_change_of_a_header_is_a_header_or_a_format_error(
    data: st.DataObject, tensors: list[StoredTensor]
) -> None:
    """Whatever JSON stands in the place of any of its values."""
    document = json.loads(encode_header(tensors, {"a": "b"})[8:])
    holder: Any = document
    key = data.draw(st.sampled_from(sorted(document)))
    while isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.booleans()):
        holder = holder[key]
        choices = list(holder) if isinstance(holder, dict) else range(len(holder))
        key = data.draw(st.sampled_from(choices))
    holder[key] = data.draw(json_values)
    with contextlib.suppress(CheckpointError):
        found, _ = decode_header(make(document), size_of(tensors))
        assert size_of(found) == size_of(tensors)


def _key(tensor: StoredTensor) -> tuple[int, int, str]:
    return tensor.start, tensor.nbytes, tensor.name
