from __future__ import annotations

import dataclasses
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync
from ckptio.conversion.convert import FORMATS
from ckptio.conversion.own import sync_above
from ckptio.errors import StorageError
from tests.conftest import open_files, still_open_beside
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STATE = {f"w{i}": torch.full((100,), float(i)) for i in range(4)}


def modes_under(path: Path) -> set[tuple[bool, int]]:
    """Give whether each is a directory, and its permissions."""
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    return {(one.is_dir(), stat.S_IMODE(one.stat().st_mode)) for one in found}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file that each format can be made of."""
    torch.save(STATE, tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.fixture(params=[0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with the most usual mask, and with one that takes all of others' rights."""
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("modes", [None, (0o640, 0o750)])
def test_what_a_conversion_makes_has_the_modes_of_its_options(
    to: Any, modes: tuple[int, int] | None, source: Path, tmp_path: Path
) -> None:
    """As what a save makes: by default for the owner alone, whatever the umask."""
    config = None
    file_mode, dir_mode = modes or (0o600, 0o700)
    if modes is not None:
        config = dataclasses.replace(SMALL, file_mode=file_mode, dir_mode=dir_mode)
    target = tmp_path / "new" / "target"
    shards: Any = {"max_shard_nbytes": 800} if to == "hf" else {}
    sync.convert(source, target, to=to, config=config, **shards)
    wanted = {(True, dir_mode), (False, file_mode)}
    assert modes_under(tmp_path / "new") == wanted
    sync.convert(source, target, to=to, config=config, overwrite=True)
    assert modes_under(tmp_path / "new") == wanted


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_directory_that_was_there_keeps_its_mode(to: Any, source: Path, tmp_path: Path) -> None:
    """And so do the user's own files in it."""
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    (target / "config.json").write_text("{}")
    (target / "config.json").chmod(0o644)
    sync.convert(source, target, to=to, config=SMALL)
    assert modes_under(target) == {(True, 0o755), (False, 0o644), (False, 0o600)}


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_what_a_killed_conversion_left_gets_the_modes_of_the_next(
    to: Any, source: Path, tmp_path: Path
) -> None:
    """Whatever the killed one was told, and no byte of what it wrote."""
    folder = tmp_path / "target"
    folder.mkdir(mode=0o700)
    target = folder if to == "hf" else folder / "model.safetensors"
    left = folder / ".model.safetensors.partial"
    left.write_bytes(bytes(1 << 16))
    left.chmod(0o666)
    (file,) = sync.convert(source, target, to=to, config=SMALL).files
    assert modes_under(folder) == {(True, 0o700), (False, 0o600)}
    assert (folder / "model.safetensors").stat().st_size == file.nbytes


