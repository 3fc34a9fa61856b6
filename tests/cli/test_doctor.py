from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.__main__ import main
from ckptio.cli.mounts import kind_in
from ckptio.config import PAGE_NBYTES
from ckptio.staging import moves
from ckptio.storage import linux, locks
from ckptio.storage.files import PosixFiles
from ckptio.storage.lending import Lender
from ckptio.storage.linux import DirectAlignment
from tests.cli.rig import plain_lines, run_json, run_on_terminal, save_at

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [
    "direct I/O", "reserving room", "exclusive names", "exchange", "locks", "fsync", "page cache",
    "leases", "copies", "small copies",
]  # fmt: skip


def test_doctor_says_what_the_file_system_can_do_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each thing is tried in a directory that is gone afterwards."""
    code, document = run_json(capsys, "doctor", str(tmp_path))
    assert code == 0
    assert [finding["name"] for finding in document["findings"]] == NAMES
    assert {finding["state"] for finding in document["findings"]} <= {"yes", "slow"}
    assert document["free_nbytes"] > 0
    assert document["file_system"]
    assert document["leftovers"] == []
    assert os.listdir(tmp_path) == []


def test_doctor_has_a_line_for_each_thing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind what is there, in columns. Of a file system without a name it says that."""
    _, document = run_json(capsys, "doctor", str(tmp_path))
    lines = [f"{f['state']:4}  {f['name']:15}  {f['detail']}" for f in document["findings"]]
    for kind in (document["file_system"], "unknown file system"):
        assert main(["doctor", str(tmp_path)]) == 0
        head, *rest = capsys.readouterr().out.splitlines()
        assert head.startswith(f"{tmp_path}  {kind}  ")
        assert head.endswith(" free")
        assert rest == [*lines, "nothing left by dead saves"]
        monkeypatch.setattr("ckptio.cli.doctor.file_system_of", lambda _: None)


def test_doctor_says_how_this_machine_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower, but as well, where the processor is another or a sandbox forbids system calls."""
    monkeypatch.setattr(moves, "_stream", None)
    monkeypatch.setattr(moves, "_process_vm_readv", lambda *_: -1)
    code, document = run_json(capsys, "doctor", str(tmp_path))
    assert code == 0
    states = {finding["name"]: finding["state"] for finding in document["findings"]}
    assert (states["copies"], states["small copies"]) == ("slow", "slow")


def test_doctor_says_what_a_mount_does_not_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the option that saves there all the same. The mounts are played."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    fsync = os.fsync
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(linux, "_renameat2", refuse)
    monkeypatch.setattr(os, "fsync", lambda fd: refuse() if is_directory(fd) else fsync(fd))
    code, document = run_json(capsys, "doctor", str(tmp_path))
    told = {finding["name"]: finding for finding in document["findings"]}
    assert code == 2
    assert told["exclusive names"]["state"] == told["fsync"]["state"] == "no"
    assert "overwrite=True" in told["exclusive names"]["detail"]
    assert told["fsync"]["detail"].count("durability='file'") == 1
    assert told["exchange"]["state"] == "slow"


def test_doctor_says_so_where_an_exchange_is_a_plain_rename(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is as after an exchange, and what it was before is gone."""
    tried: list[str] = []

    def rename(source: str, target: str) -> None:
        tried.append(source)
        os.replace(source, target)

    monkeypatch.setattr(linux, "rename_exchange", rename)
    _, document = run_json(capsys, "doctor", str(tmp_path))
    (found,) = (each for each in document["findings"] if each["name"] == "exchange")
    assert found["state"] == "slow"
    assert "plain rename" in found["detail"]
    assert tried[0].startswith(f"{tmp_path}/.ckptio-doctor-")  # there, and not in /tmp


