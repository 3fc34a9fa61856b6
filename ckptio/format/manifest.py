"""The manifest: what a checkpoint is made of, written last, and so the commit.

It is one JSON document whose last member is the crc32c of every byte before it, so that
no byte of it can change unseen. It names files, sizes, a checksum for each block of each
file, where each tensor lies, and the tree of the state with all values that are no
tensors. README.md beside this has the rules and their reasons.

Parsing is strict: what comes out is consistent in itself (offsets inside files, no two
chunks on the same bytes, chunks that fill their tensor), so that nobody behind the
parser needs to doubt it, and no allocation is larger than files whose sizes are checked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from ckptio.config import PAGE_NBYTES
from ckptio.errors import FormatError, FormatVersionError
from ckptio.format.checksum import crc32c, unpack_checksums
from ckptio.format.earlier import require_first
from ckptio.layout import DTYPES, Box, nbytes_of, numel
from ckptio.tiling import find_overlap, is_grid

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Version that is written, and the last that is read; all before it are read too.
FORMAT_VERSION = 2
#: Of a manifest that was made in memory of what another program wrote; no file has it.
FOREIGN_VERSION = 0
MANIFEST_NAME = "manifest.json"
#: The name is a common one: another program's file begins otherwise.
OPENING = b'{"ckptio":'
#: Of a tensor that is no part of the state: what torch.distributed.checkpoint knows besides.
DOCUMENT_NAME = "__torch.distributed.checkpoint__"
#: A larger manifest is refused unread. One million chunks take about 100 MB.
MAX_MANIFEST_NBYTES = 1 << 30
#: Dimensions, elements and offsets stay below this, so that sums never overflow 64 bits.
MAX_EXTENT = 1 << 56
MAX_DIMS = 64
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")
_HOST = re.compile(r"[\x21-\x7e]{1,255}\Z")
_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n\Z')
TAIL_NBYTES = len(b',"crc32c":"00000000"}\n')

Scalar = None | bool | int | float | str
#: Plain values by name, at most one level deep, so that it needs no limits of its own.
Metadata = dict[str, Scalar | dict[str, Scalar]]


class FileEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A data file.

    Attributes:
        name: Its name inside the checkpoint's directory.
        nbytes: Its size.
        packed_checksums: crc32c of each block, as little-endian 32-bit words; none if foreign.
        rank: The rank that wrote it.
    """

    name: str
    nbytes: int
    packed_checksums: bytes
    rank: int = 0

    def checksums(self) -> tuple[int, ...]:
        """Give the crc32c of each block."""
        return unpack_checksums(self.packed_checksums)

    def expected(self, block_nbytes: int) -> tuple[int | None, ...]:
        """Give the crc32c of each block, `None` for those of a foreign file, which has none."""
        if self.nbytes and not self.packed_checksums:
            return (None,) * -(-self.nbytes // block_nbytes)
        return self.checksums()


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A rectangular part of a tensor, at a place in a file, row-major.

    Attributes:
        file: Index of its file.
        start: Where it starts in the file, in bytes.
        global_offset: Its first index in the tensor; all zeros if not given.
        local_shape: Its shape; the tensor's if not given.
        copies: Other places of the same bytes: file and start.
    """

    file: int
    start: int
    global_offset: tuple[int, ...] | None = None
    local_shape: tuple[int, ...] | None = None
    copies: tuple[tuple[int, int], ...] = ()


class TensorEntry(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """A tensor (or an array, or bytes) of the state.

    Attributes:
        name: Its fully qualified name.
        dtype: torch's name of its element type.
        shape: Its global shape.
        chunks: Where its parts lie. Parts do not overlap and fill the tensor; one
            without elements may have none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return nbytes_of(self.shape, self.dtype)

    @property
    def box(self) -> Box:
        """All of it."""
        return Box((0,) * len(self.shape), self.shape)

    def box_of(self, chunk: Chunk) -> Box:
        """Give the part of it that a chunk is."""
        if chunk.global_offset is None or chunk.local_shape is None:
            return self.box
        return Box(chunk.global_offset, chunk.local_shape)

    def chunk_nbytes(self, chunk: Chunk) -> int:
        """Give the bytes of a chunk."""
        if chunk.local_shape is None:
            return self.nbytes
        return nbytes_of(chunk.local_shape, self.dtype)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is made of. Immutable, and consistent if it was parsed.

    Attributes:
        ckptio: Version of the format.
        writer: Version of the package that wrote it.
        save_id: Id of the save, 32 hexadecimal digits; in the name of each data file of ours.
        created: When it was made, just before the commit; ISO 8601, UTC.
        block_nbytes: Bytes under one checksum.
        files: Data files.
        tensors: Tensors, in the order in which the tree refers to them.
        tree: The state with its tensors by index, as `format.encode` writes it.
        hosts: Host of each rank that took part in the save; none if it was one rank alone.
        metadata: What was said of the checkpoint beside its state. Do not change it.
    """

    ckptio: int
    writer: str
    save_id: str
    created: str
    block_nbytes: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    tree: msgspec.Raw
    hosts: tuple[str, ...] = ()
    metadata: Metadata = {}

    def __repr__(self) -> str:
        """Name the save, and say how large it is: all tensors would be pages."""
        tensors = f"{len(self.tensors)} tensor{'s'[: len(self.tensors) != 1]}"
        files = f"{len(self.files)} file{'s'[: len(self.files) != 1]}"
        return (
            f"<Manifest of save {self.save_id}, {self.created}: {tensors} in {files},"
            f" {self.nbytes} bytes>"
        )

    @property
    def num_ranks(self) -> int:
        """Ranks that took part in the save."""
        return len(self.hosts) or 1

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote the checkpoint: its files have no checksums."""
        return self.ckptio == FOREIGN_VERSION

    @property
    def document(self) -> TensorEntry | None:
        """What torch.distributed.checkpoint knows besides; `None` if it did not save this."""
        return next((tensor for tensor in self.tensors if tensor.name == DOCUMENT_NAME), None)

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)