@pytest.mark.parametrize("to", ["safetensors", "hf", "dcp"])
@pytest.mark.parametrize("durability", ["none", "file", "full"])
def test_a_conversion_syncs_what_it_is_told_to(
    to: Any, durability: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, files, or files and the names of all that is new."""
    synced: list[str] = []
    real = os.fsync

    def fsync(file: Any) -> None:
        fd = file if type(file) is int else file.fileno()
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    target = tmp_path / "new" / "target"
    config = dataclasses.replace(SMALL, durability=durability)
    sync.convert(source, target, to=to, config=config)
    dirs = {str(tmp_path), str(tmp_path / "new")} | (
        {str(target)} if to != "safetensors" else set()
    )
    # above, whatever is young: who made it may have been killed
    inside = {path for path in synced if os.path.isdir(path) and path.startswith(str(tmp_path))}
    assert inside == (dirs if durability == "full" else set())
    assert bool([path for path in synced if not os.path.isdir(path)]) == (durability != "none")


@pytest.mark.parametrize("to", ["safetensors", "hf", "dcp"])
def test_a_file_has_all_its_bytes_when_it_is_synced(
    to: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote it: what is written behind its last sync, a power cut takes."""
    synced: dict[int, int] = {}
    real = os.fsync

    def fsync(file: Any) -> None:
        status = os.stat(file if type(file) is int else file.fileno())
        synced[status.st_ino] = status.st_size
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    shards: Any = {"max_shard_nbytes": 800} if to == "hf" else {}
    sync.convert(source, tmp_path / "new" / "target", to=to, **shards)
    made = [path.stat() for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert all(synced[status.st_ino] == status.st_size for status in made)


@pytest.mark.parametrize("to", ["safetensors", "hf", "ckptio"])
def test_what_an_earlier_conversion_wrote_is_synced_all_the_same(
    to: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been killed before it was, or told not to."""
    target = tmp_path / "new" / "target"
    shards: Any = {"max_shard_nbytes": 800} if to == "hf" else {}
    config = dataclasses.replace(SMALL, durability="none")
    sync.convert(source, target, to=to, config=config, **shards)
    synced = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    report = sync.convert(source, target, to=to, config=SMALL, **shards)
    assert all(file.was_there for file in report.files)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert set(synced) >= {str(path) for path in (tmp_path, *made)}


def refuse_syncs(patch: pytest.MonkeyPatch, code: int, which: Callable[[Path], bool]) -> None:
    """Let syncs of some paths fail."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if which(Path(os.readlink(f"/proc/self/fd/{fd}"))):
            raise OSError(code, os.strerror(code))
        real(fd)

    patch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize("is_dir", [False, True])
def test_what_is_there_and_cannot_be_synced_is_no_success(
    to: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_dir: bool
) -> None:
    """A power cut may take what an earlier conversion wrote."""
    (tmp_path / "new").mkdir()
    target = tmp_path / "new" / "target"
    sync.convert(source, target, to=to, config=SMALL)
    within = target if to == "hf" else tmp_path / "new"
    refuse_syncs(
        monkeypatch,
        errno.EIO,
        lambda path: within in (path, path.parent) and path.is_dir() == is_dir,
    )
    with pytest.raises(StorageError, match="cannot sync what is there"):
        sync.convert(source, target, to=to, config=SMALL)


@pytest.mark.parametrize("to", ["safetensors", "hf", "dcp"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_directories_above_may_be_nobodys_to_sync(
    to: Any, code: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they were there already; a disk that fails is told of."""
    (tmp_path / "there" / "target").mkdir(parents=True)
    target = tmp_path / "there" / "target"
    refuse_syncs(monkeypatch, code, lambda path: path == tmp_path)
    if to == "safetensors":
        target /= "file"
    if code == errno.EACCES:
        sync.convert(source, target, to=to, config=SMALL)
        assert sync.load(target).keys() == STATE.keys()
    else:
        with pytest.raises(StorageError, match="cannot sync what is there"):
            sync.convert(source, target, to=to, config=SMALL)


def test_what_goes_away_while_it_is_synced_is_an_error_of_ours(tmp_path: Path) -> None:
    """Somebody removes what was converted to."""
    with pytest.raises(StorageError, match="No such file"):
        sync_above(str(tmp_path / "gone"), SMALL)


def test_a_file_is_gone_for_good_when_its_shards_are_a_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its removal is the step that makes them one: a power cut must not bring it back."""
    target = tmp_path / "target"
    sync.convert(source, target, to="hf", config=SMALL)
    there: list[bool] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(target):
            there.append((target / "model.safetensors").exists())
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    sync.convert(source, target, to="hf", max_shard_nbytes=800, overwrite=True, config=SMALL)
    assert not there[-1]


def test_old_files_go_when_the_names_of_the_new_ones_last(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an earlier conversion, too, which was killed before it had synced them."""
    target = tmp_path / "target"
    shards: Any = {"max_shard_nbytes": 800, "overwrite": True}
    sync.convert(
        source, target, to="hf", config=dataclasses.replace(SMALL, durability="none"), **shards
    )
    (target / "model-00001-of-00009-00000000.safetensors").write_bytes(b"of before")
    steps: list[str] = []
    fsync, unlink = os.fsync, os.unlink

    def synced(fd: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def unlinked(path: Any) -> None:
        steps.append(f"unlink {path}")
        unlink(path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "unlink", unlinked)
    report = sync.convert(source, target, to="hf", config=SMALL, **shards)
    assert all(file.was_there for file in report.files)
    gone = [number for number, step in enumerate(steps) if step.startswith("unlink")]
    assert str(target) in steps[: gone[0]]
    assert str(target) in steps[gone[-1] :]


@pytest.mark.parametrize("overwrite", [False, True])
def test_metadata_of_dcp_comes_when_the_name_of_its_data_lasts(
    *, overwrite: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And old data goes when its own does: else a power cut leaves it without data."""
    target = tmp_path / "target"
    sync.convert(source, target, to="dcp", config=SMALL)
    (old,) = target.glob("*.distcp")
    if not overwrite:
        (target / ".metadata").unlink()
    seen: list[tuple[int, bool]] = []
    metadata = (target / ".metadata").stat().st_ino if overwrite else None
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(target):
            there = (
                (target / ".metadata").stat().st_ino if (target / ".metadata").exists() else None
            )
            seen.append((len(list(target.glob("*.distcp"))), there == metadata))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    sync.convert(source, target, to="dcp", overwrite=overwrite, config=SMALL)
    assert seen[-2:] == [(2, True), (2, False)]
    assert not old.exists()


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_a_conversion_that_fails_leaves_no_directory(
    to: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its own nor those above that it made."""

    def pwrite(*_: Any) -> int:
        raise OSError(28, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(StorageError, match="no space"):
            sync.convert(source, tmp_path / "new" / "target", to=to, config=SMALL)
    assert sorted(os.listdir(tmp_path)) == ["x.pt"]


@pytest.mark.parametrize("name", ["", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_only_looks_like_a_file_is_neither_waited_for_nor_replaced(
    *, name: str, overwrite: bool, source: Path, tmp_path: Path
) -> None:
    """Nobody writes to a FIFO that nobody reads."""
    fifo = tmp_path / "target" / name
    fifo.parent.mkdir(exist_ok=True)
    os.mkfifo(fifo)
    options: dict[str, Any] = {"to": "hf" if name else "safetensors"}
    if name.endswith(".json"):
        options["max_shard_nbytes"] = 800
    files = open_files()
    with pytest.raises(StorageError):
        sync.convert(source, tmp_path / "target", overwrite=overwrite, config=SMALL, **options)
    assert fifo.is_fifo()
    assert still_open_beside(files) == set()
