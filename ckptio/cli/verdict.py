"""What an error means for the checkpoint at a path, where the path may be another program's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckptio.cli.find import find_checkpoints, is_foreign
from ckptio.cli.find_objects import find_objects, is_foreign_prefix, open_place
from ckptio.cli.outcome import explain, state_of
from ckptio.errors import CheckpointError
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.runtime.solo import solo_engine
from ckptio.storage.files import absolute
from ckptio.storage.resolve import local_path, remote_url

if TYPE_CHECKING:
    from ckptio.cli.outcome import State
    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext


def judge(path: str, error: CheckpointError, config: CheckpointConfig) -> tuple[State, str]:
    """Say what state an error means, and why.

    A manifest that is another program's is no damage: its name is a common one.
    """
    state = state_of(error)
    if state == "damaged" and _is_of_another(path, config):
        return "unreadable", f"{MANIFEST_NAME} is another program's: there is no checkpoint here"
    return state, explain(error)


def _is_of_another(path: str, config: CheckpointConfig) -> bool:
    """Whether a manifest is another program's, as `ls` judges it; no if that is not known."""
    url = remote_url(path)
    with contextlib.suppress(CheckpointError, OSError):
        if url is None:
            top = absolute(local_path(path))
            return any(map(is_foreign, find_checkpoints(top, depth=0, hidden=False)))

        async def look(context: EngineContext) -> bool:
            place = await open_place(context.stores, url, context.config, context.emit)
            found = await find_objects(place, depth=0, hidden=False)
            return any([await is_foreign_prefix(place, item) for item in found])

        with solo_engine(config) as core:
            return core.call_blocking(look, "list")
    return False