_version_decoder = msgspec.json.Decoder(
    msgspec.defstruct("_Version", [("ckptio", int)], frozen=True)
)
_decoder = msgspec.json.Decoder(Manifest)


def checked_document(data: bytes) -> bytes:
    """Give a manifest without its checksum, which is right.

    Raises:
        FormatError: `data` is not a manifest, or was damaged.
    """
    tail = _TAIL.search(data[-TAIL_NBYTES:])
    if tail is None and data[: len(OPENING)] != OPENING[: len(data)]:
        raise FormatError("this is no manifest of ckptio's: it neither begins nor ends like one")
    if tail is None:
        raise FormatError("the manifest is cut short: it does not end with its checksum")
    body = memoryview(data)[:-TAIL_NBYTES]
    if crc32c(body) != int(tail[1], 16):
        raise FormatError("the manifest is damaged: its bytes do not have its checksum")
    return bytes(body) + b"}"


def decode_manifest(data: bytes, *, is_passed_on: bool = False) -> Manifest:
    """Read a manifest.

    Args:
        data: Its bytes.
        is_passed_on: Also take one that another rank made of a foreign checkpoint, or has read
            and written again, with members that its version had not.

    Raises:
        FormatError: `data` is not a manifest, was damaged, or contradicts itself.
        FormatVersionError: It has a format this version does not read.
    """
    document = checked_document(data)
    try:
        version = _version_decoder.decode(document).ckptio  # type: ignore[attr-defined]  # defstruct
        is_foreign = is_passed_on and version == FOREIGN_VERSION
        if not 1 <= version <= FORMAT_VERSION and not is_foreign:
            raise FormatVersionError(
                f"the checkpoint has format {version} and this version of ckptio reads"
                f" 1 to {FORMAT_VERSION}; upgrade ckptio"
            )
        manifest = _decoder.decode(document)
        if version == 1 and not is_passed_on:
            require_first(document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the manifest is not what ckptio writes: {error}") from None
    if not is_foreign:
        _check_head(manifest)
    check_tensors(manifest)
    return manifest


def _check_head(manifest: Manifest) -> None:
    """Check everything but tensors."""
    if not re.fullmatch(r"[0-9a-f]{32}", manifest.save_id):
        raise FormatError(f"bad save id {manifest.save_id!r} in the manifest")
    if not 0 < manifest.block_nbytes < MAX_EXTENT or manifest.block_nbytes % PAGE_NBYTES:
        raise FormatError(f"bad block size {manifest.block_nbytes} in the manifest")
    check_hosts(manifest.hosts)
    check_names(manifest.files)
    for file in manifest.files:
        num_blocks = -(-file.nbytes // manifest.block_nbytes)
        if not 0 <= file.nbytes < MAX_EXTENT or len(file.packed_checksums) != 4 * num_blocks:
            raise FormatError(
                f"file {file.name!r} of {file.nbytes} bytes has"
                f" {len(file.packed_checksums)} bytes of checksums in the manifest"
            )
        if not 0 <= file.rank < manifest.num_ranks:
            raise FormatError(
                f"file {file.name!r} is of rank {file.rank} in a manifest of"
                f" {manifest.num_ranks} ranks"
            )


def check_names(files: Sequence[FileEntry]) -> None:
    """Check that names of files are different, and of files in the checkpoint's directory."""
    names: set[str] = set()
    for file in files:
        if not _FILE_NAME.match(file.name) or file.name == MANIFEST_NAME or file.name in names:
            raise FormatError(f"bad or repeated file name {file.name!r} in the manifest")
        names.add(file.name)


def check_hosts(hosts: Sequence[str]) -> None:
    """Check that names of hosts are short and printable."""
    for host in hosts:
        if not _HOST.match(host):
            raise FormatError(
                f"bad host {host!r}: a name has 1 to 255 printable ASCII characters, no spaces"
            )


def check_tensors(manifest: Manifest) -> None:
    """Check that chunks lie inside files and tensors, apart from each other.

    One pass, since checkpoints of 64,000 chunks are opened in a tenth of a second.

    Raises:
        FormatError: They do not.
    """
    itemsizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    spans: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    num_files = len(spans)
    # an empty tensor of another program's may begin anywhere: none of it is read
    ends = [MAX_EXTENT if manifest.is_foreign else file.nbytes for file in manifest.files]
    names: set[str] = set()
    for tensor in manifest.tensors:
        name, shape, chunks = tensor.name, tensor.shape, tensor.chunks
        itemsize = itemsizes.get(tensor.dtype, 0)
        count = _checked_numel(shape)
        if count < 0 or not itemsize or name in names:
            raise FormatError(
                f"tensor {name!r} {tensor.dtype} {shape} in the manifest is repeated, or has"
                " an unknown element type or an impossible shape"
            )
        names.add(name)
        chunk = chunks[0] if len(chunks) == 1 else None
        if chunk and chunk.global_offset is chunk.local_shape is None and not chunk.copies:
            # nearly all chunks of nearly all checkpoints
            file, start = chunk.file, chunk.start
            if 0 <= file < num_files and start >= 0 and not start % itemsize:
                if count:
                    spans[file].append((start, start + count * itemsize))
                elif start > ends[file]:
                    raise FormatError(f"tensor {name!r} begins behind the end of its file")
                continue
        _take_places(tensor, count, itemsize, spans, ends)
    _check_spans(manifest, spans)


def _take_places(
    tensor: TensorEntry,
    count: int,
    itemsize: int,
    spans: list[list[tuple[int, int]]],
    ends: list[int],
) -> None:
    """Add the bytes of every chunk of a tensor, and of every copy, to those of its file."""
    counts = _part_numels(tensor, count)
    for chunk, part in zip(tensor.chunks, counts, strict=True):
        for file, start in ((chunk.file, chunk.start), *chunk.copies):
            if not 0 <= file < len(spans) or start < 0 or start % itemsize:
                raise FormatError(f"tensor {tensor.name!r} has an impossible chunk in the manifest")
            if part:
                spans[file].append((start, start + part * itemsize))
            elif start > ends[file]:
                raise FormatError(f"tensor {tensor.name!r} begins behind the end of its file")


def _check_spans(manifest: Manifest, spans: list[list[tuple[int, int]]]) -> None:
    """Check that no byte of a file belongs to two tensors, and none lies behind its end."""
    for file, taken in zip(manifest.files, spans, strict=True):
        taken.sort()
        stop = 0
        for start, end in taken:
            if start < stop:
                raise FormatError(f"two tensors lie on byte {start} of {file.name!r}")
            stop = end
        if stop > file.nbytes:
            raise FormatError(f"a tensor ends at {stop} in {file.name!r} of {file.nbytes} bytes")


def _checked_numel(shape: tuple[int, ...]) -> int:
    """Elements of `shape`, or -1 where torch could not make it."""
    if len(shape) > MAX_DIMS:
        return -1
    count = span = 1
    for extent in shape:
        if extent < 0:
            return -1
        count *= extent
        span *= extent or 1
        if span >= MAX_EXTENT:
            return -1
    return count


def _part_numels(tensor: TensorEntry, count: int) -> list[int]:
    """Elements of each chunk of a tensor of `count` elements, which they fill exactly."""
    shape, chunks = tensor.shape, tensor.chunks
    offsets = [c.global_offset for c in chunks if c.global_offset is not None]
    shapes = [c.local_shape for c in chunks if c.local_shape is not None]
    if not offsets and not shapes:  # whole, each of them
        offsets, shapes = [(0,) * len(shape)] * len(chunks), [shape] * len(chunks)
    if not len(offsets) == len(shapes) == len(chunks) or not (
        {*map(len, offsets), *map(len, shapes)} <= {len(shape)}
    ):
        raise FormatError(f"tensor {tensor.name!r} has an impossible chunk in the manifest")
    counts = [numel(local) for local in shapes]
    if chunks and is_grid(shape, offsets, shapes):
        return counts
    for offset, local in zip(offsets, shapes, strict=True):
        for extent, first, part in zip(shape, offset, local, strict=True):
            if first < 0 or part < 0 or first + part > extent:
                raise FormatError(f"tensor {tensor.name!r} has an impossible chunk in the manifest")
    boxes = [box for box in zip(offsets, shapes, strict=True) if 0 not in box[1]]
    if sum(counts) != count or find_overlap(boxes):
        raise FormatError(f"the chunks of tensor {tensor.name!r} do not fill it exactly")
    return counts
