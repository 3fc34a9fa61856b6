"""Hear signals while a block lasts, and give them back to whom they belonged before.

A forked child inherits handlers, and would take no notice of the signal that is to end it:
it gives them back as well, where it begins, and the parent keeps them.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

from ckptio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType


class SignalWatch:
    """Handlers of some signals, from `start` to `stop`. Both on the main thread.

    Args:
        signals: Which.
        on_signal: Called on the main thread, between any two instructions of it, with the
            name of a signal; must take no lock.
    """

    def __init__(self, signals: Sequence[int], on_signal: Callable[[str], None]) -> None:
        self._signals = check_signals(signals)
        self._on_signal = on_signal
        self._before: dict[signal.Signals, Any] = {}

    @property
    def names(self) -> list[str]:
        """Names of the signals."""
        return [number.name for number in self._signals]

    def start(self) -> None:
        """Take the signals over.

        Raises:
            ConfigError: This is not the main thread, and so cannot.
        """
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "preempt_signals= needs the main thread: only there does Python take signals;"
                " enter the checkpointer there, or call its preempt() from your own handler"
            )
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)
        if self._before:
            found = weakref.WeakMethod(self.stop)

            def give_back() -> None:
                stop = found()
                if stop is not None:
                    stop()

            os.register_at_fork(after_in_child=give_back)

    def stop(self) -> None:
        """Give the signals back.

        Raises:
            ValueError: This is not the main thread, and so cannot.
        """
        for number in list(self._before):
            before = self._before.pop(number)
            # one that C code had set cannot be put back; the default ends the process, too
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._on_signal(signal.Signals(number).name)


def check_signals(signals: Sequence[int]) -> tuple[signal.Signals, ...]:
    """Check numbers of signals.

    Raises:
        ConfigError: One is none, or nobody can handle it.
    """
    try:
        numbers = tuple(dict.fromkeys(signal.Signals(number) for number in signals))
    except (TypeError, ValueError):
        raise ConfigError(
            f"preempt_signals= are signals, such as (signal.SIGTERM,), not {signals!r}"
        ) from None
    if {signal.SIGKILL, signal.SIGSTOP} & {*numbers}:
        raise ConfigError("preempt_signals=: nobody can handle SIGKILL and SIGSTOP")
    if signal.SIGURG in numbers:
        raise ConfigError(
            "preempt_signals=: SIGURG comes whenever somebody waits for a file that is being loaded"
        )
    return numbers
