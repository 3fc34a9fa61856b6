"""Files of others on a web server that asks for a signature behind the path."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from safetensors.torch import save_file

from ckptio import sync
from ckptio.errors import CheckpointError, CheckpointNotFoundError, UnknownFormatError
from tests.foreign.rig import assert_same_state
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("aiohttp")
SIGNATURE = "X-Sig=AKIA%2F2026/"


class Signed(http.server.SimpleHTTPRequestHandler):
    """Gives ranges of files to who has the signature, and to nobody by HEAD, as S3 does."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:  # http.server's name
        self.send_error(403)

    def do_GET(self) -> None:  # as above
        found = urlsplit(self.path)
        if parse_qs(found.query) != parse_qs(SIGNATURE):
            self.send_error(403)
            return
        try:
            with open(self.translate_path(found.path), "rb") as file:
                data = file.read()
        except OSError:
            self.send_error(404)
            return
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hash(data)}"')
        if asked:
            stop = int(asked[1]) + len(part)
            self.send_header("Content-Range", f"bytes {asked[1]}-{stop - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def top(tmp_path: Path) -> Iterator[str]:
    """Serve a directory."""
    handler = functools.partial(Signed, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_signed_url_of_a_file_loads(tmp_path: Path, top: str) -> None:
    """The file is looked for where the URL says; names go before the signature."""
    state = {"w": torch.arange(100_000.0), "b": torch.ones(3)}
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    (tmp_path / "hub").mkdir()
    save_file(state, tmp_path / "hub" / "model.safetensors")
    sync.save(state, tmp_path / "ours", config=SMALL)
    with sync.Engine(SMALL) as engine:
        for name in ("a.safetensors", "a.pt", "hub", "ours"):
            for _ in range(2):
                assert_same_state(engine.load(f"{top}/{name}?{SIGNATURE}"), state)
    rows = sync.load_slice(f"{top}/a.pt?{SIGNATURE}", "w", slice(5, 7), config=SMALL)
    assert rows.tolist() == [5, 6]


def test_a_signature_is_not_shown(tmp_path: Path, top: str) -> None:
    """Whatever is wrong with what it is for."""
    (tmp_path / "odd").write_text("odd")
    (tmp_path / "cut.safetensors").write_bytes(b"\0" * 7)
    for name, kind in (
        ("none", CheckpointNotFoundError),
        ("odd", UnknownFormatError),
        ("cut.safetensors", CheckpointError),
    ):
        with pytest.raises(kind) as caught:
            sync.load(f"{top}/{name}?{SIGNATURE}", config=SMALL)
        assert "AKIA" not in str(caught.value)
