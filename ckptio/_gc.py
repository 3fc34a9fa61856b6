"""The cyclic garbage collector, kept out of the way."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from starting inside the block.

    Taking 20,000 tensors apart makes 60,000 small objects, none of them garbage; the
    collections that this sets off took as long as everything else.

    An interrupt (a signal's handler that raises) comes where a call has returned. So what is called
    is inside of what undoes it; and where the block is not left, or not entered, as the interrupt
    comes to `contextlib`, the generator is closed when nobody has it any more.
    """
    if not gc.isenabled():
        yield
        return
    pause = object()
    try:
        _pauses[pause] = None
        gc.disable()
        yield
    finally:
        try:
            gc.enable()
        finally:
            _pauses.pop(pause, None)


#: The blocks that are under way. Of the module, as the collector is of the process.
_pauses: dict[object, None] = {}


def _end_in_child() -> None:
    """Let a child that was forked meanwhile collect: nobody there ends the block."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_end_in_child)
