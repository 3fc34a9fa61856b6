from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import CheckpointError, FormatError, FormatVersionError
from ckptio.format.checksum import crc32c
from ckptio.format.compose import encode_again, encode_manifest
from ckptio.format.manifest import (
    FORMAT_VERSION,
    MAX_EXTENT,
    Chunk,
    Manifest,
    Metadata,
    TensorEntry,
    decode_manifest,
)
from ckptio.format.summary import decode_summary
from tests.manifests import encode_tensors

SAVE_ID = "0123456789abcdef" * 2
FILES = [("data-0.safetensors", 9000, [1, 2, 3]), ("data-1.safetensors", 0, [])]
TENSORS = [
    TensorEntry("a", "float32", (2, 3), (Chunk(0, 4096),)),
    TensorEntry("b", "uint8", (), (Chunk(0, 4120),)),
    TensorEntry("c", "bool", (0, 7), (Chunk(1, 0),)),
    TensorEntry(
        "d", "int16", (4, 2), (Chunk(0, 5000, (0, 0), (1, 2)), Chunk(0, 6000, (1, 0), (3, 2)))
    ),
]
TREE = {"x": {"~": 0}, "rest": [{"~": 1}, {"~": 2}, {"~": 3}], "n": 1.5}


def manifest(**changes: Any) -> bytes:
    parts: dict[str, Any] = {
        "writer": "1",
        "save_id": SAVE_ID,
        "created": "2025-01-01T00:00:00+00:00",
        "block_nbytes": 4096,
        "files": FILES,
        "tensors": encode_tensors(TENSORS),
        "tree": json.dumps(TREE).encode(),
    }
    return encode_manifest(**parts | changes)


