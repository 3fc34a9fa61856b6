"""A commit that is small although its manifest is not: it says where that is.

Object stores decide between writers by one request for one small object, and whoever waits
for the answer, or doubts it, reads that object back. A manifest of many megabytes is no such
object. So it is written first, under a name of its save, as data is; and what is written last,
under the name of a manifest, is this. It exists in object stores, and where somebody copied a
checkpoint from there.

Parsing is strict: a pointer leads to the one name that its save id gives, nowhere else, and
to just as many bytes with just that checksum.
"""

from __future__ import annotations

import re

import msgspec

from ckptio.errors import FormatError, FormatVersionError
from ckptio.format.checksum import crc32c
from ckptio.format.compose import sealed
from ckptio.format.manifest import FORMAT_VERSION, MAX_MANIFEST_NBYTES, checked_document

_FIRST_VERSION = 2
_MAX_NBYTES = 1024
_SAVE_ID = re.compile(r"[0-9a-f]{32}\Z")
_OPENING = re.compile(rb'\{"ckptio":[0-9]{1,9},"pointer":')


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the manifest of a checkpoint is.

    Attributes:
        ckptio: Version of the format.
        pointer: Name of the object, or file, that has the manifest.
        save_id: Id of the save.
        nbytes: Size of the manifest.
        manifest_crc32c: The crc32c of all of it.
    """

    ckptio: int
    pointer: str
    save_id: str
    nbytes: int
    manifest_crc32c: int

    def check(self, manifest: bytes) -> None:
        """Check that bytes are those that are pointed to.

        Raises:
            FormatError: They are others.
        """
        if len(manifest) != self.nbytes:
            raise FormatError(
                f"{self.pointer!r} has {len(manifest)} bytes and not the {self.nbytes} of the"
                " manifest that was committed"
            )
        if crc32c(manifest) != self.manifest_crc32c or _save_id_in(manifest) != self.save_id:
            raise FormatError(f"{self.pointer!r} is not the manifest that was committed")


_id_decoder = msgspec.json.Decoder(msgspec.defstruct("_Identity", [("save_id", str)], frozen=True))
_version_decoder = msgspec.json.Decoder(
    msgspec.defstruct("_Version", [("ckptio", int)], frozen=True)
)
_decoder = msgspec.json.Decoder(Pointer)


def _save_id_in(manifest: bytes) -> str | None:
    """Give the save id of a manifest that is not parsed yet; `None` if it says none."""
    try:
        return _id_decoder.decode(manifest).save_id  # type: ignore[attr-defined,no-any-return]  # defstruct
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def pointed_name(save_id: str) -> str:
    """Name the manifest of a save that is pointed to."""
    return f"manifest-{save_id}.json"


def encode_pointer(save_id: str, manifest: bytes) -> bytes:
    """Write what points to a manifest."""
    pointer = Pointer(
        ckptio=FORMAT_VERSION,
        pointer=pointed_name(save_id),
        save_id=save_id,
        nbytes=len(manifest),
        manifest_crc32c=crc32c(manifest),
    )
    return sealed(msgspec.json.encode(pointer)[:-1])


def decode_pointer(data: bytes) -> Pointer | None:
    """Read a pointer; `None` of what is none, a manifest as a rule, which it does not judge.

    Raises:
        FormatError: It was damaged, or is not what ckptio writes.
        FormatVersionError: It has a format this version does not read.
    """
    if not _OPENING.match(data):
        return None
    if len(data) > _MAX_NBYTES:
        raise FormatError(f"a pointer to a manifest has at most {_MAX_NBYTES} bytes")
    document = checked_document(data)
    try:
        version = _version_decoder.decode(document).ckptio  # type: ignore[attr-defined]  # defstruct
        if not _FIRST_VERSION <= version <= FORMAT_VERSION:
            raise FormatVersionError(
                f"the checkpoint has format {version} and this version of ckptio reads"
                f" pointers of {_FIRST_VERSION} to {FORMAT_VERSION}; upgrade ckptio"
            )
        pointer = _decoder.decode(document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"the pointer to the manifest is not what ckptio writes: {error}"
        ) from None
    if not _SAVE_ID.match(pointer.save_id):
        raise FormatError(f"bad save id {pointer.save_id!r} in the pointer to the manifest")
    if pointer.pointer != pointed_name(pointer.save_id):
        raise FormatError(f"bad name {pointer.pointer!r} in the pointer to the manifest")
    if not 0 < pointer.nbytes <= MAX_MANIFEST_NBYTES or not 0 <= pointer.manifest_crc32c < 1 << 32:
        raise FormatError("bad size or checksum in the pointer to the manifest")
    return pointer
