"""Values that `torch.save` wrote, read by torch with `weights_only`, as trees of ours.

torch's own reader makes them, of a list of types that is known to be harmless, and never a class
that a file names. `load_bytes` and `load_file` load a file whole, with the tensors in it, which
stay in memory for as long as whoever called has the value. (`torchsave` has torch load a file of
holes instead, whose tensors are read by ranges later; what it loads so, it takes apart here.)
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import safe_globals

from ckptio.errors import FormatError, UnsupportedLeafError
from ckptio.foreign.archive import require_plain
from ckptio.foreign.folder import MemorySource
from ckptio.foreign.interface import Encoded
from ckptio.foreign.pickles import UnpicklingError
from ckptio.foreign.scan import most_of
from ckptio.format.encode import MAX_DEPTH
from ckptio.format.manifest import Chunk, TensorEntry
from ckptio.layout import DTYPES
from ckptio.state.flatten import flatten
from ckptio.state.leaves import encode_key, raw_bytes
from ckptio.state.tree import renumbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptio.state.flatten import FlatState
    from ckptio.storage.streams import Source

_CONTAINERS = (list, tuple, dict, OrderedDict, Counter)
#: torch has one set of what is allowed, and makes a new one for each change of it.
_ALLOWING = threading.Lock()
_SETS = (set, frozenset)
_KEYS = (str, int)


def load_bytes(data: bytes) -> Any:
    """Load what `torch.save` wrote.

    Raises:
        UnpicklingError: It is more than data.
        FormatError: It is not whole.
    """
    file = io.BytesIO(data)
    nbytes = require_plain(file).nbytes
    with allowed():
        value = load_file(file)
    return copied(value, nbytes)


@contextlib.contextmanager
def allowed(makers: Iterable[Any] = ()) -> Iterator[None]:
    """Let torch make an empty `bytes`, and what `makers` make, for as long as the context lasts.

    Pickles have an empty `bytes` as a call of `bytes()`. torch refuses the name: with a number it
    makes as many bytes as it is told. The stand-in that is allowed here takes no argument.

    Args:
        makers: Classes and functions, under the names that files have for them. Each caller makes
            its own: another load that ends meanwhile disallows only what it allowed itself.
    """
    allowing = safe_globals([_NoBytes(), *makers])
    with _ALLOWING:
        allowing.__enter__()
    try:
        yield
    finally:
        with _ALLOWING:
            allowing.__exit__(None, None, None)


class _NoBytes:
    """Stands for `bytes`, and makes an empty one only; torch finds it by the name that it bears.

    Attributes:
        of_ckptio: See `rules.allowed`.
    """

    of_ckptio = True

    def __init__(self) -> None:
        self.__module__ = "builtins"
        self.__name__ = self.__qualname__ = "bytes"  # torch before 2.7 asks for the first

    def __call__(self) -> bytes:
        """Make it."""
        return b""


def load_file(file: io.BytesIO | str) -> Any:
    """Have torch load a file whole that was looked through, in memory or at a path.

    What it may make besides is `allowed` by the caller.

    Raises:
        UnpicklingError: It is more than data.
        FormatError: It is not whole.
    """
    if not isinstance(file, str):
        file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    except (UnpicklingError, FileNotFoundError):
        raise
    except Exception as error:  # a damaged archive raises anything
        raise FormatError(f"torch.load cannot read it: {error}") from None


def copied(value: Any, nbytes: int, instead: Callable[[Any], Any] | None = None) -> Any:
    """Copy the containers of a loaded value, so that what is in them can be stored.

    Files in memory, in which some modules keep what they pickled, become their bytes. What is
    referred to in several places is copied for each. What is under a key that has no portable
    form is under a name of it, as something that has none either.

    Args:
        value: The value.
        nbytes: Bytes of the pickle that it comes from.
        instead: Gives what to take for a value; itself, if it is what it should be.

    Raises:
        FormatError: Written out, it is far more than the pickle.
    """
    return _Copier(most_of(nbytes), instead).copy(value)


def take_apart(value: Any, instead: Callable[[str, Any], torch.Tensor] | None = None) -> FlatState:
    """Take a loaded value apart.

    Args:
        value: The value, as `copied` gives it.
        instead: Gives what to store for something that has no portable form.

    Raises:
        UnportableError: Something in it has no portable form.
    """
    try:
        return flatten(value, instead=instead)
    except UnsupportedLeafError as error:
        raise UnportableError(f"it holds what cannot be loaded: {error}") from None


class UnportableError(FormatError):
    """A value is whole, and has something in it that has no portable form."""


class Unending:
    """Takes the place of a container that is inside itself, or inside too many others."""


class Unkeyed:
    """Takes the place of what is under a key that has no portable form, or of a set with one.

    Args:
        key: The key.
    """

    def __init__(self, key: object) -> None:
        self.kind = f"{type(key).__module__}.{type(key).__qualname__}"


class _Copier:
    """Copies containers.

    Args:
        num_left: Values that may be copied.
        instead: See `copied`.
    """

    def __init__(self, num_left: int, instead: Callable[[Any], Any] | None = None) -> None:
        self._num_left = num_left
        self._instead = instead
        self._open: set[int] = set()

    def copy(self, value: Any) -> Any:
        """Copy a value; see `copied`."""
        self._num_left -= 1
        if self._num_left < 0:
            raise FormatError("written out, its values are far more than its bytes")
        if self._instead is not None:
            value = self._instead(value)
        if isinstance(value, io.BytesIO):
            return value.getvalue()
        kind = type(value)
        if kind in _SETS:
            return next((Unkeyed(item) for item in value if not _is_key(item)), value)
        if kind not in _CONTAINERS:
            return value
        if id(value) in self._open or len(self._open) >= MAX_DEPTH:
            return Unending()
        self._open.add(id(value))
        try:
            if kind in (list, tuple):
                return kind(self.copy(item) for item in value)
            copied = kind(self._items(value))
            versions = getattr(value, "_metadata", None) if kind is OrderedDict else None
            if _are_versions(versions):  # of modules; whatever else is there has no use
                copied._metadata = self.copy(versions)  # noqa: SLF001
            return copied
        finally:
            self._open.discard(id(value))

    def _items(self, value: dict[Any, Any]) -> dict[Any, Any]:
        """Copy what is in a dict."""
        found = {}
        odd = []
        for key, item in value.items():
            if _is_key(key):
                found[key] = self.copy(item)
            else:
                odd.append(Unkeyed(key))
        for number, unkeyed in enumerate(odd, 1):
            name = f"<{unkeyed.kind} {number}>"
            while name in found:
                name = f"<{name}>"
            found[name] = unkeyed
        return found


def _is_key(key: Any) -> bool:
    """Whether a key has a portable form."""
    if type(key) in _KEYS:
        return True
    try:
        encode_key("", key)
    except UnsupportedLeafError:
        return False
    return True


def _are_versions(found: Any) -> bool:
    """Whether something is a dict of dicts of plain values."""
    return isinstance(found, dict) and all(
        isinstance(entry, dict)
        and all(
            _is_plain(v) or (isinstance(v, dict) and all(map(_is_plain, v.values())))
            for v in entry.values()
        )
        for entry in found.values()
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, type(None)))


def add_flat(
    flat: FlatState,
    rename: Callable[[str], str],
    name_of: Callable[[int], str],
    files: list[tuple[str, int]],
    tensors: list[TensorEntry],
) -> Encoded:
    """Add the tensors of a value to those of a checkpoint.

    Args:
        flat: The value.
        rename: Gives the name in the checkpoint of a tensor of the value.
        name_of: Gives the name of the file with the tensor of a number.
        files: Takes a file for each tensor.
        tensors: Takes the tensors.

    Returns:
        The value's part of the tree.
    """
    base = len(tensors)
    for number, spec in enumerate(flat.specs):
        files.append((name_of(number), spec.nbytes))
        chunk = Chunk(len(files) - 1, 0)
        tensors.append(TensorEntry(rename(spec.name), spec.dtype, spec.shape, (chunk,)))
    return Encoded(renumbered(flat.tree, lambda index: index + base))


def source_of(tensor: torch.Tensor) -> Source:
    """Give the row-major bytes of a tensor; a copy only where they do not lie so."""
    return MemorySource(raw_bytes(tensor).numpy().data)


def bytes_of(value: Any, dtype: str, shape: tuple[int, ...]) -> Source:
    """Give the bytes of a loaded tensor, if it is the one that was expected.

    Raises:
        FormatError: It is not.
    """
    if (
        not isinstance(value, torch.Tensor)
        or str(value.dtype) != f"torch.{dtype}"
        or tuple(value.shape) != shape
        or value.layout is not torch.strided
    ):
        raise FormatError(f"not the tensor {DTYPES[dtype].name} {shape} that its metadata has")
    return source_of(value)
