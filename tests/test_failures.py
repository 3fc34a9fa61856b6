"""Errors that are kept: what they say stays, and what the program had where they came by goes."""

from __future__ import annotations

import asyncio
import traceback
import weakref
from dataclasses import dataclass
from typing import NoReturn

import pytest

from ckptio._failures import described, raised, without_frames, without_locals
from ckptio.events import CopyFailed, SaveFailed, notify

pytestmark = pytest.mark.usefixtures("no_collections")


class Held:
    """Something of the program."""


def fail(kept: list[weakref.ref[Held]]) -> None:
    held = Held()
    kept.append(weakref.ref(held))
    nothing: dict[str, int] = {}
    try:
        kept.pop(nothing["x"])
    except KeyError as error:
        raise ValueError("y") from error


def caught(kept: list[weakref.ref[Held]]) -> BaseException:
    """Give a group of errors, one of which has a cause."""
    held = Held()
    kept.append(weakref.ref(held))
    errors: list[Exception] = []
    for _ in range(2):
        try:
            fail(kept)
        except ValueError as error:
            errors.append(error)

    def raise_all() -> NoReturn:
        raise ExceptionGroup("all", errors)

    try:
        raise_all()
    except ExceptionGroup as group:
        return group
    finally:
        errors = []


def lines_of(error: BaseException) -> list[str]:
    """Give what is shown of an error, but for the marks below its lines."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return [line for line in lines if not {*line} <= {*" |~^"}]


def test_a_kept_error_says_where_it_came_by_and_keeps_no_values() -> None:
    """Files, functions and lines, of its causes and of a group's members, too."""
    kept: list[weakref.ref[Held]] = []
    error = caught(kept)
    shown = lines_of(error)
    assert [held() is None for held in kept] == [False] * 3
    assert without_locals(error) is error
    assert [held() for held in kept] == [None] * 3
    assert lines_of(error) == shown
    assert any("in fail" in line for line in shown)


def test_a_kept_error_can_be_raised_again() -> None:
    """What it comes by then is shown behind the rest."""
    kept: list[weakref.ref[Held]] = []
    error = without_locals(caught(kept))
    num_lines = len(lines_of(error))
    with pytest.raises(ExceptionGroup) as raised:
        raise error
    assert len(lines_of(raised.value)) == num_lines + 2


@dataclass(frozen=True)
class FrozenError(Exception):
    """Takes no attribute: not even a traceback, where that is set as one."""


def test_odd_errors_are_kept_as_well() -> None:
    """A failure that cannot be told would leave whoever waits for it waiting for ever."""
    no_lines = compile("raise error", "made", "exec").replace(co_linetable=b"")
    for error in (FrozenError(), ValueError("x")):
        with pytest.raises(type(error)) as caught:
            exec(no_lines, {"error": error})  # noqa: S102  # as a program that makes code
        for keep in (without_locals, without_frames):
            assert keep(caught.value) is error
            traceback.format_exception(error)


class DumbError(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_is_described_by_its_kind_its_text_and_its_notes() -> None:
    """With the file; and by its kind alone, if it cannot be shown."""
    error = FileNotFoundError(2, "no such file", "/a")
    error.add_note("save again")
    assert described(error) == "FileNotFoundError: [Errno 2] no such file: '/a'; save again"
    assert described(error, with_notes=False).endswith("'/a'")
    assert described(KeyError()) == "KeyError"
    assert described(DumbError()) == "DumbError, which cannot be shown"
    assert raised(KeyError("x")) == "KeyError('x')"
    assert raised(KeyError(10**5000)) == "KeyError, which cannot be shown"


def test_an_event_with_an_error_that_cannot_be_shown_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a thread of the engine's: whatever it raised would be the save's failure."""
    notify(None, SaveFailed(path="p", save_id="1", error=DumbError()))
    notify(None, CopyFailed(path="p", to="q", save_id="1", error=DumbError()))
    assert "error=DumbError, which cannot be shown" in caplog.text


def test_what_was_handled_already_keeps_its_frames() -> None:
    """They are those of who handles it, and shows it later."""
    try:
        try:
            fail([])
        except ValueError as handled:
            before = lines_of(handled)
            try:
                raise KeyError("x")  # noqa: TRY301  # inside
            except KeyError as error:
                without_frames(error, handled)
                assert error.__traceback__ is None
            raise
    except ValueError as handled:
        assert lines_of(handled)[: len(before) - 1] == before[:-1]


def test_frames_that_were_let_go_of_are_not_shown() -> None:
    """Of no error of the family."""
    kept: list[weakref.ref[Held]] = []
    error = without_frames(caught(kept))
    assert [held() for held in kept] == [None] * 3
    assert not any("in fail" in line for line in lines_of(error))


async def test_a_coroutine_that_caught_a_kept_error_goes_on() -> None:
    """A library raises one error in two of them, where both waited for it."""
    error = ConnectionError("lost")
    shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    go_on = asyncio.Event()

    async def handle_it() -> str:
        try:
            await shared
        except ConnectionError:
            await go_on.wait()
        return "went on"

    handling = asyncio.create_task(handle_it())
    await asyncio.sleep(0)
    shared.set_exception(error)
    with pytest.raises(ConnectionError):
        await shared
    await asyncio.sleep(0)
    without_locals(error)
    go_on.set()
    assert await handling == "went on"
