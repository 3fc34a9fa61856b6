"""A conversion that was stopped anywhere and is run again; nothing that is whole is written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import ckptio.conversion.compared
import ckptio.conversion.dcp
import ckptio.storage.local
from ckptio import sync
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    StorageError,
)
from ckptio.testing.files import RecordingFiles
from tests.foreign.rig import assert_same_state, load_dcp, save_dcp
from tests.foreign.test_dcp import save_chunks
from tests.rig import assert_tidy, config_with, names_in

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio.testing.faults import Operation
    from ckptio.testing.files import RefuseDirect

#: A file for each tensor.
FILES = config_with(bucket_nbytes=16 << 10)

#: What changes a file system; locks and reads do not.
WRITES = {
    "create", "pwrite", "truncate", "fsync", "fsync_dir", "mkdir", "rmdir", "unlink", "publish",
    "exchange", "replace", "allocate",
}  # fmt: skip


class _Machine:
    """File operations of a process that dies before its `num_ops`-th write.

    Or before its first write of a kind.
    """

    def __init__(self, num_ops: int, refuse_direct: RefuseDirect = "", *, until: str = "") -> None:
        self.refuse_direct: RefuseDirect = refuse_direct
        self.until = until
        self.left = num_ops
        self.is_dead = False
        self.made: list[RecordingFiles] = []

    def files(self) -> RecordingFiles:
        files = RecordingFiles(self.step, refuse_direct=self.refuse_direct)
        self.made.append(files)
        return files

    def step(self, operation: Operation) -> None:
        if operation.kind not in WRITES:
            return
        if operation.kind == self.until:
            self.left = 0
        self.left -= 1
        if self.left < 0:
            self.is_dead = True
            raise OSError(5, "the process is dead", operation.path)

    def written(self) -> list[tuple[str, str]]:
        return [pair for files in self.made for pair in files.kinds("pwrite")]

    def bury(self) -> None:
        for files in self.made:
            files.bury()


def make_source(path: Path, *, is_sharded: bool) -> tuple[Path, dict[str, Any]]:
    """Save several files, of whole tensors or of chunks."""
    if is_sharded:
        w = torch.arange(6.0 * 4096).reshape(6, 4096)
        chunks = [(0, 0, 4, 2000), (0, 2000, 4, 2096), (4, 0, 2, 4096)]
        return save_chunks(path, w, chunks), {"w": w}
    state = {f"w{i}": torch.full((5000 + i,), float(i)) for i in range(3)}
    sync.save({**state, "epoch": 3}, path, config=FILES)
    return path, {**state, "epoch": 3}


def convert(
    source: Path, target: Path, files: Any, patch: pytest.MonkeyPatch, **options: Any
) -> Any:
    with patch.context() as inner:
        inner.setattr(ckptio.storage.local, "PosixFiles", files)
        return sync.convert(source, target, to="ckptio", config=FILES, **options)


@pytest.mark.parametrize(("is_sharded", "replaces"), [(False, False), (False, True), (True, False)])
def test_a_conversion_to_ours_goes_on_wherever_it_was_killed(
    *, is_sharded: bool, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is the old checkpoint or the new one; the second run makes it the new one."""
    source, state = make_source(tmp_path / "source", is_sharded=is_sharded)
    num_kept = 0
    for number in range(10_000):
        target = tmp_path / f"target-{number}"
        old = {"old": torch.ones(3)}
        if replaces:
            sync.save(old, target, config=FILES)
        machine = _Machine(number)
        failure: Exception | None = None
        try:
            convert(source, target, machine.files, monkeypatch, overwrite=replaces)
        except StorageError as error:
            failure = error
        machine.bury()
        try:
            assert_same_state(sync.load(target, config=FILES), state)
            is_new = True
        except CheckpointNotFoundError:
            assert not replaces
            is_new = False
        except AssertionError:
            assert_same_state(sync.load(target, config=FILES), old)
            assert replaces
            is_new = False
        if not machine.is_dead:
            assert failure is None
            break
        again = _Machine(10_000)
        report = convert(source, target, again.files, monkeypatch, overwrite=replaces)
        again.bury()
        assert_same_state(sync.load(target, config=FILES), state)
        assert sync.verify(target, config=FILES).is_whole
        if not is_new or replaces:
            unborn = [name for name in names_in(target) if name.startswith(".attempt-")]
            for name in names_in(target) if unborn else ():  # for an hour it may be living
                os.utime(target / name, (0, 0))
            if unborn:
                sync.save(state, target, overwrite=True)
            assert_tidy(target)
        data = [name for kind, name in again.written() if name.startswith("data-")]
        whole = {file.name for file in report.files if file.was_there}
        assert not whole & set(data)
        assert bool(whole) or not (is_new and not replaces)
        num_kept += bool(whole) and not is_new
    assert num_kept > 3


