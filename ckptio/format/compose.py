"""Write a manifest; `format.manifest` has what it is, and reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ckptio.errors import FormatError
from ckptio.format.checksum import crc32c, pack_checksums
from ckptio.format.manifest import FORMAT_VERSION, MAX_MANIFEST_NBYTES, TAIL_NBYTES, check_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.format.manifest import Manifest, Metadata


def encode_manifest(
    *,
    writer: str,
    save_id: str,
    created: str,
    block_nbytes: int,
    files: Sequence[tuple[str, int, Sequence[int]] | tuple[str, int, Sequence[int], int]],
    tensors: bytes,
    tree: bytes,
    hosts: Sequence[str] = (),
    metadata: Metadata | None = None,
) -> bytes:
    """Write a manifest.

    Args:
        writer: Version of the package.
        save_id: Id of the save.
        created: When, ISO 8601, UTC.
        block_nbytes: Bytes under one checksum.
        files: Name, size and checksums of each data file, and the rank that wrote it; 0
            if that is left out.
        tensors: What `encode_rows` gave; kept with the plan, since it does not change
            from save to save.
        tree: The tree, as JSON.
        hosts: Host of each rank that took part; none for one rank alone.
        metadata: What to say beside the state; floats are finite.

    Raises:
        FormatError: A host has no name that readers take, or it would be larger than they
            take.
    """
    check_hosts(hosts)
    head = msgspec.json.encode(
        {
            "ckptio": FORMAT_VERSION,
            "writer": writer,
            "save_id": save_id,
            "created": created,
            "block_nbytes": block_nbytes,
            "files": [
                # a rank of 0 is left out
                (name, nbytes, pack_checksums(crcs), *(rank for rank in ranks if rank))
                for name, nbytes, crcs, *ranks in files
            ],
            "tensors": msgspec.Raw(tensors),
            **({"hosts": tuple(hosts)} if hosts else {}),
            **({"metadata": metadata} if metadata else {}),
            "tree": msgspec.Raw(tree),
        }
    )
    body = head[:-1]  # without the closing brace: the checksum is the last member
    if len(body) + TAIL_NBYTES > MAX_MANIFEST_NBYTES:
        raise FormatError(
            f"a manifest of {len(body)} bytes, and readers take {MAX_MANIFEST_NBYTES}; raise"
            " block_nbytes, or save fewer and larger tensors"
        )
    return sealed(body)


def encode_again(manifest: Manifest) -> bytes:
    """Write a manifest that was read, to pass it on."""
    return sealed(msgspec.json.encode(manifest)[:-1])


def sealed(body: bytes) -> bytes:
    """End a document, whose closing brace is missing, with its checksum."""
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def encode_rows(rows: Sequence[tuple[str, str, tuple[int, ...], list[tuple[Any, ...]]]]) -> bytes:
    """Write a tensor table whose rows are those of the manifest already, a million of them."""
    return msgspec.json.encode(rows)
