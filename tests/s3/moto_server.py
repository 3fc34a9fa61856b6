"""moto's server, run as a program, with one lock taken that it forgets.

`FakeKey.etag` moves the position of the part's buffer to work the etag out, and `FakeKey.value`
does so to read it, the latter alone under the lock of the key (moto 5.2.5). Who lists the parts of
a running upload while it goes on, as a second save of the same path does, so makes another's etag
wrong (`InvalidPart`), or its part empty in the object that is put together.
"""

from __future__ import annotations

from typing import Any

from moto.s3.models import FakeKey
from moto.server import main

_etag: property = vars(FakeKey)["etag"]


def _locked(key: FakeKey) -> Any:
    with key.lock:
        return _etag.__get__(key)


if __name__ == "__main__":
    setattr(FakeKey, "etag", property(_locked))  # noqa: B010  # it is a method to mypy
    main()
