"""Directories that torch.distributed.checkpoint wrote, Megatron-core's among them.

`.metadata` is a pickle and says which bytes of which `.distcp` file are which item; every
item is a file of `torch.save` by itself. The pickle is read into inert records; values are
loaded by torch with `weights_only`; and of a tensor only the bytes that are wanted are read.

What Megatron-core does not shard (the iteration, the script's arguments, the options of the
optimizer) is in a `common.pt` beside it, a file of `torch.save` to be loaded by its own path:
reports say so. Rejected: to load it with the rest. Its names are those of the rest again (both
have an `optimizer`), Megatron alone knows how they go together, and arguments are more than data.

A value that `weights_only` refuses, or what has no portable form, is kept as an item that
nobody can open: a load that leaves it out succeeds, and one that wants it fails with its name
before it fills anything.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptio._texts import some_of
from ckptio.errors import CorruptionError, FormatError
from ckptio.foreign.archive import find_tensor
from ckptio.foreign.contents import Contents
from ckptio.foreign.folder import OverlapError, place_of
from ckptio.foreign.interface import Encoded, at, encode_places, make_manifest, place
from ckptio.foreign.nesting import nest
from ckptio.foreign.pickles import UnpicklingError, first_sentence, read_metadata
from ckptio.foreign.rules import (
    allowed,
    is_big,
    made_otherwise,
    number_of,
    numbered,
    outline_of,
    read_as,
    under,
)
from ckptio.format.encode import TAG
from ckptio.format.manifest import Chunk, TensorEntry
from ckptio.shards import distinct_name
from ckptio.state.numbered import numbered_below

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ckptio.foreign.contents import Item
    from ckptio.foreign.folder import Folder
    from ckptio.format.manifest import Manifest
    from ckptio.state.flatten import FlatState
    from ckptio.storage.streams import AwaitedSource, Source

METADATA = ".metadata"
#: Of Megatron-core.
_COMMON = "common.pt"
_MAX_METADATA_NBYTES = 1 << 30


class Refusal(NamedTuple):
    """Why an item is not loaded.

    Attributes:
        reason: In words.
        is_portable: Whether it might be, if its classes were allowed.
    """

    reason: str
    is_portable: bool = True


class DcpReader:
    """A directory of torch.distributed.checkpoint.

    Args:
        folder: The directory.
        block_nbytes: The unit in which it is read.
        order: What `rules.byte_order` gave to the caller.
    """

    def __init__(self, folder: Folder, block_nbytes: int, order: Any = None) -> None:
        self._folder = folder
        self._block_nbytes = block_nbytes
        self._order = order
        self._starts: dict[str, int | None] = {}
        self._apart: dict[str, tuple[FlatState, str]] = {}
        self._refused: dict[str, Refusal] | None = None

    @property
    def version(self) -> Hashable:
        """See `interface.ForeignReader`."""
        return read_as(self._folder.version(METADATA), self._order), self._allowed

    @functools.cached_property
    def _allowed(self) -> Hashable:
        return allowed()

    @functools.cached_property
    def _contents(self) -> Contents:
        data = self._folder.read_small(METADATA, _MAX_METADATA_NBYTES, "no metadata of DCP")
        try:
            return Contents(read_metadata(data))
        except FormatError as error:
            if isinstance(error, OverlapError):
                self._require_no_safetensors(error.file, error.start)
            raise at(self._folder.join(METADATA), error) from None

    def _require_no_safetensors(self, file: str, start: int) -> None:
        """Refuse data that no reader of DCP takes; its metadata has all of it in one place.

        Raises:
            FormatError: A safetensors file is there, behind values that are no tensors.
        """
        there = self._folder.status(file) is not None
        if there and self._folder.read(file, start + 8, start + 9) == b"{":
            way = "" if start else "; load each such file by its own path"
            raise FormatError(
                f"{self._folder.join(file)!r} has tensors as a safetensors file has them: they were"
                f" saved with serialization_format=SAFETENSORS, which DCP does not load either{way}"
            )

    def manifest(self) -> Manifest:
        """Read the metadata, and the values that are no tensors."""
        version = read_as(self._folder.version(METADATA), self._order)
        status = self._folder.status(METADATA)
        contents = self._contents
        try:
            files = [(name, item.nbytes) for name, item in contents.chunks.items()]
            tensors = list(contents.tensors)
            state: dict[str, Encoded] = {t.name: place(i) for i, t in enumerate(tensors)}
            names = set(contents.names)
            for name, item in contents.values.items():
                state[item.fqn] = self._value(name, item, files, tensors, names)
            return make_manifest(
                writer="torch.distributed.checkpoint",
                version=version,
                modified_s=status.modified_s if status is not None else 0.0,
                block_nbytes=self._block_nbytes,
                files=files,
                tensors=tensors,
                tree=numbered_below(
                    encode_places(nest({fqn: state[fqn] for fqn in contents.names}, contents.paths))
                ),
                beside=self._beside(),
                seen=self._folder.seen(),
            )
        except CorruptionError:
            raise
        except FormatError as error:
            raise at(self._folder.root, error) from None

    def _beside(self) -> dict[str, str]:
        """Say what is there besides; see `make_manifest`."""
        if self._folder.status(_COMMON) is None:
            return {}
        note = "what Megatron-core does not shard is no part of this; take it by this path"
        return {_COMMON: f"{self._folder.join(_COMMON)}: {note}"}

    def _value(
        self,
        name: str,
        item: Item,
        files: list[tuple[str, int]],
        tensors: list[TensorEntry],
        names: set[str],
    ) -> Encoded:
        """Load a value, or make one that cannot be opened of it.

        Args:
            name: The range that has it.
            item: What is there.
            files: Takes a file for each tensor in it.
            tensors: Takes the tensors.
            names: Of all tensors and values; takes those of the tensors in it.
        """
        from ckptio.foreign import values  # noqa: PLC0415  # imports torch

        reason = self._refusals().get(name)
        if reason is not None:
            nbytes = place_of(name)[2]
            files.append((name, nbytes))
            chunk = Chunk(len(files) - 1, 0)
            tensors.append(TensorEntry(item.fqn, "uint8", (nbytes,), (chunk,)))
            return Encoded({TAG: "bytes", "t": len(tensors) - 1})
        flat, outline = self._taken(name)
        return values.add_flat(
            flat,
            lambda inner: distinct_name(f"{item.fqn}.{inner}", names),
            lambda number: f"{name}#{numbered(number, outline)}",
            files,
            tensors,
        )

    def _taken(self, name: str) -> tuple[FlatState, str]:
        """Take a value apart, once, and sum up what it is; see `rules`."""
        from ckptio.foreign.values import take_apart  # noqa: PLC0415  # imports torch

        if name not in self._apart:
            flat = take_apart(self._load(name))
            self._apart[name] = flat, outline_of(flat)
        return self._apart[name]

    def _load(self, name: str) -> Any:
        """Load an item whole.

        Raises:
            UnpicklingError: It is more than data.
            FormatError: It is not whole.
        """
        from ckptio.foreign.values import load_bytes  # noqa: PLC0415  # imports torch

        file, start, nbytes = self._checked(name)
        try:
            with under(self._order):
                return load_bytes(self._folder.read(file, start, start + nbytes))
        except FormatError as error:
            raise FormatError(f"bytes [{start}, {start + nbytes}) of {file!r}: {error}") from None

    def _refusals(self) -> dict[str, Refusal]:
        """Say which items cannot be loaded, and why."""
        if self._refused is None:
            names = sorted(self._contents.values, key=place_of)  # as they lie in the files
            reasons = self._folder.each(self._reason, names)
            self._refused = {
                name: reason
                for name, reason in zip(names, reasons, strict=True)
                if reason is not None
            }
        return self._refused

    def _reason(self, name: str) -> Refusal | None:
        """Say why an item cannot be loaded; `None` if it can."""
        from ckptio.foreign.values import UnportableError  # noqa: PLC0415  # imports torch

        unknown = self._contents.unknown.get(name)
        if unknown is not None:
            return Refusal(unknown, is_portable=False)
        try:
            self._taken(name)
        except UnpicklingError as error:
            return Refusal(first_sentence(error))
        except UnportableError as error:
            return Refusal(str(error), is_portable=False)
        return None

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Look whether items are there, whole, and what the metadata says they are."""
        refused = self._refusals()
        wanted = [name for name in names if name in refused]
        if wanted:
            raise self._refusal(wanted)
        return list(self._folder.each(self._size, names))

    def _size(self, name: str) -> int:
        item = self._contents.chunks.get(name)
        if item is None:
            return int(self._inner(name).nbytes)
        if self._start_of(name, item) is None:
            self._whole(name, item).close()  # tried now, before any target changes
        return item.nbytes

    def _refusal(self, wanted: Sequence[str]) -> FormatError:
        """Say what is not loaded, and what to do."""
        refused = self._refusals()
        for name in wanted:
            if not refused[name].is_portable:
                return FormatError(
                    f"{self._folder.root!r}: {self._contents.values[name].fqn!r}:"
                    f" {refused[name].reason}; leave it out with select="
                )
        fqns = [self._contents.values[name].fqn for name in wanted]
        return FormatError(
            f"{self._folder.root!r} holds objects that are more than data, and loading them may run"
            f" anything: {some_of(fqns)}; leave them out with select=, or, if you trust the"
            " file, allow their classes with torch.serialization.safe_globals"
        )

    def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Open a chunk of a tensor, or a tensor inside a value."""
        from ckptio.foreign.values import source_of  # noqa: PLC0415  # imports torch

        item = self._contents.chunks.get(name)
        if item is None:
            return source_of(self._inner(name))
        start = self._start_of(name, item)
        file, first, _ = self._checked(name)
        if start is None:
            return self._whole(name, item)
        return self._folder.open(file, nbytes, first + start)

    def _whole(self, name: str, item: Item) -> Source:
        """Load a chunk that does not lie in one piece, as torch does."""
        from ckptio.foreign.values import bytes_of  # noqa: PLC0415  # imports torch

        if item.nbytes > place_of(name)[2]:  # one element that stands for many, say
            raise self._bad(item, f"{item.nbytes} bytes of it lie in {place_of(name)[2]}")
        try:
            return bytes_of(self._load(name), item.dtype, item.shape)
        except UnpicklingError as error:
            raise self._bad(item, f"it is more than data: {first_sentence(error)}") from None
        except FormatError as error:
            raise self._bad(item, error) from None

    def _inner(self, name: str) -> Any:
        """Give a tensor inside a value.

        Raises:
            CheckpointChangedError: It is of what was made under another rule.
        """
        item, _, number = name.rpartition("#")
        if item not in self._contents.values or item in self._refusals():
            raise made_otherwise(self._folder.root)
        flat, outline = self._taken(item)
        return flat.sources[number_of(number, outline, self._folder.root)]

    def _start_of(self, name: str, item: Item) -> int | None:
        """Find the bytes of a chunk in its item; `None` if torch has to load it whole."""
        if name not in self._starts:
            file, first, nbytes = self._checked(name)

            def read(start: int, stop: int) -> bytes:
                return self._folder.read_within(nbytes, file, first + start, first + stop)

            try:
                self._starts[name] = find_tensor(
                    read, nbytes, item.dtype, item.shape, is_big=is_big(self._order)
                )
            except FormatError as error:
                self._require_no_safetensors(file, first)
                raise self._bad(item, error) from None
        return self._starts[name]

    def _bad(self, item: Item, error: object) -> FormatError:
        return FormatError(f"{self._folder.root!r}: {item.fqn!r}: {error}")

    def _checked(self, name: str) -> tuple[str, int, int]:
        """Give file, start and bytes of an item that is there.

        Raises:
            CorruptionError: It is not.
        """
        file, start, nbytes = place_of(name)
        found = self._folder.part_nbytes(file, start, nbytes)
        if found == nbytes:
            return file, start, nbytes
        item = self._contents.chunks.get(name) or self._contents.values[name]
        problem = "no such regular file" if found is None else f"only {found} bytes of {nbytes}"
        raise CorruptionError(
            problem,
            path=self._folder.root,
            file=file,
            start=start,
            stop=start + nbytes,
            fqns=[item.fqn],
        )
