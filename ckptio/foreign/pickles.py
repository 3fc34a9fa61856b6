"""Read pickles of other programs without running anything that they say.

A pickle is a program: it names what to import and what to call. Here every name that is
allowed stands for an inert record of ours, which keeps what it is given and does nothing;
every other name ends the reading. No class of the program that wrote the file is imported,
let alone made. The classes are made anew for each pickle, so that none can leave anything
behind for the next.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError
from ckptio.layout import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

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
    {"strided", "sparse_coo", "contiguous_format", "preserve_format", "channels_last"}
)
UNTYPED = "untyped"
_REFUSAL = re.compile(r"WeightsUnpickler error:\s*([^\n]{1,200})")


class Record:
    """Keeps what a pickle gives an object, and is nothing else.

    Attributes:
        kind: Name of the class that the pickle names.
        args: What it was made with.
        state: What it was given afterwards.
    """

    kind = ""
    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __new__(cls, *args: Any) -> Self:
        """Make it also where `__init__` is not called."""
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
            return tuple
        if key == ("torch.serialization", "_get_layout"):
            return str
        if key == ("collections", "OrderedDict"):
            return dict
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
    record = _load(_Inert(data, _RECORDS))
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
        record = _load(_InertTensor(data, _TENSOR_RECORDS))
    except FormatError:
        return None
    if not isinstance(record, Record) or record.state is not None:
        return None
    return (record.kind, *record.args)


def first_sentence(error: Exception) -> str:
    """Shorten what torch says of a pickle it refuses, advice to run it all the same included."""
    found = _REFUSAL.search(str(error))
    return found[1] if found is not None else str(error).split(".", 1)[0]


def _load(unpickler: _Inert) -> Any:
    try:
        return unpickler.load()
    except FormatError:
        raise
    except (Exception, RecursionError, MemoryError) as error:  # a damaged pickle raises anything
        raise FormatError(f"it is no pickle of the format: {error!r}") from None
