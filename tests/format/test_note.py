from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import ConfigError, FormatError
from ckptio.format.note import (
    MAX_REPLACED,
    CopyNote,
    decode_note,
    encode_note,
    note_replacing,
)
from ckptio.storage.notes import MAX_NOTE_NBYTES


def test_a_place_whose_name_is_no_text_is_refused() -> None:
    """A directory may be called by any bytes; a note may not."""
    with pytest.raises(ConfigError, match="UTF-8"):
        encode_note(CopyNote(copy_to="/far/\udcff", overwrite=False))


@given(copy_to=st.text(min_size=1), overwrite=st.booleans(), replaced=st.lists(st.text()))
def test_a_note_comes_back(copy_to: str, replaced: list[str], *, overwrite: bool) -> None:
    """Whatever the place is called."""
    note = CopyNote(copy_to=copy_to, overwrite=overwrite, replaced=tuple(replaced))
    assert decode_note(encode_note(note)) == note


def test_a_note_of_what_replaced_nothing_is_as_it_was() -> None:
    """Versions before this one read it, and this one reads theirs."""
    data = b'{"copy_to":"far","overwrite":true}\n'
    note = CopyNote(copy_to="far", overwrite=True)
    assert decode_note(data) == note
    assert encode_note(note) == data


def test_a_note_names_what_was_replaced_in_a_row() -> None:
    """The latest first; of very many the first of all stays, which is where the copy goes."""
    own = CopyNote(copy_to="far", overwrite=True)
    note = None
    for number in range(2 * MAX_REPLACED):
        note = note_replacing(own, f"{number:032x}", note)
    assert note is not None
    numbers = [int(save_id, 16) for save_id in note.replaced]
    assert numbers == [*range(2 * MAX_REPLACED - 1, MAX_REPLACED, -1), 0]
    assert len(encode_note(note)) < MAX_NOTE_NBYTES // 2


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
        b'{"copy_to": "far", "overwrite": false, "replaced": [1]}',
        b'{"copy_to": "far", "overwrite": false} and more',
        b'{"copy_to": "\xff", "overwrite": false}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_note_is_refused(data: bytes) -> None:
    """Strictly: nothing is guessed, and nothing is executed."""
    with pytest.raises(FormatError):
        decode_note(data)
