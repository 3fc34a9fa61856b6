from __future__ import annotations

import dataclasses
import logging

import pytest

from ckptio import events
from ckptio.events import Event, SaveStaged, notify
from ckptio.testing import EventLog

EVENT = SaveStaged(path="p", save_id="1", elapsed_s=0.5)


def test_an_observer_is_told() -> None:
    """The very event is given to it."""
    log = EventLog()
    notify(log, EVENT)
    assert log.events == [EVENT]
    assert log.of(SaveStaged) == [EVENT]
    assert log.kinds() == ["SaveStaged"]


def test_nobody_needs_to_observe() -> None:
    """Without an observer nothing happens."""
    notify(None, EVENT)


def test_an_observer_that_raises_is_logged_and_harmless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its bug goes to the log of the package, with the event, and no further."""

    def broken(_: Event) -> None:
        raise ValueError("broken bar")

    with caplog.at_level(logging.ERROR, logger="ckptio"):
        notify(broken, EVENT)
    assert "broken bar" in caplog.text
    assert "SaveStaged" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_leaving_is_not_swallowed(error: type[BaseException]) -> None:
    """An observer that ends the program ends it, where that is: on the main thread."""

    def leave(_: Event) -> None:
        raise error

    with pytest.raises(error):
        notify(leave, EVENT)


def test_every_event_is_a_frozen_value() -> None:
    """Observers on other threads may keep events: nobody changes them."""
    kinds = [
        kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]  # set by dataclass
        assert "path" in {field.name for field in dataclasses.fields(kind)}
