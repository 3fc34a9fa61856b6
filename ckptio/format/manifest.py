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

import itertools
import re
from typing import TYPE_CHECKING, Any

import msgspec

from ckptio.config import PAGE_NBYTES
from ckptio.errors import FormatError, FormatVersionError
from ckptio.format.checksum import crc32c, pack_checksums, unpack_checksums
from ckptio.layout import DTYPES, numel

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
#: A larger manifest is refused unread. One million chunks take about 100 MB.
MAX_MANIFEST_NBYTES = 1 << 30
#: Dimensions, elements and offsets stay below this, so that sums never overflow 64 bits.
MAX_EXTENT = 1 << 56
_MAX_DIMS = 64
_MAX_COMPARISONS = 64
_Region = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")
_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n\Z')
_TAIL_NBYTES = len(b',"crc32c":"00000000"}\n')


class FileEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A data file.

    Attributes:
        name: Its name inside the checkpoint's directory.
        nbytes: Its size.
        packed_checksums: crc32c of each block, as little-endian 32-bit words.
    """

    name: str
    nbytes: int
    packed_checksums: bytes

    def checksums(self) -> tuple[int, ...]:
        """Give the crc32c of each block."""
        return unpack_checksums(self.packed_checksums)


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A rectangular part of a tensor, at a place in a file, row-major.

    Attributes:
        file: Index of its file.
        start: Where it starts in the file, in bytes.
        global_offset: Its first index in the tensor; all zeros if not given.
        local_shape: Its shape; the tensor's if not given.
    """

    file: int
    start: int
    global_offset: tuple[int, ...] | None = None
    local_shape: tuple[int, ...] | None = None


class TensorEntry(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """A tensor (or an array, or bytes) of the state.

    Attributes:
        name: Its fully qualified name.
        dtype: torch's name of its element type.
        shape: Its global shape.
        chunks: Where its parts lie. Parts do not overlap and fill the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return numel(self.shape) * DTYPES[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is made of. Immutable, and consistent if it was parsed.

    Attributes:
        ckptio: Version of the format.
        writer: Version of the package that wrote it.
        save_id: Id of the save, 32 hexadecimal digits; in the name of each data file.
        created: When it was committed, ISO 8601, UTC.
        block_nbytes: Bytes under one checksum.
        files: Data files.
        tensors: Tensors, in the order in which the tree refers to them.
        tree: The state with its tensors by index, as `format.encode` writes it.
    """

    ckptio: int
    writer: str
    save_id: str
    created: str
    block_nbytes: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    tree: msgspec.Raw

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)


_version_decoder = msgspec.json.Decoder(
    msgspec.defstruct("_Version", [("ckptio", int)], frozen=True)
)
_decoder = msgspec.json.Decoder(Manifest)


def encode_manifest(
    *,
    writer: str,
    save_id: str,
    created: str,
    block_nbytes: int,
    files: Sequence[tuple[str, int, Sequence[int]]],
    tensors: bytes,
    tree: bytes,
) -> bytes:
    """Write a manifest.

    Args:
        writer: Version of the package.
        save_id: Id of the save.
        created: When, ISO 8601, UTC.
        block_nbytes: Bytes under one checksum.
        files: Name, size and checksums of each data file.
        tensors: What `encode_tensors` gave; kept with the plan, since it does not change
            from save to save.
        tree: The tree, as JSON.
    """
    head = msgspec.json.encode(
        {
            "ckptio": FORMAT_VERSION,
            "writer": writer,
            "save_id": save_id,
            "created": created,
            "block_nbytes": block_nbytes,
            "files": [(name, nbytes, pack_checksums(crcs)) for name, nbytes, crcs in files],
            "tensors": msgspec.Raw(tensors),
            "tree": msgspec.Raw(tree),
        }
    )
    body = head[:-1]  # without the closing brace: the checksum is the last member
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def encode_tensors(tensors: Sequence[TensorEntry]) -> bytes:
    """Write the tensor table of a manifest. Defaults of chunks are left out."""
    return msgspec.json.encode(
        [(t.name, t.dtype, t.shape, [_short(chunk) for chunk in t.chunks]) for t in tensors]
    )


def _short(chunk: Chunk) -> tuple[Any, ...]:
    """Leave out what a chunk that is its whole tensor does not need."""
    if chunk.global_offset is None:
        return (chunk.file, chunk.start)
    return (chunk.file, chunk.start, chunk.global_offset, chunk.local_shape)