def sealed(document: Any) -> bytes:
    """Give any document the checksum it would need: damage that no checksum tells."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()[:-1]
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def as_document() -> dict[str, Any]:
    document = json.loads(manifest())
    del document["crc32c"]
    assert isinstance(document, dict)
    return document


def test_a_manifest_is_read_back() -> None:
    """Everything comes back; defaults of chunks are left out and filled in."""
    found = decode_manifest(manifest())
    assert (found.ckptio, found.save_id, found.block_nbytes) == (FORMAT_VERSION, SAVE_ID, 4096)
    assert [(f.name, f.nbytes, list(f.checksums())) for f in found.files] == FILES
    assert found.tensors == tuple(TENSORS)
    assert json.loads(bytes(found.tree)) == TREE
    assert found.nbytes == 9000
    assert [t.nbytes for t in found.tensors] == [24, 1, 0, 16]


def test_a_manifest_is_shown_in_a_line() -> None:
    """However many tensors it has, and whatever its tree is."""
    assert repr(decode_manifest(manifest())) == (
        f"<Manifest of save {SAVE_ID}, 2025-01-01T00:00:00+00:00: 4 tensors in 2 files, 9000 bytes>"
    )
    one = msgspec.structs.replace(decode_manifest(manifest()), files=(), tensors=(TENSORS[0],))
    assert ": 1 tensor in 0 files, 0 bytes>" in repr(one)


def test_a_manifest_is_a_json_document() -> None:
    """Any tool reads it; the checksum is its last member and covers all before it."""
    data = manifest()
    document = json.loads(data)
    assert list(document)[-1] == "crc32c"
    body, _, tail = data.rpartition(b',"crc32c":"')
    assert tail == b'%08x"}\n' % crc32c(body)


def test_a_manifest_that_is_cut_short_is_refused() -> None:
    """However much of it is missing."""
    data = manifest()
    for nbytes in range(len(data)):
        with pytest.raises(FormatError):
            decode_manifest(data[:nbytes])


def test_every_bit_of_a_manifest_counts() -> None:
    """Flip any bit of any byte: it is a `FormatError`."""
    data = bytearray(manifest())
    for i in range(len(data) * 8):
        data[i // 8] ^= 1 << i % 8
        with pytest.raises(FormatError):
            decode_manifest(bytes(data))
        data[i // 8] ^= 1 << i % 8


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, 99, -1, 2**80])
def test_another_version_is_named(version: int) -> None:
    """A checkpoint of a later version says so, whatever else stands in it."""
    document = {"ckptio": version, "unknown": [1, 2, 3]}
    with pytest.raises(FormatError) as caught:
        decode_manifest(sealed(document))
    if version < 2**64:
        assert isinstance(caught.value, FormatVersionError)
        assert f"has format {version}" in str(caught.value)


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_every_version_so_far_is_read(version: int) -> None:
    """What one rank writes has been the same since version 1."""
    found = decode_manifest(sealed(as_document() | {"ckptio": version}))
    assert (found.ckptio, found.tensors, found.num_ranks) == (version, tuple(TENSORS), 1)


def test_ranks_hosts_and_copies_are_read_back() -> None:
    """Who wrote a file, where each rank ran, and where else the same bytes lie."""
    tensors = [
        TensorEntry("w", "int16", (4,), (
            Chunk(0, 0, (0,), (3,), ((1, 8), (2, 0))), Chunk(2, 100, (3,), (1,)),
        )),
        TensorEntry("b", "int16", (4,), (Chunk(1, 100, copies=((2, 50),)),)),
    ]  # fmt: skip
    data = manifest(
        files=[("a", 100, [1], 1), ("b", 200, [2], 0), ("c", 300, [3], 2)],
        tensors=encode_tensors(tensors),
        hosts=("n0", "n0", "n1.local:5"),
    )
    found = decode_manifest(data)
    assert found.tensors == tuple(tensors)
    assert [file.rank for file in found.files] == [1, 0, 2]
    assert found.hosts == ("n0", "n0", "n1.local:5")
    assert found.num_ranks == 3
    document = json.loads(data)
    assert [len(file) for file in document["files"]] == [4, 3, 4]
    assert [len(chunk) for t in document["tensors"] for chunk in t[3]] == [5, 4, 5]


HOSTED = {"hosts": ["n0", "n1"]}
COPIED = ["a", "uint8", [4], [[0, 0, None, None, [[0, 4]]]]]


@pytest.mark.parametrize(
    "changes",
    [
        HOSTED, {"hosts": []}, {"files": [["f", 9000, "AQAAAAIAAAADAAAA", 1]], **HOSTED},
        {"files": [["f", 9000, "AQAAAAIAAAADAAAA", 0]]}, {"tensors": [COPIED]},
        {"tensors": [["a", "uint8", [4], [[0, 0, None, None, []]]]]},
        {"metadata": {"step": 1}}, {"metadata": {}},
    ],
    ids=str,
)  # fmt: skip
def test_version_1_knows_no_ranks_no_copies_and_no_metadata(changes: dict[str, Any]) -> None:
    """A manifest that says it is of version 1 and has more, even if empty, is no manifest."""
    assert decode_manifest(sealed(as_document() | {"tensors": []} | changes))
    with pytest.raises(FormatError, match="format 1"):
        decode_manifest(sealed(as_document() | {"tensors": []} | changes | {"ckptio": 1}))


def test_a_manifest_of_version_1_is_passed_on() -> None:
    """To other ranks of a job, by whom it was not read itself; with members of today."""
    found = decode_manifest(sealed(as_document() | {"ckptio": 1}))
    again = encode_again(found)
    assert b"metadata" in again
    assert decode_manifest(again, is_passed_on=True) == found


@pytest.mark.parametrize("host", ["", "a b", "é", "a\n", "x" * 256, "\0", "\x7f"])
def test_a_host_is_short_and_printable(host: str) -> None:
    """It is shown to people; neither written nor read otherwise."""
    with pytest.raises(FormatError, match="bad host"):
        manifest(hosts=("n0", host))
    with pytest.raises(FormatError, match="bad host"):
        decode_manifest(sealed(as_document() | {"hosts": ["n0", host]}))


@pytest.mark.parametrize("hosts", [None, [1], "n0", ["n0", None], {}])
def test_hosts_are_a_list_of_names(hosts: object) -> None:
    """Nothing else is taken for it."""
    with pytest.raises(FormatError):
        decode_manifest(sealed(as_document() | {"hosts": hosts}))


@pytest.mark.parametrize(("rank", "num_hosts"), [(1, 0), (1, 1), (2, 2), (-1, 2), (2**70, 2)])
def test_a_file_is_of_a_rank_that_took_part(rank: int, num_hosts: int) -> None:
    """One rank alone is rank 0."""
    document = as_document() | {"tensors": [], "hosts": ["n"] * num_hosts}
    document["files"][0].append(rank)
    with pytest.raises(FormatError):
        decode_manifest(sealed(document))


@pytest.mark.parametrize(
    "copies",
    [
        [[0, 0]], [[0, 3]], [[0, 100], [0, 102]], [[0, 8999]], [[1, 0]], [[2, 0]], [[-1, 0]],
        [[0, -4]], [[0, 2**70]], [[0]], [[0, 100, 0]], [0], None, [[0, 100], [0, 100]], [["0", 8]],
    ],
    ids=str,
)  # fmt: skip
def test_a_copy_lies_in_a_file_and_apart_from_all_else(copies: object) -> None:
    """Copies are checked as the first place is: a byte belongs to one of them."""
    with pytest.raises(FormatError):
        decode_manifest(with_tensors(["a", "uint8", [4], [[0, 0, None, None, copies]]]))


def test_a_copy_starts_on_its_element() -> None:
    """As every chunk does."""
    assert decode_manifest(with_tensors(["a", "int32", [2], [[0, 0, None, None, [[0, 8]]]]]))
    with pytest.raises(FormatError):
        decode_manifest(with_tensors(["a", "int32", [2], [[0, 0, None, None, [[0, 10]]]]]))


def test_a_tensor_without_elements_needs_no_chunk() -> None:
    """Where nobody holds a byte of it, nobody writes it."""
    found = decode_manifest(with_tensors(["a", "int32", [0, 3], []]))
    assert found.tensors == (TensorEntry("a", "int32", (0, 3), ()),)


@pytest.mark.parametrize(
    "chunk", [[0, 9004], [1, 4], [0, 9004, [0], [0]], [0, 0, [0], [0], [[1, 4]]]], ids=str
)
def test_a_tensor_without_elements_begins_in_its_file(chunk: list[Any]) -> None:
    """At its end, at the latest, and so does a part of one, and a copy."""
    assert decode_manifest(with_tensors(["a", "float32", [0], [[0, 9000]]]))
    with pytest.raises(FormatError, match="behind the end"):
        decode_manifest(with_tensors(["a", "float32", [0], [chunk]]))


HEADS = [
    ("save_id", ""), ("save_id", SAVE_ID.upper()), ("save_id", SAVE_ID + "\n"), ("save_id", 5),
    ("block_nbytes", 4096.5), ("block_nbytes", None),
    ("writer", None), ("created", 5), ("tensors", None), ("files", {}), ("unknown", 1),
    ("ckptio", "1"), ("ckptio", True),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), HEADS)
def test_a_bad_head_is_refused(key: str, value: object) -> None:
    """Ids, sizes and types are checked; nothing unknown is skipped."""
    with pytest.raises(FormatError):
        decode_manifest(sealed(as_document() | {key: value}))


@pytest.mark.parametrize("nbytes", [0, -4096, 2048, MAX_EXTENT])
def test_blocks_are_whole_pages(nbytes: int) -> None:
    """Some of them, and not more than a file can have."""
    with pytest.raises(FormatError, match=f"bad block size {nbytes}"):
        decode_manifest(sealed(as_document() | {"block_nbytes": nbytes}))


@pytest.mark.parametrize("key", list(as_document()))
def test_nothing_may_be_missing(key: str) -> None:
    """Every member is there, or it is no manifest."""
    document = as_document()
    del document[key]
    with pytest.raises(FormatError):
        decode_manifest(sealed(document))


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "-rf", "a\0b", "a\n",
        "é", "a b", "manifest.json", "x" * 201, "data-1.safetensors",
    ],
)  # fmt: skip
def test_a_file_name_stays_inside_the_checkpoint(name: str) -> None:
    """A name is one plain component, not the manifest's, and there once."""
    files = [(name, 9000, [1, 2, 3]), FILES[1]]
    for decode in (decode_manifest, decode_summary):  # from the second come names to remove
        with pytest.raises(FormatError, match="bad or repeated file name"):
            decode(manifest(files=files))


