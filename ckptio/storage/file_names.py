"""The names of files beside a manifest, on disks and in object stores alike.

data-SAVE-RANK-BUCKET.safetensors   tensors; no two saves, ranks or buckets meet
.attempt-SAVE                       a save is under way, or was when it was killed; or the removal
                                    of what it committed, on a disk
.copy-SAVE                          a copy to a second tier is owed
.manifest-SAVE                      its manifest, on the way to its place; or, after an exchange
                                    of the two, the one that it replaced
.manifest-SAVE-was                  the one that it replaces, where names cannot be exchanged
.manifest-SAVE-old-REMOVAL          its manifest, out of its place: it is being removed; in a store
                                    a copy, without the last part
"""

from __future__ import annotations

import re
import secrets

ATTEMPT_PREFIX = ".attempt-"
NEW_MANIFEST_PREFIX = ".manifest-"
#: Of the note that a checkpoint is still to be copied; see `storage.notes`.
NOTE_PREFIX = ".copy-"
#: Of a copy of the manifest that a save replaces.
REPLACED_SUFFIX = "-was"
#: The manifest of a checkpoint that is being removed.
TOMB = re.compile(r"\.manifest-([0-9a-f]{32})-old(?:-[0-9a-f]{8})?")
#: A save that is alive writes something every few seconds, or sends something every few
#: minutes; an hour without is its end.
QUIET_S = 3600.0
#: One that waits, or finds what it would write, says this often, in seconds, that it is alive.
STAY_S = 60.0


def data_file_name(save_id: str, rank: int, index: int) -> str:
    """Name a data file."""
    return f"data-{save_id}-{rank:05d}-{index:05d}.safetensors"


def numbered(name: str) -> list[str | tuple[int, str]]:
    """Give what sorts names of steps by their numbers, however many digits these have."""
    parts = re.split("([0-9]+)", name)
    # numbers by length first: int() refuses what is longer than 4,300 digits
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if place % 2 else part
        for place, part in enumerate(parts)
    ]


def tomb_name(save_id: str) -> str:
    """Name the manifest that a removal takes out of its place: a name of this removal alone."""
    return f".manifest-{save_id}-old-{secrets.token_hex(4)}"
