"""Files that would have a reader take far more memory than they have bytes, or no end of time."""

from __future__ import annotations

import collections
import gc
import io
import pickle
import struct
import weakref
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from ckptio import sync
from ckptio.errors import CheckpointChangedError, FormatError, StorageError
from ckptio.foreign.archive import find_tensor
from ckptio.foreign.dcp import DcpReader
from ckptio.foreign.folder import LocalFolder
from ckptio.foreign.interface import make_manifest
from ckptio.foreign.pickles import read_metadata as read_pickle
from tests.foreign.rig import assert_same_state, save_dcp
from tests.foreign.test_dcp import read_metadata, write_metadata
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

_METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


def laughs(depth: int) -> Any:
    """Nest a tuple so that it refers to its innermost part `2**depth` times."""
    value: Any = ("ha",)
    for _ in range(depth):
        value = (value, value)
    return value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of stock DCP."""
    return save_dcp(tmp_path / "dcp", {"w": torch.arange(48.0), "list": [torch.ones(2)], "n": 3})


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x02Np99999999999\n.",
        b"\x80\x02Np" + b"9" * 5000 + b"\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 45) + b".",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b".",
        b"\x80\x02T\xff\xff\xff\x7f.",
    ],
    ids=["LONG_BINPUT", "PUT", "PUT of many digits", "BINBYTES8", "BINUNICODE8", "BINSTRING"],
)
def test_a_few_bytes_of_pickle_take_no_memory(pickled: bytes) -> None:
    """Places of the unpickler's memory, and strings, that are larger than the pickle."""
    with pytest.raises(FormatError, match=r"what is not there|was cut"):
        read_pickle(pickled)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_right_metadata_is_read_whatever_the_protocol(folder: Path, protocol: int) -> None:
    """With more than 256 things to number, and numbers of all lengths."""
    metadata = read_metadata(folder)
    metadata.planner_data["w"] = ("w", *map(str, range(300)), 1 << 40, 1 << 400, 0.5, None, True)
    assert read_pickle(pickle.dumps(metadata, protocol)).keys() >= {"state_dict_metadata"}


@pytest.mark.parametrize(
    "called",
    [
        b"ctorch.serialization\n_get_layout\n((X\x01\x00\x00\x00attR",
        b"ctorch\nSize\n(](" + b"N" * 100 + b"etR",
        b"ccollections\nOrderedDict\n(](X\x02\x00\x00\x00abetR",
    ],
    ids=["text of a tuple", "a long shape", "a dict of a list"],
)
def test_nothing_that_may_be_called_makes_more_of_its_arguments(called: bytes) -> None:
    """Each copy of a copy would be twice as large."""
    body = b"\x80\x02" + _METADATA + b")\x81}X\x01\x00\x00\x00a" + called + b"sb."
    if b"_get_layout" in called:
        assert read_pickle(body)["a"] == ("a",)
    else:
        with pytest.raises(FormatError):
            read_pickle(body)


def lies() -> dict[str, Callable[[Metadata], object]]:
    """Changes to right metadata that would take long or much to look at."""

    def place(metadata: Metadata, **changes: Any) -> None:
        (info,) = (v for k, v in metadata.storage_data.items() if k.fqn == "w")
        vars(info).update(changes)

    def tensor(metadata: Metadata, **changes: Any) -> None:
        vars(metadata.state_dict_metadata["w"]).update(changes)

    listed = TensorProperties()
    vars(listed).update(dtype=["float32"])

    def overlap(metadata: Metadata) -> None:
        value = metadata.storage_data[MetadataIndex("n")]
        place(metadata, offset=value.offset + 1, length=value.length)

    return {
        "a size": lambda m: tensor(m, size=laughs(60)),
        "a type": lambda m: tensor(m, properties=laughs(60)),
        "a list for a type": lambda m: tensor(m, properties=listed),
        "a file": lambda m: place(m, relative_path=laughs(60)),
        "a place": lambda m: place(m, offset=laughs(60)),
        "a transform": lambda m: place(m, transform_descriptors=laughs(60)),
        "an overlap": overlap,
        "a deep place": lambda m: m.planner_data.update(n=("x",) * 5000),
        "a far element": lambda m: m.planner_data.update(n=("list", 900_000)),
    }


