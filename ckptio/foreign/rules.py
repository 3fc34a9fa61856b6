"""What torch was told that decides what it makes of a file of `torch.save`.

Two settings of torch do. `torch.serialization.safe_globals` says, for the whole process, which
classes may be in a file: an object of another class becomes a byte that nobody is given, one of an
allowed class the tensors that it holds. And `set_default_load_endianness` says, since some version
for one thread, in which byte order a file is that does not say so itself: files are read on threads
of ours, so that setting is read on the caller's thread, and set on ours (`under`).

So a manifest that was made under one rule is none for whoever reads under another, though nobody
wrote to the file: both are a part of the version by which a manifest is kept, and the order is one
of the identity by which a conversion knows what it wrote before. What is allowed may still
change between one look and the next, and other ranks may have other rules. So the name that a
tensor has in the manifest ends with a sum of all that was made (`outline_of`), and whoever opens it
compares that with what was made there. Rejected: to go by the number of a tensor alone, which
gives one tensor's bytes under another's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from typing import TYPE_CHECKING, Any

from ckptio.errors import CheckpointChangedError
from ckptio.state.tree import walk

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from ckptio.state.flatten import FlatState

#: Long enough that two of one checkpoint are never equal, short enough for each name.
_SUM_NBYTES = 6


def allowed() -> frozenset[Hashable]:
    """Give what callers have allowed torch to make, and nothing that a load of ours has."""
    import torch  # noqa: PLC0415  # where there is such a file

    entries = torch.serialization.get_safe_globals()
    return frozenset(entry for entry in entries if not getattr(entry, "of_ckptio", False))


def byte_order() -> Any:
    """Give what was said on this thread of files that do not say their byte order.

    Nothing is imported for it: whoever said something has imported where torch keeps it, and a
    signal's handler that saves may have interrupted an import.

    Returns:
        torch's own word for it; `None` if nothing was said, or torch was not imported yet.
    """
    serialization = sys.modules.get("torch.serialization")
    kept_in = "torch.utils.serialization.config"
    if kept_in not in sys.modules and not hasattr(serialization, "_default_load_endian"):
        return None
    try:
        get = getattr(serialization, "get_default_load_endianness", None)
        return None if get is None else get()
    except AttributeError:  # it is being imported: nothing was said yet
        return None


def is_big(order: Any) -> bool:
    """Whether elements have to be turned around, by what `byte_order` gave."""
    name = getattr(order, "name", "LITTLE")
    return (sys.byteorder if name == "NATIVE" else name.lower()) == "big"


def read_as(version: Hashable, order: Any) -> Hashable:
    """Add to the version of files that may not say their byte order how they are read.

    Equal to the version where nothing was said: what is named after it keeps its name.
    """
    return (version, "big") if is_big(order) else version


@contextlib.contextmanager
def under(order: Any) -> Iterator[None]:
    """Have torch go by what was said on another thread, on this one."""
    before = byte_order()
    if before == order:
        yield
        return
    from torch.serialization import (  # noqa: PLC0415  # somebody has imported it to say so
        set_default_load_endianness,
    )

    set_default_load_endianness(order)
    try:
        yield
    finally:
        set_default_load_endianness(before)


def outline_of(flat: FlatState, refused: Iterable[int] = ()) -> str:
    """Sum up which tensors were made of a file, and where in them each is that is seen.

    The same in every process. Plain values are no part of it: whoever opens a tensor has them
    from the manifest.

    Args:
        flat: What was made.
        refused: Numbers of those that stand for something that is not given.
    """
    digest = hashlib.blake2b(digest_size=_SUM_NBYTES)
    for spec in flat.specs:
        digest.update(repr((spec.name, spec.dtype, spec.shape)).encode())
    for found in walk("", flat.tree):
        digest.update(repr(found).encode())
    digest.update(repr(sorted(refused)).encode())
    return digest.hexdigest()


def numbered(number: int, outline: str) -> str:
    """Name a tensor by its number among what was made."""
    return f"{number}-{outline}"


def number_of(name: str, outline: str, path: str) -> int:
    """Give the number of a tensor by the name that `numbered` gave it.

    Args:
        name: The name.
        outline: Of what was made here.
        path: The checkpoint.

    Raises:
        CheckpointChangedError: Something else was made when it was named.
    """
    number, _, named = name.partition("-")
    if named != outline:
        raise made_otherwise(path)
    return int(number)


def made_otherwise(path: str) -> CheckpointChangedError:
    """Say that a manifest was made under another rule."""
    return CheckpointChangedError(
        path,
        "what torch makes of it is not what it was when it was looked at: other classes are"
        " allowed (torch.serialization.safe_globals), or are on another rank",
    )
