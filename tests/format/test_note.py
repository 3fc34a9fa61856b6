from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import FormatError
from ckptio.format.note import CopyNote, decode_note, encode_note


@given(copy_to=st.text(min_size=1), overwrite=st.booleans())
def test_a_note_comes_back(copy_to: str, *, overwrite: bool) -> None:
    """Whatever the place is called."""
    try:
        copy_to.encode()
    except UnicodeEncodeError:  # half a surrogate pair, of which no path is made
        return
    note = CopyNote(copy_to=copy_to, overwrite=overwrite)
    assert decode_note(encode_note(note)) == note


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"copy_to": "far"}',
        b'{"copy_to": "", "overwrite": false}',
        b'{"copy_to": 1, "overwrite": false}',
        b'{"copy_to": "far", "overwrite": 0}',
        b'{"copy_to": "far", "overwrite": false, "more": 1}',
        b'{"copy_to": "far", "overwrite": false} and more',
        b'{"copy_to": "\xff", "overwrite": false}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_note_is_refused(data: bytes) -> None:
    """Strictly: nothing is guessed, and nothing is executed."""
    with pytest.raises(FormatError):
        decode_note(data)