def decode_manifest(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        FormatError: `data` is not a manifest, was damaged, or contradicts itself.
        FormatVersionError: It has a format this version does not read.
    """
    tail = _TAIL.search(data[-_TAIL_NBYTES:])
    if tail is None:
        raise FormatError("the manifest is cut short: it does not end with its checksum")
    body = memoryview(data)[:-_TAIL_NBYTES]
    if crc32c(body) != int(tail[1], 16):
        raise FormatError("the manifest is damaged: its bytes do not have its checksum")
    document = bytes(body) + b"}"
    try:
        version = _version_decoder.decode(document).ckptio  # type: ignore[attr-defined]  # defstruct
        if version != FORMAT_VERSION:
            raise FormatVersionError(
                f"the checkpoint has format {version} and this version of ckptio reads"
                f" {FORMAT_VERSION}; upgrade ckptio"
            )
        manifest = _decoder.decode(document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the manifest is not what ckptio writes: {error}") from None
    _check_head(manifest)
    _check_tensors(manifest)
    return manifest


def _check_head(manifest: Manifest) -> None:
    """Check everything but tensors."""
    if not re.fullmatch(r"[0-9a-f]{32}", manifest.save_id):
        raise FormatError(f"bad save id {manifest.save_id!r} in the manifest")
    if not 0 < manifest.block_nbytes < MAX_EXTENT or manifest.block_nbytes % PAGE_NBYTES:
        raise FormatError(f"bad block size {manifest.block_nbytes} in the manifest")
    names: set[str] = set()
    for file in manifest.files:
        if not _FILE_NAME.match(file.name) or file.name == MANIFEST_NAME or file.name in names:
            raise FormatError(f"bad or repeated file name {file.name!r} in the manifest")
        names.add(file.name)
        num_blocks = -(-file.nbytes // manifest.block_nbytes)
        if not 0 <= file.nbytes < MAX_EXTENT or len(file.packed_checksums) != 4 * num_blocks:
            raise FormatError(
                f"file {file.name!r} of {file.nbytes} bytes has"
                f" {len(file.packed_checksums)} bytes of checksums in the manifest"
            )


def _check_tensors(manifest: Manifest) -> None:
    """Check that chunks lie inside files and tensors, apart from each other.

    One pass, since checkpoints of 64,000 chunks are opened in a tenth of a second.
    """
    itemsizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    spans: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    num_files = len(spans)
    names: set[str] = set()
    for tensor in manifest.tensors:
        name, shape = tensor.name, tensor.shape
        itemsize = itemsizes.get(tensor.dtype, 0)
        count = _checked_numel(shape)
        if count < 0 or not itemsize or name in names:
            raise FormatError(
                f"tensor {name!r} {tensor.dtype} {shape} in the manifest is repeated, or has"
                " an unknown element type or an impossible shape"
            )
        names.add(name)
        covered = 0
        for chunk in tensor.chunks:
            is_whole = chunk.global_offset is None and chunk.local_shape is None
            part = count if is_whole else _part_numel(shape, chunk)
            start = chunk.start
            if part < 0 or not 0 <= chunk.file < num_files or start < 0 or start % itemsize:
                raise FormatError(f"tensor {name!r} has an impossible chunk in the manifest")
            covered += part
            if part:
                spans[chunk.file].append((start, start + part * itemsize))
        if covered != count or (len(tensor.chunks) > 1 and _overlap(tensor)):
            raise FormatError(f"the chunks of tensor {name!r} do not fill it exactly")
    _check_spans(manifest, spans)


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
    if len(shape) > _MAX_DIMS:
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


def _part_numel(shape: tuple[int, ...], chunk: Chunk) -> int:
    """Elements of a chunk that is part of a tensor of `shape`, or -1 if it is not inside."""
    offset, local = chunk.global_offset or (), chunk.local_shape or ()
    if not len(shape) == len(offset) == len(local):
        return -1
    for extent, first, count in zip(shape, offset, local, strict=True):
        if first < 0 or count < 0 or first + count > extent:
            return -1
    return numel(local)


def _overlap(tensor: TensorEntry) -> bool:
    """Whether two chunks of `tensor` share an element.

    Nearly all shardings are grids, seen in one pass. Others take a sweep along the
    dimension with the most distinct offsets. A tiling that takes more comparisons than
    `_MAX_COMPARISONS` for each chunk is none anybody makes, and counts as overlapping.
    """
    boxes = [
        (c.global_offset or (0,) * len(tensor.shape), c.local_shape or tensor.shape)
        for c in tensor.chunks
        if 0 not in (c.local_shape or tensor.shape)
    ]
    if not tensor.shape:
        return len(boxes) > 1
    if _is_grid(boxes):
        return False
    num_offsets = [len({offset[dim] for offset, _ in boxes}) for dim in range(len(tensor.shape))]
    dim = num_offsets.index(max(num_offsets))
    boxes.sort(key=lambda box: box[0][dim])
    active: list[_Region] = []
    num_comparisons = 0
    for offset, shape in boxes:
        num_comparisons += len(active)
        if num_comparisons > _MAX_COMPARISONS * len(boxes):
            return True
        active = [(o, s) for o, s in active if o[dim] + s[dim] > offset[dim]]
        for other_offset, other_shape in active:
            if all(
                a < b + t and b < a + s
                for a, s, b, t in zip(offset, shape, other_offset, other_shape, strict=True)
            ):
                return True
        active.append((offset, shape))
    return False


def _is_grid(boxes: Sequence[_Region]) -> bool:
    """Whether boxes are all cells of a grid, each there once, and so apart from each other."""
    num_cells = 1
    for dim in range(len(boxes[0][0]) if boxes else 0):
        extents = {offset[dim]: shape[dim] for offset, shape in boxes}
        if any(extents[offset[dim]] != shape[dim] for offset, shape in boxes):
            return False
        edges = sorted(extents.items())
        if any(a + extent > b for (a, extent), (b, _) in itertools.pairwise(edges)):
            return False
        num_cells *= len(edges)
    return num_cells == len(boxes) == len({offset for offset, _ in boxes})
