"""A world of one rank: the same words, nobody to wait for."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from ckptio.ranks.host import this_host
from ckptio.ranks.interface import Same

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ckptio.ranks.interface import Decide, Json


class SoloRanks:
    """An implementation of `interface.Ranks` for one rank.

    Messages and answers are passed as they are, and so are errors.

    Args:
        host: Its host; this machine if not given.
    """

    rank = 0
    world_size = 1
    address = rank_0_address = ""

    def __init__(self, host: str | None = None) -> None:
        self.hosts = (this_host() if host is None else host,)
        self.nonce = secrets.token_hex(16)

    @contextlib.asynccontextmanager
    async def session(
        self, key: str, title: str = "", *, commits: bool = False
    ) -> AsyncIterator[SoloRanks]:
        """Make a session; see `interface.Ranks`."""
        del key, title, commits
        yield self

    def decisive(self, *, is_on: bool) -> None:
        """Do nothing: nobody is in doubt who decides alone; see `interface.Session`."""

    def absent(self) -> Sequence[int]:
        """Name nobody; see `interface.Session`."""
        return ()

    async def round(self, phase: str, message: Json, decide: Decide) -> Json:
        """Decide alone; see `interface.Session`."""
        del phase
        answers = await decide([message])
        return answers.answer if isinstance(answers, Same) else answers[0]

    async def close(self) -> None:
        """Do nothing; see `interface.Ranks`."""
