"""A bucket is a safetensors file: header, then tensors without holes.

    8 bytes      length of the JSON that follows, little-endian
    JSON         {"__metadata__": {...}, name: {dtype, shape, data_offsets}, ...}
                 padded with spaces, so that the data starts on a page
    data         tensors, back to back, in the order of their offsets

Tensors whose size is a multiple of the page come first and so lie on pages; the others
follow by falling element size, so that each starts on a multiple of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckptio.config import PAGE_NBYTES, MiB
from ckptio.errors import FormatError
from ckptio.layout import DTYPES, nbytes_of, numel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: What safetensors itself accepts as a header, in bytes.
MAX_HEADER_NBYTES = 100 * MiB
_LENGTH_NBYTES = 8
_METADATA = "__metadata__"
#: Where torch.distributed.checkpoint's safetensors writer notes the place of each shard.
_SHARDING_INFO = "DCP_SHARDING_INFO"
#: Types that later versions of safetensors have: read, and written for others (`convert`).
_LATER_CODES = {
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_LATER_NAMES = {name: code for code, name in _LATER_CODES.items()}
_TWO_IN_A_BYTE = "float4_e2m1fn_x2"  # "F4" counts its elements, and torch its bytes


class StoredTensor(NamedTuple):
    """A tensor inside a bucket. A tuple, as there are thousands.

    Attributes:
        name: Its name in the bucket's header.
        dtype: torch's name of its element type.
        shape: Its shape, in elements of `dtype`.
        start: Where it starts, in bytes from the start of the data.
        unknown: The code of its element type, if that is not known; it is read as bytes then.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    unknown: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return nbytes_of(self.shape, self.dtype)


