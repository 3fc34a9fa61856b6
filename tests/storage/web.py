"""A web server on loopback that serves files from memory."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator


class Web(http.server.ThreadingHTTPServer):
    """Serves files, each with the time when it was written and nothing else that tells it apart.

    It takes no notice of queries.

    Attributes:
        files: Contents and `Last-Modified` by path.
        status: Of answers about what is not there.
        has_ranges: Whether parts of files are sent; else all of a file for each request.
        directories: What is said of a directory: nothing that is not said of what is not there,
            that nobody may look at it, or a page, with its size or without.
        requests: Method and path of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, tuple[bytes, str]] = {}
        self.status = 404
        self.has_ranges = True
        self.directories: Literal["", "refused", "page", "page without size"] = ""
        self.requests: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, path: str, data: bytes, *, second: int = 0) -> None:
        """Write a file, as if at some second of a minute."""
        self.files[path] = (data, f"Mon, 01 Jan 2024 12:00:{second:02d} GMT")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Web

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        data = self.answer()
        with contextlib.suppress(ConnectionError):  # who asked has enough of it
            self.wfile.write(data)

    def answer(self) -> bytes:
        self.server.requests.append((self.command, self.path))
        path = self.path.partition("?")[0]
        found = self.server.files.get(path)
        if found is None and any(f.startswith(f"{path}/") for f in self.server.files):
            if self.server.directories.startswith("page"):
                return self.page()
            if self.server.directories:
                self.send_error(403)
                return b""
        if found is None:
            self.send_response(self.server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return b""
        data, modified = found
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.server.has_ranges:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            data = data[start:stop]
        else:
            self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", modified)
        self.end_headers()
        return data

    def page(self) -> bytes:
        """Begin to give the page of a directory."""
        page = b"<html><body>What is here.</body></html>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if self.server.directories == "page":
            self.send_header("Content-Length", str(len(page)))
        else:
            self.close_connection = True
        self.end_headers()
        return page

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[Web]:
    """Run a server."""
    with Web() as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield web
        finally:
            web.shutdown()
            thread.join()