@pytest.mark.parametrize("case", list(lies()))
def test_metadata_that_is_small_and_large_at_once_is_refused(folder: Path, case: str) -> None:
    """With a message that is short."""
    metadata = read_metadata(folder)
    lies()[case](metadata)
    write_metadata(folder, metadata)
    with pytest.raises(FormatError) as caught:
        sync.load(folder, config=SMALL)
    assert len(str(caught.value)) < 1000


def repacked(data: bytes, *, compress: Callable[[str], bool], **more: bytes) -> bytes:
    """Write an archive again, with some members compressed, or replaced."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            kind = zipfile.ZIP_DEFLATED if compress(name) else zipfile.ZIP_STORED
            new.writestr(name, more.get(name.rpartition("/")[2], old.read(name)), kind)
    return made.getvalue()


def saved(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


@pytest.mark.parametrize("member", ["byteorder", "data.pkl", "0"])
def test_a_compressed_member_is_refused(tmp_path: Path, member: str) -> None:
    """It could become anything: in a file of torch.save, and in an item of DCP."""
    data = repacked(
        saved({"w": torch.zeros(1000)}),
        compress=lambda name: name.endswith(member),
        byteorder=b"little" * 10_000,
    )
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(FormatError, match="compressed"):
        sync.load(tmp_path / "file.pt", config=SMALL)
    with pytest.raises(FormatError, match="compressed"):
        find_tensor(lambda start, stop: data[start:stop], len(data), "float32", (1000,))


def test_members_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    """Each of them would be as large as the file."""
    data = bytearray(saved({"a": torch.zeros(1000), "b": torch.ones(10)}))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = {info.filename.rpartition("/")[2]: info for info in archive.infolist()}
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(infos["1"].filename.encode()))
    data[entry + 20 : entry + 28] = struct.pack("<II", 9000, 9000)
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(FormatError, match="more bytes than the archive"):
        sync.load(tmp_path / "file.pt", config=SMALL)


@pytest.mark.parametrize("is_swapped", [False, True], ids=["one place", "swapped places"])
def test_a_directory_that_has_members_in_the_place_of_others_is_refused(
    tmp_path: Path, *, is_swapped: bool
) -> None:
    """Each has a header of its own, with its name; two tensors would come from one."""
    data = bytearray(saved({"a": torch.zeros(10), "b": torch.ones(10)}))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = {info.filename.rpartition("/")[2]: info for info in archive.infolist()}
    places = {
        name: data.rindex(b"PK\x01\x02", 0, data.rindex(infos[name].filename.encode())) + 42
        for name in ("0", "1")
    }
    right = {name: bytes(data[place : place + 4]) for name, place in places.items()}
    data[places["1"] : places["1"] + 4] = right["0"]
    if is_swapped:
        data[places["0"] : places["0"] + 4] = right["1"]
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(FormatError, match="over each other" if not is_swapped else "no member"):
        sync.load(tmp_path / "file.pt", config=SMALL)


def test_a_chunk_whose_header_reaches_into_the_next_member_is_refused() -> None:
    """Its bytes would be those of the other."""
    data = bytearray(saved(torch.arange(10.0)))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (info,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
    extra = info.header_offset + 28
    assert find_tensor(lambda a, b: bytes(data[a:b]), len(data), "float32", (10,)) is not None
    more = int.from_bytes(data[extra : extra + 2], "little") + 100
    data[extra : extra + 2] = more.to_bytes(2, "little")
    with pytest.raises(FormatError, match="over each other"):
        find_tensor(lambda a, b: bytes(data[a:b]), len(data), "float32", (10,))


@pytest.mark.parametrize(
    ("dtype", "shape"), [("int32", (2, 3)), ("float32", (3, 2)), ("float32", (6,))]
)
def test_a_chunk_that_is_another_tensor_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    """Its bytes would make one all the same."""
    data = saved(torch.zeros(2, 3))
    with pytest.raises(FormatError, match="instead of"):
        find_tensor(lambda a, b: data[a:b], len(data), dtype, shape)


def test_a_chunk_that_is_larger_than_its_storage_is_refused() -> None:
    """It would go on with the bytes behind it."""
    data = repacked(saved(torch.zeros(10)), compress=lambda _: False, **{"0": bytes(36)})
    with pytest.raises(FormatError, match="smaller than the tensor"):
        find_tensor(lambda a, b: data[a:b], len(data), "float32", (10,))


@pytest.mark.parametrize(
    "error", [StorageError("no answer", path="x"), CheckpointChangedError("x")]
)
def test_a_chunk_that_cannot_be_read_is_not_called_damaged(error: StorageError) -> None:
    """The storage's own error is raised, also where the middle of the archive is looked at."""
    made = io.BytesIO()
    whole = io.BytesIO(saved(torch.zeros(9000)))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(made, "w") as new:
        new.writestr("archive/extra", bytes(20_000))
        for name in old.namelist():
            new.writestr(name, old.read(name))
    data = made.getvalue()
    assert find_tensor(lambda a, b: data[a:b], len(data), "float32", (9000,)) is not None

    def read(start: int, stop: int) -> bytes:
        if start > 0 and stop < len(data):
            raise error
        return data[start:stop]

    with pytest.raises(type(error)) as caught:
        find_tensor(read, len(data), "float32", (9000,))
    assert caught.value is error


