"""Errors that are told by a log, or kept as values: what they say, and what they keep of frames.

A traceback has the frames, and these have all that the program had there: a state, its plan and
its manifest, and the error itself, which would stay in memory until Python collects garbage.
"""

from __future__ import annotations

import contextlib
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

E = TypeVar("E", bound=BaseException)

#: What says where a module's lines are to be read, for those that lie in an archive.
_SOURCE = ("__name__", "__loader__", "__spec__")


def described(error: BaseException, *, with_notes: bool = True) -> str:
    """Say what kind of error it is, and its text and notes.

    Not its `repr`: that of an `OSError` has no file name, and none has notes. Never raises: an
    error of somebody else's that cannot be shown is no reason to fail who tells of it.
    """
    kind = type(error).__name__
    try:
        text = str(error)
        notes = [str(note) for note in getattr(error, "__notes__", ())] if with_notes else []
    except Exception:
        return f"{kind}, which cannot be shown"
    return "; ".join([f"{kind}: {text}" if text else kind, *notes])


def raised(error: BaseException) -> str:
    """Write what the code of a caller has raised as `repr` does. Never raises, as `described`."""
    try:
        return repr(error)
    except Exception:
        return f"{type(error).__name__}, which cannot be shown"


def as_of_future(error: BaseException) -> BaseException:
    """Give what the future of a loop can end with: before Python 3.13 it takes no `StopIteration`.

    It would refuse it where nobody sees that, and who waits for it waited for ever. What a
    coroutine raises so is a `RuntimeError`, too.
    """
    if not isinstance(error, StopIteration):
        return error
    other = RuntimeError(f"what was called raised {raised(error)}")
    other.__cause__ = error
    return other


def without_frames(error: E, but: BaseException | None = None) -> E:
    """Give an error that is kept for a moment, without any of the frames.

    Args:
        error: The error, and what it came of.
        but: What was handled already as the work began: its frames are its handler's.
    """
    for each in _family(error, but):
        BaseException.with_traceback(each, None)  # where its class lets no attribute be set, too
    return error


def without_locals(error: E) -> E:
    """Give an error that somebody may raise later; it says where it came by, and keeps no values.

    Frames that look alike stand for those that were. To clear the frames themselves, as
    `traceback.clear_frames` does, was rejected: one may belong to a coroutine that goes on, where
    a library raised one error in two of them, and Python 3.12 ends that coroutine.
    """
    with contextlib.suppress(Exception):  # of odd classes: the failure is told all the same
        for each in _family(error):
            BaseException.with_traceback(each, _bare(each.__traceback__))
    return error


def _family(error: BaseException, but: BaseException | None = None) -> Iterator[BaseException]:
    """Give an error, what it came of, and the members of groups, each once."""
    rest: list[BaseException | None] = [error]
    seen = {id(but)}
    while rest:
        each = rest.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            rest += (each.__cause__, each.__context__)
            if isinstance(each, BaseExceptionGroup):
                rest += each.exceptions


def _bare(trace: TracebackType | None) -> TracebackType | None:
    """Give a traceback with the same files, functions and lines."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    bare: TracebackType | None = None
    for entry in reversed(entries):
        line = _line_of(entry)
        bare = TracebackType(bare, _empty(entry.tb_frame, line), 0, line)
    return bare


def _line_of(entry: TracebackType) -> int:
    """Give the line; code that was made by a program may have none."""
    line: int | None = entry.tb_lineno
    return max(1, line or entry.tb_frame.f_code.co_firstlineno)


def _never_run() -> Iterator[None]:
    yield


def _empty(frame: FrameType, line: int) -> FrameType:
    """Give a frame that looks like one of a traceback where it is shown, at this line.

    Of a generator that does not begin: that of a function that was called keeps its caller's.
    """
    code = _never_run.__code__.replace(
        co_filename=frame.f_code.co_filename,
        co_name=frame.f_code.co_name,
        co_qualname=frame.f_code.co_qualname,
        co_firstlineno=line,
    )
    names = {name: frame.f_globals[name] for name in _SOURCE if name in frame.f_globals}
    empty: FrameType = FunctionType(code, names)().gi_frame
    return empty
