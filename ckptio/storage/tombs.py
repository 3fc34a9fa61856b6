"""Manifests that removals have taken out of their place.

    .manifest-<save id>-old-<removal>    of that save: it is being removed
                                         of another one: it was taken by mistake

No file system renames on condition. So a removal takes what has the manifest's name, and looks
then what it was: another save may have been committed there since the one that is to go was
read. What was taken by mistake is a checkpoint still. The removal puts it back, unless another save
has been committed since: then that one has replaced it. If the removal was killed, whoever comes
next puts it back, before anything is called left over. Where another checkpoint stands by then,
what was taken stays under that name, with its files, and is put back when that one has gone. So it
is with all but one of several that killed removals had taken.

Each removal has a name of its own. Under one name for all, two that were at it at once wrote over
what the other had taken, and the one that put its own back removed the other's.

What is taken by mistake and then put back may be removed as it should be, while the name that it
was taken under is there yet (the removal was killed in between). Put back once more, it would be a
manifest whose files are going. So who removes a checkpoint first removes such names of it, and what
lies under a right name is put back from no wrong one.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ckptio.errors import FormatError
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES
from ckptio.storage.anew import look_anew
from ckptio.storage.file_names import TOMB
from ckptio.storage.files import NoExclusiveNames, read_regular
from ckptio.storage.leftovers import is_whole, read_summary

if TYPE_CHECKING:
    from ckptio.format.summary import Summary
    from ckptio.storage.files import PosixFiles


def tombs_in(directory: str, save_id: str = "") -> list[str]:
    """Name what removals have taken in a directory, in order; none if it is not there.

    Args:
        directory: A checkpoint's directory.
        save_id: Only what was taken as this save's.

    Raises:
        OSError: It cannot be listed.
    """
    try:
        listed = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = map(TOMB.fullmatch, listed)
    return [match[0] for match in matches if match and save_id in ("", match[1])]


def put_back(files: PosixFiles, directory: str, tomb: str, *, may_stay: bool = False) -> None:
    """Make a checkpoint again of what was taken by mistake, unless another one was committed since.

    That one has replaced it: what was taken loses its name then, too, and its files are left over.
    Where no name is given on condition, a save that is committed between look and rename is
    replaced, as one that came first.

    Args:
        files: Operations to use.
        directory: The checkpoint's directory.
        tomb: The name of what was taken.
        may_stay: Whether it stays where another one is there: nobody knows which one came first.

    Raises:
        FileNotFoundError: Somebody took one of both away, just then.
        OSError: It cannot be put back.
    """
    path, manifest = f"{directory}/{tomb}", f"{directory}/{MANIFEST_NAME}"
    try:
        try:
            files.publish(path, manifest)
        except NoExclusiveNames:
            if os.path.lexists(manifest):
                raise FileExistsError(manifest) from None
            files.replace(path, manifest)
    except FileExistsError:  # or a server says so of a request that was sent twice
        if may_stay and _read(files, manifest) != _read(files, path):
            return
    except FileNotFoundError:
        pass
    with contextlib.suppress(FileNotFoundError):  # it was moved, not linked
        files.unlink(path)


def is_to_be_put_back(directory: str, tomb: str, summary: Summary) -> bool:
    """Whether what was taken is another save's, whole, and not being removed itself.

    Raises:
        OSError: The directory cannot be listed.
    """
    if summary.save_id in tomb:
        return False
    return is_whole(directory, summary) and not tombs_in(directory, summary.save_id)


def put_back_mistakes(files: PosixFiles, directory: str) -> None:
    """Put back what a removal that was killed had taken by mistake, if anything.

    What another host has committed or removed there is seen by whoever looks next.

    Raises:
        OSError: It cannot be put back.
    """
    manifest = f"{directory}/{MANIFEST_NAME}"
    look_anew(manifest)
    if os.path.lexists(manifest):
        return
    for tomb in tombs_in(directory):
        with contextlib.suppress(FileNotFoundError, FormatError):  # then it is left over
            summary, _ = read_summary(files, f"{directory}/{tomb}")
            if is_to_be_put_back(directory, tomb, summary):
                put_back(files, directory, tomb, may_stay=True)
                if os.path.lexists(manifest):
                    return  # what else was taken stays beside it


def forget_mistakes(files: PosixFiles, directory: str, save_id: str, commit: bytes) -> None:
    """Remove names under which a checkpoint lies that was taken by mistake, and put back since.

    Args:
        files: Operations to use.
        directory: The checkpoint, which is about to be removed.
        save_id: Its save's id.
        commit: What stands in the manifest's place.

    Raises:
        OSError: One cannot be looked at, or removed.
    """
    ours = tombs_in(directory, save_id)
    for tomb in tombs_in(directory):
        path = f"{directory}/{tomb}"
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
            if tomb not in ours and _read(files, path) == commit:
                files.unlink(path)


def _read(files: PosixFiles, path: str) -> bytes:
    return read_regular(files, path, MAX_MANIFEST_NBYTES)