@pytest.mark.parametrize("refuse_direct", ["", "open", "open-after-create", "align", "read"])
def test_bytes_decide_and_not_sizes(
    refuse_direct: RefuseDirect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the right size with one wrong byte is mended there, and nowhere else."""
    source, state = make_source(tmp_path / "source", is_sharded=False)
    target = tmp_path / "target"
    machine = _Machine(10_000, refuse_direct, until="publish")
    with pytest.raises(StorageError):
        convert(source, target, machine.files, monkeypatch)
    machine.bury()
    with pytest.raises(CheckpointNotFoundError):
        sync.load(target, config=FILES)
    first, *others = sorted(target.glob("data-*"))
    assert others
    raw = bytearray(first.read_bytes())
    raw[9000] ^= 1
    first.write_bytes(raw)
    again = _Machine(10_000, refuse_direct)
    report = convert(source, target, again.files, monkeypatch)
    written = [name for _, name in again.written() if name.startswith("data-")]
    assert first.name in written
    kept = {file.name for file in report.files if file.was_there}
    assert first.name not in kept
    assert kept
    assert_same_state(sync.load(target, config=FILES), state)
    assert_tidy(target)


def test_what_was_committed_is_there_unless_it_is_damaged(tmp_path: Path) -> None:
    """Run again, a conversion that ended well writes nothing; damage is not written over."""
    source, state = make_source(tmp_path / "source", is_sharded=False)
    target = tmp_path / "target"
    sync.convert(source, target, to="ckptio", config=FILES)
    report = sync.convert(source, target, to="ckptio", config=FILES)
    assert all(file.was_there for file in report.files)
    for others in ("w1", ["w0", "w1", "w2"]):  # the same tensors, but not the same values
        with pytest.raises(CheckpointExistsError):
            sync.convert(source, target, to="ckptio", select=others, config=FILES)
    first = min(target.glob("data-*"))
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)
    with pytest.raises(CheckpointExistsError):
        sync.convert(source, target, to="ckptio", config=FILES)
    assert first.read_bytes() == raw
    report = sync.convert(source, target, to="ckptio", overwrite=True, config=FILES)
    assert not any(file.was_there for file in report.files)
    assert_same_state(sync.load(target, config=FILES), state)
    assert_tidy(target)


def test_a_checkpoint_that_nobody_can_read_is_there_all_the_same(tmp_path: Path) -> None:
    """It is replaced where that is asked for; nothing of it is taken for that of a conversion."""
    source, state = make_source(tmp_path / "source", is_sharded=False)
    target = tmp_path / "target"
    sync.convert(source, target, to="ckptio", config=FILES)
    (target / "manifest.json").write_bytes(b"{}")
    before = names_in(target)
    with pytest.raises(CheckpointExistsError):
        sync.convert(source, target, to="ckptio", config=FILES)
    assert names_in(target) == before
    for _ in range(2):
        (target / "manifest.json").write_bytes(b"{}")
        report = sync.convert(source, target, to="ckptio", overwrite=True, config=FILES)
        assert not any(file.was_there for file in report.files)
        assert_same_state(sync.load(target, config=FILES), state)


#: What the writing of a directory of DCP does to a file system.
_CALLS = ("open", "mkdir", "pwrite", "ftruncate", "fsync", "unlink", "rename", "rmdir")


def dying_after(num_calls: int, patch: pytest.MonkeyPatch, inside: Path) -> list[str]:
    """Let every change below a directory fail from some number of them on; gives what was done."""
    done: list[str] = []
    is_dead: list[str] = []

    def behind(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            what = args[0]
            path = os.readlink(f"/proc/self/fd/{what}") if type(what) is int else os.fspath(what)
            flags = args[1] if name == "open" and len(args) > 1 else os.O_CREAT
            if not path.startswith(str(inside)) or not flags & os.O_CREAT:
                return real(*args, **kwargs)
            if is_dead or len(done) >= num_calls:
                is_dead.append(name)
                raise OSError(5, "the process is dead", path)
            done.append(f"{name} {os.path.basename(path)}")
            return real(*args, **kwargs)

        return call

    for name in _CALLS:
        patch.setattr(os, name, behind(name))
    return done


@pytest.mark.parametrize("replaces", [False, True])
def test_a_conversion_to_dcp_goes_on_wherever_it_was_killed(
    *, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is the old checkpoint or the new one; the second run makes it the new one."""
    source, state = make_source(tmp_path / "source", is_sharded=False)
    old = {"old": torch.ones(3)}
    monkeypatch.setattr(ckptio.conversion.compared, "PIECE_NBYTES", 16 << 10)
    monkeypatch.setattr(ckptio.conversion.dcp, "PIECE_NBYTES", 16 << 10)
    with monkeypatch.context() as patch:
        done = dying_after(10_000, patch, tmp_path / "all")
        sync.convert(source, tmp_path / "all", to="dcp", config=FILES)
    num_pieces = len([call for call in done if call == "pwrite data"])
    assert num_pieces > 4
    num_kept = 0
    for number in range(10_000):
        target = tmp_path / f"target-{number}"
        if replaces:
            save_dcp(target, old)
        with monkeypatch.context() as patch:
            done = dying_after(number, patch, target)
            try:
                sync.convert(source, target, to="dcp", overwrite=replaces, config=FILES)
                died = False
            except StorageError:
                died = True
        try:
            found = sync.load(target, config=FILES)
        except CheckpointNotFoundError:
            assert not replaces
        else:
            assert_same_state(found, old if "old" in found else state)
        if not died:
            break
        is_new = (target / ".metadata").exists() and "old" not in sync.load(target, config=FILES)
        with monkeypatch.context() as patch:
            again = dying_after(10_000, patch, target)
            if is_new and not replaces:
                with pytest.raises(CheckpointExistsError):
                    sync.convert(source, target, to="dcp", config=FILES)
            else:
                sync.convert(source, target, to="dcp", overwrite=replaces, config=FILES)
        assert_same_state(sync.load(target, config=FILES), state)
        loaded = {name: torch.zeros_like(w) for name, w in state.items() if name != "epoch"}
        load_dcp(target, loaded)
        assert_same_state({**loaded, "epoch": 3}, state)
        metadata, data = sorted(os.listdir(target))
        assert metadata == ".metadata"
        assert data.endswith(".distcp")
        before = [call for call in done if call == "pwrite data"]
        rewritten = [call for call in again if call == "pwrite data"]
        if not is_new and not any(call.startswith("rename") for call in done):
            assert len(before) + len(rewritten) <= num_pieces
            num_kept += bool(before)
    assert num_kept > 3


def load_as_others(folder: Path) -> dict[str, torch.Tensor]:
    """Load what Hugging Face's libraries find in a folder."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(folder / file)[name] for name, file in index.items()}
    assert found.keys() == {n for file in set(index.values()) for n in load_file(folder / file)}
    return found


@pytest.mark.parametrize("limit", [20_000, 1 << 20], ids=["to many", "to one"])
@pytest.mark.parametrize("before", ["nothing", "many", "one", "one and an index"])
def test_a_conversion_to_a_folder_goes_on_wherever_it_was_killed(
    before: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reader finds all of the old checkpoint or all of the new one, of the same names."""
    states = [{f"w{i}": torch.full((5000,), x + i) for i in range(3)} for x in (0.0, 10.0, 20.0)]
    for name, state in zip(("old", "new", "left over"), states, strict=True):
        sync.save(state, tmp_path / name, config=FILES)

    def convert(name: str, target: Path, nbytes: int, **options: Any) -> list[str]:
        options |= {"to": "hf", "max_shard_nbytes": nbytes, "config": FILES}
        return [file.name for file in sync.convert(tmp_path / name, target, **options).files]

    for number in range(1000):
        target = tmp_path / f"target-{number}"
        if before == "one and an index":
            convert("left over", target, 20_000)
            sync.convert(
                tmp_path / "old", target / "model.safetensors", to="safetensors", config=FILES
            )
        elif before != "nothing":
            convert("old", target, 20_000 if before == "many" else 1 << 20)
        with monkeypatch.context() as patch:
            done = dying_after(number, patch, target)
            try:
                convert("new", target, limit, overwrite=before != "nothing")
                died = False
            except StorageError:
                died = True
        try:
            found = sync.load(target, config=FILES)
        except CheckpointNotFoundError:
            assert before == "nothing"
        else:
            (state,) = [state for state in states[:2] if torch.equal(state["w0"], found["w0"])]
            assert_same_state(dict(sorted(found.items())), state)
            assert_same_state(dict(sorted(load_as_others(target).items())), state)
        if not died:
            break
        files = convert("new", target, limit, overwrite=before != "nothing")
        assert_same_state(dict(sorted(sync.load(target, config=FILES).items())), states[1])
        assert set(os.listdir(target)) == set(files)
    assert len(done) == number > 3


@pytest.mark.parametrize("limit", [20_000, 40_000, 1 << 20])
def test_what_another_conversion_left_in_a_folder_is_not_called_a_checkpoint(
    limit: int, tmp_path: Path
) -> None:
    """Nobody reads it; it is replaced where that is asked for, and not before."""
    target = tmp_path / "target"
    for value in (0.0, 1.0):
        state = {f"w{i}": torch.full((5000,), value) for i in range(4)}
        sync.save(state, tmp_path / str(value), config=FILES)
    options: dict[str, Any] = {"to": "hf", "max_shard_nbytes": 20_000, "config": FILES}
    sync.convert(tmp_path / "0.0", target, **options)
    (target / "model.safetensors.index.json").unlink()  # it was killed before it wrote that
    options["max_shard_nbytes"] = limit
    with pytest.raises(CheckpointExistsError, match=r"not written to its end.*overwrite=True"):
        sync.convert(tmp_path / "1.0", target, **options)
    with pytest.raises(CheckpointNotFoundError):
        sync.load(target, config=FILES)
    sync.convert(tmp_path / "1.0", target, overwrite=True, **options)
    assert_same_state(dict(sorted(sync.load(target, config=FILES).items())), state)


@pytest.mark.parametrize("to", ["dcp", "hf", "safetensors", "ckptio"])
def test_two_conversions_to_one_place_do_not_meet(to: Any, tmp_path: Path) -> None:
    """The second is refused, and takes nothing from the first."""
    source = tmp_path / "source"
    state = {f"w{i}": torch.full((5000 + i,), float(i)) for i in range(4)}
    sync.save(state, source, config=FILES)
    target = tmp_path / "target"
    met: list[bool] = []

    def progress(done: int, total: int) -> None:
        del done, total
        if not met:
            met.append(True)
            with pytest.raises(CommitConflictError):
                sync.convert(source, target, to=to, config=FILES)

    sync.convert(source, target, to=to, progress=progress, config=FILES)
    assert met
    found = sync.load(target, config=FILES)
    assert_same_state(dict(sorted(found.items())), state)
    assert not list(tmp_path.rglob("*partial"))


@pytest.mark.parametrize("to", ["dcp", "hf", "safetensors"])
def test_a_conversion_goes_where_there_are_no_locks(
    to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS, a directory has none; but what is broken is told."""
    state = {"w": torch.ones(5000)}
    sync.save(state, tmp_path / "source", config=FILES)
    code = errno.EIO

    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageError, match="cannot write"):
        sync.convert(tmp_path / "source", tmp_path / "x", to=to, config=FILES)
    code = errno.EBADF
    sync.convert(tmp_path / "source", tmp_path / "x", to=to, config=FILES)
    assert_same_state(sync.load(tmp_path / "x", config=FILES), state)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_lost_before_it_is_locked_is_of_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_replaced: bool
) -> None:
    """That one has ended meanwhile, and maybe a third one has begun, whose file stays."""
    sync.save({"w": torch.ones(5000)}, tmp_path / "source", config=FILES)
    aside, real = tmp_path / ".x.safetensors.partial", fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if aside.exists():
            aside.unlink()
            if is_replaced:
                aside.write_bytes(b"begun")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CommitConflictError):
        sync.convert(
            tmp_path / "source", tmp_path / "x.safetensors", to="safetensors", config=FILES
        )
    left = [".x.safetensors.partial"] if is_replaced else []
    assert names_in(tmp_path) == [*left, "source"]
    assert not is_replaced or aside.read_bytes() == b"begun"


def test_a_file_whose_writer_died_between_two_names_stays_whole(tmp_path: Path) -> None:
    """It has its own and the one that it was written under: whoever writes there leaves it."""
    for name in ("a", "b"):
        sync.save({"w": torch.full((5000,), float(ord(name)))}, tmp_path / name, config=FILES)
    target = tmp_path / "x.safetensors"
    options: dict[str, Any] = {"to": "safetensors", "overwrite": True, "config": FILES}
    sync.convert(tmp_path / "a", target, **options)
    os.link(target, tmp_path / ".x.safetensors.partial")
    with pytest.raises(CommitConflictError):
        sync.convert(tmp_path / "b", target, **options)
    assert load_file(target)["w"][-1] == float(ord("a"))
    sync.convert(tmp_path / "b", target, **options)
    assert load_file(target)["w"][-1] == float(ord("b"))
    assert names_in(tmp_path) == ["a", "b", "x.safetensors"]


def test_shards_that_a_killed_conversion_began_go(tmp_path: Path) -> None:
    """Nobody goes on with those of another split; what cannot be removed is in nobody's way."""
    source, _ = make_source(tmp_path / "source", is_sharded=False)
    target = tmp_path / "target"
    target.mkdir()
    (target / ".model-00001-of-00007.safetensors.partial").write_bytes(b"begun")
    (target / ".model-00002-of-00007-0123abcd.safetensors.partial").mkdir()
    sync.convert(source, target, to="hf", drop_values=True, config=FILES)
    assert names_in(target) == [
        ".model-00002-of-00007-0123abcd.safetensors.partial",
        "model.safetensors",
    ]


def test_what_a_killed_conversion_of_another_source_began_goes(tmp_path: Path) -> None:
    """Also where the file is there already, and nothing is written; but not while it is written."""
    for name in ("a", "b"):
        sync.save({"w": torch.full((5000,), float(ord(name)))}, tmp_path / name, config=FILES)
    target = tmp_path / "x.safetensors"
    options: dict[str, Any] = {"to": "safetensors", "overwrite": True, "config": FILES}
    sync.convert(tmp_path / "a", target, **options)
    (tmp_path / ".x.safetensors.partial").write_bytes(bytes(9000))  # of "b", which was killed
    (file,) = sync.convert(tmp_path / "a", target, **options).files
    assert file.was_there
    assert names_in(tmp_path) == ["a", "b", "x.safetensors"]

    def progress(done: int, total: int) -> None:
        del done, total
        sync.convert(tmp_path / "a", target, **options)

    sync.convert(tmp_path / "b", target, progress=progress, **options)
    assert load_file(target)["w"][0] == float(ord("b"))
    assert names_in(tmp_path) == ["a", "b", "x.safetensors"]
