from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import FormatError, FormatVersionError
from ckptio.format.compose import sealed
from ckptio.format.manifest import FORMAT_VERSION, MAX_MANIFEST_NBYTES
from ckptio.format.pointer import decode_pointer, encode_pointer
from tests.rig import SAVE_IDS, manifest_of

SAVE_ID = SAVE_IDS[0]
MANIFEST = manifest_of(SAVE_ID, {})


def written(**changes: Any) -> bytes:
    """Write a pointer by hand, with other values; its own checksum is right."""
    found = json.loads(encode_pointer(SAVE_ID, MANIFEST))
    del found["crc32c"]
    return sealed(json.dumps({**found, **changes}, separators=(",", ":")).encode()[:-1])


def test_a_pointer_says_where_the_manifest_is() -> None:
    """By the name of its save; its bytes, and no others, are taken."""
    pointer = decode_pointer(encode_pointer(SAVE_ID, MANIFEST))
    assert pointer is not None
    assert (pointer.pointer, pointer.save_id) == (f"manifest-{SAVE_ID}.json", SAVE_ID)
    pointer.check(MANIFEST)
    for other in (MANIFEST[:-1], MANIFEST + b" ", b"x" + MANIFEST[1:], b""):
        with pytest.raises(FormatError, match=pointer.pointer):
            pointer.check(other)


def test_a_pointer_leads_to_the_manifest_of_its_own_save() -> None:
    """Bytes with the right checksum under the right name may be another save's, or nobody's."""
    for other in (manifest_of(SAVE_IDS[1], {}), b"{}", b"nonsense", b'{"save_id":7}'):
        pointer = decode_pointer(encode_pointer(SAVE_ID, other))
        assert pointer is not None
        with pytest.raises(FormatError, match="not the manifest"):
            pointer.check(other)


@pytest.mark.parametrize("data", [MANIFEST, b"", b"{}", b"nonsense", MANIFEST[:100]])
def test_what_is_no_pointer_is_for_others_to_judge(data: bytes) -> None:
    """A manifest is none, nor is what neither is."""
    assert decode_pointer(data) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"pointer": "../manifest.json"},
        {"pointer": "manifest.json"},
        {"pointer": f"manifest-{SAVE_IDS[1]}.json"},
        {"pointer": f"x/manifest-{SAVE_ID}.json"},
        {"pointer": 7},
        {"save_id": "x", "pointer": "manifest-x.json"},
        {"save_id": "../" * 10 + "ab", "pointer": "manifest-" + "../" * 10 + "ab.json"},
        {"save_id": SAVE_ID + "\n", "pointer": f"manifest-{SAVE_ID}\n.json"},
        {"save_id": None},
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": MAX_MANIFEST_NBYTES + 1},
        {"nbytes": 1.5},
        {"nbytes": 1 << 80},
        {"manifest_crc32c": -1},
        {"manifest_crc32c": 1 << 32},
        {"manifest_crc32c": "0"},
        {"more": 1},
        {"more": "x" * 2000},
    ],
)
def test_a_pointer_that_somebody_made_up_is_refused(changes: dict[str, Any]) -> None:
    """Above all one that leads elsewhere, or to more than a manifest."""
    with pytest.raises(FormatError):
        decode_pointer(written(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"nbytes": MAX_MANIFEST_NBYTES}, {"manifest_crc32c": 0}, {"manifest_crc32c": (1 << 32) - 1}],
)
def test_a_pointer_at_the_limits_is_taken(changes: dict[str, Any]) -> None:
    """The largest manifest there may be, and every checksum there is."""
    pointer = decode_pointer(written(**changes))
    assert pointer is not None
    assert changes.items() <= msgspec.structs.asdict(pointer).items()


@pytest.mark.parametrize("version", [0, 1, FORMAT_VERSION + 1, 999_999_999])
def test_a_pointer_of_another_version_is_refused(version: int) -> None:
    """With the advice to upgrade."""
    for more in ({}, {"what_it_brought": 1}):
        with pytest.raises(FormatVersionError, match="upgrade"):
            decode_pointer(written(ckptio=version, **more))


def test_a_pointer_that_was_changed_is_damaged() -> None:
    """In any byte, or cut anywhere: an error, or no pointer and no manifest either."""
    data = encode_pointer(SAVE_ID, MANIFEST)
    opening = re.match(rb'\{"ckptio":\d+,"pointer":', data)
    assert opening is not None
    for position in range(len(data)):
        for found in (
            data[:position],
            data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :],
        ):
            if position >= opening.end():
                with pytest.raises(FormatError):
                    decode_pointer(found)
            else:
                with contextlib.suppress(FormatError):
                    assert decode_pointer(found) is None


@given(st.binary(max_size=200))
def test_nothing_but_format_errors_comes_of_bytes(tail: bytes) -> None:
    """Whatever stands behind the opening, and with a checksum that is right."""
    for data in (tail, sealed(b'{"ckptio":2,"pointer":' + tail)):
        with contextlib.suppress(FormatError):
            assert decode_pointer(data) is None
