from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckptio.__main__ import main
from ckptio.cli.mounts import kind_in
from ckptio.staging import moves
from ckptio.storage import linux
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
    monkeypatch.setattr(linux, "rename_exchange", os.replace)
    _, document = run_json(capsys, "doctor", str(tmp_path))
    (found,) = (each for each in document["findings"] if each["name"] == "exchange")
    assert found["state"] == "slow"
    assert "plain rename" in found["detail"]


def is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def test_doctor_finds_what_dead_saves_left(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a checkpoint, and where none was committed; checkpoints are no leftovers."""
    names = [f"data-{'a' * 32}-00000-00000.safetensors", f"data-{'b' * 32}-00000-00000.safetensors"]
    (ckpt / names[0]).write_bytes(b"x" * 1000)
    dead = save_at(tmp_path / "run" / "step-8")
    (dead / "manifest.json").unlink()
    for path in (ckpt / names[0], *dead.iterdir()):
        os.utime(path, (1, 1))
    code, document = run_json(capsys, "doctor", str(tmp_path))
    assert code == 0
    found = {item["path"]: item for item in document["leftovers"]}
    assert found.keys() == {str(ckpt), str(dead)}
    assert found[str(ckpt)]["names"] == [names[0]]
    assert found[str(ckpt)]["nbytes"] == 1000
    assert (ckpt / names[0]).exists()
    assert main(["doctor", str(tmp_path)]) == 0
    assert f"left  {ckpt}  1 file of dead saves  1000 B" in capsys.readouterr().out


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
    for name in ("file", "nowhere"):
        code, document = run_json(capsys, "doctor", str(tmp_path / name))
        assert code == 2
        assert document["error"]


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