@pytest.mark.parametrize("order", [b"big", b"little" * 2000])
def test_a_chunk_of_another_byte_order_is_left_to_torch(order: bytes) -> None:
    """Which turns its bytes around, or refuses it."""
    data = repacked(saved(torch.zeros(10)), compress=lambda _: False, byteorder=order)
    assert find_tensor(lambda a, b: data[a:b], len(data), "float32", (10,)) is None


@pytest.mark.parametrize("dtype", ["uint16", "float8_e4m3fn", "bfloat16"])
def test_a_chunk_is_found_whatever_its_type(dtype: str) -> None:
    """Of new types, torch writes tensors in another way."""
    tensor = torch.arange(6.0).to(getattr(torch, dtype))
    data = saved(tensor)
    start = find_tensor(lambda a, b: data[a:b], len(data), dtype, (6,))
    assert start is not None
    raw = bytes(tensor.view(torch.uint8).numpy())
    assert data[start : start + len(raw)] == raw


def test_a_tensor_whose_header_reaches_into_the_next_member_is_refused(tmp_path: Path) -> None:
    """In a file of torch.save, too, of which the directory alone is looked at first."""
    data = bytearray(saved({"a": torch.zeros(10), "b": torch.ones(10)}))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (info,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
    extra = info.header_offset + 28
    more = int.from_bytes(data[extra : extra + 2], "little") + 64
    data[extra : extra + 2] = more.to_bytes(2, "little")
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(FormatError, match="over each other"):
        sync.load(tmp_path / "file.pt", config=SMALL)
    assert sync.load(tmp_path / "file.pt", select="b", config=SMALL)["b"].eq(1).all()


def test_a_tensor_that_is_larger_than_its_member_is_refused(tmp_path: Path) -> None:
    """It would go on with the bytes of the next one."""
    data = saved({"a": torch.zeros(10), "b": torch.ones(10)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
    larger = pickled.replace(b"K\x0a", b"K\x10")  # elements of the storages and of the tensors
    assert larger != pickled
    data = repacked(data, compress=lambda _: False, **{"data.pkl": larger})
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(FormatError, match="larger than its member"):
        sync.load(tmp_path / "file.pt", config=SMALL)


def test_a_chunk_that_begins_before_its_storage_is_left_to_torch() -> None:
    """Which refuses it; read as it says, it had the header of its member for an element."""
    data = saved(torch.arange(10.0)[1:])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read("archive/data.pkl")
    assert pickled.count(b"QK\x01") == 1
    pickled = pickled.replace(b"QK\x01", b"QJ" + struct.pack("<i", -1))
    moved = repacked(data, compress=lambda _: False, **{"data.pkl": pickled})
    for raw, is_there in ((data, True), (moved, False)):
        found = find_tensor(lambda a, b, raw=raw: raw[a:b], len(raw), "float32", (9,))  # type: ignore[misc]
        assert (found is not None) == is_there


def call(module: str, name: str, *args: bytes) -> bytes:
    """Pickle a call."""
    return f"c{module}\n{name}\n(".encode() + b"".join(args) + b"tR"


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


#: A tuple that refers to its innermost part 2**60 times, and a list that does.
_LAUGHS = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))
_LISTS = b"]" + b"".join(b"q%c](h%ch%ce" % (i, i, i) for i in range(60))
_ONE = text("storage") + b"ctorch\nLongStorage\n" + text("0") + text("cpu") + b"K\x01"
#: A tensor with one element that stands for many.
_WIDE = call(
    "torch._utils", "_rebuild_tensor_v2", b"(" + _ONE + b"tQ", b"K\x00", number(1 << 32) + b"\x85",
    b"K\x00\x85", b"\x89", call("collections", "OrderedDict"),
)  # fmt: skip
HUNGRY = {
    "bytearray": call("builtins", "bytearray", number(1 << 33)),
    "bytearray by its old name": call("__builtin__", "bytearray", number(1 << 33)),
    "bytes": call("builtins", "bytes", number(1 << 33)),
    "bytearray of a tensor": call("builtins", "bytearray", _WIDE),
    "bytearray of a list": b"cbuiltins\nbytearray\n]" + number(1 << 20) + b"aR",
    "bytes in a wide encoding": call("_codecs", "encode", text("a"), text("utf-32")),
    "bytes of bytes": call("_codecs", "encode", call("_codecs", "encode", text("a"), text("hex"))),
    "Tensor": call("torch", "Tensor", number(1 << 31)),
    "FloatTensor": call("torch", "FloatTensor", number(1 << 31)),
    "new": b"ctorch\nTensor\n" + number(1 << 31) + b"\x85\x81",
    "Storage": call("torch", "FloatStorage", number(1 << 31)),
    "UntypedStorage": call("torch.storage", "UntypedStorage", number(1 << 33)),
    "set of a tensor": call("builtins", "set", _WIDE),
    "Size of a tensor": call("torch", "Size", _WIDE),
    "copy": call(
        "torch._utils", "_rebuild_device_tensor_from_cpu_tensor",
        _WIDE.replace(number(1 << 32), number(1 << 20)), b"ctorch\nfloat64\n",
        text("cpu"), b"\x89",
    ),
    "called by another": call(
        "torch._tensor", "_rebuild_from_type_v2", b"cbuiltins\nbytearray\n", b"ctorch\nTensor\n",
        number(1 << 33) + b"\x85", b"N",
    ),
    "a tuple": _LAUGHS,
    "a list": _LISTS,
    "a key": b"}" + _LAUGHS + b"Ns",
    "keys": b"}(NN" + _LAUGHS + b"Nu",
    "keys of a state": call("collections", "OrderedDict") + b"((" + _LAUGHS + b"Nttb",
    "an element": call("builtins", "set", b"](" + _LAUGHS + b"e"),
    "many copies": b"]" + text("a" * 100_000) + b"q\x00a("
    + call("_codecs", "encode", b"h\x00", text("latin1")) * 2000 + b"e",
}  # fmt: skip


@pytest.mark.parametrize("case", list(HUNGRY))
@pytest.mark.parametrize("kind", ["zip", "old", "DCP"])
def test_a_pickle_makes_little_more_than_it_has(tmp_path: Path, kind: str, case: str) -> None:
    """Whatever torch would make of it, in a file and in a value of DCP."""
    pickled = b"\x80\x02" + HUNGRY[case] + b"."
    if kind == "old":
        data = io.BytesIO()
        torch.save({}, data, _use_new_zipfile_serialization=False)
        empty = pickle.dumps({}, 2)
        made = data.getvalue().replace(empty, pickled, 1)
        assert pickled in made
    else:
        made = repacked(
            saved(torch.zeros(1, dtype=torch.int64)),
            compress=lambda _: False,
            **{"data.pkl": pickled},
        )
    if kind == "DCP":
        folder = save_dcp(tmp_path / "dcp", {"n": 3, "w": torch.ones(2)})
        metadata = read_metadata(folder)
        (info,) = (v for k, v in metadata.storage_data.items() if k.fqn == "n")
        with (folder / info.relative_path).open("ab") as file:
            info.offset, info.length = file.tell(), len(made)
            file.write(made)
        write_metadata(folder, metadata)
    else:
        folder = tmp_path / "x.pt"
        folder.write_bytes(made)
    with pytest.raises(FormatError):
        sync.load(folder, config=SMALL)


class Storages(pickle.Unpickler):
    """Reads a pickle of before torch 1.6 for the names of its storages alone."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if module == "collections" else lambda *_: None

    def persistent_load(self, pid: Any) -> None:
        self.names.add(pid[2])


@pytest.mark.parametrize("case", ["left out", "one more", "another", "as it was"])
def test_an_old_file_without_the_bytes_of_a_storage_is_refused(tmp_path: Path, case: str) -> None:
    """Torch makes what a tensor refers to, and leaves in it whatever the memory had."""
    data = io.BytesIO()
    state = {"a": torch.arange(50.0), "b": [torch.ones(30)]}
    torch.save(state, data, _use_new_zipfile_serialization=False)
    data.seek(0)
    for _ in range(3):  # the magic number, the version, the system
        pickle.load(data)  # noqa: S301  # our own
    reader = Storages(data)
    reader.load()
    start, names = data.tell(), sorted(reader.names)
    assert pickle.load(data) == names  # noqa: S301  # our own
    changed = {
        "left out": names[:1],
        "one more": [*names, "1"],
        "another": [names[0], "1"],
        "as it was": names,
    }[case]
    raw = data.getvalue()
    made = raw[:start] + pickle.dumps(changed, 2) + raw[data.tell() :]
    (tmp_path / "x.pt").write_bytes(made)
    if case == "as it was":
        assert_same_state(sync.load(tmp_path / "x.pt", config=SMALL), state)
        return
    with pytest.raises(FormatError, match="list of storages"):
        sync.load(tmp_path / "x.pt", config=SMALL)


def old_tensor(key: bytes, part: bytes = b"N", num_elements: bytes = b"K\x01") -> bytes:
    """Pickle a tensor in a storage of one byte, of this name, as before torch 1.6."""
    storage = text("storage") + b"ctorch\nByteStorage\n" + key + text("cpu") + b"K\x01" + part
    return call(
        "torch._utils", "_rebuild_tensor_v2", b"(" + storage + b"tQ", b"K\x00",
        num_elements + b"\x85",
        b"K\x01\x85", b"\x89", call("collections", "OrderedDict"),
    )  # fmt: skip


def old_file(state: bytes, listed: bytes, storages: list[bytes]) -> bytes:
    """Give a file as before torch 1.6, of pickles without their ends."""
    data = io.BytesIO()
    torch.save({}, data, _use_new_zipfile_serialization=False)
    head = data.getvalue().removesuffix(pickle.dumps({}, 2) + pickle.dumps([], 2))
    pickles = [b"\x80\x02" + body + b"." for body in (state, listed)]
    return head + b"".join([*pickles, *(struct.pack("<q", len(raw)) + raw for raw in storages)])


_FIVE, _SIX, _LONG, _LONGER = text("5"), text("6"), text("a" * 30), text("a" * 31)


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        ((_FIVE, b"K\x06"), b"]" + _FIVE + b"a"),
        ((_FIVE, call("_codecs", "encode", _SIX, text("latin1"))), b"]" + _FIVE + b"a"),
        ((_LONG, _LONGER), b"]" + _LONG + b"a"),
        ((_FIVE, _SIX), b"]" + _SIX + b"a]" + _FIVE + b"a"),
        ((_FIVE, _SIX), b"}" + _FIVE + b"](" + _FIVE + _SIX + b"es"),
        ((_FIVE, _SIX), b""),
        ((_FIVE, _SIX), b"](" + _FIVE + _SIX + b"e"),
    ],
    ids=["a number", "bytes", "long", "two lists", "a list in a dict", "nothing", "all"],
)
def test_an_old_file_tells_all_storages_by_their_names(
    tmp_path: Path, names: tuple[bytes, bytes], listed: bytes
) -> None:
    """Else it has the bytes of one alone, and torch leaves what the memory had in the other."""
    state = b"](" + b"".join(map(old_tensor, names)) + b"e"
    (tmp_path / "x.pt").write_bytes(old_file(state, listed, [b"\x07", b"\x07"]))
    if listed.startswith(b"]("):
        assert sync.load(tmp_path / "x.pt", config=SMALL) == [torch.tensor([7])] * 2
        return
    with pytest.raises(FormatError, match=r"list of storages|no whole pickle"):
        sync.load(tmp_path / "x.pt", config=SMALL)


def test_a_part_of_an_old_storage_is_refused_as_another_one(tmp_path: Path) -> None:
    """A tensor has torch move the storage, and it leaves the part where the storage was."""
    part = b"(" + text("6") + b"K\x00K\x01t"
    state = b"](" + old_tensor(_FIVE, part) + old_tensor(_FIVE, num_elements=b"M\x00\x10") + b"e"
    (tmp_path / "x.pt").write_bytes(old_file(state, b"]" + _FIVE + b"a", [bytes(4096)]))
    with pytest.raises(FormatError, match="part of a storage"):
        sync.load(tmp_path / "x.pt", config=SMALL)


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_pickles_are_made_of_is_read(tmp_path: Path, *, is_zip: bool) -> None:
    """All that has a portable form and that torch loads, and what is referred to often."""
    often = ("a", [1, 2.5, None, True, 1 << 80], {"x": {1, 2, (3, (4,))}, (5, 6): -1})
    state: Any = {
        "bytes": [b"abc\xff" * 1000, bytearray(b"abc\xff"), bytearray()],
        "often": [often] * 1000,
        "keys": [{"a" * 20_000: n} for n in range(150)],
        "many": [0] * 300_000,
        "words": [torch.Size((2, 3)), torch.float16, torch.device("cpu"), 1 + 2j],
        "counts": collections.Counter("abca"),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "module": torch.nn.Linear(2, 3).state_dict(),
        "tensors": [torch.zeros(2, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)],
    }
    file = tmp_path / "x.pt"
    torch.save(state, file, _use_new_zipfile_serialization=is_zip)
    expected = torch.load(file)
    expected["parameter"] = expected["parameter"].detach()
    found: Any = sync.load(file, config=SMALL)
    found["parameter"] = found["parameter"].detach()
    assert_same_state(found, expected)


@pytest.mark.parametrize("field", [40, 48], ids=["size", "place"])
def test_an_archive_whose_end_lies_of_its_directory_is_refused(tmp_path: Path, field: int) -> None:
    """By a FormatError, wherever its members would begin then."""
    right = saved({"a": torch.zeros(10)})
    end = right.rindex(b"PK\x06\x06") + field
    for change in (1, -1, 300, -300, 1 << 20, 1 << 62):
        data = bytearray(right)
        number = int.from_bytes(data[end : end + 8], "little") + change
        data[end : end + 8] = (number % (1 << 64)).to_bytes(8, "little")
        (tmp_path / "file.pt").write_bytes(data)
        with pytest.raises(FormatError):
            sync.load(tmp_path / "file.pt", config=SMALL)


def test_a_directory_of_an_item_that_is_huge_is_not_read() -> None:
    """An item of one tensor has a dozen members."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for number in range(20_000):
            archive.writestr(f"{number:050}", b"")
    data = made.getvalue()
    with pytest.raises(FormatError, match="directory"):
        find_tensor(lambda start, stop: data[start:stop], len(data), "float32", (1,))


def test_an_element_that_stands_for_many_is_refused_as_a_chunk(folder: Path) -> None:
    """A chunk has all of its bytes in its item."""
    data = saved(torch.zeros(1).expand(1 << 40))
    metadata = read_metadata(folder)
    (info,) = (v for k, v in metadata.storage_data.items() if k.fqn == "w")
    with (folder / info.relative_path).open("ab") as file:
        info.offset, info.length = file.tell(), len(data)
        file.write(data)
    entry: Any = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size((1 << 40,))
    write_metadata(folder, metadata)
    reader = DcpReader(LocalFolder(str(folder)), SMALL.block_nbytes)
    names = [file.name for file in reader.manifest().files if file.nbytes > 1 << 40]
    with pytest.raises(FormatError, match="'w'"):
        reader.sizes(names)


def test_a_reader_goes_with_its_load(folder: Path) -> None:
    """And with it the values that it read."""
    reader = DcpReader(LocalFolder(str(folder)), SMALL.block_nbytes)
    reader.manifest()
    gone = weakref.ref(reader)
    del reader
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("modified_s", [1e12, -1e11, 1e17, -1e17, 1e30])
def test_a_file_of_a_year_that_no_calendar_has_is_read(modified_s: float) -> None:
    """A broken clock gave it one, or a damaged file system: there is nothing wrong with it."""
    manifest = make_manifest(
        writer="x",
        version=(),
        modified_s=modified_s,
        block_nbytes=4096,
        files=[],
        tensors=[],
        tree={},
        seen={},
    )
    assert manifest.created == "1970-01-01T00:00:00.000+00:00"
