"""An observer that remembers what it was told.

Events come from threads of the engine and of its callers, at times from two at once; a list's
`append` is atomic, so a test may look at any moment. What was told is kept whole: a test that
wants an order looks at `kinds`, one that wants numbers at `of`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ckptio.events import Event

E = TypeVar("E", bound="Event")


class EventLog:
    """Keeps every event: `Engine(config, observer=EventLog())`.

    Attributes:
        events: In the order in which they came.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Keep an event."""
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """Give the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def kinds(self) -> list[str]:
        """Give the name of each event's kind, in order."""
        return [type(event).__name__ for event in self.events]
