"""Say what is at a path where a checkpoint was looked for."""

from __future__ import annotations

import contextlib
import itertools
import os

from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.file_names import numbered

#: What files of torch.save are usually called.
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
#: Entries of a directory that are looked at for what is below it.
_MAX_LOOKED_AT = 1000


def hint_about(path: str) -> str:
    """Say what is at a path that has no manifest."""
    if not os.path.lexists(path):
        return "there is nothing here"
    hint = "there is no committed checkpoint here"
    files: list[str] = []
    below: list[str] = []
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in itertools.islice(entries, _MAX_LOOKED_AT):
            if entry.is_dir() and os.path.exists(f"{entry.path}/{MANIFEST_NAME}"):
                below.append(entry.name)
            if entry.name.endswith(_TORCH_SUFFIXES) and entry.is_file():
                files.append(entry.name)
    if below:  # steps have numbers: the newest, of those that were looked at
        return f"{hint}, but below, as {max(below, key=numbered)!r}"
    if files:
        return f"{hint}; what torch.save wrote is loaded file by file, as {min(files)!r}"
    return hint
