"""What `ckptio doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["yes", "no", "slow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a file system or store can or cannot do.

    Attributes:
        name: What.
        state: `"yes"`; `"slow"`, if a save works without it, only not as well; or `"no"`, if
            saves need it.
        detail: What was seen, and what it means.
    """

    name: str
    state: State
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Files of dead saves in a directory or under a prefix.

    Attributes:
        path: The directory or URL.
        names: The files.
        nbytes: Their bytes.
    """

    path: str
    names: tuple[str, ...]
    nbytes: int
