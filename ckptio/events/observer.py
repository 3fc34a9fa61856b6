"""What all events are, and how an observer gets one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

from ckptio._failures import described

_log = logging.getLogger("ckptio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened to a checkpoint.

    Attributes:
        path: Path or URL of the checkpoint, or of the directory of steps if it is about those.
        is_trouble: Whether somebody has to hear of it: without an observer, the log has it.
    """

    is_trouble: ClassVar[bool] = False
    path: str


Observer = Callable[[Event], object]


def notify(observer: Observer | None, event: Event) -> None:
    """Give `event` to `observer`, and log what it raises; without one, log what is trouble.

    On the main thread, a `KeyboardInterrupt` or `SystemExit` is raised, so that the program can
    end. Elsewhere everything is logged: an exit would end a part of a save, and not the program.
    """
    if observer is None:
        if event.is_trouble:
            _log.warning("%s", _shown(event))
        return
    try:
        observer(event)
    except BaseException as error:  # an observer's bug is its own; the save goes on
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise  # it can end the program there
        _log.exception("the observer raised on %r", event)


def _shown(event: Event) -> str:
    """Show an event as its `repr` does, but an error in it with all that it says."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    shown = {
        name: described(value) if isinstance(value, BaseException) else repr(value)
        for name, value in values.items()
    }
    return f"{type(event).__name__}({', '.join(f'{name}={text}' for name, text in shown.items())})"
