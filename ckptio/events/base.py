"""What all events are, and how an observer gets one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

_log = logging.getLogger("ckptio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened to a checkpoint.

    Attributes:
        path: Path or URL of the checkpoint.
        is_trouble: Whether somebody has to hear of it: without an observer, the log has it.
    """

    is_trouble: ClassVar[bool] = False
    path: str


Observer = Callable[[Event], None]


def notify(observer: Observer | None, event: Event) -> None:
    """Give `event` to `observer`, and log what it raises; without one, log what is trouble."""
    if observer is None:
        if event.is_trouble:
            _log.warning("%s", event)
        return
    try:
        observer(event)
    except Exception:  # an observer's bug is its own; the log has it, the save goes on
        _log.exception("the observer raised on %r", event)
