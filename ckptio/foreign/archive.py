"""Archives of `torch.save`: what is checked before torch sees one, and where a tensor lies in it.

Such a file is a zip archive whose members are stored as they are. `require_stored` and
`require_plain` refuse one that would become more than it is. `find_tensor` finds the bytes of a
tensor in a file of it alone, so that a part can be read without the rest; what is not laid out that
simply is left to torch.
"""

from __future__ import annotations

import copy
import io
import zipfile
from typing import IO, TYPE_CHECKING, Any

from ckptio.errors import FormatError, StorageError
from ckptio.foreign.pickles import UNTYPED, UnpicklingError, read_tensor
from ckptio.foreign.scan import NUM_OLD_PICKLES, Scanned, scan_pickle, together
from ckptio.layout import DTYPES, nbytes_of, row_major_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: How an archive begins.
ZIP = b"PK\x03\x04"
_WINDOW_NBYTES = 8192
_MAX_PICKLE_NBYTES = 1 << 20
#: Of the directory of an archive with one tensor in it, which has a dozen members.
_MAX_READ_NBYTES = 1 << 20
LOCAL_HEADER_NBYTES = 30
#: A name in a directory is UTF-8; IBM's code page 437 otherwise.
UTF8_FLAG = 0x800
_NUM_V2, _NUM_V3 = 7, 8  # a name and at least so many arguments


class Window(io.RawIOBase):
    """A range of a file as a file. Its head and its tail are read at once, and kept.

    Args:
        read: Reads `[start, stop)` of it.
        nbytes: Its size.
        max_read_nbytes: What is read at a time, at most.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        nbytes: int,
        max_read_nbytes: int = _MAX_READ_NBYTES,
    ) -> None:
        self._max_read_nbytes = max_read_nbytes
        self._read = read
        self.nbytes = nbytes
        self._position = 0
        self._tail_start = max(0, nbytes - _WINDOW_NBYTES)
        self._head = read(0, min(nbytes, _WINDOW_NBYTES))
        self._tail = read(self._tail_start, nbytes)

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """See `io.RawIOBase`."""
        base = (0, self._position, self.nbytes)[whence]
        self._position = base + offset
        if self._position < 0:
            raise OSError("a position before the file")
        return self._position

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._position

    def read(self, nbytes: int | None = -1, /) -> bytes:
        """See `io.RawIOBase`."""
        start = self._position
        stop = self.nbytes
        if nbytes is not None and nbytes >= 0:
            stop = min(stop, start + nbytes)
        if stop <= start:
            return b""
        if stop <= len(self._head):
            data = self._head[start:stop]
        elif start >= self._tail_start:
            data = self._tail[start - self._tail_start : stop - self._tail_start]
        elif stop - start > self._max_read_nbytes:
            raise FormatError("its directory, or another part, is larger than any is")
        else:
            data = self._read(start, stop)
        self._position = start + len(data)
        return data


def find_tensor(
    read: Callable[[int, int], bytes],
    nbytes: int,
    dtype: str,
    shape: tuple[int, ...],
    *,
    is_big: bool = False,
) -> int | None:
    """Find the row-major bytes of a tensor.

    Args:
        read: Reads `[start, stop)` of the archive.
        nbytes: Its size.
        dtype: Element type that the tensor should have.
        shape: Shape that it should have.
        is_big: Whether an archive that does not say its byte order is big-endian.

    Returns:
        Where its first byte is; `None` if it does not lie there in one piece.

    Raises:
        FormatError: It is another tensor, or no archive.
        StorageError: What `read` raises.
    """
    window = Window(read, nbytes)
    try:
        with zipfile.ZipFile(window) as archive:
            found = _find(archive, window, dtype, shape, is_big=is_big)
    except (FormatError, StorageError):
        raise
    except Exception as error:  # a damaged archive raises anything
        raise FormatError(f"not a tensor as torch.save writes it: {error!r}") from None
    if found is not None and found + nbytes_of(shape, dtype) > nbytes:
        raise FormatError("the bytes of the tensor lie behind the end of its item")
    return found


def require_stored(archive: zipfile.ZipFile, nbytes: int) -> dict[str, zipfile.ZipInfo]:
    """Refuse an archive that would become more than it is: torch writes members as they are.

    Args:
        archive: The archive.
        nbytes: Its size.

    Returns:
        Its members, by name.

    Raises:
        FormatError: One is compressed, or they lie over each other; or it is TorchScript.
    """
    members = archive.infolist()
    if any(info.filename.endswith("/constants.pkl") for info in members):
        raise FormatError(
            "it is TorchScript, which holds code: save torch.jit.load(path).state_dict(), and load"
            " that"
        )
    if any(info.compress_type != zipfile.ZIP_STORED for info in members):
        raise FormatError("a member of the archive is compressed, as torch.save writes none")
    if sum(info.file_size for info in members) > nbytes:
        raise FormatError("the members of the archive have more bytes than the archive")
    stops = stops_of(archive)
    if len(stops) < len(members) or any(
        info.header_offset + LOCAL_HEADER_NBYTES + len(name_in(info)) + info.file_size
        > stops[info.header_offset]
        for info in members
    ):
        raise FormatError("the members of the archive lie over each other")
    return {info.filename: info for info in members}


def stops_of(archive: zipfile.ZipFile) -> dict[int, int]:
    """Say where each member ends at the latest, by where its header is."""
    starts = sorted({info.header_offset for info in archive.infolist()})
    return dict(zip(starts, [*starts[1:], archive.start_dir], strict=True))


def name_in(info: zipfile.ZipInfo) -> bytes:
    """Give the name of a member as it is in the archive."""
    return info.orig_filename.encode("utf-8" if info.flag_bits & UTF8_FLAG else "cp437")


def own_header_nbytes(header: bytes, name: bytes) -> int:
    """Give the size of the header that a member begins with.

    Args:
        header: Its first bytes, as far as the name goes.
        name: The name that the directory has.

    Raises:
        FormatError: It is no header of that name.
    """
    named = header[LOCAL_HEADER_NBYTES : LOCAL_HEADER_NBYTES + len(name)]
    if not header.startswith(ZIP) or named != name or header[26] | header[27] << 8 != len(name):
        raise FormatError("the directory of the archive refers to no member")
    return LOCAL_HEADER_NBYTES + len(name) + (header[28] | header[29] << 8)


def read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read a member whole.

    torch writes none of the sums of members if it is told so
    (`torch.serialization.set_crc32_options`), and looks at none when it loads. So a member of
    the sum zero is taken as it is. One that has a sum has to have its own: what was damaged
    since is found, as far as it is structure and not the bytes of tensors, which are read by
    ranges. Rejected: to look at no sum, as torch does, which loads a damaged value as another.

    Args:
        archive: The archive.
        info: The member.

    Raises:
        zipfile.BadZipFile: It has another sum, or is no member.
        EOFError: It is shorter than the directory says.
    """
    if not info.CRC:
        info = copy.copy(info)
        del info.CRC  # of one that has none, `zipfile` compares none
    return archive.read(info)