def encode_header(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str], *, for_others: bool = False
) -> bytes:
    """Write the header of a bucket, length and padding included.

    Types that safetensors does not know are named in `__metadata__` under
    `ckptio.dtype.<name>`.

    Args:
        tensors: In the order of their data, without holes.
        metadata: More to put in `__metadata__`.
        for_others: Name types as safetensors' own writer does, where later versions of it know
            them. Its older readers refuse such a file.

    Returns:
        A multiple of the page, in bytes.

    Raises:
        FormatError: The header would be larger than safetensors readers accept.
    """
    notes = dict(metadata)
    document: dict[str, object] = {_METADATA: notes}
    for name, dtype_name, shape, start, _ in tensors:
        dtype = DTYPES[dtype_name]
        later = later_code(dtype_name, shape) if for_others else None
        if not dtype.is_native and later is None:
            notes[f"ckptio.dtype.{name}"] = dtype_name
        code, extents = later or (dtype.code, (*shape, *dtype.inner))
        stop = start + numel(shape) * dtype.itemsize
        document[name] = {"dtype": code, "shape": extents, "data_offsets": (start, stop)}
    text = msgspec.json.encode(document)
    padded = -(-(_LENGTH_NBYTES + len(text)) // PAGE_NBYTES) * PAGE_NBYTES - _LENGTH_NBYTES
    if padded > MAX_HEADER_NBYTES:
        raise FormatError(
            f"a bucket of {len(tensors)} tensors has a header of {padded} bytes and safetensors"
            f" readers take {MAX_HEADER_NBYTES}; lower bucket_nbytes"
        )
    return padded.to_bytes(_LENGTH_NBYTES, "little") + text.ljust(padded)


def later_code(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Give what later versions of safetensors call a type that older ones do not know.

    Args:
        dtype: torch's name of the element type.
        shape: Of a tensor of it.

    Returns:
        Its code, and the shape that goes with it; `None` if none knows it.
    """
    if dtype in _LATER_NAMES:
        return _LATER_NAMES[dtype], shape
    if dtype == _TWO_IN_A_BYTE and shape:
        return "F4", (*shape[:-1], 2 * shape[-1])
    return None


def sharding_note(
    shards: Iterable[tuple[str, str, tuple[int, ...], tuple[int, ...] | None]],
) -> dict[str, str]:
    """Say in `__metadata__` where shards lie in their tensors, as DCP's own writer does.

    Its reader and its consolidation to whole tensors take what is written this way.

    Args:
        shards: Of every tensor of the bucket: its name there, torch's name of its element
            type, its offset in the whole tensor, and the shape of that; `None` if it is
            the whole tensor.
    """
    info: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, dtype, offset, global_shape in shards:
        inner = DTYPES[dtype].inner
        info[name] = {"saved_offsets": (*offset, *(0 for _ in inner))}
        if global_shape is not None:
            info[name]["global_shape"] = (*global_shape, *inner)
    return {_SHARDING_INFO: msgspec.json.encode(info).decode()}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata_decoder = msgspec.json.Decoder(dict[str, str] | None)
_entry_decoder = msgspec.json.Decoder(_Entry)


def header_nbytes(prefix: bytes, file_nbytes: int) -> int:
    """Read from the first 8 bytes of a bucket where its data starts.

    Args:
        prefix: The first 8 bytes of the file, or fewer if it has fewer.
        file_nbytes: Size of the whole file.

    Raises:
        FormatError: The file is no bucket.
    """
    length = int.from_bytes(prefix[:_LENGTH_NBYTES], "little")
    if len(prefix) < _LENGTH_NBYTES or length > min(
        MAX_HEADER_NBYTES, file_nbytes - _LENGTH_NBYTES
    ):
        raise FormatError(f"no safetensors header: length {length} in a file of {file_nbytes}")
    return _LENGTH_NBYTES + length


def decode_header(header: bytes, data_nbytes: int) -> tuple[list[StoredTensor], dict[str, str]]:
    """Read a header that anybody may have written: every byte of the data belongs to one tensor.

    It may have what safetensors itself ignores: `null` for its metadata, and further members of a
    tensor. A note of an element type that contradicts its tensor is ignored, too.

    Args:
        header: The header, length included.
        data_nbytes: Bytes of data behind it.

    Returns:
        Tensors in the order of their data, those of unknown types as bytes, and `__metadata__`.

    Raises:
        FormatError: Anything else than what `encode_header` or another safetensors
            writer makes.
    """
    try:
        raw = _header_decoder.decode(header[_LENGTH_NBYTES:])
        metadata = _metadata_decoder.decode(raw.pop(_METADATA, b"{}")) or {}
        entries = [(name, _entry_decoder.decode(text)) for name, text in raw.items()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"bad safetensors header: {error}") from None
    entries.sort(key=lambda item: item[1].data_offsets)
    tensors: list[StoredTensor] = []
    stop = 0
    for name, entry in entries:
        known = _dtype_of(name, entry, metadata)
        if known is not None:
            tensor = StoredTensor(name, *known, entry.data_offsets[0])
        else:
            start, end = entry.data_offsets
            tensor = StoredTensor(name, "uint8", (max(0, end - start),), start, entry.dtype)
        if tensor.start != stop or tensor.start + tensor.nbytes != entry.data_offsets[1]:
            raise FormatError(
                f"tensor {name!r} of {tensor.nbytes} bytes has offsets {entry.data_offsets},"
                f" and the one before it ends at {stop}"
            )
        stop = entry.data_offsets[1]
        tensors.append(tensor)
    if stop != data_nbytes:
        problem = ": it was cut off" if data_nbytes < stop else ""
        raise FormatError(f"tensors end at {stop} and the data at {data_nbytes}{problem}")
    return tensors, metadata


def _dtype_of(
    name: str, entry: _Entry, metadata: Mapping[str, str]
) -> tuple[str, tuple[int, ...]] | None:
    """Give torch's element type of `entry` and the shape in elements of it, if it is known."""
    if any(extent < 0 for extent in entry.shape):
        raise FormatError(f"tensor {name!r} has a negative extent: {entry.shape}")
    noted = metadata.get(f"ckptio.dtype.{name}")
    if noted is not None:
        dtype = DTYPES.get(noted)
        num_inner = len(dtype.inner) if dtype else 0
        split = len(entry.shape) - num_inner
        fits = dtype and dtype.code == entry.dtype and entry.shape[split:] == dtype.inner
        if fits:
            return noted, entry.shape[:split]
    for dtype in DTYPES.values():
        if dtype.is_native and dtype.code == entry.dtype:
            return dtype.name, entry.shape
    if entry.dtype in _LATER_CODES:
        return _LATER_CODES[entry.dtype], entry.shape
    if entry.dtype == "F4" and entry.shape and not entry.shape[-1] % 2:  # two in a byte
        return _TWO_IN_A_BYTE, (*entry.shape[:-1], entry.shape[-1] // 2)
    return None
