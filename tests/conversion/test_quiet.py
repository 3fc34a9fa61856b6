"""What conversions to DCP change for the whole process while they write."""

from __future__ import annotations

import logging
import threading
import warnings
from typing import TYPE_CHECKING, Any

from ckptio.conversion import dcp

if TYPE_CHECKING:
    import pytest


def test_conversions_that_overlap_put_warnings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that begins first ends first: the other one puts back what was there before both."""
    begun = {"first": threading.Event(), "second": threading.Event()}
    ends = {"first": threading.Event(), "second": threading.Event()}

    def write(state_dict: dict[str, Any], **_: Any) -> None:
        begun[state_dict["name"]].set()
        assert ends[state_dict["name"]].wait(60)

    def save(name: str) -> threading.Thread:
        arguments: tuple[Any, ...] = ({"name": name}, None, None)
        thread = threading.Thread(target=dcp._save, args=arguments)
        thread.start()
        assert begun[name].wait(60)
        return thread

    monkeypatch.setattr(dcp, "_save_state_dict", write)
    log = logging.getLogger("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        before = list(warnings.filters), log.level
        try:
            threads = [save("first"), save("second")]
            for name, thread in zip(ends, threads, strict=True):
                assert log.level == logging.ERROR
                ends[name].set()
                thread.join()
            assert (list(warnings.filters), log.level) == before
        finally:
            for end in ends.values():
                end.set()
            log.setLevel(before[1])
