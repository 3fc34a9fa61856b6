"""Read pickles of other programs without running anything that they say.

A pickle is a program: it names what to import and what to call. Here every name that is
allowed stands for an inert record of ours, which keeps what it is given and does nothing;
every other name ends the reading. No class of the program that wrote the file is imported,
let alone made. What stands for a name is made anew for each pickle, so that none can leave
anything behind for the next, and none of it makes more of what it is given: a file takes no
more memory than some multiple of its size.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import reprlib
from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError
from ckptio.layout import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

#: What torch raises, too, for a pickle of more than data. Nothing but this module unpickles:
#: `scan` takes the names of opcodes from `pickle`, and no more.
UnpicklingError = pickle.UnpicklingError

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = frozenset(
    {
        *((_METADATA, name) for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )),
        (_OLD_METADATA, "TensorProperties"),
        (_OLD_METADATA, "MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # the plans of all ranks, which Megatron-core keeps there too
        *((_PLANNER, name) for name in (
            "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
        )),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in (
            "Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath",
        )),
    }
)  # fmt: skip
_TENSOR_RECORDS = frozenset(
    {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")}
)
#: What torch calls its typed storages, and the element type of each.
_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_WORDS = frozenset(
    {
        "strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
        "contiguous_format", "preserve_format", "channels_last", "channels_last_3d",
        "qint8", "quint8", "qint32", "quint4x2", "quint2x4",
    }
)  # fmt: skip
UNTYPED = "untyped"
#: Dimensions of a tensor, at most, as far as metadata goes.
_MAX_DIMS = 64
#: Bytes of an opcode and what follows it, of those that only have to be skipped.
_SKIPS = {
    ord(op.code): 1 + (op.arg.n if op.arg else 0)
    for op in pickletools.opcodes
    if op.name != "LONG_BINPUT" and (op.arg is None or op.arg.n >= 0)
}
#: Bytes that say how many bytes follow.
_PREFIXES = {
    ord(op.code): {-2: 1, -3: 4, -4: 4, -5: 8}[op.arg.n]
    for op in pickletools.opcodes
    if op.arg is not None and op.arg.n < pickletools.UP_TO_NEWLINE
}
_STOP, _PUT, _LONG_BINPUT = (ord(code) for code in ".pr")
_TWO_LINES = frozenset(b"ci")
_MAX_DIGITS = 19
#: What comes before that which torch refuses, among advice.
_REFUSALS = (
    re.compile(r"WeightsUnpickler error:\s*([^\n]{1,200})"),
    re.compile(r"from a trusted source\.\s*\n([^\n]{1,200})"),
)
_SENTENCE_END = re.compile(r"\.\s|\n")
#: Where an object of torch's is: it tells nobody anything.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Record:
    """Keeps what a pickle gives an object, and is nothing else.

    Attributes:
        kind: Name of the class that the pickle names.
        args: What it was made with.
        state: What it was given afterwards.
    """

    kind = ""
    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Self:
        """Make it: a pickle may have no `__init__` called."""
        record = super().__new__(cls)
        record.args = args
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def get(self, name: str) -> Any:
        """Give a member of the state; `None` if there is none."""
        return self.state.get(name) if type(self.state) is dict else None


class _Inert(pickle.Unpickler):
    """Knows the names of a list, and makes records of them."""

    def __init__(self, data: bytes, records: frozenset[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._records = records
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Give what stands for a name.

        Raises:
            FormatError: It is not on the list.
        """
        key = (module, name)
        if key not in self._made:
            self._made[key] = self._stand_in(key)
        return self._made[key]

    def _stand_in(self, key: tuple[str, str]) -> Any:
        module, name = key
        if key in self._records:
            return type("_Record", (Record,), {"kind": name, "__slots__": ()})
        if key == ("torch", "Size"):
            return lambda extents: _shape(extents)  # noqa: PLW0108  # made anew, see above
        if key == ("torch.serialization", "_get_layout"):
            return lambda layout: layout
        if key == ("collections", "OrderedDict"):
            return lambda: {}  # noqa: PIE807  # takes nothing: it is filled afterwards
        if module == "torch" and (name in DTYPES or name in _WORDS):
            return name
        if self._records is _TENSOR_RECORDS and module in ("torch", "torch.storage"):
            if name in _STORAGES:
                return _STORAGES[name]
            if name == "UntypedStorage":
                return UNTYPED
        raise FormatError(
            f"it names {module}.{name}, which is not part of the format and may run anything"
        )