def require_plain(file: IO[bytes]) -> Scanned:
    """Refuse a file of torch.save that would become more than it is.

    Args:
        file: The file: an archive, or what was written before there were any.

    Returns:
        What its pickles are.

    Raises:
        UnpicklingError: They have what torch does not read.
        FormatError: It would.
    """
    nbytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    is_archive = file.read(len(ZIP)) == ZIP
    file.seek(0)
    try:
        if not is_archive:
            scanned = [scan_pickle(file) for _ in range(NUM_OLD_PICKLES)]
            _require_filled(scanned)
            return together(scanned)
        with zipfile.ZipFile(file) as archive:
            members = require_stored(archive, nbytes)
            pickles = [info for name, info in members.items() if is_pickle(name)]
            return together(scan_pickle(io.BytesIO(read_member(archive, info))) for info in pickles)
    except (FormatError, UnpicklingError):
        raise
    except Exception as error:  # a damaged archive raises anything
        raise FormatError(f"it is no whole archive, as one that was cut off: {error!r}") from None
    finally:
        file.seek(0)


def _require_filled(pickles: Sequence[Scanned]) -> None:
    """Refuse an old file with a storage that it has no bytes for, or has bytes for no storage.

    torch makes each storage that a tensor refers to, fills those that the last pickle lists,
    and leaves in the others whatever the memory had.

    Raises:
        FormatError: There is one.
    """
    state, listed = pickles[-2:]
    if state.storages != listed.listed or "" in state.storages:
        raise FormatError("its list of storages is not that of its tensors")


def is_pickle(name: str) -> bool:
    """Whether torch may take a member of this name for its pickle: in any case, as it looks."""
    return name.lower().endswith("data.pkl")


def _find(
    archive: zipfile.ZipFile, window: Window, dtype: str, shape: tuple[int, ...], *, is_big: bool
) -> int | None:
    members = require_stored(archive, window.nbytes)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1 or members[pickles[0]].file_size > _MAX_PICKLE_NBYTES:
        raise FormatError("not a tensor as torch.save writes it")
    prefix = pickles[0].removesuffix("data.pkl")
    order = members.get(f"{prefix}byteorder")
    if order is None:
        is_little = not is_big
    else:
        is_little = order.file_size <= _WINDOW_NBYTES and read_member(archive, order) == b"little"
    if not is_little:
        return None
    described = read_tensor(read_member(archive, members[pickles[0]]))
    storage = None if described is None else _simple(described, dtype, shape)
    if storage is None:
        return None
    key, start = storage
    info = members.get(f"{prefix}data/{key}")
    if info is None:
        return None
    if start + nbytes_of(shape, dtype) > info.file_size:
        raise FormatError("the storage of the tensor is smaller than the tensor")
    window.seek(info.header_offset)
    name = name_in(info)
    header = window.read(LOCAL_HEADER_NBYTES + len(name))
    first = info.header_offset + own_header_nbytes(header, name)
    if first + info.file_size > stops_of(archive)[info.header_offset]:
        raise FormatError("the members of the archive lie over each other")
    return first + start


def _simple(
    described: tuple[Any, ...], dtype: str, shape: tuple[int, ...]
) -> tuple[str, int] | None:
    """Give the storage of a contiguous tensor, and where in it the tensor begins, in bytes."""
    kind, *args = described
    if kind == "_rebuild_tensor_v2" and len(args) in (_NUM_V2 - 1, _NUM_V2):
        storage, offset, size, stride, _, hooks, *rest = args
        found = storage[1]
    elif kind == "_rebuild_tensor_v3" and len(args) in (_NUM_V3 - 1, _NUM_V3):
        storage, offset, size, stride, _, hooks, found, *rest = args
        if storage[1] != UNTYPED:
            return None
    else:
        return None
    if hooks or any(rest) or storage[0] != "storage":
        return None
    if found != dtype or tuple(size) != shape:
        raise FormatError(f"a tensor {found} {tuple(size)} instead of {dtype} {shape}")
    steps = zip(shape, stride, row_major_strides(shape), strict=True)
    if type(offset) is not int or offset < 0 or any(n > 1 and a != b for n, a, b in steps):
        return None
    return str(storage[2]), offset * DTYPES[dtype].itemsize
