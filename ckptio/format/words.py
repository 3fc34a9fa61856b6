"""Values of numpy's and torch's that name something: scalars, sizes, element types, devices.

They stand in the tree like other values, and as keys of dicts and elements of sets, so they
have to be named and compared where torch is not imported: by the command line, and by the
plan. numpy is, for its scalars alone.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError
from ckptio.format.encode import TAG

if TYPE_CHECKING:
    import numpy as np

    from ckptio.format.encode import Json

_NUMPY_NAME = re.compile(
    r"\|[b]1|[<>|][iufcSU][0-9]{1,9}|[<>][mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|[munpfa]s)\])?"
)

_MAX_SIZE = 1 << 63


class Word:
    """Stands for one of torch's element types or devices, where torch is not imported.

    Args:
        text: What torch writes for it, and what it is called as a key.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __eq__(self, other: object) -> bool:
        """Whether it stands for the same."""
        return isinstance(other, Word) and other._text == self._text

    def __hash__(self) -> int:
        """Hash what it stands for."""
        return hash((Word, self._text))

    def __repr__(self) -> str:
        """Write it as torch does."""
        return self._text


def decode_word(fqn: str, node: Json) -> Any:
    """Decode a value of numpy's or torch's without torch; for `ObjectDecoder`.

    Returns:
        A numpy scalar; a tuple for a `torch.Size`, which is equal to it; a `Word` for others.

    Raises:
        FormatError: It is none, but a tensor, say.
    """
    match node[TAG]:
        case "npscalar":
            return numpy_scalar(node["d"], node["v"])
        case "torch.Size":
            return size_of(node["v"])
        case "torch.dtype":
            return Word(f"torch.{_text(node['v'])}")
        case "torch.device":
            return Word(_text(node["v"]))
        case _:
            raise FormatError(f"a tensor, or something unknown, for a value at {fqn!r}")


def size_of(value: Json) -> tuple[int, ...]:
    """Give what a `torch.Size` is made of.

    Raises:
        FormatError: It is not made of integers, or of some that torch has no room for.
    """
    if type(value) is not list or not all(
        type(item) is int and -_MAX_SIZE <= item < _MAX_SIZE for item in value
    ):
        raise FormatError(f"{value!r} for a torch.Size in the manifest")
    return tuple(value)


def numpy_dtype(name: object) -> np.dtype[Any]:
    """Give a numpy dtype of plain kinds only, by its exact name; never objects or records.

    Raises:
        FormatError: It is none.
    """
    import numpy as np  # noqa: PLC0415  # 50 ms that few checkpoints need

    if not isinstance(name, str) or not _NUMPY_NAME.fullmatch(name):
        raise FormatError(f"bad numpy dtype {name!r} in the manifest")
    try:
        return np.dtype(name)
    except TypeError:  # numpy has none of that size, at least not here
        raise FormatError(f"numpy knows no dtype {name!r}, as one in the manifest is") from None


def numpy_scalar(name: object, encoded: str) -> np.generic:
    """Make a numpy scalar of its bytes.

    Raises:
        FormatError: It has too few, or more.
        ValueError: They are not base64.
    """
    import numpy as np  # noqa: PLC0415  # 50 ms that few checkpoints need

    dtype = numpy_dtype(name)
    raw = base64.b64decode(encoded, validate=True)
    # numpy gives an empty string the bytes of one character
    is_empty = not dtype.itemsize and raw in (bytes(1), bytes(4))
    if len(raw) != dtype.itemsize and not is_empty:
        raise FormatError(f"a scalar {dtype} of {len(raw)} bytes in the manifest")
    raw = raw[: dtype.itemsize]
    if dtype.kind == "S":  # indexing an array would drop trailing zeros
        return np.bytes_(raw)
    if dtype.kind == "U":
        return np.str_(
            raw.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass")
        )
    value: np.generic = np.frombuffer(raw, dtype)[0]
    return value


def _text(value: Json) -> str:
    if type(value) is not str:
        raise FormatError(f"{value!r} for a name in the manifest")
    return value
