from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import Engine, sync
from ckptio.engine.landing import Reading, check_and_land
from ckptio.errors import CheckpointError, CorruptionError
from ckptio.plan.load import ReadSegment
from ckptio.staging.pool import Slab
from ckptio.storage import linux
from ckptio.storage.blocks import BlockReader
from ckptio.storage.files import PosixFiles
from ckptio.storage.lending import Lender
from ckptio.storage.linux import num_cached_pages
from ckptio.testing import RecordingFiles, fail_kind
from tests.manifests import block_checksums
from tests.rig import SMALL, FilesCore, engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.storage.streams import Memory

pytestmark = pytest.mark.usefixtures("no_leaks")
NBYTES = 100_000
#: Writes the file over and over with bytes of one kind, as who copies another over it does.
OVERWRITE = """
import os, sys
for value in range(int(sys.argv[2])):
    fd = os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)
    os.write(fd, bytes([value % 256]) * int(sys.argv[3]))
    os.close(fd)
"""


@pytest.fixture
def place(tmp_path: Path, tmpfs: Path) -> Path:
    """A directory whose files can be leased: the temporary one, or one in memory."""
    for directory in (tmp_path, tmpfs):
        file = directory / "probe"
        file.write_bytes(bytes(NBYTES))
        with opened(file) as fd, Lender(PosixFiles(), fd).lend(0, NBYTES) as lent:
            if lent is not None:
                file.unlink()
                return directory
    pytest.skip("needs leases: a local file system")


class opened:  # noqa: N801  # as open() is
    """A file that is open for reading."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def can_be_written(path: Path) -> bool:
    """Whether somebody who opens a file for writing need not wait."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("offset", [0, 64, 4096, 5 * 4096 + 192])
def test_what_is_lent_is_the_file_where_it_lies(place: Path, offset: int) -> None:
    """As a buffer and at its address, from any aligned byte to any."""
    data = os.urandom(NBYTES)
    (place / "file").write_bytes(data)
    with opened(place / "file") as fd, Lender(PosixFiles(), fd).lend(offset, 7777) as lent:
        assert lent is not None
        assert lent.view[:7777] == data[offset : offset + 7777]
        assert ctypes.string_at(lent.address, 7777) == data[offset : offset + 7777]


def test_what_is_not_in_the_page_cache_is_not_lent(place: Path) -> None:
    """It is to be read past it."""
    path = place / "file"
    path.write_bytes(bytes(NBYTES))
    with opened(path) as fd:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if num_cached_pages(fd, 0, NBYTES):
            pytest.skip("this file system keeps its pages")
        with Lender(PosixFiles(), fd).lend(0, NBYTES) as lent:
            assert lent is None


def test_what_somebody_may_write_to_is_not_lent(place: Path) -> None:
    """Nor is anything more of that file, whose writer may come back."""
    path = place / "file"
    path.write_bytes(bytes(NBYTES))
    with opened(path) as fd:
        lender = Lender(PosixFiles(), fd)
        with path.open("r+b"), lender.lend(0, NBYTES) as lent:
            assert lent is None
        with lender.lend(0, NBYTES) as lent:
            assert lent is None


