"""What is said of a file of `torch.save` that holds more than data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.errors import UnknownFormatError
from ckptio.foreign.pickles import first_sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.foreign.pickles import UnpicklingError
    from ckptio.foreign.standins import Taken

#: Names in a message, at most.
_MAX_SHOWN = 8
#: In files of before 1.6, modules have another mark than storages.
_OLD_MODULE = "persistent_load of storage"
_OF_MODULES = (
    "if you trust it, save torch.load(path, weights_only=False).state_dict(), and load that"
)


def of_pickle(path: str, error: UnpicklingError) -> UnknownFormatError:
    """Say that torch refuses a file."""
    if _OLD_MODULE in str(error):
        return UnknownFormatError(
            f"{path!r} has a whole pickled module in it, and making it may run anything;"
            f" {_OF_MODULES}"
        )
    return UnknownFormatError(
        f"{path!r} holds more than data, and loading it may run anything: {first_sentence(error)};"
        " if you trust it, save what torch.load(path, weights_only=False) gives, and load that"
    )


def of_whole(path: str, taken: Taken) -> UnknownFormatError:
    """Say that all that a file has is one object."""
    if taken.has_modules:
        return UnknownFormatError(
            f"{path!r} is a whole pickled module ({taken.whole}), and making it may run anything;"
            f" {_OF_MODULES}"
        )
    return UnknownFormatError(
        f"{path!r} is one object that is more than data ({taken.whole}), and making it may run"
        " anything; if it is a dataclass, an enum or an array that you trust, allow what it is made"
        " with by torch.serialization.safe_globals"
    )


def of_objects(path: str, refused: Sequence[str], taken: Taken) -> UnknownFormatError:
    """Say which objects of a file are asked for that are more than data.

    Args:
        path: The file.
        refused: Name and class of each.
        taken: What is in the file.
    """
    has_arrays = any("(numpy." in name for name in refused)
    how = " (numpy's arrays: this function, numpy.ndarray, numpy.dtype, type(dtype))"
    modules = "; of a whole pickled module that you trust, save the state_dict()"
    return UnknownFormatError(
        f"{path!r} holds objects that are more than data, and making them may run anything:"
        f" {', '.join(refused[:_MAX_SHOWN])}; leave them out with select=, or, if they are"
        " dataclasses, enums or arrays that you trust, allow what they are made"
        f" with{how * has_arrays} by torch.serialization.safe_globals{modules * taken.has_modules}"
    )
