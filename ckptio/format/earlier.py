"""What manifests of earlier versions have, and no more.

Readers of that time refuse what they do not know, so a manifest that claims their version and has
more is none that anybody wrote: a member, or an element of a row, even one that says nothing.
"""

from __future__ import annotations

import msgspec

from ckptio.errors import FormatError


class _File(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    name: msgspec.Raw
    nbytes: msgspec.Raw
    packed_checksums: msgspec.Raw


class _Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A place; parts of tensors were known from the first version on, and written by none."""

    file: int
    start: int
    global_offset: msgspec.Raw = msgspec.Raw(b"null")
    local_shape: msgspec.Raw = msgspec.Raw(b"null")


class _Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    name: msgspec.Raw
    dtype: msgspec.Raw
    shape: msgspec.Raw
    chunks: tuple[_Chunk, ...]


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ckptio: int
    writer: msgspec.Raw
    save_id: msgspec.Raw
    created: msgspec.Raw
    block_nbytes: msgspec.Raw
    files: tuple[_File, ...]
    tensors: tuple[_Tensor, ...]
    tree: msgspec.Raw


_decoder = msgspec.json.Decoder(_Manifest)


def require_first(document: bytes) -> None:
    """Refuse a manifest of version 1 that has what version 2 brought; see README.md for that.

    Args:
        document: The manifest, without its checksum. What its members are is not checked, but
            what there is of them; nor is its tree.

    Raises:
        FormatError: It has.
    """
    try:
        _decoder.decode(document)
    except msgspec.MsgspecError as error:
        raise FormatError(f"the manifest has format 1 and what format 2 brought: {error}") from None
