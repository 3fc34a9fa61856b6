"""Which files of a directory nobody needs: those of killed saves and of replaced manifests.

A living save holds the lock of its attempt file; the kernel frees the lock of a dead one.
The order matters: list first, then look at locks, then read the manifest. A save that was
alive when its lock was looked at is left alone; one that had ended by then has its
manifest in place before that manifest is read.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ckptio.errors import FormatError
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, decode_manifest

if TYPE_CHECKING:
    from ckptio.storage.files import PosixFiles

ATTEMPT_PREFIX = ".attempt-"
_OURS = re.compile(
    r"(?:data-|\.attempt-|\.manifest-)([0-9a-f]{32})(?:-\d{5}-\d{5}\.safetensors|-old)?"
)


def data_file_name(save_id: str, rank: int, index: int) -> str:
    """Name a data file so that no two saves, ranks or buckets meet."""
    return f"data-{save_id}-{rank:05d}-{index:05d}.safetensors"


def find_leftovers(files: PosixFiles, directory: str, save_id: str) -> list[str]:
    """Name the files in `directory` that belong to no living save and to no checkpoint.

    Args:
        files: Operations to use.
        directory: A checkpoint's directory.
        save_id: The save that asks; its own files are not leftovers.

    Returns:
        Names; none where locks do not work or the manifest cannot be read.

    Raises:
        OSError: The directory cannot be read.
    """
    owners: dict[str, list[str]] = {}
    for name in sorted(os.listdir(directory)):
        match = _OURS.fullmatch(name)
        if match and match[1] != save_id:
            owners.setdefault(match[1], []).append(name)
    if not owners:
        return []
    dead = {
        owner: names
        for owner, names in owners.items()
        if not _is_alive(files, f"{directory}/{ATTEMPT_PREFIX}{owner}")
    }
    try:
        with open(f"{directory}/{MANIFEST_NAME}", "rb") as file:
            manifest = decode_manifest(file.read(MAX_MANIFEST_NBYTES))
    except FileNotFoundError:
        needed: set[str] = set()
    except FormatError:
        return []  # damaged, or of a newer version: whatever it needs stays
    else:
        needed = {entry.name for entry in manifest.files}
    return [name for names in dead.values() for name in names if name not in needed]


def _is_alive(files: PosixFiles, marker: str) -> bool:
    """Whether somebody holds the lock of an attempt."""
    try:
        fd = files.open(marker, direct=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not files.lock(fd)
    except OSError:
        return True
    finally:
        files.close(fd)
