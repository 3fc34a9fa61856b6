from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.config import KiB
from ckptio.conversion import stream
from ckptio.conversion.stream import StreamWriter
from tests.rig import config_with

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROOM_NBYTES = 64 * KiB


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_ROOM_NBYTES", ROOM_NBYTES)


def write(path: Path, ranges: Sequence[tuple[int, bytes]], direct_io: Any) -> None:
    """Write some ranges of a file, in their order."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        file = StreamWriter(fd, config_with(direct_io=direct_io))
        reach = 0
        for start, data in ranges:
            file.write(memoryview(data), start)
            reach = max(reach, start + len(data))
            assert os.fstat(fd).st_size <= reach  # cut off, it is not as long as a whole one
        file.end()
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    finally:
        os.close(fd)


def cut(data: bytes, rng: random.Random) -> list[tuple[int, bytes]]:
    """Cut bytes into ranges, a few of them empty or longer than the room."""
    places = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(12)))
    ranges = [(a, data[a:b]) for a, b in itertools.pairwise([0, *places, len(data)])]
    return [(0, b""), *ranges, (7, b"")]  # nothing, as a tensor without elements, is anywhere


class Writes:
    """Stands before `os.pwrite`: notes how ranges are written, and refuses or shortens them."""

    def __init__(self, rng: random.Random, *, refused: bool, short: bool) -> None:
        self.rng, self.refused, self.short = rng, refused, short
        self.direct: list[tuple[int, int]] = []
        self._write = os.pwrite

    def __call__(self, fd: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            if self.refused or offset % 512 or len(data) % 512:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self.direct.append((offset, len(data)))
        if self.short and len(data) > 1:
            data = data[: self.rng.randrange(1, len(data))]
        return self._write(fd, data, offset)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("refused", ["no", "at once", "as it is written"])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, ROOM_NBYTES, 5 * ROOM_NBYTES + 4097])
def test_the_file_has_every_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    nbytes: int,
    refused: str,
    short: bool,
    seed: int,
) -> None:
    """However ranges are cut, and whatever the file system takes at a time or refuses."""
    rng = random.Random(seed)
    data = rng.randbytes(nbytes)
    writes = Writes(rng, refused=refused != "no", short=short)
    monkeypatch.setattr(os, "pwrite", writes)
    if refused == "at once":
        monkeypatch.setattr(StreamWriter, "_set_direct", lambda *_, **__: False)
    write(tmp_path / "f", cut(data, rng), "auto")
    assert (tmp_path / "f").read_bytes() == data
    assert refused == "no" or not writes.direct


def test_ranges_in_another_order_are_written_where_they_belong(tmp_path: Path) -> None:
    """What was in memory by then is there, too."""
    data = random.Random(0).randbytes(3 * ROOM_NBYTES)
    for cuts in ((5000, 9000), (ROOM_NBYTES, 2 * ROOM_NBYTES), (1, ROOM_NBYTES + 1)):
        first, middle, last = ((a, data[a:b]) for a, b in itertools.pairwise([0, *cuts, len(data)]))
        for ranges in ((first, last, middle), (middle, first, last), (last, middle, first)):
            write(tmp_path / "f", ranges, "auto")
            assert (tmp_path / "f").read_bytes() == data


def test_nothing_goes_past_the_page_cache_where_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whole rooms do where it is on, on a file system that can."""
    data = random.Random(0).randbytes(3 * ROOM_NBYTES + 5000)
    writes = Writes(random.Random(0), refused=False, short=False)
    monkeypatch.setattr(os, "pwrite", writes)
    write(tmp_path / "f", cut(data, random.Random(1)), "off")
    assert writes.direct == []
    write(tmp_path / "f", cut(data, random.Random(1)), "auto")
    whole = [(n * ROOM_NBYTES, ROOM_NBYTES) for n in range(3)]
    assert writes.direct in ([], [*whole, (3 * ROOM_NBYTES, 4096)])  # none on a tmpfs, say
    assert (tmp_path / "f").read_bytes() == data


def test_a_system_that_writes_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked again for ever."""
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing of 3 bytes"):
        write(tmp_path / "f", [(0, b"abc")], "off")
