"""What the machine must have for a power cut, and how disks are made, mounted and removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.config import MiB
from tests.stress.recorder import CONTROL_NAME, DISK_NAME, READY

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_CAP_SYS_ADMIN = 21
_TIMEOUT_S = 60.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """A file system of the kernel.

    Attributes:
        name: What it is mounted as.
        mkfs: Makes it on a disk, small, and initializes nothing behind a test's back.
        disk_nbytes: Size of the disk.
        sector_nbytes: What the disk writes whole, or not at all.
    """

    name: str
    mkfs: tuple[str, ...]
    disk_nbytes: int
    sector_nbytes: int = 512


EXT4 = FileSystem(
    name="ext4",
    mkfs=(
        *("mkfs.ext4", "-q", "-F", "-b", "4096"),
        *("-J", "size=4"),  # a small journal wraps many times in a run
        *("-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"),
    ),
    disk_nbytes=16 * MiB,
)
XFS = FileSystem(name="xfs", mkfs=("mkfs.xfs", "-q", "-f", "-K"), disk_nbytes=300 * MiB)
BTRFS = FileSystem(
    name="btrfs",
    mkfs=("mkfs.btrfs", "-q", "-f", "-K"),
    disk_nbytes=128 * MiB,
    sector_nbytes=4096,  # half of a superblock is none, and one is all that is looked at
)


def why_not(fs: FileSystem) -> str | None:
    """Say why no power can be cut on this machine; `None` if it can."""
    if not sys.platform.startswith("linux"):
        return "power cuts need Linux"
    if os.geteuid() != 0:
        return "power cuts need root, to mount file systems"
    with open("/proc/self/status", encoding="ascii") as file:
        capabilities = next(line for line in file if line.startswith("CapEff:"))
    if not int(capabilities.split()[1], 16) >> _CAP_SYS_ADMIN & 1:
        return "power cuts need CAP_SYS_ADMIN, to mount file systems"
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(device):
            return f"power cuts need {device}"
    for program in (fs.mkfs[0], "mount", "umount"):
        if shutil.which(program) is None:
            return f"power cuts need {program}"
    try:
        import mfusepy  # noqa: F401, PLC0415  # needs libfuse, which few machines have
    except (ImportError, OSError) as error:
        return f"power cuts need mfusepy and libfuse: {error}"
    return None


@contextlib.contextmanager
def recording(directory: str, fs: FileSystem, log_path: str) -> Iterator[tuple[str, str]]:
    """Give the root of a fresh file system on a recorded disk, and the disk's control file.

    At the end the file system is unmounted and the log complete.
    """
    with contextlib.ExitStack() as stack:
        disks = _make_dir(directory, "disks")
        arguments = ["-m", "tests.stress.recorder", disks, str(fs.disk_nbytes), log_path]
        recorder = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            start_new_session=True,  # an interrupt from the keyboard is not for the disk
        )
        stack.callback(_end, recorder, disks)
        disk = f"{disks}/{DISK_NAME}"
        _wait_for(disk, recorder)
        _run(*fs.mkfs, disk)
        root = stack.enter_context(mounted(fs, disk, _make_dir(directory, "recorded")))
        control_path = f"{disks}/{CONTROL_NAME}"
        with open(control_path, "wb", buffering=0) as control:
            control.write(READY)
        yield root, control_path


@contextlib.contextmanager
def mounted(fs: FileSystem, image: str, mount_point: str) -> Iterator[str]:
    """Mount an image, which recovers its journal; unmount it at the end.

    Raises:
        subprocess.CalledProcessError: It cannot be mounted, or something still holds it.
    """
    try:
        _run("mount", "-t", fs.name, "-o", "loop", image, mount_point)
        yield mount_point
    finally:
        _unmount(mount_point)


def _unmount(mount_point: str) -> None:
    """Unmount what is mounted: now or, if something still holds it, when that lets go."""
    with open("/proc/self/mounts", encoding="utf-8") as file:
        if all(line.split(" ")[1] != mount_point for line in file):
            return
    try:
        _run("umount", mount_point)
    except subprocess.CalledProcessError:
        _run("umount", "--lazy", mount_point)
        raise


def _end(recorder: subprocess.Popen[bytes], mount_point: str) -> None:
    """Unmount a recorder's disk, which ends it; kill it if that does not."""
    try:
        _unmount(mount_point)
        recorder.wait(_TIMEOUT_S)
    finally:
        recorder.kill()
        recorder.wait(_TIMEOUT_S)


def _wait_for(path: str, recorder: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not os.path.exists(path):
        if recorder.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the recorder gives no disk at {path!r}: {recorder.poll()}")
        time.sleep(_POLL_S)


def _make_dir(directory: str, name: str) -> str:
    path = f"{directory}/{name}"
    os.makedirs(path, exist_ok=True)
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