@pytest.mark.parametrize(
    "reason", ["odd", "short", "cannot be mapped", "no leases", "another host's"]
)
def test_what_cannot_be_lent_is_to_be_read(
    place: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason is: who reads it says what is wrong with it."""
    path = place / "file"
    path.write_bytes(bytes(NBYTES))
    files = RecordingFiles(has_leases=reason != "no leases")
    if reason == "another host's":
        monkeypatch.setattr(linux, "_LOCAL_FILE_SYSTEMS", frozenset({0x6969}))  # NFS
    if reason == "cannot be mapped":
        files.fault = fail_kind("map")
    offset, nbytes = {"odd": (1, 99), "short": (0, 2 * NBYTES)}.get(reason, (0, NBYTES))
    with opened(path) as fd, Lender(files, fd).lend(offset, nbytes) as lent:
        assert lent is None
        assert can_be_written(path)


def test_a_map_is_whole_and_goes_before_the_lease(place: Path) -> None:
    """Every page of it is there first, and none is left where others may cut the file."""
    path = place / "file"
    path.write_bytes(bytes(NBYTES))
    with opened(path) as fd:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with PosixFiles().map(fd, 0, NBYTES):
            assert num_cached_pages(fd, 0, NBYTES) == -(-NBYTES // mmap.PAGESIZE)
        with Lender(PosixFiles(), fd).lend(0, NBYTES) as lent:
            assert lent is not None
            assert str(path) in Path("/proc/self/maps").read_text()
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_who_would_write_waits_until_nothing_is_lent(place: Path) -> None:
    """And nobody is lent anything meanwhile, so that it does not wait for long."""
    path = place / "file"
    path.write_bytes(b"a" * NBYTES)
    with opened(path) as fd, ThreadPoolExecutor() as executor:
        lender = Lender(PosixFiles(), fd)
        with lender.lend(0, NBYTES) as first:
            assert first is not None
            assert not can_be_written(path)  # does not wait, and the lease stays
            begun = threading.Event()

            def overwrite() -> None:
                begun.set()
                path.write_bytes(b"b" * NBYTES)

            writing = executor.submit(overwrite)
            begun.wait()
            is_lent = True
            while is_lent:  # until the system knows that it waits
                with lender.lend(0, NBYTES) as lent:
                    assert lent is None or lent.view[:NBYTES] == b"a" * NBYTES
                    is_lent = lent is not None
            assert not writing.done()
            assert first.view[:NBYTES] == b"a" * NBYTES
        writing.result()
        assert path.read_bytes() == b"b" * NBYTES


def test_nothing_changes_while_it_is_lent(place: Path) -> None:
    """Another process that truncates the file all the time ends nothing and mixes nothing."""
    path = place / "file"
    path.write_bytes(bytes(NBYTES))
    num_lent = 0
    order = [sys.executable, "-c", OVERWRITE, str(path), "300", str(NBYTES)]
    with subprocess.Popen(order) as process:
        while process.poll() is None:
            with opened(path) as fd, Lender(PosixFiles(), fd).lend(0, NBYTES) as lent:
                if lent is not None:
                    num_lent += 1
                    kinds = {bytes(lent.view[:1]), bytes(lent.view[NBYTES - 1 : NBYTES])}
                    assert lent.view[:NBYTES] == kinds.pop() * NBYTES
                    assert not kinds
    assert process.returncode == 0
    assert num_lent


def test_a_part_of_a_file_is_lent_where_it_lies(place: Path) -> None:
    """Through the reader that would read it."""
    path = place / "file"
    path.write_bytes(data := os.urandom(NBYTES))
    reader = BlockReader(PosixFiles(), str(path), name="file", nbytes=NBYTES, direct=True)
    with reader.lend(4096, 500) as lent:
        assert lent is not None
        assert lent.view[:500] == data[4096:4596]
    reader.close()


class Lending:
    """A source that lends what is right for a while, and takes it back."""

    def __init__(self, data: bytes, num_blocks: int) -> None:
        self.data = data
        self.reads: list[int] = []
        self.is_cached = True
        self.pinned = False
        self._num_left = num_blocks
        self._room = bytearray(data)
        self._keep = ctypes.c_char.from_buffer(self._room)
        self.view = memoryview(self._room)
        self.address = ctypes.addressof(self._keep)

    def is_held(self) -> bool:
        """Until some blocks were looked at; then somebody else writes."""
        self._num_left -= 1
        if not self._num_left:
            self.view[:] = bytes(len(self.data))
        return self._num_left >= 0

    @contextlib.contextmanager
    def lend(self, offset: int, nbytes: int) -> Iterator[Lending]:
        """Lend all of it."""
        assert (offset, nbytes) == (0, len(self.data))
        yield self

    def pread_into(self, offset: int, room: memoryview, nbytes: int) -> None:
        """Read a block."""
        self.reads.append(offset)
        room[:nbytes] = self.data[offset : offset + nbytes]

    def close(self) -> None:
        """Nothing is open."""


class Target:
    """Takes blocks, and remembers where they were."""

    def __init__(self, nbytes: int, *, is_async: bool = False) -> None:
        self.is_async = is_async
        self.data = bytearray(nbytes)
        self.addresses: list[int] = []

    def scatter(self, blocks: Any, memory: Memory, pending: Any) -> None:
        """Take blocks; the only piece of each is its place."""
        del pending
        for start, ((place, _, _, nbytes, _),) in blocks:
            self.addresses.append(memory.address + start)
            self.data[place : place + nbytes] = ctypes.string_at(memory.address + start, nbytes)


def land(
    source: Lending, target: Target, slab: Slab, written: bytes | None = None
) -> list[CorruptionError]:
    """Verify and land four blocks; of those `written`, if they are others by now."""
    block = SMALL.block_nbytes
    sums = tuple(block_checksums(memoryview(written or source.data), block))
    places: Any = tuple(((i * block, 0, 0, block, None),) for i in range(4))
    segment = ReadSegment(0, 0, len(source.data), sums, places)
    entry = types.SimpleNamespace(name="data")
    manifest: Any = types.SimpleNamespace(block_nbytes=block, files=[entry], tensors=())
    storage: Any = types.SimpleNamespace(path="checkpoint")
    reading = Reading(storage, manifest, target=target)
    return check_and_land(segment, slab, source, reading, [])


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 4])
def test_what_is_taken_back_is_read(num_blocks: int) -> None:
    """From the block on that was at hand then, whether it still looked right or damaged."""
    block = SMALL.block_nbytes
    with contextlib.closing(Slab(4 * block)) as slab:
        source, target = Lending(os.urandom(4 * block), num_blocks), Target(4 * block)
        assert land(source, target, slab) == []
        assert target.data == source.data
        # the last answer that it is held comes before the bytes change
        assert source.reads == [i * block for i in range(num_blocks, 4)]


@pytest.mark.parametrize(("num_blocks", "num_reads"), [(1, 1), (2, 0), (9, 0)])
def test_the_first_damaged_block_ends_a_range_nobody_collects_of(
    num_blocks: int, num_reads: int
) -> None:
    """Lent or read: what lies behind it is not looked at, as the load has failed."""
    block = SMALL.block_nbytes
    data = os.urandom(4 * block)
    damaged = data[:block] + bytes(3 * block)
    with contextlib.closing(Slab(4 * block)) as slab:
        source, target = Lending(damaged, num_blocks), Target(4 * block)
        (error,) = land(source, target, slab, data)
        assert error.start == block
        assert len(target.addresses) == 1
        assert len(source.reads) == num_reads


def test_a_device_reads_from_slabs_alone() -> None:
    """It may be at it when a map is gone."""
    block = SMALL.block_nbytes
    with contextlib.closing(Slab(4 * block)) as slab:
        source, target = Lending(os.urandom(4 * block), 9), Target(4 * block, is_async=True)
        assert land(source, target, slab) == []
        assert target.data == source.data
        assert target.addresses == [slab.address + i * block for i in range(4)]


@pytest.mark.parametrize(("num_rows", "num_calls"), [(None, 1), (3_000, 1), (30_000, 4)])
def test_blocks_are_landed_together_unless_they_have_many_rows(
    monkeypatch: pytest.MonkeyPatch, num_rows: int | None, num_calls: int
) -> None:
    """For a device: each row is told it, and takes memory until then."""
    block = SMALL.block_nbytes
    data = os.urandom(4 * block)
    rows = None if num_rows is None else (num_rows, 2, 1)
    places: Any = tuple(((0, i, 0, 1, rows),) for i in range(4))
    segment = ReadSegment(0, 0, 4 * block, tuple(block_checksums(memoryview(data), block)), places)
    manifest: Any = types.SimpleNamespace(block_nbytes=block, files=[None], tensors=())
    storage: Any = types.SimpleNamespace(path="checkpoint")
    target, calls = Target(4 * block, is_async=True), list[int]()
    monkeypatch.setattr(target, "scatter", lambda blocks, *_: calls.append(len(blocks)))
    with contextlib.closing(Slab(4 * block)) as slab:
        reading = Reading(storage, manifest, target=target)
        assert check_and_land(segment, slab, Lending(data, 9), reading, []) == []
    assert len(calls) == num_calls
    assert sum(calls) == 4


def warm(directory: Path) -> None:
    """Bring the files of a checkpoint into the page cache."""
    for file in directory.iterdir():
        file.read_bytes()


async def test_a_warm_load_reads_nothing(place: Path) -> None:
    """All of it is lent, verified and landed: into tensors of any layout, and into new ones."""
    state: dict[str, Any] = {
        "a": torch.randn(300, 200),
        "b": torch.randn(100, 70).t(),
        "c": torch.randn(64, dtype=torch.float64),
        "d": [1, 2],
    }
    async with Engine(SMALL) as engine:
        await engine.save(state, place / "checkpoint")
    warm(place / "checkpoint")
    files = RecordingFiles(has_leases=True)
    target = {
        "a": torch.zeros(300, 200),
        "b": torch.zeros(70, 100),
        "c": torch.zeros(128, dtype=torch.float64)[::2],
        "d": [0, 0],
    }
    async with engine_on(FilesCore(SMALL, None, files)) as engine:
        loaded: list[Any] = [
            await engine.load(place / "checkpoint", into=target),
            await engine.load(place / "checkpoint"),
        ]
        assert (await engine.verify(place / "checkpoint")).is_whole
    for found in loaded:
        assert torch.equal(found["a"], state["a"])
        assert torch.equal(found["b"], state["b"])
        assert torch.equal(found["c"], state["c"])
    assert {name.partition("-")[0] for _, name in files.kinds("map")} == {"data"}
    assert not [name for _, name in files.kinds("pread") if name.startswith("data")]
    for file in (place / "checkpoint").iterdir():
        assert can_be_written(file)


async def test_what_is_lent_is_verified(place: Path) -> None:
    """A flipped byte in the page cache is found as one on the disk is."""
    state = {"a": torch.ones(5000)}
    async with Engine(SMALL) as engine:
        await engine.save(state, place / "checkpoint")
        (data,) = (place / "checkpoint").glob("data-*")
        raw = bytearray(data.read_bytes())
        raw[-100] ^= 1
        data.write_bytes(raw)
        target = torch.zeros(5000)
        with pytest.raises(CorruptionError, match="checksum"):
            await engine.load(place / "checkpoint", into={"a": target})
        assert not target[-20:].any()


def test_a_checkpoint_that_is_copied_over_meanwhile_ends_no_process(place: Path) -> None:
    """A load of it gives what was saved, or a typed error."""
    state = {"a": torch.randn(200_000)}
    sync.save(state, place / "checkpoint", config=SMALL)
    (data,) = (place / "checkpoint").glob("data-*")
    nbytes = data.stat().st_size
    order = [sys.executable, "-c", OVERWRITE, str(data), "100", str(nbytes)]
    with subprocess.Popen(order) as process:
        while process.poll() is None:
            with contextlib.suppress(CheckpointError):
                loaded = sync.load(place / "checkpoint", config=SMALL)
                assert torch.equal(loaded["a"], state["a"])
    assert process.returncode == 0
    with pytest.raises(CorruptionError):
        sync.load(place / "checkpoint", config=SMALL)
