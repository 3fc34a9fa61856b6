from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import ConfigError, FormatError
from ckptio.format.note import CopyNote, decode_note, encode_note


def test_a_place_whose_name_is_no_text_is_refused() -> None:
    """A directory may be called by any bytes; a note may not."""
    with pytest.raises(ConfigError, match="UTF-8"):
        encode_note(CopyNote(copy_to="/far/\udcff", overwrite=False))


@given(copy_to=st.text(min_size=1), overwrite=st.booleans())
def test_a_note_comes_back(copy_to: str, *, overwrite: bool) -> None:
    """Whatever the place is called."""
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
