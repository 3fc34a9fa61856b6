from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from ckptio.__main__ import main
from tests.cli.rig import (
    WIDE,
    data_file,
    flip,
    plain_lines,
    rewrite,
    run_on_terminal,
    save_at,
)

if TYPE_CHECKING:
    from pathlib import Path

_ESCAPE = "\x1b[31m[red]\u202ename[/red]"


def test_hostile_names_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a terminal nor rich takes orders from a manifest, or from a path."""
    path = tmp_path / f"run-{_ESCAPE}"
    save_at(path, {_ESCAPE: torch.ones(3), "value": _ESCAPE, "tied": {}})
    rewrite(path, created=_ESCAPE, writer=_ESCAPE)
    shown = r"\x1b[31m[red]\u202ename[/red]"
    for argv in (["ls", str(tmp_path)], ["show", str(path)]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert shown in out
        assert out.replace("\n", "").isprintable()
    flip(data_file(path), 4096)
    assert main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"run-{shown}" in out
    assert out.replace("\n", "").isprintable()
    _, sent = run_on_terminal(WIDE, "verify", str(path))
    assert "\x1b[31m[red]" not in sent
    assert any(f"run-{shown}" in line for line in plain_lines(sent))
    for command in ("ls", "show", "verify"):
        assert main([command, "--json", str(path)]) in (0, 1)
        out = capsys.readouterr().out
        assert out.isascii()
        assert "\x1b" not in out
        json.loads(out)


@pytest.mark.parametrize(
    "tree",
    [
        b'{"a": {"~": 99}}',
        b'{"a": {"~": "view", "t": 0, "d": "float32", "o": 0, "s": "x", "r": []}}',
        b'{"a": {"~": "view", "t": 0, "d": "evil", "o": 0, "s": [], "r": []}}',
        b'{"a": {"~": "np", "t": 0}}',
        b'{"a": {"~": "dict", "v": [[1]]}}',
        b"[" * 300 + b"]" * 300,
        b"[" * 399 + b"]" * 399,
        b'{"~": "enum", "v": ' * 300 + b"1" + b"}" * 300,
        b'{"a": {"~": "npscalar", "d": "O", "v": "AAAAAAAAAAA="}}',
        b'{"a": {"~": "int", "v": "' + b"f" * 9999 + b'"}}',
        b'{"a": {"~": "torch.Size", "v": {"b": 1}}, "c": {"~": "datetime", "v": 7}}',
        b'{"a": 1e999}',
        b'{"~": []}',
    ],
)
def test_a_hostile_tree_is_shown_or_is_damage(
    tree: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never an exception, and never more than a line for a value."""
    path = save_at(tmp_path / "c", {"w": torch.ones(3)})
    rewrite(path, tree=tree)
    for options in ([], ["--json"], ["--select=*"]):
        assert main(["show", *options, str(path)]) in (0, 1)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        assert options == ["--json"] or len(shown.out) < 1000