def is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def test_doctor_finds_what_dead_saves_left(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a checkpoint, and where none was committed, four levels deep; checkpoints are none."""
    names = [f"data-{'a' * 32}-00000-00000.safetensors", f"data-{'b' * 32}-00000-00000.safetensors"]
    dead, hidden, deep = (
        save_at(tmp_path / name) for name in ("run/step-8", ".old/a/b/step-8", "a/b/c/d/step-8")
    )
    (ckpt / names[0]).write_bytes(b"x" * 1000)
    for folder in (dead, hidden, deep):
        (folder / "manifest.json").unlink()
    for path in (ckpt / names[0], *dead.iterdir(), *hidden.iterdir(), *deep.iterdir()):
        os.utime(path, (1, 1))
    code, document = run_json(capsys, "doctor", str(tmp_path))
    assert code == 0
    found = {item["path"]: item for item in document["leftovers"]}
    assert found.keys() == {str(ckpt), str(dead), str(hidden)}
    assert found[str(ckpt)]["names"] == [names[0]]
    assert found[str(ckpt)]["nbytes"] == 1000
    assert (ckpt / names[0]).exists()
    assert main(["doctor", str(tmp_path)]) == 0
    assert f"left  {ckpt}  1 file of dead saves  1000 B" in capsys.readouterr().out


def no_space(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lend_nothing(*_: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


FULL = os.strerror(errno.ENOSPC)
PAGE = DirectAlignment(PAGE_NBYTES, PAGE_NBYTES)
PLAYED: list[tuple[object, str, object, str, str, str]] = [
    (PosixFiles, "alignment", lambda *_: PAGE, "direct I/O", "yes", "offsets on 4096 bytes"),
    (PosixFiles, "alignment", lambda *_: None, "direct I/O", "yes", "does not say"),
    (PosixFiles, "alignment", lambda *_: DirectAlignment(512, 8192), "direct I/O", "slow", "more"),
    (PosixFiles, "alignment", lambda *_: DirectAlignment(8192, 512), "direct I/O", "slow", "more"),
    (os, "pwrite", no_space, "direct I/O", "slow", f"transfer fails ({FULL})"),
    (os, "preadv", lambda *_: 100, "direct I/O", "slow", "gave 100 bytes of 4096"),
    (linux, "allocate", lambda *_: True, "reserving room", "yes", "room is reserved"),
    (linux, "allocate", lambda *_: False, "reserving room", "slow", "fallocate is not there"),
    (linux, "allocate", no_space, "reserving room", "no", f"failed: {FULL}"),
    (os, "link", shutil.copy, "exclusive names", "no", "two saves may overwrite"),
    (linux, "rename_exchange", lambda *_: None, "exchange", "no", "did not exchange"),
    (locks, "lock", lambda _: True, "locks", "no", "two holders"),
    (locks, "lock", lambda _: False, "locks", "no", "two holders"),
    (locks, "lock", no_space, "locks", "slow", f"no locks ({FULL})"),
    (PosixFiles, "fsync_dir", no_space, "fsync", "no", f"failed: {FULL}"),
    (linux, "num_cached_pages", lambda *_: 0, "page cache", "yes", "the kernel tells"),
    (linux, "num_cached_pages", lambda *_: None, "page cache", "slow", "nobody tells"),
    (Lender, "lend", lend_nothing, "leases", "slow", "no read leases"),
]


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(("where", "name", "does", "finding", "state", "said"), PLAYED)
def test_doctor_knows_what_it_sees(
    where: object,
    name: str,
    does: object,
    finding: str,
    state: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thing by itself, whatever is here. The mounts are played."""
    create = PosixFiles.create

    def buffered(files: PosixFiles, path: str, mode: int, *, direct: bool) -> int:
        del direct  # tmpfs has none
        return create(files, path, mode, direct=False)

    monkeypatch.setattr(PosixFiles, "create", buffered)
    monkeypatch.setattr(where, name, does)
    code, document = run_json(capsys, "doctor", str(tmp_path))
    (found,) = [each for each in document["findings"] if each["name"] == finding]
    assert (found["state"], said in found["detail"]) == (state, True), found
    assert code == (2 if state == "no" else 0)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_doctor_says_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Saves cannot work there: 2."""
    tmp_path.chmod(0o500)
    assert main(["doctor", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("where", "real"),
    [
        (b"/mnt/run", "/mnt/run/step-1"),
        ("/mnt/l\u00e4ufe".encode(), "/mnt/l\u00e4ufe/step-1"),
        (b"/mnt/my\\040runs\\134", "/mnt/my runs\\"),
        (b"/mnt/\xff", "/mnt/\udcff/step-1"),
        (b"/mnt/a\rb", "/mnt/a\rb"),
    ],
)
def test_a_mount_may_have_any_name(where: bytes, real: str) -> None:
    """Names are bytes; the kernel writes some of them in octal, and leaves all others."""
    others = [b"/dev/sda / ext4 rw 0 0", b"x /mnt/\xfe\x85 btrfs rw 0 0", b"y /m nfs4 rw 0 0", b""]
    mounts = b"\n".join([others[0], b"tmpfs " + where + b" tmpfs rw 0 0", *others[1:]])
    assert kind_in(mounts, real) == "tmpfs"
    assert kind_in(mounts, "/home") == "ext4"
    assert kind_in(b"", real) is None
    over = mounts + b"\nserver:/runs " + where + b" nfs4 rw 0 0"
    assert kind_in(over, real) == "nfs4", "what was mounted there last hides the rest"


def test_doctor_wants_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a file, nor nothing."""
    (tmp_path / "file").write_text("x")
    for name, error in (("file", "Not a directory"), ("nowhere", "No such file or directory")):
        code, document = run_json(capsys, "doctor", str(tmp_path / name))
        assert (code, document["error"]) == (2, error)
        assert document["findings"] == document["leftovers"] == []


def test_doctor_fits_a_narrow_terminal_and_imports_no_torch(tmp_path: Path) -> None:
    """Each finding begins a line of its own."""
    code, sent = run_on_terminal(40, "doctor", str(tmp_path))
    assert code == 0
    assert sum(line.startswith(("yes ", "slow ")) for line in plain_lines(sent)) == len(NAMES)
    program = (
        "import sys; from ckptio.__main__ import main; code = main(['doctor', sys.argv[1]]);"
        " sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=False, capture_output=True
    )
    assert done.returncode == 0
