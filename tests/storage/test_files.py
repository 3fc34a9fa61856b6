from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ckptio.storage.files import MAX_TRIES, PosixFiles, make_dirs, read_regular

if TYPE_CHECKING:
    from pathlib import Path


class VanishingDirs(PosixFiles):
    """Somebody else removes the directory above, so many times."""

    def __init__(self, num_times: int) -> None:
        self.num_left = num_times

    def mkdir(self, path: str, mode: int) -> None:
        above = os.path.dirname(path)
        if self.num_left and os.path.basename(path) == "c":
            self.num_left -= 1
            os.rmdir(above)
        super().mkdir(path, mode)


def test_directories_are_made_though_those_above_go_meanwhile(tmp_path: Path) -> None:
    """The end of a save that failed removes what it had made, and another one begins there."""
    made: list[str] = []
    make_dirs(VanishingDirs(3), f"{tmp_path}/a/b/c", 0o700, made)
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert made[-1] == f"{tmp_path}/a/b/c"
    with pytest.raises(FileNotFoundError):
        make_dirs(VanishingDirs(MAX_TRIES), f"{tmp_path}/d/e/c", 0o700, [])


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """Not tried for long: it stays."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError):
        make_dirs(PosixFiles(), f"{tmp_path}/file", 0o700, [])
    with pytest.raises(NotADirectoryError):
        make_dirs(PosixFiles(), f"{tmp_path}/file/c", 0o700, [])


def test_a_file_that_comes_in_pieces_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some mounts give less than was asked for; a file that was cut off ends where it does."""
    (tmp_path / "f").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: pread(fd, min(nbytes, 7), at))
    assert read_regular(PosixFiles(), str(tmp_path / "f"), 100) == bytes(range(100))
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: pread(fd, min(nbytes, 50 - at), at))
    assert read_regular(PosixFiles(), str(tmp_path / "f"), 100) == bytes(range(50))
