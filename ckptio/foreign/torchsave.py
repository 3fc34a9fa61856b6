"""Files that `torch.save` wrote, read by ranges, through `torch.load` with `weights_only`.

What classes may be in such a file is torch's to say (`torch.serialization.safe_globals`
allows more).

torch can only map a file that is there, and a map ends the process if somebody writes the file
over. So torch is given one that is nearly empty: a file in memory, as long as the real one, that
has the directory of the archive and its small members, and holes where tensors are. torch makes
tensors of it with `weights_only`, as of any file; where each lies in the mapped memory says which
bytes of the real file it is.

A tensor that lies elsewhere was made of holes while it was loaded, and one of another byte order
would have to be: then a local file is loaded as a whole, and one in an object store is refused.
Files of before 1.6 are no archives, and are loaded as a whole, too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import zipfile
from typing import TYPE_CHECKING, Any

import torch

from ckptio.errors import CheckpointChangedError, FormatError, StorageError
from ckptio.foreign.archive import (
    LOCAL_HEADER_NBYTES,
    ZIP,
    Window,
    is_pickle,
    name_in,
    read_member,
    require_plain,
    require_stored,
    stops_of,
)
from ckptio.foreign.folder import LocalFolder
from ckptio.foreign.holes import NoRoomError, file_of_holes, header_of, mapped
from ckptio.foreign.interface import at, make_manifest, with_files
from ckptio.foreign.members import Member, Members
from ckptio.foreign.pickles import UnpicklingError
from ckptio.foreign.refusals import of_objects, of_pickle, of_whole
from ckptio.foreign.rules import allowed, is_big, number_of, numbered, outline_of, read_as, under
from ckptio.foreign.scan import Scanned, scan_pickle, together
from ckptio.foreign.standins import Taken, load_whole, load_with_stand_ins, take_apart_data
from ckptio.foreign.values import add_flat, load_file, source_of
from ckptio.format.encode import TAG
from ckptio.state.tree import tensor_index, walk
from ckptio.storage.files import write_at

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from ckptio.foreign.folder import Folder
    from ckptio.format.manifest import Manifest, TensorEntry
    from ckptio.state.flatten import FlatState
    from ckptio.storage.streams import AwaitedSource, Source

#: Of a member that is no tensor: pickled structure.
_MAX_MEMBER_NBYTES = 1 << 30
_MAX_DIRECTORY_NBYTES = 1 << 28
#: Of the names that tensors have in the manifest.
_PREFIX = "tensor-"
_OTHER_ORDER = "its bytes are in another order than this machine's"
_RETYPED = "it has tensors of two types in one storage without bytes; copy the file to a local one"


class _NotByRangesError(FormatError):
    """A file can be loaded, but only as a whole."""


class TorchSaveReader:
    """A file of `torch.save`.

    Args:
        folder: Its directory.
        name: Its name there.
        block_nbytes: The unit in which it is read.
        order: What `rules.byte_order` gave to the caller.
    """

    def __init__(self, folder: Folder, name: str, block_nbytes: int, order: Any) -> None:
        self._folder = folder
        self._name = name
        self._block_nbytes = block_nbytes
        self._order = order

    @property
    def version(self) -> Hashable:
        """See `interface.ForeignReader`."""
        return read_as(self._folder.version(self._name), self._order), self._allowed

    @functools.cached_property
    def _allowed(self) -> Hashable:
        return allowed()

    @property
    def _flat(self) -> FlatState:
        """The state; its tensors have places, and no bytes, unless it is loaded as a whole.

        Raises:
            UnknownFormatError: It is one object that is more than data.
        """
        if self._taken.whole:
            raise of_whole(self._folder.join(self._name), self._taken)
        return self._taken.flat

    @functools.cached_property
    def _taken(self) -> Taken:
        """The state, taken apart at the first look at it."""
        path = self._folder.join(self._name)
        status = self._folder.status(self._name)
        if status is None:
            raise CheckpointChangedError(self._folder.root)
        self._members = Members(self._folder, self._name, [])
        self._memory: list[tuple[int, int, int]] = []
        self._scanned: list[Scanned] = []
        try:
            with under(self._order):
                return self._load(path, status.nbytes)
        except UnpicklingError as error:
            raise of_pickle(path, error) from None
        except FormatError as error:
            raise at(path, error) from None

    def _load(self, path: str, nbytes: int) -> Taken:
        """Load it by ranges, or as a whole where that cannot be."""
        try:
            return self._load_outline(nbytes)
        except (_NotByRangesError, NoRoomError):
            if not isinstance(self._folder, LocalFolder):
                raise
        self._memory = []
        return take_apart_data(load_whole(path))

    def _load_outline(self, nbytes: int) -> Taken:
        """Load a state of tensors without bytes; one of before 1.6 is loaded as a whole.

        Raises:
            _NotByRangesError: Its tensors are not as they lie in the file.
        """
        if self._folder.read(self._name, 0, len(ZIP)) != ZIP:
            if isinstance(self._folder, LocalFolder):
                raise _NotByRangesError("it is no archive")
            data = io.BytesIO(self._folder.read(self._name, 0, nbytes))
            scanned = require_plain(data)
            return take_apart_data(load_with_stand_ins(lambda: load_file(data), scanned))
        with self._with_holes(nbytes) as fd:
            file = f"/proc/self/fd/{fd}"
            state = load_with_stand_ins(
                lambda: torch.load(file, map_location="cpu", weights_only=True, mmap=True),
                together(self._scanned),
            )
            self._memory = mapped(fd)
        taken = take_apart_data(state)
        self._require_places(taken)
        return taken

    @functools.cached_property
    def _outlined(self) -> str:
        """What the names of tensors end with; see `rules`."""
        return outline_of(self._flat, self._taken.refused)

    def manifest(self) -> Manifest:
        """Take the state apart."""
        version = read_as(self._folder.version(self._name), self._order)
        status = self._folder.status(self._name)
        flat = self._flat
        files: list[tuple[str, int]] = []
        tensors: list[TensorEntry] = []
        end = self._outlined
        tree = add_flat(flat, str, lambda n: _PREFIX + numbered(n, end), files, tensors)
        order = sorted(range(len(files)), key=self._lies_at)
        return make_manifest(
            writer="torch.save",
            version=version,
            modified_s=status.modified_s if status is not None else 0.0,
            block_nbytes=self._block_nbytes,
            files=[files[number] for number in order],
            tensors=with_files(tensors, order),
            tree=tree.node,
            seen=self._folder.seen(),
        )

    @contextlib.contextmanager
    def _with_holes(self, nbytes: int) -> Iterator[int]:
        """Make the file with holes, and lend its descriptor to the `with` block.

        What the block raises is turned, too: it has torch load the file.

        Raises:
            _NotByRangesError: torch cannot load it so. Of a local file, loading it whole says what
                is wrong, if something is.
            NoRoomError: There is no such file here.
        """
        fd = file_of_holes(nbytes, self._folder.join(self._name))
        try:
            try:
                window = Window(self._read, nbytes, _MAX_DIRECTORY_NBYTES)
                with zipfile.ZipFile(window) as archive:
                    self._outline(archive, fd, nbytes)
                yield fd
            except (FormatError, UnpicklingError, StorageError):
                raise
            except Exception as error:
                # a damaged file raises anything, and so do the indices of sparse tensors: holes
                raise _NotByRangesError(f"torch.load cannot read it: {error}") from None
        finally:
            os.close(fd)

    def _outline(self, archive: zipfile.ZipFile, fd: int, nbytes: int) -> None:
        """Write everything but tensors."""
        stored, stops = require_stored(archive, nbytes), stops_of(archive)
        members: list[Member] = []
        if is_big(self._order) and not any(name.endswith("/byteorder") for name in stored):
            raise _NotByRangesError(_OTHER_ORDER)
        start = archive.start_dir
        write_at(fd, self._read(start, nbytes), start)
        for name, info in stored.items():
            if info.header_offset < 0:
                raise FormatError(f"member {name!r} begins before the file")
            encoded = name_in(info)
            # nothing behind the name, whatever the real header has there: that is looked at
            # when a tensor is read
            write_at(fd, header_of(encoded, info), info.header_offset)
            start = info.header_offset + LOCAL_HEADER_NBYTES + len(encoded)
            if "/data/" in name:
                if info.file_size:
                    header, stop = info.header_offset, stops[info.header_offset]
                    members.append(Member(start, info.file_size, header, stop, encoded))
                continue
            if info.file_size > _MAX_MEMBER_NBYTES:
                raise FormatError(f"member {name!r} has {info.file_size} bytes")
            data = read_member(archive, info)
            if is_pickle(name):
                self._scanned.append(scan_pickle(io.BytesIO(data)))
            if name.endswith("/byteorder") and data != b"little":
                raise _NotByRangesError(_OTHER_ORDER)
            write_at(fd, data, start)
        self._require_types(stored)
        self._members = Members(self._folder, self._name, members)

    def _require_types(self, stored: Mapping[str, zipfile.ZipInfo]) -> None:
        """Refuse tensors of two types in one storage without bytes.

        Raises:
            _NotByRangesError: There are some. torch gives both the type of the first in a file that
                it maps, and each its own otherwise.
        """
        empty = {name.rpartition("/")[2] for name, info in stored.items() if not info.file_size}
        if any(empty & scanned.retyped for scanned in self._scanned):
            raise _NotByRangesError(_RETYPED)

    def _read(self, start: int, stop: int) -> bytes:
        return self._folder.read(self._name, start, stop)

    def _require_places(self, taken: Taken) -> None:
        """Refuse tensors that are not in the file.

        Raises:
            _NotByRangesError: There is one.
        """
        if not self._memory:
            return
        for name, node in walk("", taken.flat.tree):
            index = tensor_index(node)
            assert index is not None  # noqa: S101  # a tree that was made here
            if index in taken.refused:
                continue
            source = taken.flat.sources[index]
            is_tensor = type(node[TAG]) is int or node[TAG] == "view"
            if is_tensor and source.numel() and self._place_of(source.untyped_storage()) is None:
                raise _NotByRangesError(
                    f"{name!r} is made while it is loaded, and cannot be read by ranges; copy the"
                    " file to a local one"
                )

    def _place_of(self, storage: torch.UntypedStorage) -> int | None:
        """Say where in the file with holes a storage begins; `None` if it is not there."""
        address = storage.data_ptr()
        for first, stop, offset in self._memory:
            if first <= address < stop:
                return address - first + offset
        return None

    def _lies_at(self, number: int) -> int:
        """Say where a tensor begins in the file with holes; before all if it is not there."""
        source = self._flat.sources[number]
        place = self._place_of(source.untyped_storage()) if self._memory else None
        return -1 if place is None else place + int(source.storage_offset()) * source.itemsize

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Look whether tensors are there, and give their bytes.

        Raises:
            UnknownFormatError: One of them stands for an object that is more than data.
            CheckpointChangedError: They are of what was made under another rule.
        """
        held_back = self._taken.refused
        numbers = [self._number_of(name) for name in names]
        if refused := [held_back[n] for n in numbers if n in held_back]:
            raise of_objects(self._folder.join(self._name), refused, self._taken)
        return list(self._folder.each(self._size, numbers))

    def _number_of(self, name: str) -> int:
        path = self._folder.join(self._name)
        return number_of(name.removeprefix(_PREFIX), self._outlined, path)

    def _size(self, number: int) -> int:
        self._range_of(self._flat.sources[number])  # whole, or it raises
        return self._flat.specs[number].nbytes

    def _range_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Give start and bytes of a tensor, or of all that it is a view of.

        Returns:
            `None` if it is in memory: bytes that were in the pickle.
        """
        if not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        place = self._place_of(storage)
        if place is None:
            return None
        try:
            if _is_plain(tensor):
                inside = int(tensor.storage_offset()) * tensor.itemsize
                length = tensor.numel() * tensor.itemsize
                return self._members.real(place + inside, length), length
            return self._members.real(place, storage.nbytes()), storage.nbytes()
        except FormatError as error:
            raise at(self._folder.join(self._name), error) from None

    def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Give the bytes of a tensor."""
        tensor = self._flat.sources[self._number_of(name)]
        found = self._range_of(tensor)
        if found is None:
            return source_of(tensor)
        start, length = found
        if _is_plain(tensor):
            return self._folder.open(self._name, nbytes, start)
        data = torch.frombuffer(bytearray(self._read(start, start + length)), dtype=torch.uint8)
        whole = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(data.untyped_storage())
        view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        view = torch._neg_view(view) if tensor.is_neg() else view  # noqa: SLF001  # the only way
        return source_of(view.conj() if tensor.is_conj() else view)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in row-major order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
