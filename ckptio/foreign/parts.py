"""Which tensors of a safetensors file are one rank's part of them, as its metadata says.

torch's `HuggingFaceStorageWriter` notes in each file that a rank writes where each of its tensors
begins in the whole one (`DCP_SHARDING_INFO`); our own files have that too, and the shape of the
whole. What torch has consolidated has no such note. A folder may look like any other and have the
part of one rank alone: without `save_distributed=True` all ranks write to the same names, and the
last one's file stays. Where that part begins at zero, only the index tells: it counts the bytes of
all ranks.

Rejected: putting the files of several ranks together. torch says neither how large the whole is nor
how many files there are, so that one that was lost would give a smaller tensor, and no error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from ckptio.foreign.pickles import short
from ckptio.format.manifest import MAX_EXTENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptio.format.bucket import StoredTensor

#: What DCP's writer of safetensors calls a file that a rank wrote for itself.
SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
#: How whole tensors come of the files of all ranks.
CONSOLIDATE = (
    "have the files of all ranks consolidated"
    " (HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True), or"
    " torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files)"
)
_NOTE = "DCP_SHARDING_INFO"
_MAX_SHOWN = 5

_Extent = Annotated[int, msgspec.Meta(ge=0, lt=MAX_EXTENT)]


class _Place(msgspec.Struct, frozen=True):
    saved_offsets: tuple[_Extent, ...]
    global_shape: tuple[_Extent, ...] | None = None


_decoder = msgspec.json.Decoder(dict[str, _Place])


class Sharding(NamedTuple):
    """What a file says of the ranks' parts.

    Attributes:
        parts: Why a tensor is known to be a part, by its name.
        is_noted: Whether there is such a note.
        is_unreadable: Whether nobody can read it.
    """

    parts: dict[str, str]
    is_noted: bool = False
    is_unreadable: bool = False

    def note(self, path: str, name: str, *, is_alone: bool) -> str:
        """Say what whoever loads the file should know; nothing of most.

        Args:
            path: The file.
            name: Its name.
            is_alone: Whether parts are loaded, as it was asked for by its own path.
        """
        if self.parts and is_alone:
            shown = listed(f"{tensor!r} ({why})" for tensor, why in self.parts.items())
            return (
                f"{path}: only one rank's parts are here, of these tensors at least: {shown};"
                f" for whole ones load the checkpoint that it is of, or {CONSOLIDATE}"
            )
        if self.is_unreadable:
            return f"{path}: its tensors may be one rank's parts: its {_NOTE} cannot be read"
        if SHARD.fullmatch(name):
            return (
                f"{path}: its tensors may be one rank's parts, as its name is that of such a file;"
                f" for whole ones, {CONSOLIDATE}"
            )
        return ""


def read_sharding(metadata: Mapping[str, str], stored: Iterable[StoredTensor]) -> Sharding:
    """Read what the metadata of a file says of its tensors."""
    note = metadata.get(_NOTE)
    if note is None:
        return Sharding({})
    try:
        places = _decoder.decode(note)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Sharding({}, is_noted=True, is_unreadable=True)
    parts = {}
    for tensor in stored:
        place = places.get(tensor.name)
        if place is not None and (why := _why(place, tensor.shape)):
            parts[tensor.name] = why
    return Sharding(parts, is_noted=True)


def _why(place: _Place, shape: tuple[int, ...]) -> str:
    """Say why a tensor is a part; nothing if it is none, or nobody knows."""
    if any(place.saved_offsets):
        return f"begins at {short(list(place.saved_offsets))}"
    whole = place.global_shape
    # of elements that are made of several numbers, those are its last dimensions
    if whole is not None and whole[: len(shape)] != shape:
        return f"is a part of {short(list(whole))}"
    return ""


def listed(texts: Iterable[str]) -> str:
    """List the first few, and say how many more there are."""
    shown: list[str] = []
    num_more = 0
    for text in texts:
        if len(shown) < _MAX_SHOWN:
            shown.append(text)
        else:
            num_more += 1
    return ", ".join(shown) + (f" and {num_more} more" if num_more else "")
