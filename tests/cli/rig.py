"""Checkpoints to look at, and ways to run a command on them."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any

import torch

from ckptio import sync
from ckptio.__main__ import main
from ckptio.format.compose import encode_manifest
from ckptio.format.manifest import decode_manifest
from ckptio.format.note import CopyNote, encode_note
from ckptio.storage.file_names import NOTE_PREFIX
from tests.manifests import encode_tensors
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

WIDE = 120
NARROW = 40


def make_state() -> dict[str, Any]:
    """A model with a tie and a view, an optimizer, and values of other kinds."""
    weight = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)
    return {
        "model": {
            "embed.weight": weight,
            "blocks": [{"bias": torch.zeros(16, dtype=torch.bfloat16)} for _ in range(2)],
            "head.weight": weight,
            "rows": weight[:2],
        },
        "optimizer": {"groups": [{"lr": 3e-4, "betas": (0.9, 0.999), "ids": list(range(99))}]},
        "epoch": 3,
        "nan": float("nan"),
    }


def save_at(path: Path, state: Any = None) -> Path:
    """Save a small checkpoint."""
    sync.save(make_state() if state is None else state, path, config=SMALL)
    return path


def owe(path: Path, to: str = "s3://bucket/there") -> Path:
    """Leave the note of a copy beside a checkpoint, as one that failed does; gives its path."""
    save_id = decode_manifest((path / "manifest.json").read_bytes()).save_id
    note = path / (NOTE_PREFIX + save_id)
    note.write_bytes(encode_note(CopyNote(copy_to=to, overwrite=False)))
    return note


def data_file(path: Path) -> Path:
    """The only data file of a checkpoint."""
    (found,) = path.glob("data-*")
    return found


def flip(file: Path, offset: int) -> None:
    """Change one byte."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def rewrite(path: Path, **changes: Any) -> None:
    """Give a checkpoint another manifest, with a checksum that is right."""
    file = path / "manifest.json"
    old = decode_manifest(file.read_bytes())
    fields: dict[str, Any] = {
        "writer": old.writer,
        "save_id": old.save_id,
        "created": old.created,
        "block_nbytes": old.block_nbytes,
        "files": [(f.name, f.nbytes, f.checksums()) for f in old.files],
        "tensors": encode_tensors(old.tensors),
        "tree": bytes(old.tree),
    }
    file.write_bytes(encode_manifest(**{**fields, **changes}))


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """Run a command with `--json`, in this process."""
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def run(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, with pipes."""
    return subprocess.run(
        [sys.executable, "-m", "ckptio", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def run_on_terminal(columns: int, *argv: str) -> tuple[int, str]:
    """Run a command on a terminal of its own, and give what it sent there."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "ckptio", *argv],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environ, "TERM": "xterm"},
    ) as process:
        os.close(theirs)
        sent = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that the other end is closed
                break
            sent += part
        os.close(ours)
    return process.returncode, sent.decode().replace("\r\n", "\n")


def plain_lines(sent: str) -> list[str]:
    """Lines as they stand on a terminal in the end: no colours, no line of progress."""
    lines: list[str] = []
    for line in re.sub(r"\x1b\[\?25[lh]", "", sent).split("\n"):
        if line.startswith("\r\x1b[1A"):  # up, to erase what stands there
            lines.pop()
        lines.append(re.sub(r"\x1b\[[0-9;]*[mA]", "", line.split("\x1b[2K")[-1]).strip("\r"))
    return lines