@pytest.mark.parametrize(
    ("nbytes", "sums"),
    [
        (9000, [1, 2]), (9000, [1, 2, 3, 4]), (8192, [1, 2, 3]), (8193, [1, 2]), (-1, []),
        (0, [1]), (MAX_EXTENT, []), (-4096, []),
    ],
)  # fmt: skip
def test_a_file_has_one_checksum_for_each_block(nbytes: int, sums: list[int]) -> None:
    """A size and a number of checksums that do not agree are refused."""
    with pytest.raises(FormatError, match="bytes of checksums"):
        decode_manifest(manifest(files=[("f", nbytes, sums)], tensors=b"[]"))


def with_tensors(*tensors: list[Any]) -> bytes:
    return sealed(as_document() | {"tensors": list(tensors)})


@pytest.mark.parametrize(
    "tensor",
    [
        ["a", "float31", [2], [[0, 0]]], ["a", "", [2], [[0, 0]]], ["a", "qint8", [2], [[0, 0]]],
        ["a", "uint8", [-2], [[0, 0]]], ["a", "uint8", [-2, -2], [[0, 0]]],
        ["a", "uint8", [2.5], [[0, 0]]], ["a", "uint8", ["2"], [[0, 0]]],
        ["a", "uint8", [1] * 65, [[0, 0]]], ["a", "uint8", [2**30, 2**30], [[0, 0]]],
        ["a", "uint8", [0, 2**60], [[0, 0]]], ["a", "uint8", [2**70], [[0, 0]]],
        ["a", "uint8", [9000], [[0, 1]]], ["a", "uint8", [1], [[0, 9000]]],
        ["a", "uint8", [1], [[1, 0]]], ["a", "uint8", [1], [[2, 0]]],
        ["a", "uint8", [1], [[-1, 0]]],
        ["a", "uint8", [1], [[0, -1]]], ["a", "uint8", [1], [[0, 2**70]]], ["a", "uint8", [1], []],
        ["a", "uint8", [2], [[0, 0], [0, 10]]], ["a", "uint8", [], [[0, 0], [0, 10]]],
        ["a", "uint8", [4], [[0, 0, [0], [2]]]], ["a", "uint8", [4], [[0, 0, [2], [4]]]],
        ["a", "uint8", [4], [[0, 0, [0], [2]], [0, 10, [1], [2]]]],
        ["a", "uint8", [4], [[0, 0, [0], [2]], [0, 1, [2], [2]]]],
        ["a", "uint8", [4], [[0, 0, [0, 0], [2, 2]]]], ["a", "uint8", [4], [[0, 0, [0]]]],
        ["a", "uint8", [4], [[0, 0, [-1], [4]]]], ["a", "uint8", [4], [[0, 0, [5], [-1]]]],
        ["a", "uint8", [4], [[0, 0, None, [4]]]], ["a", "uint8", [4], [[0, 0, [0], [4], 1]]],
        ["a", "uint8", [0], [[0, 0, None, [5, 5]], [0, 0, None, [5]]]],
        ["a", "uint8", [0], [[0, 0, None, [5]], [0, 0, None, [5]]]],
        ["a", "uint8", [2, 2], [[0, 0, [0, 0], [2, 1]], [0, 8, [0, 0], [2, 1]]]],
        ["a", "uint8", [1], [[0]]], ["a", "uint8", [1]], ["a"], "a", None,
        ["a", "uint8", [1], [[0, 0]], "more"],
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_does_not_fit_its_files_is_refused(tensor: Any) -> None:
    """Chunks fill their tensor, lie inside their file, and apart from each other."""
    with pytest.raises(FormatError):
        decode_manifest(with_tensors(tensor))


@pytest.mark.parametrize(
    "tensors",
    [
        [["a", "uint8", [1], [[0, 0]]], ["a", "uint8", [1], [[0, 9]]]],
        [["a", "uint8", [4], [[0, 0]]], ["b", "uint8", [4], [[0, 3]]]],
        [["a", "uint8", [4], [[0, 8]]], ["b", "uint8", [9000], [[0, 0]]]],
    ],
    ids=["one name", "one byte", "one inside the other"],
)
def test_two_tensors_share_nothing(tensors: list[Any]) -> None:
    """Neither a name nor a byte: a manifest cannot make one byte a thousand tensors."""
    with pytest.raises(FormatError):
        decode_manifest(with_tensors(*tensors))


def grid(num: int, *, gap: bool = False) -> bytes:
    """Give a manifest with a tensor of `num` x `num` chunks, one of them moved if `gap`."""
    chunks = [(i, j) for i in range(num) for j in range(num)]
    entry = TensorEntry(
        "w", "uint8", (4 * num, 4 * num),
        tuple(
            Chunk(0, 16 * n, (4 * i, 4 * j if n or not gap else 4), (4, 4))
            for n, (i, j) in enumerate(chunks)
        ),
    )  # fmt: skip
    nbytes = 16 * num * num
    sums = [0] * -(-nbytes // 4096)
    return manifest(files=[("f", nbytes, sums)], tensors=encode_tensors([entry]), tree=b'{"~":0}')


def test_a_manifest_of_64_thousand_chunks_is_read() -> None:
    """A large sharded checkpoint: 256 x 256 chunks of one tensor."""
    assert len(decode_manifest(grid(256)).tensors[0].chunks) == 65536


def test_a_manifest_of_64_thousand_tensors_is_read() -> None:
    """Many small tensors are checked one by one, in one pass."""
    entries = [TensorEntry(f"t{i}", "uint8", (4,), (Chunk(0, 4 * i),)) for i in range(65536)]
    data = manifest(files=[("f", 4 * 65536, [0] * 64)], tensors=encode_tensors(entries))
    assert len(decode_manifest(data).tensors) == 65536


def test_one_overlap_among_many_chunks_is_found() -> None:
    """Two chunks on the same elements are found in a grid of thousands."""
    with pytest.raises(FormatError, match="do not fill it exactly"):
        decode_manifest(grid(50, gap=True))


def ragged(num: int) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Tile a square by `num` columns that are cut at different heights: no grid."""
    tiles = []
    for i in range(num):
        tiles += [((0, i), (i + 1, 1)), ((i + 1, i), (num - i, 1))]
    return tuple(tiles)


def tiled(tiles: tuple[tuple[tuple[int, int], tuple[int, int]], ...], num: int) -> bytes:
    nbytes = (num + 1) * num
    starts = [nbytes * 2 * i for i in range(len(tiles))]
    chunks = tuple(Chunk(0, at, *tile) for at, tile in zip(starts, tiles, strict=True))
    entry = TensorEntry("w", "uint8", (num + 1, num), chunks)
    file = ("f", nbytes * 2 * len(tiles), [0] * -(-nbytes * 2 * len(tiles) // 4096))
    return manifest(files=[file], tensors=encode_tensors([entry]), tree=b"0")


def test_chunks_that_are_no_grid_are_read() -> None:
    """Any tiling is a sharding, as long as it is one."""
    assert len(decode_manifest(tiled(ragged(20), 20)).tensors[0].chunks) == 40


def test_chunks_that_are_no_grid_may_be_empty() -> None:
    """A rank may have nothing of a tensor that the others have cut like that."""
    tiles = (*ragged(20), ((3, 0), (0, 5)), ((0, 20), (21, 0)))
    assert len(decode_manifest(tiled(tiles, 20)).tensors[0].chunks) == 42


def test_chunks_that_are_no_grid_and_overlap_are_refused() -> None:
    """One tile that covers another's elements instead of its own."""
    tiles = list(ragged(20))
    (first, column), shape = tiles[6]
    tiles[6] = ((first + 1, column), shape)
    with pytest.raises(FormatError, match="do not fill it exactly"):
        decode_manifest(tiled(tuple(tiles), 20))


def test_a_grid_whose_cells_are_cut_again_is_read() -> None:
    """As it is when replicas of some blocks are shared out among their ranks."""
    num = 64
    cells = [((i, 2 * j), (1, 2)) for i in range(num) for j in range(num)]
    cells[7:8] = [((0, 14), (1, 1)), ((0, 15), (1, 1))]
    data = written(cells, (num, 2 * num))
    assert len(decode_manifest(data).tensors[0].chunks) == num * num + 1


def test_a_tiling_that_takes_forever_to_check_is_refused() -> None:
    """The work of a check is bounded: a pathological tiling counts as a bad one."""
    num = 160  # four blades of a windmill, so that no plane cuts it, around a fine grid
    cells = [((i + 1, j + 1), (1, 1)) for i in range(num) for j in range(num)]
    cells += [
        ((0, 0), (1, num + 1)), ((0, num + 1), (num + 1, 1)),
        ((num + 1, 1), (1, num + 1)), ((1, 0), (num + 1, 1)),
    ]  # fmt: skip
    with pytest.raises(FormatError, match="do not fill it exactly"):
        decode_manifest(written(cells, (num + 2, num + 2)))


def written(boxes: list[tuple[tuple[int, int], tuple[int, int]]], shape: tuple[int, int]) -> bytes:
    """Give a manifest of one tensor of bytes in these boxes."""
    chunks = []
    start = 0
    for offset, local in boxes:
        chunks.append(Chunk(0, start, offset, local))
        start += local[0] * local[1]
    entry = TensorEntry("w", "uint8", shape, tuple(chunks))
    file = ("f", start, [0] * -(-start // 4096))
    return manifest(files=[file], tensors=encode_tensors([entry]), tree=b"0")


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_a_checkpoint_error(data: bytes) -> None:
    """Random bytes, with and without the checksum they would need."""
    for attempt in (data, sealed(data), sealed(b"{" + data)):
        with pytest.raises(CheckpointError):
            decode_manifest(attempt)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 10)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@given(data=st.data())
def test_any_change_of_a_manifest_is_a_manifest_or_a_checkpoint_error(data: st.DataObject) -> None:
    """What a parser lets through is consistent, whatever was put in the place of a value."""
    document = as_document()
    if data.draw(st.booleans()):  # as many ranks write it
        document["hosts"] = ["n0", "n1"]
        document["files"][0].append(1)
        document["tensors"][0][3] = [[0, 4096, None, None, [[0, 8192], [0, 8300]]]]
    for _ in range(data.draw(st.integers(1, 2))):
        holder: Any = document
        key: Any = data.draw(st.sampled_from(sorted(document)))
        while (
            isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.integers(0, 4))
        ):
            holder = holder[key]
            choices = list(holder) if isinstance(holder, dict) else range(len(holder))
            key = data.draw(st.sampled_from(choices))
        holder[key] = data.draw(json_values)
    with contextlib.suppress(CheckpointError):
        check(decode_manifest(sealed(document)))


@given(data=st.data())
def test_a_manifest_with_other_bytes_is_a_manifest_or_a_checkpoint_error(
    data: st.DataObject,
) -> None:
    """Bytes that are cut out, repeated or replaced, with the checksum made right."""
    body = bytearray(manifest()[:-23])
    start = data.draw(st.integers(0, len(body)))
    stop = data.draw(st.integers(start, min(start + 8, len(body))))
    body[start:stop] = data.draw(st.binary(max_size=4) | st.sampled_from([b"[", b"{", b"9" * 30]))
    with contextlib.suppress(CheckpointError):
        check(decode_manifest(sealed(bytes(body))))


def check(found: Manifest) -> None:
    """Check what nobody behind the parser checks again."""
    for file in found.files:
        assert re.fullmatch(r"\w[\w.-]*", file.name, re.ASCII)
        assert len(file.checksums()) == -(-file.nbytes // found.block_nbytes)
    for tensor in found.tensors:
        assert tensor.nbytes >= 0
        assert sum(_nbytes(tensor, chunk) for chunk in tensor.chunks) == tensor.nbytes
        for chunk in tensor.chunks:
            for index, start in ((chunk.file, chunk.start), *chunk.copies):
                assert start + _nbytes(tensor, chunk) <= found.files[index].nbytes
    assert all(0 <= file.rank < max(1, len(found.hosts)) for file in found.files)


def _nbytes(tensor: TensorEntry, chunk: Chunk) -> int:
    shape = tensor.shape if chunk.local_shape is None else chunk.local_shape
    return TensorEntry("", tensor.dtype, shape, ()).nbytes


def test_metadata_is_plain_values_one_level_deep() -> None:
    """What is said beside the state; nothing that needs limits of its own."""
    metadata: Metadata = {"step": 3, "metrics": {"loss": 0.5, "bad": "nan"}, "note": None}
    data = manifest(metadata=metadata)
    assert decode_manifest(data).metadata == metadata
    assert decode_summary(data).metadata == metadata
    assert decode_manifest(manifest()).metadata == {}
    assert b"metadata" not in manifest()
    for hostile in ([1], {"a": [1]}, {"a": {"b": {"c": 1}}}, 3):
        with pytest.raises(FormatError):
            decode_manifest(manifest(metadata=hostile))
        with pytest.raises(FormatError):
            decode_summary(manifest(metadata=hostile))
