"""The engine of a checkpointer: one that is given to it, or its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from ckptio._texts import shown
from ckptio.errors import ConfigError
from ckptio.runtime.engine_options import is_word

if TYPE_CHECKING:
    from ckptio.config import CheckpointConfig
    from ckptio.events import Observer
    from ckptio.ranks.discover import RanksLike


class _Engine(Protocol):
    """How the engines of both faces are made."""

    def __init__(
        self, config: CheckpointConfig | None, *, observer: Observer | None, ranks: RanksLike
    ) -> None: ...


E = TypeVar("E", bound=_Engine)


def engine_for(
    given: object,
    kind: type[E],
    name: str,
    *,
    config: CheckpointConfig | None,
    observer: Observer | None,
    ranks: RanksLike,
) -> E:
    """Take the engine that is given, or make one.

    Args:
        given: What was given; `None` if nothing was.
        kind: The class that it has to be of.
        name: The public name of that class, for the error.
        config: For an engine that is made here, as are the next two.
        observer: As above.
        ranks: As above.

    Raises:
        ConfigError: What was given is something else, such as the engine of the other face; or
            options come with it, which would have no effect.
    """
    if given is None:
        return kind(config, observer=observer, ranks=ranks)
    if not isinstance(given, kind):
        raise ConfigError(f"engine= is a {name}, not {shown(given)}")
    if config is not None or observer is not None or not is_word(ranks, "auto"):
        raise ConfigError("config=, observer= and ranks= have no effect with engine=")
    return given