class _InertTensor(_Inert):
    """Knows how torch writes a tensor."""

    def persistent_load(self, pid: Any) -> Any:
        """Give the description of a storage as it is."""
        return pid


def read_metadata(data: bytes) -> Mapping[str, Any]:
    """Read a `.metadata` file of torch.distributed.checkpoint.

    Returns:
        The members of its `Metadata`; what is in them are records.

    Raises:
        FormatError: It is no such thing, or names anything else.
    """
    record = _load(_Inert, data, _RECORDS)
    if (
        not isinstance(record, Record)
        or record.kind != "Metadata"
        or type(record.state) is not dict
    ):
        raise FormatError("it is not the metadata of a checkpoint")
    return record.state


def read_tensor(data: bytes) -> tuple[Any, ...] | None:
    """Read how torch describes one tensor.

    Returns:
        The arguments of its `_rebuild_tensor` function, the name of which comes first; `None`
        if it is something else.
    """
    try:
        record = _load(_InertTensor, data, _TENSOR_RECORDS)
    except FormatError:
        return None
    if not isinstance(record, Record) or record.state is not None:
        return None
    return (record.kind, *record.args)


def _shape(extents: Any) -> tuple[Any, ...]:
    """Give the extents of a shape.

    Raises:
        FormatError: There are more than any tensor has.
    """
    if type(extents) not in (tuple, list) or len(extents) > _MAX_DIMS:
        raise FormatError("it has a shape that is none")
    return tuple(extents)


def _require_bounded(data: bytes) -> None:
    """Refuse a pickle that would have the unpickler take memory for what is not there.

    It makes room for a place in its memory by the number of that place: ten bytes are enough
    to have it take 64 GiB. What pickles number, they number through, so that a number is
    never larger than what was read.

    Raises:
        FormatError: It does.
    """
    position, index = 0, 0
    while position < len(data):
        code = data[position]
        if code == _STOP:
            return
        if skip := _SKIPS.get(code):
            position += skip
            continue
        if code == _LONG_BINPUT:
            index = int.from_bytes(data[position + 1 : position + 5], "little")
            position += 5
        elif prefix := _PREFIXES.get(code):
            start = position + 1 + prefix
            position = start + int.from_bytes(data[position + 1 : start], "little")
        else:
            stop = data.find(b"\n", position) + 1 or len(data)
            if code == _PUT:
                digits = data[position + 1 : stop].strip()
                index = int(digits) if digits.isdigit() and len(digits) < _MAX_DIGITS else stop
            elif code in _TWO_LINES:
                stop = data.find(b"\n", stop) + 1 or len(data)
            position = stop
        if index >= position:
            raise FormatError("it is no pickle of the format: it numbers what is not there")
    if position > len(data):
        raise FormatError("it is no pickle of the format: it was cut")


def short(value: object) -> str:
    """Show what a file has, for a message: it may be anything, and refer to itself a lot."""
    return reprlib.repr(value)


def first_sentence(error: Exception) -> str:
    """Shorten what torch says of a pickle it refuses, advice to run it all the same included."""
    found = next(filter(None, (pattern.search(str(error)) for pattern in _REFUSALS)), None)
    said = found[1] if found is not None else str(error)
    return _ADDRESS.sub("", _SENTENCE_END.split(said, maxsplit=1)[0].removesuffix("."))


def _load(kind: type[_Inert], data: bytes, records: frozenset[tuple[str, str]]) -> Any:
    try:
        _require_bounded(data)
        return kind(data, records).load()
    except FormatError:
        raise
    except (Exception, RecursionError, MemoryError) as error:  # a damaged pickle raises anything
        raise FormatError(f"it is no pickle of the format: {error!r}") from None
