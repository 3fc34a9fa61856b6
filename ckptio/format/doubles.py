"""Find members of JSON objects that stand in one object twice, of which a parser keeps the last."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from ckptio.errors import FormatError

if TYPE_CHECKING:
    from ckptio.format.encode import Json


def require_distinct(document: msgspec.Raw, value: Json) -> None:
    """Refuse a document with a member that stands twice in one object, so that one was lost.

    What a save writes is the same, byte for byte, once it is read and written again; nothing can
    have been lost then. What is not, as another program wrote it, is parsed once more.

    Args:
        document: JSON.
        value: What it was parsed to, which is not nested too deep.

    Raises:
        FormatError: There is such a member.
    """
    if msgspec.json.encode(value) == memoryview(document):
        return
    try:
        text = bytes(memoryview(document))
        json.loads(text, object_pairs_hook=_of_pairs, parse_int=len, parse_float=len)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the tree of the manifest is not JSON: {error}") from None


def _of_pairs(pairs: list[tuple[str, Json]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise FormatError(f"{name!r} stands twice in one object of the manifest")
        seen.add(name)
