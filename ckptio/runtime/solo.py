"""An engine for the length of a call."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckptio.runtime.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.config import CheckpointConfig
    from ckptio.events import Observer


@contextlib.contextmanager
def solo_engine(
    config: CheckpointConfig | None, observer: Observer | None = None
) -> Iterator[EngineCore]:
    """Have an engine that meets no other ranks; it is closed when the block ends. Blocks.

    Closing waits for what is in flight, also if an error ends the block: nothing is aborted.

    Raises:
        ConfigError: An option is wrong.
    """
    core = EngineCore(config, observer, "solo")
    core.start()
    try:
        yield core
    finally:
        core.close()
