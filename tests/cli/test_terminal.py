from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.cli.rig import (
    NARROW,
    WIDE,
    data_file,
    flip,
    plain_lines,
    run_on_terminal,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_wide_terminal_has_tables(ckpt: Path) -> None:
    """With colour where it says something."""
    code, sent = run_on_terminal(WIDE, "ls", str(ckpt.parent))
    head, row, *_ = plain_lines(sent)
    assert code == 0
    assert head == "PATH    COMMITTED                BYTES  FILES  TENSORS  FORMAT"
    assert re.fullmatch(r"step-9  \d{4}-\d\d-\d\d [0-9:]{8}Z  [0-9.]+ KiB {6}1 {8}3 {7}2", row)
    code, sent = run_on_terminal(WIDE, "show", str(ckpt))
    assert code == 0
    tree = plain_lines(sent)[3:-5]
    assert tree == [
        "model",
        "  embed.weight  float32 [64, 64]  16.0 KiB  #0",
        "  blocks",
        "    0",
        "      bias      bfloat16 [16]         32 B  #0",
        "    1",
        "      bias      bfloat16 [16]         32 B  #0",
        "  head.weight   float32 [64, 64]         -  = model.embed.weight",
        "  rows          float32 [2, 64]          -  in model.embed.weight",
        "optimizer",
        "  groups",
        "    0",
        "      lr        0.0003",
        "      betas     [0.9, 0.999]",
        "      ids       [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13... (99 items)",
        "epoch           3",
        'nan             "nan"',
    ]
    code, sent = run_on_terminal(WIDE, "verify", str(ckpt))
    assert code == 0
    assert "\x1b[32mok" in sent
    assert "100%" in sent  # progress, gone in the end
    assert not any("100%" in line for line in plain_lines(sent))


def test_a_narrow_terminal_has_no_line_longer_than_itself(ckpt: Path) -> None:
    """But for file names and paths, which stay whole so that they can be copied."""
    _, sent = run_on_terminal(NARROW, "ls", str(ckpt.parent))
    path, *rest = plain_lines(sent)
    assert path == "step-9"
    assert re.fullmatch(r"  \d{4}-\d\d-\d\d [0-9:]{8}Z  [0-9.]+ KiB  1 file", rest[0])
    assert rest[1:] == ["  3 tensors  format 2", ""]
    flip(data_file(ckpt), 5000)
    code, sent = run_on_terminal(NARROW, "verify", str(ckpt))
    assert code == 1
    _, shown = run_on_terminal(NARROW, "show", str(ckpt))
    lines = [*plain_lines(sent), *plain_lines(shown)]
    long = [line for line in lines if len(line) > NARROW]
    assert all(str(ckpt) in line or "data-" in line for line in long)
    assert "  embed.weight  float32 [64, 64]" in lines
    assert "    16.0 KiB  #0" in lines
    assert "        [0, 1, 2, 3, 4, 5... (99 items)" in lines
